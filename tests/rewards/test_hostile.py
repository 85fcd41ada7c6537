"""Model output never raises, and never costs more than linear time."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards import (
    ParsedCalls,
    RuleJudge,
    ToolCall,
    action_score,
    answer_calls,
    as_gold,
    loose_match,
    matching,
    parse_tool_calls,
    process_score,
    reference_rule,
    validate_call,
)
from rewards.calls import MAX_ATTEMPTS
from tests.rewards.checks import CLOSE, OPEN, TOOLS, block, call

SIZE = 1_000_000
GOLD = [[call("add", a=1), call("add", a=2)]]
# Each is repeated to a megabyte. What they try: one attempt that reads to the end from every tag.
UNITS = {
    "opening tags": OPEN,
    "closing tags": CLOSE,
    "broken objects": OPEN + "{x",
    "strings that swallow tags": OPEN + '{"',
    "strings of both parities": OPEN + '["',
    "escapes between tags": OPEN + '["\\',
    "commas between tags": OPEN + '[",',
    "keys": OPEN + '{"a":"',
    "numbers": OPEN + "[1,",
    "deep lists": OPEN + "[" * 900,
    "long integers": OPEN + "1" * 5000,
    "spaces": OPEN + " " * 50,
    "lines": OPEN + "\n{x\n",
    "duplicate keys, cut": OPEN + '{"a":1,"a":"',
    "NaN, cut": OPEN + '[NaN,"',
    "think tags": "<think></think>" + OPEN,
    "valid calls": block(call("add", a=1)),
    "calls with tags inside": block(call("add", a=CLOSE)),
    "half surrogates": OPEN + '{"a":"\\ud800"}' + CLOSE,
    "accents": block(call("é", é="é")),
}
ONCE = {
    "objects in one tag": OPEN + "{}" * (SIZE // 2) + CLOSE,
    "a list of objects": OPEN + "[" + "{}," * (SIZE // 3) + "{}]" + CLOSE,
    "calls in one tag": OPEN + json.dumps(call("add", a=CLOSE)) * (SIZE // 55) + CLOSE,
    "tags in one string": OPEN + json.dumps(call("add", tag=CLOSE * (SIZE // 12))) + CLOSE,
    "an endless string": OPEN + '{"name": "' + CLOSE * (SIZE // 12),
    "escaped quotes without an end": OPEN + '{"name": "' + '\\"' * (SIZE // 2),
    "an escape fault behind escaped quotes": OPEN + '{"name": "' + '\\"' * (SIZE // 2) + CLOSE + "\\q",
    "brackets": OPEN + "[" * SIZE,
    "objects in objects": OPEN + '{"a":' * (SIZE // 5),
    "many keys, one twice": OPEN + "{" + "".join(f'"k{i}":1,' for i in range(SIZE // 12)) + '"k1":2}' + CLOSE,
    "arguments in a string": OPEN + json.dumps({"name": "add", "arguments": "[" * SIZE}) + CLOSE,
    "broken calls after lines": "\n" * (SIZE // 2) + (OPEN + "{x") * (SIZE // 26),
}
TEXTS = {name: unit * (SIZE // len(unit)) for name, unit in UNITS.items()} | ONCE


@pytest.mark.parametrize("name", TEXTS)
def test_a_megabyte_is_read_and_scored(name: str) -> None:
    text = TEXTS[name]
    parsed = parse_tool_calls(text)
    process_score([parsed], GOLD, TOOLS)
    reference_rule([parsed], GOLD, TOOLS)
    for attempt in parsed.calls[:50]:
        _ = attempt.name_span, attempt.key_spans
    assert parsed.num_open <= text.count(OPEN)


# In a process of its own: the type checker of the tests costs ten times what the reading costs.
_TIMED = """
import json, sys, time
from rewards import parse_tool_calls
texts, formats = json.load(sys.stdin)
slow = []
for format in formats:
    for name, text in texts.items():
        took = []
        while not took or (min(took) >= 0.5 and len(took) < 3):
            began = time.process_time()
            parse_tool_calls(text, format)
            took.append(time.process_time() - began)
        if min(took) >= 0.5:
            slow.append((format, name, min(took)))
