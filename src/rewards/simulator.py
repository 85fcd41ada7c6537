"""SGLS, the schema-guided simulator: an environment for tools that exist only as schemas."""

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from urllib.parse import unquote

from rewards._json import canonical, depth_exceeds
from rewards.calls import ToolCall, parse_tool_calls
from rewards.formats.qwen_xml import type_arguments
from rewards.process import Tools
from rewards.schema import Problem, as_call, as_toolset, schema_error

# Keys under which tool catalogues keep the schema of an answer.
_ANSWER_SCHEMAS = ("outputSchema", "output_schema", "returns", "response")
_DEEPEST_ANSWER = 6
_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "iris", "juniper", "lark", "maple")


@dataclass(frozen=True)
class ToolResponse:
    """What a tool answered.

    Attributes:
        content: the text for the model; an error is a JSON object `{"error", "field", "message"}`, which names every
            missing argument.
        error: None, or the kind of the first problem.
        name: the tool that was called, "" where the call has no name.
    """

    content: str
    error: str | None = None
    name: str = ""


@runtime_checkable
class Mocker(Protocol):
    """Makes up the answer to a call; `function` is the tool's schema, None where the call names no known tool."""

    def __call__(self, call: ToolCall, function: Mapping[str, Any] | None) -> str: ...


@dataclass(frozen=True)
class DeterministicMocker:
    """Answers from a hash of tool and arguments: the same call gets the same answer, on any machine, in any order.

    The answer has the shape of the tool's answer schema (`outputSchema`, `output_schema`, `returns` or `response`)
    where there is one; otherwise `{"status", "id", "result"}`. It never repeats the arguments.

    Args:
        seed: another seed gives another world.

    Example:
        >>> mock = DeterministicMocker()
        >>> tool = {"name": "city", "returns": {"type": "object", "properties": {"population": {"type": "integer"}}}}
        >>> mock(ToolCall("city", {"name": "Rome"}), tool) == mock(ToolCall("city", {"name": "Rome"}), tool)
        True
        >>> list(json.loads(mock(ToolCall("city", {"name": "Rome"}), tool)))
        ['population']

    Reference: the embedded mocker is ours; SLCA appendix C.3 uses a frozen language model.
    """

    seed: int = 0

    def __call__(self, call: ToolCall, function: Mapping[str, Any] | None) -> str:
        arguments = "" if depth_exceeds(call.arguments) else canonical(call.arguments)
        text = json.dumps([self.seed, call.name, arguments])
        draw = random.Random(hashlib.blake2b(text.encode()).digest())
        schema = next((function[key] for key in _ANSWER_SCHEMAS if key in function), None) if function else None
        # Catalogues are loose about answers ("returns": "str"): what is no schema gives no shape.
        if isinstance(schema, Mapping) and not schema_error(schema):
            return json.dumps(_shaped(schema, draw, 0, schema))
        answer = {"status": "success", "id": f"{draw.getrandbits(32):08x}", "result": draw.choice(_WORDS)}
        return json.dumps(answer)


def simulate(
    call: ToolCall | Mapping[str, Any],
    tools: Tools,
    mocker: Mocker = DeterministicMocker(),  # frozen
    validate: bool = True,
) -> ToolResponse:
    """Answer one call: a fixed error for a wrong one, the mocker's answer for a valid one.

    Args:
        call: a parsed call, or `{"name": …, "arguments": …}`.
        tools: OpenAI-style tool schemas or a `ToolSet`.
        mocker: answers valid calls.
        validate: False forwards every call to the mocker, without a schema: the paper's ablation. An attempt that
            could not be read is no call, and gets its error all the same.

    Returns:
        The answer. No model output raises; what the mocker raises comes through.

    Raises:
        ToolSchemaError: one of the tools is not one.

    Example:
        >>> tools = [{"name": "city", "parameters": {"type": "object", "required": ["name"]}}]
        >>> simulate({"name": "city", "arguments": {}}, tools).content
        '{"error": "missing_required", "field": "name", "message": "\\\\"name\\\\" is a required property"}'
        >>> simulate({"name": "city", "arguments": {"name": "Rome"}}, tools).error is None
        True

    Reference: SLCA section 3.4, appendix C.3.
    """
    toolset, made = as_toolset(tools), as_call(call)
    if made.status == "ok" and not validate:
        return ToolResponse(mocker(made, None), None, made.name)
    problems = toolset.validate(made)
    if problems:
        return ToolResponse(_error(problems), problems[0].kind, made.name)
    return ToolResponse(mocker(made, toolset.function(made.name)), None, made.name)


