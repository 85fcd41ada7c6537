"""The fuzzer finds nothing in the parsers, and finds what is planted in one."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from benchmarks.fuzz_rewards import CORPUS, check, fuzz
from rewards.calls import _FORMATS, ParsedCalls, Think, parse_tool_calls, register_format


@pytest.fixture(autouse=True)
def _room() -> Iterator[None]:
    """The type checker of the tests puts a frame before each call, and the lenient reader nests by calls."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(3 * limit)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.parametrize("text", CORPUS)
def test_the_corpus_holds(text: str) -> None:
    assert check(text) is None


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_found(seed: int) -> None:
    count, failure = fuzz(seed, seconds=1.2, most=150)
    assert failure is None, failure
    assert count > 5


def _raises(text: str, parsed: ParsedCalls) -> ParsedCalls:
    return ParsedCalls(parsed.calls, parsed.num_open // (1 - ("\\ud" in text)), parsed.num_close)


def _moved(text: str, parsed: ParsedCalls) -> ParsedCalls:
    calls = [replace(call, span=(call.span[0], len(text) + 1)) for call in parsed.calls[:2]]
    return replace(parsed, calls=tuple(calls)) if len(calls) == 2 else parsed


def _slow(text: str, parsed: ParsedCalls) -> ParsedCalls:
    for _ in range(len(text) * len(text) // 100 if len(text) > 5000 else 0):
        pass
    return parsed


@pytest.mark.parametrize(
    ("fault", "oracle"), [(_raises, "returns"), (_moved, "places"), (_slow, "returns")], ids=["raises", "moved", "slow"]
)
def test_a_planted_fault_is_found(fault: Callable[[str, ParsedCalls], ParsedCalls], oracle: str) -> None:
    def planted(text: str, think: Think) -> ParsedCalls:
        return fault(text, parse_tool_calls(text, "hermes", think))

    register_format("planted", planted)
    try:
        failure = next(found for seed in range(9) if (found := fuzz(seed, 20.0, 400, ("planted",), 0.5)[1]) is not None)
    finally:
        del _FORMATS["planted"]
    assert oracle in failure.oracle
    if oracle == "returns" and "Zero" in failure.detail:
        assert failure.text == "\\ud"