assert not slow, slow
"""
# The tags of the other formats around the same bodies.
OTHER_TAGS = {
    "llama3_json": ("<|python_tag|>", "; "),
    "mistral": ("[TOOL_CALLS]", ""),
    "chat": ('{"tool_calls": [', "]}"),
    "pythonic": ("[f(a=", ")]"),
    "qwen3_coder": ("<tool_call><function=f><parameter=a>", "</parameter></function></tool_call>"),
}

# Whole calls, whose parts have to be placed: many small values, many keys.
_LISTS = "[" + "[]," * (SIZE // 3 - 30) + "1]"
_KEYS = "{" + ",".join(f'"{i}":1' for i in range(SIZE // 11)) + "}"
WIDE = {
    "chat": {
        "lists in one argument": f'{{"tool_calls":[{{"function":{{"name":"f","arguments":{{"a":{_LISTS}}}}}}}]}}',
        "a message of many keys": _KEYS[:-1] + ',"tool_calls":[{"name":"f"}]}',
    },
    "mistral": {"lists in one argument": f'[TOOL_CALLS]f{{"a":{_LISTS}}}', "many keys": f"[TOOL_CALLS]f{_KEYS}"},
    "pythonic": {
        "strings with escapes": "[f(a=[" + "'\\n'," * (SIZE // 5 - 10) + "])]",
        "strings with tabs": "[f(a=[" + "'\t'," * (SIZE // 4 - 10) + "])]",
    },
    "qwen3_coder": {
        "functions in one tag": OPEN + "<function=f></function>" * (SIZE // 23 - 2) + CLOSE,
        "functions in one broken tag": OPEN + "<function=f></function>" * (SIZE // 23 - 2) + "x" + CLOSE,
    },
}


@pytest.mark.parametrize("format", ["hermes", *OTHER_TAGS])
def test_a_hostile_megabyte_takes_half_a_second(format: str) -> None:
    """Processor time of the reading, with the texts made for Hermes and the same with the format's own tags."""
    opening, closing = OTHER_TAGS.get(format, (OPEN, CLOSE))
    own = {f"{name}, own tags": text.replace(OPEN, opening).replace(CLOSE, closing) for name, text in TEXTS.items()}
    own |= {f"{name}, once": opening + text.replace(OPEN, "").replace(CLOSE, "") for name, text in TEXTS.items()}
    texts = {name: text[:SIZE] for name, text in (TEXTS | own | WIDE.get(format, {})).items()}
    given = json.dumps([texts, [format]]).encode()
    subprocess.run([sys.executable, "-c", _TIMED], input=given, check=True)


