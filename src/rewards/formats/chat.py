"""Calls as the chat API writes them: the `tool_calls` of an assistant message."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rewards._json import decode_at, depth_exceeds, scan_plainly, skip_space
from rewards._places import elements, members
from rewards.calls import (
    MAX_ATTEMPTS,
    ParsedCalls,
    Span,
    Status,
    Think,
    ToolCall,
    made,
    parse_tool_calls,
    read_call,
    register_format,
)
from rewards.formats._blocks import TOO_MANY, after_reasoning, failed

_BEGINS = re.compile(r"\s*(?:\{|\[\s*[{\]])")
# What makes a broken text an attempt at a call rather than a broken answer.
_KEYS = ('"tool_calls"', '"function_call"', '"function"')


def parse_chat(text: str, think: Think = "reasoning") -> ParsedCalls:
    """Read the JSON text of an assistant message with `tool_calls`, or of such a list alone.

    An entry is `{"type": "function", "function": {"name": …, "arguments": …}}` or the inner object alone; arguments are
    an object or a JSON string. `function_call`, the API's older form, is one call. Each entry is a block. Text that is
    no JSON object or list holds no call.

    Args:
        text: the JSON text.
        think: as in `parse_tool_calls`; a text that begins with JSON holds no reasoning.

    Returns:
        The attempts in order. Bad text never raises and costs linear time.

    Example:
        >>> text = '{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\\\\"a\\\\": 1}"}}]}'
        >>> call = parse_chat(text).calls[0]
        >>> call.name, call.arguments
        ('f', {'a': 1})

    Reference: the chat completions format of OpenAI.
    """
    start = skip_space(text, after_reasoning(text, think, _BEGINS))
    if text[start : start + 1] not in ("{", "["):
        return ParsedCalls()
    found = decode_at(text, start)
    if found.reason is not None:
        if not any(key in text for key in _KEYS):
            return ParsedCalls()
        status: Status = "invalid_json" if found.whole or skip_space(text, found.end) < len(text) else "unclosed"
        return ParsedCalls((failed(status, found.reason, (start, found.end), 0),), 1, int(found.whole))
    entries = _entries(found.value)
    read = zip(range(MAX_ATTEMPTS), entries, _places(text, start, found.value))
    calls = [_call(entry, number, text, span) for number, entry, span in read]
    return _bounded(calls, len(entries))


def parse_message(message: Mapping[str, Any], format: str = "hermes", think: Think = "reasoning") -> ParsedCalls:
    """Read the calls of one assistant message: its `tool_calls`, or else what its content says.

    Args:
        message: a chat message; `tool_calls` and `function_call` as in `parse_chat`.
        format: the format of calls in the content.
        think: as in `parse_tool_calls`.

    Returns:
        The attempts in order; structured ones have no place in a text. No message of a model raises.

    Raises:
        ValueError: the format is not registered.

    Example:
        >>> message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
        >>> parse_message(message).valid[0].name
        'f'

    Reference: ours.
    """
    entries = _entries(message)
    if entries:
        read = zip(range(MAX_ATTEMPTS), entries)
        return _bounded([_structured(entry, number) for number, entry in read], len(entries))
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = "".join(part for part in parts if isinstance(part, str))
    return parse_tool_calls(content if isinstance(content, str) else "", format, think)


def _entries(value: object) -> list[object]:
    """The entries of a message, or of a list of them."""
    if isinstance(value, list):
        calls = all(isinstance(item, Mapping) and ("function" in item or "name" in item) for item in value)
        return value if calls else []
    if not isinstance(value, Mapping):
        return []
    several = value.get("tool_calls")
    if several:
        return list(several) if isinstance(several, (list, tuple)) else [several]
    return [value["function_call"]] if value.get("function_call") else []


def _places(text: str, start: int, value: object) -> Iterator[Span]:
    """Where each entry begins and ends."""
    if isinstance(value, Mapping):
        calls = value.get("tool_calls")
        wanted = "tool_calls" if calls else "function_call"
        start = next(begin for key, _, _, begin in members(text, start) if key == wanted)
        if not isinstance(calls, list) or not calls:
            yield start, scan_plainly(text, start)[1]
            return
    yield from elements(text, start)


def _structured(entry: object, number: int) -> ToolCall:
    """A call that another parser decoded, which may have let pass what is not JSON."""
    if depth_exceeds(entry):
        return failed("invalid_arguments", "nested too deep", (0, 0), number)
    name, arguments, status, reason, notes = read_call(_inner(entry))
    try:
        json.dumps([name, arguments], ensure_ascii=False, allow_nan=False, default=dict).encode()
    except (ValueError, TypeError) as error:
        return failed("invalid_arguments", f"not JSON: {error}"[:200], (0, 0), number)
    return ToolCall(name, arguments, status, reason, block=number, notes=notes)


def _inner(entry: object) -> object:
    return entry.get("function", entry) if isinstance(entry, Mapping) else entry


def _call(entry: object, number: int, text: str, span: Span) -> ToolCall:
    inner, start = _inner(entry), span[0]
    name, arguments, status, reason, notes = read_call(inner)
    if inner is not entry:
        start = next(begin for key, _, _, begin in members(text, start) if key == "function")
    return made(name, arguments, status, reason, span, number, notes, text, start if isinstance(inner, Mapping) else -1)


def _bounded(calls: list[ToolCall], count: int) -> ParsedCalls:
    if count > MAX_ATTEMPTS:
        calls = [*calls, failed("invalid_json", TOO_MANY, (0, 0), MAX_ATTEMPTS)]
    return ParsedCalls(tuple(calls), count, count)


register_format("chat", parse_chat)
