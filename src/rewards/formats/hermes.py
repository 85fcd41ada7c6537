"""The Hermes/Qwen format: JSON between `<tool_call>` and `</tool_call>`."""

import re
from functools import partial

from rewards._frozen import frozen
from rewards._json import Decoded, decode_at, is_encodable, keys_differ, may_nest, scan_plainly, skip_space
from rewards._places import elements
from rewards.calls import MAX_ATTEMPTS, ParsedCalls, Status, Think, ToolCall, made, read_call, register_format
from rewards.formats._blocks import TOO_MANY, Block, failed, next_tag, walk

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAG = re.compile(r"</?(?:tool_call|think)>")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def parse_hermes(text: str, think: Think = "reasoning") -> ParsedCalls:
    """Read the tool calls of one text; see `rewards.parse_tool_calls`.

    Example:
        >>> [call.name for call in parse_hermes('<tool_call>{"name": "f", "arguments": {}}</tool_call>').valid]
        ['f']

    Reference: ours; the counts are those of SLCA eq. 23.
    """
    found = read_well_formed(text, think)
    return walk(text, think, _TAG, _read, _CLOSE) if found is None else found


def read_well_formed(text: str, think: Think) -> ParsedCalls | None:
    """What `walk` finds, for texts as models are trained to write them; None for all others.

    They are prose without `<`, after at most one closed think block, and blocks of one whole call each.
    """
    at = 0
    if think == "reasoning" and text.startswith("<think>"):
        end = text.find("</think>")
        if end < 0:
            return None
        at = end + len("</think>")
    if not is_encodable(text):
        return None
    # Many flat calls have as many brackets as one deep call: where the text is not sure, each call is asked.
    unsure = may_nest(text, at, len(text))
    calls: list[ToolCall] = []
    while (start := text.find("<", at)) >= 0:
        begin = start + len(_OPEN) + 1
        if not text.startswith("<tool_call>\n{", start):
            begin -= 1
            if not text.startswith("<tool_call>{", start):
                return None
        try:
            value, end = scan_plainly(text, begin)
        except (ValueError, StopIteration, RecursionError):
            return None
        if unsure and may_nest(text, begin, end):
            return None
        name, arguments = value.get("name"), value.get("arguments")
        if type(name) is not str or not name or type(arguments) is not dict:
            return None
        if len(value) + len(arguments) != text.count(":", begin, end) and not keys_differ(text, value, begin, end):
            return None
        at = end + len(_CLOSE) + 1
        if not text.startswith("\n</tool_call>", end):
            at -= 1
            if not text.startswith(_CLOSE, end):
                return None
        fields = {
            "name": name, "arguments": arguments, "span": (start, at), "block": len(calls),
            "_text": text, "_start": begin, "_bounded": True,
        }  # fmt: skip
        calls.append(frozen(ToolCall, fields))
    found, count = tuple(calls), len(calls)
    if count > MAX_ATTEMPTS:
        return None
    return frozen(ParsedCalls, {"calls": found, "num_open": count, "num_close": count, "valid": found})


def _read(text: str, start: int, at: int, number: int, room: int) -> Block:
    """What the opening tag at [start, at) began; whether a closing tag ends it, the next tag tells."""
    values, resume = _values(text, at, room)
    return Block([], False, resume, partial(_attempts, text, values, start, number, room))


def _values(text: str, start: int, room: int) -> tuple[list[Decoded], int]:
    """At most `room` values after an opening tag, up to the first thing that is not one; and where to look for a tag.

    A failed decode costs as much as the text before its error (Python counts the lines there), so each gets a window
    that ends at a tag, and the window doubles while it ends inside a string. Two attempts that overlap disagree on
    which quotes open a string, so only one of them outlives the next tag: the whole stays linear.
    """
    found: list[Decoded] = []
    base, end = start, next_tag(text, start, _TAG)
    window, at = text[base:end], skip_space(text, start)
    while at < len(text) and not _TAG.match(text, at):
        if len(found) == room:
            found.append(Decoded(None, TOO_MANY, at, at))
            break
        value = decode_at(window, at - base)
        if value.cut and end < len(text):
            base, end = at, next_tag(text, at + 2 * (end - at), _TAG)
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


def _attempts(
    text: str, found: list[Decoded], start: int, number: int, room: int, end: int, closed: bool
) -> list[ToolCall]:
    """The calls of one block, now that its end is known."""
    calls: list[ToolCall] = []
    span = (start, end)
    broken: Status = "invalid_json" if closed else "unclosed"
    for one in found or [Decoded(None, "nothing between the tags", -1, -1)]:
        if one.reason is not None:
            calls.append(failed(broken, one.reason, span, number))
            continue
        listed = isinstance(one.value, list) and bool(one.value)
        values = zip(one.value, elements(text, one.start)) if listed else ((one.value, (one.start, one.end)),)
        for value, (place, _) in values:
            if len(calls) > room:
                return [*calls[:-1], failed(broken, TOO_MANY, span, number)]
            name, arguments, status, reason, notes = read_call(value)
            if not closed:
                status, reason = "unclosed", "no closing tag"
            notes = (*notes, "list") if listed else notes
            place = place if isinstance(value, dict) else -1
            calls.append(made(name, arguments, status, reason, span, number, notes, text, place))
    return calls


register_format("hermes", parse_hermes)
