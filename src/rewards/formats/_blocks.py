"""What formats share: the walk from tag to tag, reasoning left out, and JSON after a tag in linear time."""

import re
from collections.abc import Callable
from typing import NamedTuple

from rewards._json import Decoded, decode_at, skip_space
from rewards._places import elements
from rewards.calls import MAX_ATTEMPTS, ParsedCalls, Span, Status, Think, ToolCall, made, read_call

TOO_MANY = f"more than {MAX_ATTEMPTS} attempts in one text; the rest is not read"
_ENDS = {"<think>": "</think>", "[THINK]": "[/THINK]"}


class Block(NamedTuple):
    """What one opening tag began: its attempts, whether it was closed, and where the walk goes on.

    A reader that does not look for the closing tag gives `attempts` in their place: called with the position and
    kind (closing or not) of the tag that comes next, it makes them.
    """

    calls: list[ToolCall]
    closed: bool
    end: int
    attempts: Callable[[int, bool], list[ToolCall]] | None = None


# From the text, the start and the end of the opening tag, the number of the block and how many attempts may follow.
Read = Callable[[str, int, int, int, int], Block]


def tags(*opening: str, closing: str = "") -> "re.Pattern[str]":
    """The pattern of a format's tags and of think tags."""
    ends = [re.escape(text) for pair in _ENDS.items() for text in pair]
    return re.compile("|".join([*map(re.escape, opening), *([re.escape(closing)] if closing else []), *ends]))


def walk(text: str, think: Think, pattern: "re.Pattern[str]", read: Read, closing: str = "") -> ParsedCalls:
    """Read block after block, reasoning left out."""
    calls: list[ToolCall] = []
    num_open = num_close = at = 0
    thought = False
    left: Block | None = None
    while tag := pattern.search(text, at):
        at, kind = tag.end(), tag.group()
        if kind in _ENDS:
            if think == "reasoning":
                thought = True
                end = text.find(_ENDS[kind], at)
                at = len(text) if end < 0 else end + len(_ENDS[kind])
        elif kind in _ENDS.values():
            if think == "reasoning" and not thought:
                # The prompt opened the think block: what came before its end was reasoning.
                calls, num_open, num_close, left, thought = [], 0, 0, None, True
        elif kind == closing:
            num_close += 1
            calls += _ended(left, at, True)
            left = None
        else:
            calls += _ended(left, tag.start(), False)
            left = None
            num_open += 1
            # Beyond the bound only tags are counted, so that no later block is valid.
            if len(calls) <= MAX_ATTEMPTS:
                left = read(text, tag.start(), at, num_open - 1, MAX_ATTEMPTS - len(calls))
                num_close, at = num_close + left.closed, left.end
                calls += left.calls
                if len(calls) > MAX_ATTEMPTS:
                    calls[MAX_ATTEMPTS:] = [failed("invalid_syntax", TOO_MANY, (tag.start(), at), num_open - 1)]
    return ParsedCalls(tuple(calls + _ended(left, len(text), False)), num_open, num_close)


def _ended(block: Block | None, end: int, closed: bool) -> list[ToolCall]:
    return block.attempts(end, closed) if block and block.attempts else []


def after_reasoning(text: str, think: Think, begins: "re.Pattern[str]") -> int:
    """Where the answer begins, for formats that have no tag. `begins` tells a call from reasoning."""
    if think == "text" or begins.match(text):
        return 0
    start = skip_space(text, 0)
    for opening, ending in _ENDS.items():
        if text.startswith(opening, start) or ending in text:
            end = text.find(ending, start)
            return len(text) if end < 0 else end + len(ending)
    return 0


def decode_to(text: str, start: int, pattern: "re.Pattern[str]") -> Decoded:
    """Decode one value from `start` on; like `decode_at`, but a failure costs no more than the text up to a tag.

    Python counts the lines before an error. So decoding sees a window that ends at a tag, and the window doubles while
    it ends inside a string.
    """
    end = next_tag(text, start, pattern)
    found = decode_at(text[start:end], 0)
    while found.cut and end < len(text):
        end = next_tag(text, start + 2 * (end - start), pattern)
        found = decode_at(text[start:end], 0)
    return moved(found, start)


def moved(found: Decoded, by: int) -> Decoded:
    """What was decoded in a window that begins at `by`."""
    value, reason, start, end, whole, cut = found
    return Decoded(value, reason, start + by, end + by, whole, cut)


def next_tag(text: str, start: int, pattern: "re.Pattern[str]") -> int:
    """Where the next tag begins; the end of the text if there is none."""
    tag = pattern.search(text, start)
    return tag.start() if tag else len(text)


def failed(status: Status, reason: str, span: Span, block: int) -> ToolCall:
    """An attempt that is no call."""
    return ToolCall("", {}, status, reason, span, block)


def calls_of(text: str, found: Decoded, span: Span, block: int) -> list[ToolCall]:
    """The calls of one decoded value: a call, or a list of calls."""
    if found.reason is not None:
        unfinished = found.cut or (not found.whole and skip_space(text, found.end) == len(text))
        return [failed("unclosed" if unfinished else "invalid_json", found.reason, span, block)]
    listed = isinstance(found.value, list) and bool(found.value)
    values = found.value if listed else [found.value]
    calls: list[ToolCall] = []
    places = elements(text, found.start) if listed else ((found.start, found.end),)
    for value, (start, _) in zip(values, places):
        if len(calls) > MAX_ATTEMPTS:
            break
        name, arguments, status, reason, notes = read_call(value)
        notes = (*notes, "list") if listed else notes
        place = start if isinstance(value, dict) else -1
        calls.append(made(name, arguments, status, reason, span, block, notes, text, place))
    return calls
