"""Call formats beside Hermes: what each reads, where names and keys stand, and that no text hurts."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards import (
    ParsedCalls,
    ToolSet,
    answer_calls,
    parse_message,
    parse_tool_calls,
    process_score,
    read_bfcl,
    reference_rule,
    type_arguments,
)
from rewards.calls import MAX_ATTEMPTS
from tests.rewards.format_checks import CHECKS, FORMATS, write


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check(check: Any) -> None:
    check()


_texts = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=8) | st.sampled_from(
    ["</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "it's", '"', "\\", "\n", "{", "]", "</think>", "\\u00e9", "😀"]
)
_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_texts, inner, max_size=2),
    max_leaves=5,
)
_steps = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.from_regex(r"[a-z]{1,5}(\.[a-z]{1,3})?", fullmatch=True),
            "arguments": st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), _values, max_size=3),
        }
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=80, deadline=None)
@given(_steps, st.sampled_from(FORMATS))
def test_what_is_written_is_read(step: list[dict[str, Any]], format: str) -> None:
    text = write(step, format)
    parsed = parse_tool_calls(text, format)
    assert [{"name": call.name, "arguments": call.arguments} for call in parsed.valid] == step, parsed
    assert json.dumps([dict(call.arguments) for call in parsed.valid]) == json.dumps([c["arguments"] for c in step])
    for call, said in zip(parsed.calls, step):
        assert call.name_span is not None
        assert text[slice(*call.name_span)] == said["name"]
        assert {key: text[slice(*span)] for key, span in call.key_spans.items()} == {k: k for k in said["arguments"]}
    assert process_score([text], [step], None, format=format).total == 1.0
    assert reference_rule([text], [step], None, format=format)


@settings(max_examples=60, deadline=None)
@given(_steps)
def test_qwen_xml_writes_text_and_schemas_type_it(step: list[dict[str, Any]]) -> None:
    texts = [{**call, "arguments": {k: "x" + json.dumps(v) for k, v in call["arguments"].items()}} for call in step]
    text = write(texts, "qwen3_coder")
    if not any("</parameter>" in value for call in texts for value in call["arguments"].values()):
        parsed = parse_tool_calls(text, "qwen3_coder")
        assert [{"name": call.name, "arguments": call.arguments} for call in parsed.valid] == texts
        for call, said in zip(parsed.calls, texts):
            assert {key: text[slice(*span)] for key, span in call.key_spans.items()} == {
                k: k for k in said["arguments"]
            }
        assert process_score([text], [texts], None, format="qwen3_coder").total == 1.0


_FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<|python_tag|>",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>", "[THINK]", "[/THINK]", '{"name": "f"', '"parameters"',
    '"tool_calls": [', "f(", "a=", "[", "]", "{", "}", "(", ")", ",", ":", ";", '"', "'", "\\", "1", "-", " ", "\n",
    "NaN", "True", "\ud800", "é", "\0",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(_FRAGMENTS) | st.text(max_size=3), max_size=15).map("".join))
def test_no_text_raises(text: str) -> None:
    for format in (*FORMATS, "qwen3_coder"):
        for think in ("reasoning", "text"):
            parsed = parse_tool_calls(text, format, think)
            assert parsed.num_close <= len(text)
            for call in parsed.calls:
                first, last = call.span
                assert 0 <= first <= last <= len(text)
                _ = call.name_span, call.key_spans
                assert (call.reason is None) == (call.status == "ok")
        process_score([text], [], None, format=format)


_UNITS = {
    "chat": ["[", '[{"function":', '{"tool_calls":', '"', "{}", '{"tool_calls":[{}],"a":'],
    "llama3_json": ["<|python_tag|>", "<|python_tag|>{", '<|python_tag|>{"', '<|python_tag|>["\\', '{"name":"f"};',
                    '{"name":', "<|python_tag|>{x\n", ";", '<|python_tag|>{",'],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]f", "[TOOL_CALLS]f[ARGS]{", '[TOOL_CALLS][{"', "[TOOL_CALLS]f{}", "[",
                '[TOOL_CALLS]["\\', "[TOOL_CALLS]f[CALL_ID]", "[TOOL_CALLS] \n{x", "[THINK]"],
    "pythonic": ["[f(a=", "[f(a=[", "[f(a={", "[f(),", "f(a='", "[f(a='\\", "[f(a=1,b=", "[a ", "[f(a=-", "[f(a=\"'",
                 "<|python_start|>[", "(" ],
    "qwen3_coder": ["<tool_call>", "<tool_call><function=f>", "<tool_call><function=f><parameter=a>", "</parameter>",
                    "<tool_call><function=f><parameter=a></parameter>", "<tool_call> \n", "<tool_call><function=",
                    "<tool_call><function=f></function></tool_call>", "<parameter=a>", "</tool_call>"],
}  # fmt: skip


# The type checker of the tests costs more than the reading, so this runs without it.
_TIMED = """
import json, sys, time
from rewards import parse_tool_calls
starts = {"pythonic": "[f(a=1), ", "chat": '{"tool_calls": ', "llama3_json": '{"name": "f"}'}
ends = {"qwen3_coder": "</parameter>", "pythonic": ")]", "mistral": '"}]'}
for format, units in json.loads(sys.argv[1]).items():
    for unit in units:
        many = unit * (1_000_000 // len(unit))
        for text in (many, starts.get(format, "") + many + ends.get(format, "")):
            began = time.process_time()
            parsed = parse_tool_calls(text, format)
            took = time.process_time() - began
            # Linear: under 0.1 s on an idle machine. Quadratic: minutes.
            assert took < 1.5, (format, unit, took)
            assert len(parsed.calls) <= int(sys.argv[2]) + 1, (format, unit)
"""


_MANY_ENTRIES = """
import time
from rewards import parse_tool_calls
for text in (
    "[" + ",".join(['{"name":1}'] * 90_000) + "]",
    "[" + ",".join(['{"function":0}'] * 65_000) + "]",
    '{"tool_calls":[' + ",".join("0" * 500_000) + "]}",
):
    began = time.process_time()
    parsed = parse_tool_calls(text, "chat")
    assert time.process_time() - began < 0.5, text[:40]
    assert len(parsed.calls) == 4097 and parsed.num_open > 60_000
    assert "the rest is not read" in parsed.calls[-1].reason
"""


def test_a_megabyte_of_entries_is_bounded() -> None:
    subprocess.run([sys.executable, "-c", _MANY_ENTRIES], check=True)


def test_hostile_text_takes_linear_time() -> None:
    subprocess.run([sys.executable, "-c", _TIMED, json.dumps(_UNITS), str(MAX_ATTEMPTS)], check=True)


def test_messages() -> None:
    entry = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [entry, {"name": "g", "arguments": {}}, "x"]}
    parsed = parse_message(message)
    assert [(call.name, call.status) for call in parsed.calls] == [("f", "ok"), ("g", "ok"), ("", "not_an_object")]
    assert parsed.calls[0].arguments == {"a": 1}
    assert parsed.calls[0].name_span is None
    assert parse_message({"function_call": {"name": "f", "arguments": ""}}).valid[0].name == "f"
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert parse_message({"content": text}) == parse_message({"content": [{"type": "text", "text": text}]})
    assert parse_message({"content": text}).valid[0].name == "f"
    assert parse_message({}) == parse_message({"content": 3, "tool_calls": []}) == ParsedCalls()
    deep: Any = 1
    for _ in range(10_000):
        deep = [deep]
    assert parse_message({"tool_calls": [{"function": {"name": "f", "arguments": {"a": deep}}}]}).valid == ()


def test_structured_calls_are_json_too() -> None:
    for value in (float("nan"), float("inf"), {1, 2}, "\ud800"):
        message = {"tool_calls": [{"function": {"name": "f", "arguments": {"a": value}}}]}
        (attempt,) = parse_message(message).calls
        assert attempt.status == "invalid_arguments", value
        assert "not JSON" in str(attempt.reason)


def test_half_a_surrogate_pair_has_no_type() -> None:
    tools = [{"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}]
    text = write([{"name": "f", "arguments": {"a": "\ud800"}}], "qwen3_coder")
    assert process_score([text], [], tools, format="qwen3_coder").name == 0.0
    assert len(answer_calls(text, tools, format="qwen3_coder")) == 1


def test_types_come_from_the_schema() -> None:
    kinds = {
        "s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": ["number", "null"]}, "b": {"type": "boolean"},
        "l": {"type": "array"}, "any": {}, "r": {"$ref": "#/$defs/r"}, "e": {"enum": [1, 2]},
    }  # fmt: skip
    schema = {"type": "object", "properties": kinds, "$defs": {"r": {"type": "object"}}}
    tools = [{"name": "f", "parameters": schema}, {"name": "t", "parameters": True}]
    said = {"s": "5", "i": "5", "n": "null", "b": "True", "l": "[1]", "any": "{}", "r": '{"a": 1}', "e": "2"}
    said["new"] = "7"
    want = {"s": "5", "i": 5, "n": None, "b": True, "l": [1], "any": {}, "r": {"a": 1}, "e": 2, "new": "7"}
    text = write([{"name": "f", "arguments": said}, {"name": "t", "arguments": {"a": "1"}}], "qwen3_coder")
    typed = type_arguments(parse_tool_calls(text, "qwen3_coder"), tools)
    assert [dict(call.arguments) for call in typed.calls] == [want, {"a": "1"}]
    assert typed.calls[0].notes == ()
    assert text[slice(*typed.calls[0].key_spans["new"])] == "new"
    wrong = write([{"name": "f", "arguments": {"i": "five"}}], "qwen3_coder")
    assert process_score([wrong], [[{"name": "f", "arguments": {"i": 5}}]], tools, format="qwen3_coder").format == 0.0
    assert type_arguments(typed, tools) is typed


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(ValueError, match="'yaml' is not registered; known: chat, hermes"):
        process_score(["x"], [], None, format="yaml")
    with pytest.raises(ValueError, match="format: 'yaml'"):
        reference_rule(["x"], [], None, format="yaml")


def test_the_simulator_reads_every_format() -> None:
    tools = [{"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}]
    for format in (*FORMATS, "qwen3_coder"):
        right = write([{"name": "f", "arguments": {"a": 5}}], format)
        wrong = write([{"name": "x", "arguments": {}}], format)
        (answer,) = answer_calls(right, tools, format=format)
        assert answer.error is None, format
        assert [answer.error for answer in answer_calls(wrong, tools, format=format)] == ["unknown_tool"]


def test_released_gold_scores_one_in_every_format() -> None:
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("BFCL's data is not here: pip install --no-deps bfcl-eval==2026.3.23")
    file = Path(spec.submodule_search_locations[0]) / "data" / "BFCL_v4_parallel_multiple.json"
    for row in read_bfcl(file):
        assert row.gold is not None
        (step,), tools = row.gold.calls(), ToolSet(row.tools)
        texts = {format: write(step, format) for format in FORMATS}
        spelled = [{**call, "arguments": {k: _spelled(v) for k, v in call["arguments"].items()}} for call in step]
        texts["qwen3_coder"] = write(spelled, "qwen3_coder")
        for format, text in texts.items():
            assert process_score([text], row.gold, tools, format=format).total == 1.0, (row.id, format)


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
