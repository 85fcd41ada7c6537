"""Llama 3's format: bare JSON objects, or the same after `<|python_tag|>`, several of them parted by `;`."""

import re

from rewards._json import decode_at, skip_space
from rewards.calls import MAX_ATTEMPTS, ParsedCalls, Think, ToolCall, register_format
from rewards.formats._blocks import TOO_MANY, after_reasoning, calls_of, decode_to, failed, moved, next_tag

_TAG = "<|python_tag|>"
_TAGS = re.compile(re.escape(_TAG))
_PARTS = re.compile(r"[\s;]*")
# A final answer may be a JSON object too; its first key tells a call.
_BEGINS = re.compile(r'\s*(?:<\|python_tag\|>|\{\s*"(?:(?:name|parameters|arguments)"|type"\s*:\s*"function"))')


def parse_llama3_json(text: str, think: Think = "reasoning") -> ParsedCalls:
    """Read `{"name": …, "parameters": {…}}; {…}`, with or without `<|python_tag|>` before it.

    Calls stand at the beginning of the answer or after the tag. An object without the tag is an attempt if its first
    key is `name`, `parameters` or `arguments`, or it is of type "function". Each object is a block, closed if its JSON
    is whole.

    Args:
        text: what the model wrote in one turn.
        think: as in `parse_tool_calls`; an answer that begins with a call holds no reasoning.

    Returns:
        The attempts in order. Bad text never raises and costs linear time.

    Example:
        >>> [call.name for call in parse_llama3_json('{"name": "f", "parameters": {}}; {"name": "g"}').valid]
        ['f', 'g']
        >>> parse_llama3_json('{"answer": 4}').calls
        ()

    Reference: Meta's prompt format of Llama 3.1 and 3.2.
    """
    begin = skip_space(text, after_reasoning(text, think, _BEGINS))
    runs = [_run(text, begin, 0)] if _BEGINS.match(text, begin) and text[begin] == "{" else []
    calls, opened, closed, at = runs[0] if runs else ([], 0, 0, begin)
    while (tag := text.find(_TAG, at)) >= 0:
        if opened >= MAX_ATTEMPTS:
            calls.append(failed("invalid_syntax", TOO_MANY, (tag, tag), opened))
            return ParsedCalls(tuple(calls), opened + text.count(_TAG, tag), closed)
        more, count, whole, at = _run(text, skip_space(text, tag + len(_TAG)), opened)
        if not count:
            more, count = [failed("invalid_json", "no object after the tag", (tag, at), opened)], 1
        calls, opened, closed = [*calls, *more], opened + count, closed + whole
    return ParsedCalls(tuple(calls), opened, closed)


def _run(text: str, at: int, number: int) -> tuple[list[ToolCall], int, int, int]:
    """Objects from `at` on: their calls, how many began and how many ended, and where to go on."""
    calls: list[ToolCall] = []
    opened = closed = base = end = 0
    window = ""
    while text.startswith("{", at) and number + opened < MAX_ATTEMPTS:
        if at >= end:
            base, end = at, next_tag(text, at, _TAGS)
            window = text[base:end]
        found = decode_at(window, at - base)
        found = moved(found, base)
        if found.cut:
            found = decode_to(text, at, _TAGS)
        calls += calls_of(text, found, (at, found.end), number + opened)
        opened, closed = opened + 1, closed + found.whole
        if not found.whole:
            # A lost quote makes a string of all that follows; the call after it must not be lost with it.
            return calls, opened, closed, at
        at = _PARTS.match(text, found.end).end()  # type: ignore[union-attr]  # the pattern matches the empty string
    return calls, opened, closed, at


register_format("llama3_json", parse_llama3_json)
