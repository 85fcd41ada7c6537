"""A mutation fuzzer of the parsers and scorers: `python -m benchmarks.fuzz_rewards --seconds 60 --seed 0`.

Each text is a seed of the corpus, mutated a few times by bytes, characters and tokens. The oracles are what the
parsers promise of any text. The first text that breaks one is made as short as it can be, printed and saved.
"""

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fuzz_texts import CORPUS, FORMATS, TOKENS
from rewards import action_score, parse_lenient, parse_rating, parse_tool_calls, process_score, reference_rule
from rewards.calls import ParsedCalls

TOOLS = [
    {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"name": "maps.look", "parameters": {"type": "object", "properties": {"x": {}}}},
]
GOLD = [[{"name": "add", "arguments": {"a": 1}}, {"name": "maps.look", "arguments": {"x": [1, "b", None]}}]]
# Tagged formats: a call may stand anywhere in the text. The others stand at the beginning of the answer.
_TAGGED = ("hermes", "qwen3_coder")
_PROSE = "Let me see, then: "
_MIRROR = str.maketrans("{}[]()<>", "}{][)(><")
_LONGEST = 200_000


@dataclass(frozen=True)
class Failure:
    """A broken promise: which, of what, and the text."""

    oracle: str
    detail: str
    text: str


def mutate(text: str, random: random.Random) -> str:
    """One mutation."""
    at = random.randrange(len(text) + 1)
    end = min(len(text), at + int(random.expovariate(1 / 8)) + 1)
    piece = text[at:end]
    other = random.choice(CORPUS)
    start = random.randrange(len(other) + 1)
    made: list[Callable[[], str]] = [
        lambda: text[:at] + other[start : start + 40] + text[at:],
        lambda: text[:at] + other[start:],
        lambda: text[:end] + piece + text[end:],
        lambda: text[:at] + text[end:],
        lambda: text[:at] + text[at:end][::-1] + text[end:],
        lambda: text[:at],
        lambda: text[:at] + piece.translate(_MIRROR) + text[end:],
        lambda: text.translate(_MIRROR) if random.random() < 0.1 else text[at:] + text[:at],
        lambda: text[:at] + random.choice(TOKENS) + text[at:],
        lambda: text[:at] + random.choice(TOKENS) + text[end:],
        lambda: text[:at] + chr(random.randrange(0x110000)) + text[end:],
        lambda: _bytes(text, at, random),
        lambda: _nested(text, at, end, random),
        lambda: text[:at] + piece * random.randrange(2, 9) + text[end:],
        lambda: text.replace(*random.sample(TOKENS, 2), 1),
    ]
    return random.choice(made)()


def _bytes(text: str, at: int, random: random.Random) -> str:
    raw = bytearray(text.encode("utf-8", "surrogatepass"))
    if raw:
        raw[min(at, len(raw) - 1)] ^= 1 << random.randrange(8)
    return raw.decode("utf-8", random.choice(("replace", "surrogateescape")))


def _nested(text: str, at: int, end: int, random: random.Random) -> str:
    opening, closing = random.choice((("[", "]"), ("{", "}"), ('{"a":', "}"), ("(", ")"), ("<think>", "</think>")))
    depth = random.choice((1, 2, 9, 140, 2000))
    return text[:at] + opening * depth + text[at:end] + closing * random.choice((depth, depth - 1)) + text[end:]


