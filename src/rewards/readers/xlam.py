"""xLAM function calling: `query`, `tools` and `answers`, with Python's types for parameters."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rewards.readers._fields import Row, as_tools, decoded, gold, identity, read, widened
from rewards.readers.bfcl import standard_types
from rewards.rows import MalformedRowError, Report, Rows, warn_of_row
from rewards.trajectories import Trajectory

_HEAD = re.compile(r"\s*([A-Za-z]+)")
_KINDS = {"str": "string", "string": "string", "int": "integer", "integer": "integer", "float": "number",
          "number": "number", "bool": "boolean", "boolean": "boolean", "list": "array", "array": "array",
          "tuple": "array", "set": "array", "sequence": "array", "dict": "object", "object": "object"}  # fmt: skip


def read_xlam(rows: Rows, on_error: Report = warn_of_row) -> Iterator[Trajectory]:
    """Read xLAM's rows: `query`, and JSON texts of `tools` and `answers`.

    A parameter's type is Python's ("str, optional", "List[int]"): its head becomes the JSON type, an unknown one says
    nothing. What is not "optional" and has no default is required, unless the row's own answer leaves it out; an
    answer of another type widens the schema by that type. Gold is one step of parallel calls; a row whose gold calls a
    tool that it does not offer is malformed.

    Args:
        rows: a file of JSON lines or one JSON array, or the rows themselves.
        on_error: told of each malformed row; the default warns.

    Yields:
        One task a row.

    Raises:
        OSError: the file cannot be read.

    Example:
        >>> tools = '[{"name": "f", "parameters": {"a": {"type": "int"}, "b": {"type": "str, optional"}}}]'
        >>> (row,) = read_xlam([{"query": "?", "tools": tools, "answers": '[{"name": "f", "arguments": {"a": 1}}]'}])
        >>> row.tools[0]["function"]["parameters"]["required"], row.gold.calls()
        (['a'], [[{'name': 'f', 'arguments': {'a': 1}}]])

    Reference: the data set xlam-function-calling-60k.
    """
    return read(rows, on_error, _xlam)


def _xlam(row: Row, source: str) -> Trajectory:
    query, answers, tools = row.get("query"), decoded(row, "answers"), decoded(row, "tools")
    if not isinstance(query, str) or not query:
        raise MalformedRowError("query", f"expected a text, got {query!r}")
    if not isinstance(answers, list):
        raise MalformedRowError("answers", f"expected a list of calls, got {type(answers).__name__}")
    known = gold([answers], "answers")
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise MalformedRowError("tools", "expected a list of objects")
    given: dict[str, list[Mapping[str, Any]]] = {}
    for call in known.flat:
        given.setdefault(call.name, []).append(call.arguments)
    made = [{"type": "function", "function": _function(tool, given)} for tool in tools]
    offered = {str(tool.get("name")) for tool in tools}
    for index, call in enumerate(known.flat):
        if call.name not in offered:
            raise MalformedRowError(f"answers[{index}]", f"calls {call.name!r}, which is not among the row's tools")
    message = {"role": "user", "content": query}
    return Trajectory((message,), as_tools(made, "tools"), known, identity(row, "id"), source)


def _function(tool: Mapping[str, Any], given: Mapping[str, list[Mapping[str, Any]]]) -> dict[str, Any]:
    parameters = tool.get("parameters") or {}
    if not isinstance(parameters, Mapping):
        raise MalformedRowError("tools", f"parameters: expected an object, got {type(parameters).__name__}")
    if isinstance(parameters.get("properties"), Mapping) and isinstance(parameters.get("type"), str):
        return {**tool, "parameters": standard_types(parameters)}
    uses = given.get(str(tool.get("name")), [])
    properties = {
        key: widened(_schema(value), [arguments[key] for arguments in uses if key in arguments])
        for key, value in parameters.items()
    }
    required = [
        key for key, value in parameters.items() if _is_required(value) and all(key in arguments for arguments in uses)
    ]
    return {**tool, "parameters": {"type": "object", "properties": properties, "required": required}}


def _is_required(parameter: object) -> bool:
    if not isinstance(parameter, Mapping) or "default" in parameter:
        return False
    return "optional" not in str(parameter.get("type", "")).lower()


def _schema(parameter: object) -> dict[str, Any]:
    if not isinstance(parameter, Mapping):
        return {}
    head = _HEAD.match(str(parameter.get("type", "")))
    kind = _KINDS.get(head[1].lower()) if head else None
    kept = {key: value for key, value in parameter.items() if key in ("description", "default")}
    return ({"type": kind} if kind else {}) | kept
