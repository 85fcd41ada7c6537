"""Rows that look odd and are good are read; rows whose gold cannot be called are reported."""

import json
from typing import Any

import pytest

from rewards import RowError, read_chat, read_toucan, read_xlam, validate_call
from rewards.readers._drafts import modern


@pytest.mark.parametrize("prose", ["I would use <tool_call> tags.", "</tool_call>", "<tool_call>{oops"])
def test_toucan_prose_may_speak_of_tags(prose: str) -> None:
    called = {"role": "assistant", "content": prose, "function_call": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "user", "content": "?"}, called, {"role": "assistant", "content": prose}]
    errors: list[RowError] = []
    (row,) = read_toucan([{"messages": json.dumps(messages), "tools": [{"name": "f"}]}], errors.append)
    assert errors == []
    assert row.gold is not None
    assert row.gold.calls() == [[{"name": "f", "arguments": {}}]]
    assert row.messages[-1]["content"] == prose


@pytest.mark.parametrize("wrapped", [True, False])
def test_tuples_of_draft_7_are_read(wrapped: bool) -> None:
    point = {"type": "array", "items": [{"type": "number"}, {"type": "string"}], "additionalItems": False}
    tool: dict[str, Any] = {"name": "f", "parameters": {"type": "object", "properties": {"at": {"anyOf": [point]}}}}
    tools = [{"type": "function", "function": tool} if wrapped else tool]
    for read in (read_chat, read_toucan):
        errors: list[RowError] = []
        (row,) = read([{"messages": [{"role": "user", "content": "?"}], "tools": tools}], errors.append)
        assert errors == []
        for at, good in [([1, "x"], True), (["x", 1], False), ([1, "x", 2], False), ([1], True)]:
            assert (validate_call({"name": "f", "arguments": {"at": at}}, row.tools) == []) == good


def test_only_tuples_change() -> None:
    schema = {"items": {"not": {"const": [1]}}, "properties": {"items": {"enum": ["a"]}}, "anyOf": [True]}
    assert modern(schema) == schema
    assert modern({"items": []}) == {}
    assert modern({"items": [], "additionalItems": {"type": "null"}}) == {"items": {"type": "null"}}


def test_xlam_gold_must_be_offered() -> None:
    rows = [
        {"query": "?", "tools": [{"name": "f", "parameters": {}}], "answers": [{"name": name, "arguments": {}}]}
        for name in "gf"
    ]
    errors: list[RowError] = []
    (row,) = read_xlam(rows, errors.append)
    assert row.gold is not None
    assert [call.name for call in row.gold.flat] == ["f"]
    ((error),) = errors
    assert error.field == "answers[0]"
    assert "'g'" in error.message