def texts(seed: int) -> Iterator[str]:
    """Mutated texts without end, the same for the same seed; one in fifty is repeated until it is long."""
    choose = random.Random(seed)
    while True:
        text = choose.choice(CORPUS)
        for _ in range(choose.choice((1, 1, 2, 3, 5, 8))):
            text = mutate(text, choose)
        if choose.random() < 0.02 and text:
            at = choose.randrange(len(text))
            unit = text[at : at + choose.choice((3, 12, 40, 200))]
            text = text[:at] + unit * (choose.choice((5_000, 20_000, 50_000)) // len(unit)) + text[at:]
        yield text[:_LONGEST]


def check(text: str, formats: tuple[str, ...] = FORMATS) -> Failure | None:
    """The first promise that the text breaks; None if all hold."""
    oracle = "start"
    try:
        for format in formats:
            for think in ("reasoning", "text"):
                oracle = f"{format}/{think}: returns"
                parsed = _timed(lambda: parse_tool_calls(text, format, think), len(text), 0.1)  # noqa: B023
                oracle = f"{format}/{think}: places"
                _places(text, format, parsed)
                oracle = f"{format}/{think}: same again"
                assert parse_tool_calls(text, format, think) == parsed
                oracle = f"{format}/{think}: prose before"
                if format in _TAGGED:
                    moved = parse_tool_calls(_PROSE + text, format, think)
                    assert _meant(moved) == _meant(parsed)
                    assert (moved.num_open, moved.num_close) == (parsed.num_open, parsed.num_close)
            oracle = f"{format}: scores"
            _timed(lambda: _scores(parse_tool_calls(text, format)), len(text), 0.5)  # noqa: B023
        oracle = "lenient"
        lenient = _timed(lambda: parse_lenient(text), len(text), 0.1)
        strict = parse_tool_calls(text)
        assert all(0 <= repair.at <= len(text) for repair in lenient.repairs)
        if len(strict.valid) == len(strict.calls) and strict.num_open <= strict.num_close:
            assert (lenient.calls, lenient.repairs) == (strict.calls, ())
        oracle = "rating"
        assert _timed(lambda: parse_rating(text), len(text), 0.1).score in (0.0, 0.25, 0.5, 0.75, 1.0)
    except Exception as error:  # whatever it is, it is what the fuzzer looks for
        return Failure(oracle, f"{type(error).__name__}: {error}"[:500], text)
    return None


def _timed(work: Callable[[], Any], size: int, base: float) -> Any:
    """The result; too slow are three tries that each take longer than a line over the size."""
    for _ in range(3):
        began = time.process_time()
        found = work()
        if time.process_time() - began <= base + 2e-6 * size:
            return found
    raise TimeoutError(f"more than {base} s + 2 µs a character, three times")


def _meant(parsed: ParsedCalls) -> list[Any]:
    return [(call.name, call.arguments, call.status, call.block) for call in parsed.calls]


def _places(text: str, format: str, parsed: ParsedCalls) -> None:
    assert [call.block for call in parsed.calls] == sorted(call.block for call in parsed.calls), "blocks in order"
    spans = [call.span for call in parsed.calls]
    assert spans == sorted(spans), "spans in order"
    assert all(0 <= begin <= end <= len(text) for begin, end in spans), "spans in the text"
    for call in parsed.calls[:100]:
        assert (call.status == "ok") == (call.reason is None), "a reason where there is a fault"
        if call.status != "ok":
            continue
        json.dumps(call.arguments, allow_nan=False)
        for said, place in [(call.name, call.name_span), *call.key_spans.items()]:
            assert place is not None and call.span[0] <= place[0] <= place[1] <= call.span[1], "parts in the block"  # noqa: PT018
            shown = text[slice(*place)]
            # Keys of arguments that are a JSON string inside JSON are escaped twice.
            assert said == shown or "\\" in shown, f"{said!r} is not at its place, {shown!r} is"
        assert list(call.key_spans) == list(call.arguments), "a place for each key"
        if format in _TAGGED:
            again = parse_tool_calls(text[slice(*call.span)], format, "text")
            ours = [other for other in parsed.calls if other.block == call.block]
            assert [(one.name, one.arguments) for one in again.calls] == [(one.name, one.arguments) for one in ours]


def _scores(parsed: ParsedCalls) -> None:
    score = process_score([parsed], GOLD, TOOLS)
    for name in ("format", "name", "key", "value", "parallel", "total"):
        value = getattr(score, name)
        assert math.isfinite(value), name
        assert 0.0 <= value <= 1.0, name
    assert score == process_score([parsed], GOLD, TOOLS), "same again"
    right = reference_rule([parsed], GOLD, TOOLS)
    assert not right or score.total > 0.999, "right by the rule, and less than 1 by the score"
    assert 0.0 <= action_score([parsed], GOLD, TOOLS).score <= 1.0


def minimised(failure: Failure, formats: tuple[str, ...] = FORMATS, seconds: float = 20.0) -> Failure:
    """The failure of a text from which nothing can be cut, or what was reached in that time."""
    until = time.monotonic() + seconds
    step = max(1, len(failure.text) // 2)
    while True:
        at = cut = 0
        while at < len(failure.text) and time.monotonic() < until:
            found = check(failure.text[:at] + failure.text[at + step :], formats)
            if found is not None and found.oracle == failure.oracle:
                failure, cut = found, cut + 1
            else:
                at += step
        if time.monotonic() >= until or (step == 1 and not cut):
            return failure
        step = max(1, step // 2)


def fuzz(
    seed: int, seconds: float, most: int, formats: tuple[str, ...] = FORMATS, shorten: float = 20.0
) -> tuple[int, Failure | None]:
    """How many texts were checked, and the first failure, minimised for `shorten` seconds."""
    until = time.monotonic() + seconds
    for count, text in enumerate(texts(seed)):
        if count >= most or time.monotonic() > until:
            return count, None
        failure = check(text, formats)
        if failure is not None:
            return count + 1, minimised(failure, formats, shorten)
    raise AssertionError("the texts have no end")


def main() -> int:
    """Fuzz for a time; 1 if something was found."""
    parser = argparse.ArgumentParser(description="Mutated texts through the parsers and scorers of `rewards`.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, default=Path(tempfile.gettempdir()) / "fuzz_rewards.json")
    given = parser.parse_args()
    count, failure = fuzz(given.seed, given.seconds, sys.maxsize)
    print(f"seed {given.seed}: {count} texts")
    if failure is None:
        return 0
    print(f"{failure.oracle}: {failure.detail}\n{failure.text!r}")
    given.save.write_text(json.dumps(vars(failure)), encoding="utf-8")
    print(f"saved to {given.save}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
