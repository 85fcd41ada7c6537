"""Lenient reading: what is repaired and said, what is refused, and that no scorer takes it."""

import contextlib
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards import parse_lenient, parse_tool_calls, process_score
from rewards._lenient import LenientReader, read_json_or_repr
from tests.rewards.lenient_checks import CHECKS
from tests.rewards.mutants import mutated


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check(check: Any) -> None:
    check()


_texts = st.text(max_size=8).filter(lambda text: text.encode("utf-8", "ignore").decode() == text)
_trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(_trees)
def test_reads_json_and_python_alike(value: Any) -> None:
    for written in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1), repr(value)):
        assert LenientReader(written).value() == value
        assert json.dumps(read_json_or_repr(written)) == json.dumps(value)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(_texts, _trees, max_size=3))
def test_a_right_call_needs_no_repair(arguments: dict[str, Any]) -> None:
    text = f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>"
    found = parse_lenient(text)
    assert found.repairs == ()
    assert found.calls == parse_tool_calls(text).calls
    python = parse_lenient(f"<tool_call>{ {'name': 'f', 'arguments': arguments}!r}")
    assert python.valid[0].arguments == arguments
    assert python.repairs[-1].kind == "missing closing tag"


_FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "{", "}", "[", "]", "(", ")", ",", ":", "'", '"', "\\", "\\u",
    "\\U", "\\x", "/*", "*/", "//", "#", "\n", " ", "1", "-", "NaN", "None", "name", "'name': 'f'", "```json", "\ud800",
]  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(_FRAGMENTS) | st.text(max_size=3), max_size=15).map("".join))
def test_no_text_raises(text: str) -> None:
    for tagged in (text, "<tool_call>" + text, "<tool_call>{'name': 'f', 'arguments': {'a': " + text):
        found = parse_lenient(tagged)
        assert all(0 <= call.span[0] <= call.span[1] <= len(tagged) for call in found.calls)
        assert all((call.reason is None) == (call.status == "ok") for call in found.calls)
        json.dumps([dict(call.arguments) for call in found.valid], allow_nan=False)
    with contextlib.suppress(ValueError):
        read_json_or_repr(text)


_UNITS = [
    "<tool_call>", "<tool_call>{", "<tool_call>{'", "<tool_call>['\\", "<tool_call>[/*", "<tool_call>[//", "[", "{a:",
    "'", "1,", "{},", "/**/", "#\n", "<tool_call>[',", "<tool_call>{}}", "<tool_call>```", "}", "*", "<tool_call>{}",
]  # fmt: skip
# The type checker of the tests costs more than the reading, so this runs without it.
_TIMED = """
import json, sys, time
from rewards import parse_lenient
for unit in json.loads(sys.argv[1]):
    many = unit * (300_000 // len(unit))
    for text in (many, "<tool_call>[" + many, "<tool_call>{'name': '" + many + "'}", "<tool_call>/*" + many):
        began = time.process_time()
        parse_lenient(text)
        took = time.process_time() - began
        # Linear: under 0.3 s. Quadratic: many seconds.
        assert took < 1.5, (unit, text[:20], took)
parsed = parse_lenient("<tool_call>[" + "1," * 200_000)
assert parsed.calls[-1].reason == "more than 100000 values", parsed.calls[-1]
"""


def test_hostile_text_takes_linear_time() -> None:
    subprocess.run([sys.executable, "-c", _TIMED, json.dumps(_UNITS)], check=True)


def test_scorers_refuse_it() -> None:
    with pytest.raises(TypeError):
        process_score([parse_lenient("x")], [], None)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        ("_lenient:LenientReader._object", "if key in found:", "if False:"),
        ("_lenient:LenientReader._after", 'self._repair("missing brace")', "pass"),
        ("_lenient:LenientReader._after", 'self.repairs.append(Repair("trailing comma", comma))', "pass"),
        ("_lenient:LenientReader._word", 'if sign == "(":', "if False:"),
        ("_lenient:LenientReader.value", "if depth > MAX_DEPTH:", "if False:"),
        ("_lenient:LenientReader._unescaped", "value.encode()", "pass"),
        ("lenient:_extra", "reader.text.startswith(_CLOSE, extra.end())", "True"),
        ("lenient:_ended", "_fence(reader)", "pass"),
    ],
)
def test_mutants_fail(function: str, old: str, new: str) -> None:
    def run() -> None:
        for check in CHECKS:
            check()

    run()
    with mutated(function, old, new), pytest.raises((AssertionError, ValueError, IndexError, RecursionError)):
        run()
