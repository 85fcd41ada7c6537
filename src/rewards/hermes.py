"""The Hermes/Qwen format: JSON between `<tool_call>` and `</tool_call>`."""

import re
from typing import NamedTuple

from rewards._json import Decoded, decode_at, elements, skip_space
from rewards.calls import ParsedCalls, Status, Think, ToolCall, read_call, register_format

# No honest text comes near it; what matching and answering cost grows with the number of calls.
MAX_ATTEMPTS = 4096

_TAG = re.compile(r"</?(?:tool_call|think)>")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_TOO_MANY = f"more than {MAX_ATTEMPTS} attempts in one text; the rest is not read"


class _Block(NamedTuple):
    start: int
    number: int
    values: list[Decoded]
    room: int


def _next_tag(text: str, start: int) -> int:
    tag = _TAG.search(text, start)
    return tag.start() if tag else len(text)


def _values(text: str, start: int, room: int) -> tuple[list[Decoded], int]:
    """At most `room` values after an opening tag, up to the first thing that is not one; and where to look for a tag.

    A failed decode costs as much as the text before its error (Python counts the lines there), so each gets a window
    that ends at a tag, and the window doubles while it ends inside a string. Two attempts that overlap disagree on
    which quotes open a string, so only one of them outlives the next tag: the whole stays linear.
    """
    found: list[Decoded] = []
    base, end = start, _next_tag(text, start)
    window, at = text[base:end], skip_space(text, start)
    while at < len(text) and not _TAG.match(text, at):
        if len(found) == room:
            found.append(Decoded(None, _TOO_MANY, at, at))
            break
        value = decode_at(window, at - base)
        if value.cut and end < len(text):
            base, end = at, _next_tag(text, at + 2 * (end - at))
            window = text[base:end]
            continue
        at = skip_space(text, base + value.end)
        found.append(Decoded(value.value, value.reason, base + value.start, base + value.end, value.whole, value.cut))
        if not value.whole:
            return found, _last_string(text, found[-1].start, found[-1].end)
    return found, at


def _last_string(text: str, start: int, stop: int) -> int:
    """Where to look for the next tag if decoding failed at `stop`: there, or in the string it failed in or after.

    A lost quote makes a string of all that follows; the block after it must not be lost with it.
    """
    at = begin = start
    while (quote := text.find('"', at, stop)) >= 0:
        begin, string = quote, _STRING.match(text, quote, stop)
        if string is None:
            return quote
        at = string.end()
    return begin if not text[at:stop].strip() else stop


def _attempts(text: str, block: _Block, end: int, closed: bool) -> list[ToolCall]:
    """The calls of one block."""
    calls: list[ToolCall] = []
    span = (block.start, end)
    failed: Status = "invalid_json" if closed else "unclosed"
    for found in block.values or [Decoded(None, "nothing between the tags", -1, -1)]:
        if found.reason is not None:
            calls.append(ToolCall("", {}, failed, found.reason, span, block.number))
            continue
        listed = isinstance(found.value, list) and bool(found.value)
        values = zip(found.value, elements(text, found.start)) if listed else ((found.value, found.start),)
        for value, start in values:
            if len(calls) > block.room:
                calls[-1] = ToolCall("", {}, failed, _TOO_MANY, span, block.number)
                return calls
            name, arguments, status, reason, notes = read_call(value)
            if not closed:
                status, reason = "unclosed", "no closing tag"
            notes = (*notes, "list") if listed else notes
            place = start if isinstance(value, dict) else -1
            calls.append(ToolCall(name, arguments, status, reason, span, block.number, notes, text, place))
    return calls


def parse_hermes(text: str, think: Think = "reasoning") -> ParsedCalls:
    """Read the tool calls of one text; see `rewards.parse_tool_calls`."""
    calls: list[ToolCall] = []
    num_open = num_close = at = 0
    block: _Block | None = None
    thought = False

    while tag := _TAG.search(text, at):
        at, kind = tag.end(), tag.group()
        if kind == "</tool_call>":
            num_close += 1
            if block:
                calls += _attempts(text, block, at, closed=True)
            block = None
        elif kind == "<tool_call>":
            if block:
                calls += _attempts(text, block, tag.start(), closed=False)
            block, num_open = None, num_open + 1
            # Beyond the bound only tags are counted, so that no later block is valid.
            if len(calls) <= MAX_ATTEMPTS:
                values, at = _values(text, at, MAX_ATTEMPTS - len(calls))
                block = _Block(tag.start(), num_open - 1, values, MAX_ATTEMPTS - len(calls))
        elif think == "text":
            continue
        elif kind == "<think>":
            thought = True
            end = text.find("</think>", at)
            at = len(text) if end < 0 else end + len("</think>")
        elif not thought:
            # The prompt opened the think block: what came before its end was reasoning.
            calls, num_open, num_close, block, thought = [], 0, 0, None, True
    if block:
        calls += _attempts(text, block, len(text), closed=False)
    return ParsedCalls(tuple(calls), num_open, num_close)


register_format("hermes", parse_hermes)
