"""Toucan-1.5M: string columns with JSON inside, and parallel calls as messages in a row."""

from collections.abc import Iterator, Mapping
from typing import Any

from rewards.calls import read_call
from rewards.readers._fields import Row, as_messages, as_tools, decoded, gold_of, identity, read
from rewards.rows import MalformedRowError, Report, Rows, warn_of_row
from rewards.trajectories import Trajectory

_ROLES = {"function": "tool", "tool_response": "tool", "tool_call": "assistant"}


def read_toucan(rows: Rows, on_error: Report = warn_of_row) -> Iterator[Trajectory]:
    """Read Toucan's rows: `messages` and `available_tools` (or `tools`), JSON texts or Python's `str` of them.

    Assistant messages with one `function_call` each, one after another, are the parallel calls of one step and become
    one message; so do messages of role `tool_call`. `function` and `tool_response` become `tool`.

    Args:
        rows: a file of JSON lines or one JSON array, or the rows themselves.
        on_error: told of each malformed row; the default warns.

    Yields:
        One trajectory a row; gold is what its assistant messages call, by step.

    Raises:
        OSError: the file cannot be read.

    Example:
        >>> call = {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}
        >>> (row,) = read_toucan([{"uuid": "u", "messages": [{"role": "user", "content": "?"}, call, call]}])
        >>> [len(step) for step in row.gold.steps], len(row.messages)
        ([2], 2)

    Reference: the data set Toucan-1.5M; ours.
    """
    return read(rows, on_error, _toucan)


def _toucan(row: Row, source: str) -> Trajectory:
    given = decoded(row, "messages")
    if not isinstance(given, list):
        raise MalformedRowError("messages", f"expected a list of messages, got {type(given).__name__}")
    messages = as_messages(_merged(given), "messages")
    field = "available_tools" if row.get("available_tools") is not None else "tools"
    tools = as_tools(decoded(row, field), field)
    # Toucan writes no call as text: a tag in its prose is prose.
    structured = [{**message, "content": ""} for message in messages]
    return Trajectory(tuple(messages), tools, gold_of(structured, "messages"), identity(row, "uuid", "id"), source)


def _merged(messages: list[Any]) -> list[Any]:
    """The messages in the roles of the chat format, calls that follow one another in one message."""
    found: list[Any] = []
    # Only a call that came alone in its message joins the calls before it.
    joins = False
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise MalformedRowError(f"messages[{index}]", f"expected an object, got {type(message).__name__}")
        role = message.get("role")
        call = message.get("function_call")
        if role == "tool_call":
            call = decoded(message, "content")
        kept = {key: value for key, value in message.items() if key != "function_call"}
        kept["role"] = _ROLES.get(role, role) if isinstance(role, str) else role
        if not call:
            found.append(kept)
            joins = False
            continue
        name, arguments, status, reason, _ = read_call(_decoded_call(call, index))
        if status != "ok":
            raise MalformedRowError(f"messages[{index}].function_call", str(reason))
        entry = {"type": "function", "function": {"name": name, "arguments": arguments}}
        content = "" if role == "tool_call" else message.get("content") or ""
        if joins and not content:
            found[-1]["tool_calls"].append(entry)
        else:
            found.append({**kept, "content": content, "tool_calls": [entry]})
        joins = True
    return found


def _decoded_call(call: Any, index: int) -> Any:
    """The call; one whose arguments are Python's `str` of an object is read too."""
    if not isinstance(call, Mapping):
        return call
    try:
        return {**call, "arguments": decoded(call, "arguments") if call.get("arguments") else {}}
    except MalformedRowError as error:
        raise MalformedRowError(f"messages[{index}].function_call.arguments", error.message) from None
