"""The Hermes/Qwen format: JSON between `<tool_call>` and `</tool_call>`."""

import re
from collections.abc import Mapping

from rewards._json import Decoded, decode_at, skip_space
from rewards.calls import ParsedCalls, Span, Think, ToolCall, read_call, register_format

_TAG = re.compile(r"</?tool_call>|</?think>")


def _next_tag(text: str, start: int) -> int:
    tag = _TAG.search(text, start)
    return tag.start() if tag else len(text)


def _values(text: str, start: int) -> tuple[list[Decoded], int]:
    """The values after an opening tag, ending with the first thing that is not one, and where to look for the next tag.

    A failed decode costs as much as the text before its error (Python counts the lines there), so each gets a window
    that ends at a tag, and the window doubles while it ends inside a string. Two attempts that overlap disagree on
    which quotes open a string, so only one of them outlives the next tag: the whole stays linear.
    """
    found: list[Decoded] = []
    base, end = start, _next_tag(text, start)
    window, at = text[base:end], skip_space(text, start)
    while at < len(text) and not _TAG.match(text, at):
        value = decode_at(window, at - base)
        if value.cut and end < len(text):
            base, end = at, _next_tag(text, at + 2 * (end - at))
            window = text[base:end]
            continue
        at = skip_space(text, base + value.end)
        found.append(value._replace(start=base + value.start, end=base + value.end))
        if not value.whole:
            break
    return found, at


def _attempts(text: str, values: list[Decoded], span: Span, block: int, closed: bool) -> list[ToolCall]:
    """The calls of one block."""
    calls: list[ToolCall] = []
    for found in values or [Decoded(None, "nothing between the tags", -1, -1)]:
        if found.reason is not None:
            calls.append(ToolCall("", {}, "invalid_json" if closed else "unclosed", found.reason, span, block))
            continue
        listed = isinstance(found.value, list) and bool(found.value)
        for index, value in enumerate(found.value if listed else [found.value]):
            name, arguments, status, reason, notes = read_call(value)
            if not closed:
                status, reason = "unclosed", "no closing tag"
            place = (found.start, index if listed else -1) if isinstance(value, Mapping) else (-1, -1)
            notes = (*notes, "list") if listed else notes
            calls.append(ToolCall(name, arguments, status, reason, span, block, notes, text, place))
    return calls


def parse_hermes(text: str, think: Think = "reasoning") -> ParsedCalls:
    """Read the tool calls of one text; see `rewards.parse_tool_calls`."""
    calls: list[ToolCall] = []
    num_open = num_close = 0
    values: list[Decoded] = []
    opened = -1
    at, thought = 0, False

    while tag := _TAG.search(text, at):
        at, kind = tag.end(), tag.group()
        if kind == "</tool_call>":
            num_close += 1
            if opened >= 0:
                calls += _attempts(text, values, (opened, at), num_open - 1, closed=True)
            opened = -1
        elif kind == "<tool_call>":
            if opened >= 0:
                calls += _attempts(text, values, (opened, tag.start()), num_open - 1, closed=False)
            opened, num_open = tag.start(), num_open + 1
            values, at = _values(text, at)
        elif think == "text":
            continue
        elif kind == "<think>":
            thought = True
            end = text.find("</think>", at)
            at = len(text) if end < 0 else end + len("</think>")
        elif not thought:
            # The prompt opened the think block: what came before its end was reasoning.
            calls, num_open, num_close, opened, thought = [], 0, 0, -1, True
    if opened >= 0:
        calls += _attempts(text, values, (opened, len(text)), num_open - 1, closed=False)
    return ParsedCalls(tuple(calls), num_open, num_close)


register_format("hermes", parse_hermes)
