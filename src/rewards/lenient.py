"""Calls that are almost right, read for a rollout and never for a score, with a report of what was repaired."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rewards._lenient import MOST_VALUES, LenientReader, RefusedError, Repair
from rewards.calls import MAX_ATTEMPTS, Status, Think, ToolCall, parse_tool_calls, read_call
from rewards.formats._blocks import Block, failed, tags, walk
from rewards.formats.chat import parse_message

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAGS = tags(_OPEN, closing=_CLOSE)
_FENCE = re.compile(r"\s*```[a-z]*\s*")
_EXTRA = re.compile(r"[}\]\s]+")


@dataclass(frozen=True)
class LenientCalls:
    """Calls read with repairs. No scorer takes it: a score must not reward what only a repair could read.

    Attributes:
        calls: every attempt in order; those that no repair makes a call say why.
        repairs: what was repaired, with its place in the text; empty if the text was right as it stood.
    """

    calls: tuple[ToolCall, ...] = ()
    repairs: tuple[Repair, ...] = ()

    @property
    def valid(self) -> tuple[ToolCall, ...]:
        """The attempts that are calls."""
        return tuple(call for call in self.calls if call.status == "ok")


def parse_lenient(text: str, think: Think = "reasoning") -> LenientCalls:
    """Read the Hermes calls of one assistant text as a rollout may want them, and say what was repaired.

    Repaired: single quotes, trailing commas, missing braces and closing tags, one brace too many, comments, True, False
    and None, keys without quotes, control characters in strings, a code fence in the tag. Refused: sets, tuples, NaN,
    duplicate keys, a string without its end, missing commas. A text that is right as it stands is read as
    `parse_tool_calls` reads it.

    Args:
        text: what the model wrote in one turn.
        think: as in `parse_tool_calls`.

    Returns:
        The calls and the repairs. Bad text never raises and costs linear time.

    Raises:
        ValueError: `think` is neither of the two.

    Example:
        >>> found = parse_lenient("<tool_call>{'name': 'add', 'arguments': {'a': 1,}}")
        >>> found.calls[0].arguments, [repair.kind for repair in found.repairs][-2:]
        ({'a': 1}, ['trailing comma', 'missing closing tag'])
        >>> parse_lenient("<tool_call>{'name': 'add', 'arguments': {'a': (1, 2)}}</tool_call>").calls[0].reason
        'a tuple is not JSON'

    Reference: ours.
    """
    strict = parse_tool_calls(text, "hermes", think)
    if len(strict.valid) == len(strict.calls) and strict.num_open <= strict.num_close:
        return LenientCalls(strict.calls)
    repairs: list[Repair] = []
    left = MOST_VALUES

    def read(text: str, start: int, begin: int, number: int, room: int) -> Block:
        nonlocal left
        reader = LenientReader(text, begin, _CLOSE, left)
        calls: list[ToolCall] = []
        fenced = _fence(reader)
        span = (start, begin)
        try:
            while not _ended(reader):
                value = reader.value()
                # The rest is read for its repairs and its end; one attempt beyond the bound says that there are more.
                if len(calls) <= MAX_ATTEMPTS:
                    calls += _calls(value, span, number)
                _extra(reader)
            if not calls:
                calls = [failed("invalid_json", "nothing between the tags", span, number)]
        except RefusedError as error:
            left = max(reader.left, 0)
            repairs.extend(reader.repairs)
            cut: Status = "unclosed" if error.at >= len(text) else "invalid_json"
            calls = [*calls, failed(cut, str(error), (start, min(error.at, len(text))), number)]
            return Block(calls[: MAX_ATTEMPTS + 1], False, max(begin, reader.resume(error)))
        left, closed = reader.left, text.startswith(_CLOSE, reader.at)
        end = reader.at + len(_CLOSE) if closed else reader.at
        if not closed:
            reader.repairs.append(Repair("missing closing tag", reader.at))
        repairs.extend(([Repair("code fence", begin)] if fenced else []) + reader.repairs)
        calls = [replace(call, span=(start, end)) for call in calls[: MAX_ATTEMPTS + 1]]
        return Block(calls, closed, end)

    return LenientCalls(walk(text, think, _TAGS, read, _CLOSE).calls, tuple(repairs))


def written_calls(message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """The calls of a message of a data set: structured ones as they are, Hermes text leniently where it must be."""
    calls = parse_message(message).calls
    content, structured = message.get("content"), message.get("tool_calls") or message.get("function_call")
    if structured or not isinstance(content, str) or all(call.status == "ok" for call in calls):
        return calls
    return parse_lenient(content).calls


def _fence(reader: LenientReader) -> bool:
    fence = _FENCE.match(reader.text, reader.at)
    reader.at = fence.end() if fence else reader.at
    return fence is not None


def _ended(reader: LenientReader) -> bool:
    """Whether no value follows: the block, the text, or another block."""
    reader.space()
    sign = reader.text[reader.at : reader.at + 1]
    if sign == "`":
        _fence(reader)
    elif sign not in ("<", "["):
        return not sign
    return reader.at >= len(reader.text) or _TAGS.match(reader.text, reader.at) is not None


def _extra(reader: LenientReader) -> None:
    """Skip braces that close nothing, if the block ends behind them."""
    extra = _EXTRA.match(reader.text, reader.at)
    if extra and extra[0].strip() and (extra.end() == len(reader.text) or reader.text.startswith(_CLOSE, extra.end())):
        reader.repairs.append(Repair("extra brace", reader.at))
        reader.at = extra.end()


def _calls(value: Any, span: tuple[int, int], number: int) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for item in value[: MAX_ATTEMPTS + 1] if isinstance(value, list) and value else [value]:
        name, arguments, status, reason, notes = read_call(item)
        calls.append(ToolCall(name, arguments, status, reason, span, number, notes))
    return calls