# Almost-JSON in one tag: what the lenient reader reads value by value.
LENIENT = {
    "single quotes": "'" * SIZE,
    "strings": '"" ' * (SIZE // 3),
    "lists": "[]" * (SIZE // 2),
    "ones": "1 " * (SIZE // 2),
    "keys without quotes": "{" + ",".join(f"k{i}:1" for i in range(SIZE // 10)) + "}",
    "single-quoted keys": "{" + ",".join(f"'{i}':1" for i in range(SIZE // 10)) + "}",
    "arguments in strings": json.dumps([{"name": "f", "arguments": '{"a": 1}'}] * (SIZE // 45)),
    "trailing commas": "[" + "[1,]," * (SIZE // 5) + "]",
    "comments": "[" + "1/**/," * (SIZE // 6) + "]",
    "escapes": "{'a': '" + "\\x41" * (SIZE // 4) + "'}",
}
_LENIENT_TIMED = """
import json, sys, time
from rewards import parse_lenient
slow = []
for name, text in json.load(sys.stdin).items():
    took = []
    while not took or (min(took) >= 0.5 and len(took) < 3):
        began = time.process_time()
        parse_lenient(text)
        took.append(time.process_time() - began)
    if min(took) >= 0.5:
        slow.append((name, min(took)))
assert not slow, slow
"""


def test_a_megabyte_is_repaired_in_half_a_second() -> None:
    given = json.dumps({name: OPEN + text + CLOSE for name, text in LENIENT.items()}).encode()
    subprocess.run([sys.executable, "-c", _LENIENT_TIMED], input=given, check=True)


_KEYS_OF_ONE = "abcdefgh"
# Arguments of 4,096 predicted calls, and of 100 gold calls of the same name, none of them right.
CROWDS: dict[str, Callable[[int], dict[str, object]]] = {
    "one number": lambda i: {"a": i},
    "one key differs": lambda i: {**dict.fromkeys(_KEYS_OF_ONE, 1), "a": i},
    "a value more each": lambda i: dict.fromkeys(_KEYS_OF_ONE[: abs(i) % 8], i),
    "keys of their own": lambda i: {f"k{i}": 1},
    "nulls": lambda i: {"a": None, "b": i},
    "lists": lambda i: {"a": [1, None, i]},
    "objects with nulls": lambda i: {"a": {"b": None, "c": i}},
    "numbers that hash alike": lambda i: {"a": i * (2**61 - 1)},
}


@pytest.mark.parametrize("name", CROWDS)
def test_calls_of_one_name_are_not_compared_each_with_each(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many comparisons as calls, not as pairs: counted, so that no clock decides."""
    arguments = CROWDS[name]
    gold = as_gold([[call("f", **arguments(-i)) for i in range(1, 101)]])
    steps = [ParsedCalls(tuple(ToolCall("f", arguments(i)) for i in range(MAX_ATTEMPTS)), MAX_ATTEMPTS, MAX_ATTEMPTS)]
    count = 0
    compare = matching.compare_arguments

    def counted(*given: Any) -> matching.Pair:
        nonlocal count
        count += 1
        return compare(*given)

    for module in ("pairing", "_table"):
        monkeypatch.setattr(f"rewards.{module}.compare_arguments", counted)
    score = process_score(steps, gold, None)
    assert (score.redundant_calls, score.success) == (MAX_ATTEMPTS - 100, False)
    action_score(steps, gold, None)
    # A few for each predicted call and for each member of each gold call; the pairs are 409,600.
    assert count < 3 * (MAX_ATTEMPTS + 100 * len(_KEYS_OF_ONE) * 2)


def test_a_word_of_a_megabyte_is_searched_once() -> None:
    """A fact that begins at every letter of it would be tried at full length a million times."""
    judge = RuleJudge()
    for answer, fact in (("a" * SIZE, "a" * 1000), ("ab" * (SIZE // 2), "ab" * 5000)):
        began = time.process_time()
        assert judge("", [], answer, facts=[fact]).score == 0.0
        assert judge("", [], f"{answer} {fact}.", facts=[fact]).score == 1.0
        assert time.process_time() - began < 1.0


def test_many_attempts_are_bounded_and_said() -> None:
    text = block(call("add", a=1)) * (MAX_ATTEMPTS + 10)
    parsed = parse_tool_calls(text)
    assert (parsed.num_open, len(parsed.valid)) == (MAX_ATTEMPTS + 10, MAX_ATTEMPTS)
    assert "the rest is not read" in (parsed.calls[-1].reason or "")
    score = process_score([parsed], [[call("add", a=1)]], TOOLS)
    assert score.format == MAX_ATTEMPTS / (MAX_ATTEMPTS + 10)
    listed = parse_tool_calls(OPEN + json.dumps([call("add", a=1)] * (MAX_ATTEMPTS + 10)) + CLOSE)
    assert len(listed.valid) == MAX_ATTEMPTS
    assert process_score([listed], [[call("add", a=1)]], TOOLS).format == 0.0


@pytest.mark.parametrize("depth", [127, 129, 1_000, 10_000, 100_000])
@pytest.mark.parametrize("ends", ["[]", '{"a":}'])
def test_nesting_never_raises(depth: int, ends: str) -> None:
    half = len(ends) // 2 if ends == "[]" else 5
    value = ends[:half] * depth + ("1" if half == 5 else "") + ends[half:] * depth
    for text in (
        f'{OPEN}{{"name": "add", "arguments": {{"a": {value}}}}}{CLOSE}',
        f"{OPEN}{value}{CLOSE}",
        OPEN + value,
    ):
        parsed = parse_tool_calls(text)
        assert parsed.num_open == 1
        process_score([text], GOLD, TOOLS)
        answer_calls(text, TOOLS)
    deep: object = 1
    for _ in range(depth):
        deep = [deep] if ends == "[]" else {"a": deep}
    problems = validate_call({"name": "maps.look", "arguments": {"x": deep}}, TOOLS)
    assert bool(problems) == (depth > 120)
    assert loose_match(deep, 1) is False


@pytest.mark.parametrize("key", ["anyOf", "oneOf"])
def test_a_recursive_schema_costs_no_power_of_the_depth(key: str) -> None:
    """The words for a mismatch would cost the number of alternatives to the power of the depth."""
    inner = {"type": "array", "items": {"$ref": "#/$defs/filter"}}
    groups = [
        {"properties": {"args": inner, "op": {"const": op}}, "type": "object", "required": ["args", "op"]}
        for op in ("and", "or")
    ]
    tool = {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {"where": {"$ref": "#/$defs/filter"}},
            "required": ["where"],
            "$defs": {"filter": {key: [*groups, {"type": "string"}]}},
        },
    }

    def nested(depth: int, op: str) -> str:
        value: object = "x"
        for _ in range(depth):
            value = {"op": op, "args": [value]}
        return block(call("search", where=value))

    began = time.process_time()
    for depth in (20, 50):
        (answer,) = answer_calls(nested(depth, "not"), [tool])
        assert answer.error == "invalid_value"
        assert process_score([nested(depth, "not")], GOLD, [tool]).format == 0.0
        assert answer_calls(nested(depth, "or"), [tool])[0].error is None
    assert time.process_time() - began < 2.0
    deep = json.loads(nested(9, "or").split("\n")[1])["arguments"]["where"]
    (problem,) = validate_call(call("search", what=deep), [tool])
    assert (problem.kind, problem.field) == ("missing_required", "where")
    assert validate_call(call("search", where=3), [tool])[0].field == "where"


_fragments = st.sampled_from(
    [
        OPEN,
        CLOSE,
        "<think>",
        "</think>",
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        ",",
        ":",
        " ",
        "\n",
        "NaN",
        "1e999",
        "name",
        "a",
        '"name"',
        '"add"',
        '"arguments"',
        "null",
        "true",
        "-",
        "\\ud800",
        "\ud800",
        "é",
        "'",
        block(call("add", a=1)),
        '{"name": "add", "arguments": {"a": 1}}',
        "<",
        "<tool_call",
        "\x00",
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_fragments, max_size=30).map("".join) | st.text(max_size=40).map(lambda text: OPEN + text))
def test_any_text_is_read(text: str) -> None:
    for think in ("reasoning", "text"):
        parsed = parse_tool_calls(text, think=think)  # type: ignore[arg-type]
        assert len(parsed.valid) <= len(parsed.calls)
        assert parsed.num_open <= text.count(OPEN)
        assert parsed.num_close <= text.count(CLOSE)
        assert {c.block for c in parsed.calls} == set(range(parsed.num_open))
        for attempt in parsed.calls:
            begin, end = attempt.span
            assert text.startswith(OPEN, begin)
            assert begin < end <= len(text)
            assert (attempt.status == "ok") == (attempt.reason is None)
            if attempt.status == "ok":
                assert text[:end].endswith(CLOSE)
                assert attempt.name_span
                assert begin < attempt.name_span[0] <= attempt.name_span[1] < end
                assert list(attempt.key_spans) == list(attempt.arguments)
                json.dumps(attempt.arguments, allow_nan=False, ensure_ascii=False).encode()
            validate_call(attempt, TOOLS)
    score = process_score([text], GOLD, TOOLS)
    assert 0.0 <= score.total <= 1.0
    reference_rule([text], GOLD, TOOLS)
    answer_calls(text, TOOLS)


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8"), min_size=1, max_size=6),
            st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), _json, max_size=3),
        ),
        max_size=4,
    ),
    st.booleans(),
    st.sampled_from(["blocks", "values", "list"]),
    st.booleans(),
)
def test_what_was_written_is_read(
    calls: list[tuple[str, dict[str, object]]], ascii: bool, shape: str, string: bool
) -> None:
    def arguments(value: dict[str, object]) -> object:
        return json.dumps(value, ensure_ascii=ascii) if string else value

    made = [{"name": name, "arguments": arguments(value)} for name, value in calls]
    texts = [json.dumps(one, ensure_ascii=ascii) for one in made]
    text = {
        "blocks": "\n".join(f"{OPEN}\n{one}\n{CLOSE}" for one in texts),
        "values": OPEN + "\n".join(texts) + CLOSE,
        "list": OPEN + json.dumps(made, ensure_ascii=ascii) + CLOSE,
    }[shape]
    text = f"Let me see. {text} Done."
    parsed = parse_tool_calls(text)
    assert [(c.name, c.arguments) for c in parsed.valid] == calls
    if calls:
        assert len(parsed.calls) == len(calls)
    for read in parsed.valid:
        assert read.name_span
        assert json.loads(f'"{text[slice(*read.name_span)]}"') == read.name
        for key, span in read.key_spans.items():
            shown = text[slice(*span)]
            assert json.loads(json.loads(f'"{shown}"').join('""') if string else f'"{shown}"') == key
