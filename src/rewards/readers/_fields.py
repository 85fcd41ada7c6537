"""Fields of a row: decoded, checked, and named where they are wrong."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rewards._lenient import read_json_or_repr
from rewards.calls import ToolCall
from rewards.formats.chat import parse_message
from rewards.gold import Gold, GoldError, as_gold
from rewards.lenient import written_calls
from rewards.readers._drafts import modern_tool
from rewards.rows import MalformedRowError, Report, RowError, Rows, read_rows
from rewards.schema import ToolSchemaError, ToolSet, is_instance, schema_error
from rewards.trajectories import Message, Trajectory

Row = Mapping[str, Any]
_TYPE_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
ROLES = ("system", "developer", "user", "assistant", "tool")


def read(rows: Rows, on_error: Report, convert: Callable[[Row, str], Trajectory]) -> Iterator[Trajectory]:
    """Convert row after row; `convert` gets the row and its source."""
    for file, name, line, row in read_rows(rows, on_error):
        try:
            yield convert(row, f"{name}:{line}")
        except MalformedRowError as error:
            on_error(RowError(file, line, error.field, error.message))
        except RecursionError:
            on_error(RowError(file, line, "row", "nested too deep"))


def decoded(row: Row, field: str) -> Any:
    """The value of a field that holds JSON, the text of JSON, or what Python's `str` made of it."""
    value = row.get(field)
    if not isinstance(value, str):
        return value
    try:
        return read_json_or_repr(value)
    except (ValueError, RecursionError) as error:
        raise MalformedRowError(field, str(error)) from None


def identity(row: Row, *fields: str) -> str:
    """The first of the fields that names the row; "" if none does."""
    return next((str(row[field]) for field in fields if row.get(field) not in (None, "")), "")


def as_tools(value: object, field: str) -> tuple[Mapping[str, Any], ...]:
    """Tool schemas, checked, those of older drafts in today's words; None is none."""
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise MalformedRowError(field, f"expected a list of tools, got {type(value).__name__}")
    try:
        return tuple(ToolSet(map(modern_tool, value)))
    except ToolSchemaError as error:
        raise MalformedRowError(field, str(error)) from error


def as_messages(value: object, field: str) -> list[dict[str, Any]]:
    """Chat messages: known roles, content that is text (or null, or parts), tool calls that parse."""
    if not isinstance(value, (list, tuple)) or not value:
        raise MalformedRowError(field, "expected a list of messages, at least one")
    found = []
    for index, message in enumerate(value):
        where = f"{field}[{index}]"
        if not isinstance(message, Mapping):
            raise MalformedRowError(where, f"expected an object, got {type(message).__name__}")
        if message.get("role") not in ROLES:
            raise MalformedRowError(f"{where}.role", f"expected one of {', '.join(ROLES)}, got {message.get('role')!r}")
        if not isinstance(message.get("content"), (str, list, type(None))):
            raise MalformedRowError(f"{where}.content", f"expected a text, got {type(message['content']).__name__}")
        found.append(_with_calls(dict(message), where))
    return found


def _with_calls(message: dict[str, Any], where: str) -> dict[str, Any]:
    """The message with its structured calls in one form: arguments are objects."""
    if not message.get("tool_calls") and not message.get("function_call"):
        # A table gives every message the columns of all messages, filled with nulls.
        return {key: value for key, value in message.items() if key not in ("tool_calls", "function_call")}
    calls = checked(parse_message(message).calls, f"{where}.tool_calls")
    given = message.get("tool_calls")
    ids = [entry.get("id") if isinstance(entry, Mapping) else None for entry in given or [None]]
    entries: list[dict[str, Any]] = [{"id": name} if isinstance(name, str) else {} for name in ids]
    for entry, call in zip(entries, calls):
        entry |= {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
    kept = {key: value for key, value in message.items() if key not in ("tool_calls", "function_call")}
    return {**kept, "content": message.get("content") or "", "tool_calls": entries}


def checked(calls: Sequence[ToolCall], where: str) -> list[ToolCall]:
    """The calls, all of them valid."""
    for index, call in enumerate(calls):
        if call.status != "ok":
            raise MalformedRowError(f"{where}[{index}]", str(call.reason))
    return list(calls)


def calls_of(message: Message, where: str) -> list[dict[str, Any]]:
    """The calls of one message: structured ones, or Hermes text, whose harmless slips (single quotes) are read."""
    if message.get("role") != "assistant":
        return []
    calls = written_calls(message)
    return [{"name": call.name, "arguments": call.arguments} for call in checked(calls, where)]


def gold_of(messages: Sequence[Message], field: str) -> Gold | None:
    """What the conversation itself called, by message; None if no assistant speaks in it."""
    if not any(message.get("role") == "assistant" for message in messages):
        return None
    return gold([calls_of(message, f"{field}[{index}]") for index, message in enumerate(messages)], field)


def gold(steps: object, field: str) -> Gold:
    """Gold calls, checked."""
    try:
        return as_gold(steps)
    except GoldError as error:
        raise MalformedRowError(field, str(error)) from error


def widened(schema: Any, values: Sequence[Any]) -> Any:
    """The schema, or one that also takes the types of the gold values that it refuses.

    For data whose types are loose: else the right answer would be an invalid call.
    """
    if schema_error(schema):  # it refers to another part of the whole
        return schema
    refused = {_TYPE_NAMES.get(type(value), "null") for value in values if not is_instance(value, schema)}
    return {"anyOf": [schema, {"type": sorted(refused)}]} if refused else schema