def answer_calls(
    text: str,
    tools: Tools,
    mocker: Mocker = DeterministicMocker(),  # frozen
    validate: bool = True,
    max_workers: int = 8,
    format: str = "hermes",
) -> list[ToolResponse]:
    """Answer every call of one assistant text, in order; the calls run side by side.

    A rollout that meets an empty list has its final answer. An attempt that is no call gets an error for an answer.

    Args:
        text: what the model wrote in one turn.
        tools: the row's own tools.
        mocker: answers valid calls; must be safe to call from several threads.
        validate: as in `simulate`.
        max_workers: calls that run at once.
        format: the format of the calls, as in `parse_tool_calls`.

    Returns:
        One answer for each attempt in the text, each with the name of its tool.

    Example:
        >>> tools = [{"name": "now", "parameters": {"type": "object"}}]
        >>> text = '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "then"}</tool_call>'
        >>> [(answer.name, answer.error) for answer in answer_calls(text, tools)]
        [('now', None), ('then', 'unknown_tool')]

    Reference: SLCA section 3.4; the concurrency is ours.
    """
    toolset = as_toolset(tools)
    calls = type_arguments(parse_tool_calls(text, format), toolset).calls

    def answer(call: ToolCall) -> ToolResponse:
        return simulate(call, toolset, mocker, validate)

    if len(calls) < 2 or max_workers < 2 or isinstance(mocker, DeterministicMocker):
        return [answer(call) for call in calls]
    with ThreadPoolExecutor(min(max_workers, len(calls))) as pool:
        return list(pool.map(answer, calls))


def _error(problems: Sequence[Problem]) -> str:
    """The first problem; with a missing argument, all that are missing."""
    kind = problems[0].kind
    told = [problem for problem in problems if problem.kind == kind] if kind == "missing_required" else problems[:1]
    field = ", ".join([problem.field for problem in told])
    return json.dumps({"error": kind, "field": field, "message": "; ".join([problem.message for problem in told])})


def _shaped(schema: object, draw: random.Random, depth: int, root: Mapping[str, Any]) -> Any:
    """A value of the schema's shape; bounds are kept as far as a mock needs."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST_ANSWER:
        return draw.choice(_WORDS)
    if "$ref" in schema:
        return _shaped(_referred(str(schema["$ref"]), root), draw, depth + 1, root)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return draw.choice(list(schema["enum"]))
    for some in ("anyOf", "oneOf"):
        if schema.get(some):
            return _shaped(schema[some][0], draw, depth, root)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = next((k for k in kind if k != "null"), "null") if isinstance(kind, list) else kind
    if kind == "object":
        return {key: _shaped(part, draw, depth + 1, root) for key, part in schema.get("properties", {}).items()}
    if kind == "array":
        least = min(int(schema.get("minItems", 1)), 8)
        most = min(int(schema.get("maxItems", max(least, 3))), 8)
        count = draw.randint(min(least, most), most)
        return [_shaped(schema.get("items"), draw, depth + 1, root) for _ in range(count)]
    if kind in ("integer", "number"):
        low = schema.get("minimum", min(0, schema.get("maximum", 0)))
        high = max(low, schema.get("maximum", low + 1000))
        if kind == "integer":
            return draw.randint(math.ceil(low), max(math.ceil(low), math.floor(high)))
        return min(max(round(draw.uniform(low, high), 2), low), high)
    if kind in ("boolean", "null"):
        return draw.random() < 0.5 if kind == "boolean" else None
    return f"{draw.choice(_WORDS)}-{draw.randrange(1000):03d}"


def _referred(reference: str, root: Mapping[str, Any]) -> object:
    """What a reference names, where that is a place in the same schema ("#/$defs/Place"); None otherwise."""
    if not reference.startswith("#"):
        return None
    place: Any = root
    for step in unquote(reference[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        place = place.get(step) if isinstance(place, Mapping) else None
    return place
