"""Hermes function calling: ShareGPT conversations with `<tool_call>` text."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rewards._json import decode_at, skip_space
from rewards._lenient import LenientReader, RefusedError
from rewards.readers._fields import Row, as_messages, as_tools, decoded, gold_of, identity, read
from rewards.rows import MalformedRowError, Report, Rows, warn_of_row
from rewards.trajectories import Trajectory

_TOOLS = re.compile(r"<tools>\s*(?=[\[{])")
_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
          "tool": "tool", "observation": "tool", "function_response": "tool"}  # fmt: skip


def read_hermes(rows: Rows, on_error: Report = warn_of_row) -> Iterator[Trajectory]:
    """Read Hermes rows: `conversations` of `from` and `value`, with `tools` or `<tools>` in the system text.

    Assistant texts stay as they are, tags and all. Gold is what they call, a step a message; single quotes and other
    slips of the data are read as `parse_lenient` reads them.

    Args:
        rows: a file of JSON lines or one JSON array, or the rows themselves.
        on_error: told of each malformed row; the default warns.

    Yields:
        One trajectory a row.

    Raises:
        OSError: the file cannot be read.

    Example:
        >>> said = "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>"
        >>> (row,) = read_hermes([{"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": said}]}])
        >>> row.gold.calls()
        [[{'name': 'f', 'arguments': {}}]]

    Reference: the data set hermes-function-calling-v1.
    """
    return read(rows, on_error, _hermes)


def _hermes(row: Row, source: str) -> Trajectory:
    given = decoded(row, "conversations")
    if not isinstance(given, list):
        raise MalformedRowError("conversations", f"expected a list of messages, got {type(given).__name__}")
    messages: list[Any] = []
    for index, turn in enumerate(given):
        role = _ROLES.get(str(turn.get("from"))) if isinstance(turn, Mapping) else None
        if role is None or not isinstance(turn.get("value"), str):
            raise MalformedRowError(f"conversations[{index}]", "expected a known `from` and a text as `value`")
        messages.append({"role": role, "content": turn["value"]})
    messages = as_messages(messages, "conversations")
    tools = as_tools(decoded(row, "tools") if row.get("tools") else _system_tools(messages), "tools")
    return Trajectory(tuple(messages), tools, gold_of(messages, "conversations"), identity(row, "id"), source)


def _system_tools(messages: list[dict[str, Any]]) -> list[Any]:
    """The tools between `<tools>` and `</tools>` of the system text: a list, or object after object.

    The system text itself speaks of "<tools></tools> tags", before and after it gives them, so the last opening tag
    that a value follows counts.
    """
    text = messages[0]["content"] if messages[0]["role"] == "system" else ""
    opened = [tag.end() for tag in _TOOLS.finditer(text)]
    if not opened:
        return []
    at, found = opened[-1], []
    while at < len(text) and not text.startswith("</tools>", at):
        value = decode_at(text, at)
        if value.reason is None:
            at = skip_space(text, value.end)
            found.append(value.value)
            continue
        reader = LenientReader(text, at, "</tools>")
        try:
            found.append(reader.value())
        except RefusedError as error:
            raise MalformedRowError("tools", f"between <tools> tags: {error}") from None
        at = skip_space(text, reader.at)
    return found[0] if len(found) == 1 and isinstance(found[0], list) else found
