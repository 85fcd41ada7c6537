"""What a caller did wrong is said with the row and the field."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from jaxtyping import TypeCheckError

import rewards
from rewards import (
    Accepted,
    DeterministicMocker,
    GoldError,
    ParsedCalls,
    ProcessWeights,
    ToolCall,
    ToolSchemaError,
    ToolSet,
    Trajectory,
    as_gold,
    loose_match,
    parse_tool_calls,
    process_score,
    register_format,
    unified_total,
    validate_call,
)
from rewards.calls import _FORMATS
from rewards.schema import is_instance
from tests.rewards.checks import TOOLS, block, call

F: dict[str, Any] = {"name": "f"}


@pytest.mark.parametrize(
    ("gold", "field"),
    [
        ("not json", "gold: not JSON"),
        ({"name": "f"}, "gold: expected a list of steps"),
        ([call("f")], r"gold\[0\]: expected a list of calls"),
        ([["f"]], r"gold\[0\]\[0\]: expected an object"),
        ([[call("f")], [{"arguments": {}}]], r"gold\[1\]\[0\].name"),
        ([[{"name": 3}]], r"gold\[0\]\[0\].name"),
        ([[{"name": "f", "arguments": [1]}]], r"gold\[0\]\[0\].arguments"),
        ([[{"name": "f", "arguments": "{"}]], r"gold\[0\]\[0\].arguments"),
        ([[{"name": "f", "args": {"x": 1}}]], r"gold\[0\]\[0\].arguments: missing, and 'args' is not read"),
        ([[call("f", x=Accepted(()))]], r"gold\[0\]\[0\].arguments.x: no accepted value"),
        ([[call("f", x=[{"$accepted": [], "$optional": True}])]], r"gold\[0\]\[0\].arguments.x: no accepted value"),
        ([[call("f", x={"y": {"$accepted": 1}})]], r"gold\[0\]\[0\].arguments.x"),
        ([[call("f", x={"$accepted": [1], "more": 1})]], r"gold\[0\]\[0\].arguments.x"),
        (None, "gold: expected a list of steps"),
    ],
)
def test_bad_gold(gold: object, field: str) -> None:
    for row in (None, "train.jsonl:7"):
        with pytest.raises(GoldError, match=(f"{row}: " if row else "") + field):
            process_score(["text"], gold, None, row=row)


def test_gold_in_its_other_forms() -> None:
    plain = as_gold([[call("f", x=1)]])
    assert plain == as_gold('[[{"name": "f", "arguments": {"x": 1}}]]')
    assert plain == as_gold([[{"name": "f", "arguments": '{"x": 1}'}], []])
    assert as_gold([[{"name": "f"}]]) == as_gold([[call("f")]])
    assert as_gold([[{"name": "f", "parameters": {"x": 1}}]]) == plain
    assert as_gold([[{"name": "f", "arguments": None, "result": {}}]]) == as_gold([[call("f")]])
    deep: Any = 1
    for _ in range(5_000):
        deep = [deep]
    with pytest.raises(GoldError, match=r"arguments\.x: nested too deep"):
        as_gold([[call("f", x=deep)]])


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([{"type": "function", "function": {}}], r"tools\[0\].name"),
        ([F, {"name": ""}], r"tools\[1\].name"),
        ([{"function": 3}], r"tools\[0\].function"),
        ([F, {"name": "f", "parameters": {"type": "string"}}], "'f' is defined twice"),
        ([{"name": "f", "parameters": 3}], "'f': parameters: expected a schema"),
        ([{"name": "f", "parameters": {"type": "dict"}}], "'f': parameters.type: 'dict' is not valid"),
        (
            [{"name": "f", "parameters": {"properties": {"a": {"required": True}}}}],
            r"'f': parameters.properties.a.required",
        ),
        ([{"name": "f", "parameters": {"properties": {"a": {"pattern": "("}}}}], "'f': parameters"),
        ([{"name": "f", "parameters": {"$ref": "http://localhost/x"}}], "'f': parameters"),
        ([{"name": "f", "parameters": {"$ref": "#/$defs/none"}}], "'f': parameters"),
        ([{"name": "f", "parameters": {"default": {1, 2}}}], "'f': parameters: not JSON"),
    ],
)
def test_bad_tools(tools: Any, field: str) -> None:
    with pytest.raises(ToolSchemaError, match=field):
        validate_call(call("f"), tools)
    with pytest.raises(ToolSchemaError, match=field):
        process_score([block(call("f"))], [[call("f")]], tools)


def test_a_plain_list_of_tools_is_read_anew() -> None:
    tool: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}
    assert validate_call(call("f"), [tool]) == []
    tool["parameters"]["required"] = ["x"]
    assert [p.field for p in validate_call(call("f"), [tool])] == ["x"]


def test_arguments_that_are_not_json_are_a_problem() -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    for value in ({1, 2}, {3: 4}, "\ud800"):
        (problem,) = validate_call(call("f", a=value), [tool])
        assert problem.message.startswith("not JSON"), problem


def test_problems_are_few_and_short() -> None:
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": "array", "items": {"type": "integer"}}}}}
    problems = validate_call(call("f", a=["x" * 10_000] * 1_000), [tool])
    assert len(problems) == 20
    assert max(len(problem.message) for problem in problems) < 300
    assert problems[3].field == "a.3"


def test_other_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"sum to 1, got 1\.1"):
        ProcessWeights(name=0.35)
    with pytest.raises(ValueError, match=r"ProcessWeights\.name: expected >= 0"):
        ProcessWeights(name=-0.25, format=0.6)
    with pytest.raises(ValueError, match=r"ProcessWeights\.name"):
        ProcessWeights(name=math.nan)
    with pytest.raises(TypeError, match="got one text"):
        process_score("one text", [], None)
    with pytest.raises((TypeError, TypeCheckError)):
        process_score([None], [], None)  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"'xml' is not registered; known: .*hermes"):
        parse_tool_calls("", format="xml")
    with pytest.raises((ValueError, TypeCheckError)):
        parse_tool_calls("", think="maybe")  # type: ignore[arg-type]
    for alpha in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="alpha"):
            unified_total(1.0, 1.0, alpha)
    with pytest.raises(ValueError, match="no accepted value"):
        loose_match(1, Accepted(()))


def test_unified_total() -> None:
    assert unified_total(0.5, 0.25) == 0.75
    assert unified_total(0.5, -0.5, alpha=5.0) == 2.0
    assert unified_total(None, 1.0) is None
    assert unified_total(1.0, None) is None


def test_weights_change_the_total_and_the_pairing() -> None:
    gold = [[call("f", a=1, b=1)]]
    turns = [block(call("f", a=2, b=2))]
    key_only = ProcessWeights(0.0, 0.0, 1.0, 0.0, 0.0)
    assert process_score(turns, gold, None, key_only).total == 1.0
    assert process_score(turns, gold, None, ProcessWeights(0.0, 0.0, 0.0, 1.0, 0.0)).total == 0.0
    none = process_score(turns, gold, None, ProcessWeights(0.5, 0.5, 0.0, 0.0, 0.0))
    assert (none.key, none.value) == (1.0, 0.0)


def test_parsed_turns_score_as_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    text, gold = block(call("add", a=1)), [[call("add", a=1)]]
    assert process_score([parse_tool_calls(text)], gold, TOOLS) == process_score([text], gold, TOOLS)
    monkeypatch.setitem(_FORMATS, "mine", lambda text, think: ParsedCalls())
    register_format("mine", lambda text, think: ParsedCalls((ToolCall(text),), 1, 1))
    assert parse_tool_calls("f", format="mine").calls[0].name == "f"


@pytest.mark.parametrize(
    "schema",
    [
        {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 3}, "b": {"type": "boolean"}},
        },
        {"type": "array", "items": {"type": "number", "minimum": 0.5, "maximum": 0.6}, "minItems": 4},
        {"type": ["null", "string"]},
        {"enum": [1, "x"]},
        {"const": {"a": 1}},
        {"anyOf": [{"type": "integer", "maximum": -5}]},
        {"type": "null"},
        {"properties": {"deep": {"properties": {"deep": {"type": "integer"}}}}},
        {"type": "array", "maxItems": 0},
        {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 2},
        {
            "type": "object",
            "properties": {"at": {"$ref": "#/$defs/a~1%20b"}, "all": {"type": "array", "items": {"$ref": "#/$defs/N"}}},
            "required": ["at"],
            "$defs": {
                "a/ b": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
                "N": {"type": "object", "properties": {"next": {"type": ["object", "string"]}, "n": {"const": 1}}},
            },
        },
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "boolean"}}},
    ],
)
def test_mocked_answers_have_the_shape_of_their_schema(schema: dict[str, Any]) -> None:
    for n in range(20):
        for key in ("outputSchema", "returns"):
            answer = json.loads(DeterministicMocker()(ToolCall("f", {"n": n}), {"name": "f", key: schema}))
            assert is_instance(answer, schema)
    loose = DeterministicMocker()(ToolCall("f"), {"name": "f", "returns": {"type": "a string"}})
    assert json.loads(loose)["status"] == "success"
    assert loose == DeterministicMocker()(ToolCall("f"), None)
    endless = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}
    assert len(DeterministicMocker()(ToolCall("f"), {"name": "f", "returns": endless})) < 10_000


def test_trajectory() -> None:
    user, model = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    row = Trajectory((user, model), tuple(TOOLS), as_gold([[call("f", x=Accepted((1,), True))]]), "r1", "file:1")
    assert row.prompt == (user,)
    assert Trajectory.from_row(row.to_row()) == Trajectory((user,), row.tools, row.gold, "r1", "file:1")
    assert Trajectory.from_row(Trajectory((user,)).to_row()).gold is None
    with pytest.raises(ValueError, match="r2: prompt"):
        Trajectory.from_row({"id": "r2", "prompt": "Hi"})
    with pytest.raises(ValueError, match="r2: tools"):
        Trajectory.from_row({"id": "r2", "prompt": [user], "tools": "["})
    with pytest.raises(ValueError, match="r2: prompt"):
        Trajectory.from_row({"id": "r2", "prompt": [3]})
    for tools in ('{"name": "f"}', "5", ["f"]):
        with pytest.raises(ValueError, match="r2: tools: expected a list of schemas"):
            Trajectory.from_row({"id": "r2", "prompt": [user], "tools": tools})
    with pytest.raises(GoldError, match="r2: gold"):
        Trajectory.from_row({"id": "r2", "prompt": [user], "gold": "["})
    with pytest.raises(ValueError, match="mask: 1 entries for 2 token_ids"):
        Trajectory((user,), token_ids=(1, 2), mask=(1,))


def test_exports() -> None:
    assert sorted(rewards.__all__) == rewards.__all__
    assert all(hasattr(rewards, name) for name in rewards.__all__)


@pytest.mark.parametrize("module", ["torch", "scipy", "jsonschema", "jsonschema_rs", "trl"])
def test_import_is_light(module: str) -> None:
    code = f"import sys, rewards; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_type_checker_is_on() -> None:
    wrong: Callable[..., Any] = parse_tool_calls
    with pytest.raises(TypeCheckError):
        wrong(3)


def test_toolset_reads_like_a_list() -> None:
    tools = ToolSet(TOOLS)
    assert list(tools) == TOOLS
    assert tools.function("add") == TOOLS[0]["function"]
    assert tools.function("sub") is None
    assert tools.parameters("sub") is None
