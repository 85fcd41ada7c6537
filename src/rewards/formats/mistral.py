"""Mistral's formats: `[TOOL_CALLS]` before a JSON list of calls, or before each name with its arguments."""

import re

from rewards._json import Decoded, skip_space
from rewards.calls import ParsedCalls, Places, Think, made, read_call, register_format
from rewards.formats._blocks import Block, calls_of, decode_to, failed, tags, walk

_TAGS = tags("[TOOL_CALLS]")
# A name, and an identity that newer tokenizers put between it and the arguments.
_HEAD = re.compile(r"([^\s\[\]{}]{1,256})\s*(?:\[CALL_ID\][^\s\[\]{}]{1,256}\s*)?(?:\[ARGS\])?")


def parse_mistral(text: str, think: Think = "reasoning") -> ParsedCalls:
    """Read `[TOOL_CALLS][{"name": …, "arguments": {…}}]` and `[TOOL_CALLS]name[ARGS]{…}`.

    There is no closing tag: a block whose JSON is whole counts as closed. The name of the newer form is bounded to 256
    characters; `[CALL_ID]…` may follow it.

    Args:
        text: what the model wrote in one turn.
        think: as in `parse_tool_calls`; `[THINK]…[/THINK]` is reasoning too.

    Returns:
        The attempts in order. Bad text never raises and costs linear time.

    Example:
        >>> [call.name for call in parse_mistral('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}').valid]
        ['f', 'g']

    Reference: Mistral's tokenizers v3 to v13.
    """
    return walk(text, think, _TAGS, _block)


def _block(text: str, start: int, at: int, number: int, room: int) -> Block:
    at = skip_space(text, at)
    if text[at : at + 1] in ("[", "{"):
        found = decode_to(text, at, _TAGS)
        return Block(calls_of(text, found, (start, found.end), number), found.whole, _resume(found))
    head = _HEAD.match(text, at)
    if head is None:
        return Block([failed("missing_name", "no name after the tag", (start, at), number)], False, at)
    found = decode_to(text, skip_space(text, head.end()), _TAGS)
    span = (start, found.end)
    if found.reason is not None:
        return Block(calls_of(text, found, span, number), found.whole, _resume(found))
    name, arguments, status, reason, notes = read_call({"name": head[1], "arguments": found.value})
    places = Places(head.span(1), None if arguments else {})
    call = made(name, arguments, status, reason, span, number, notes, text, found.start, places)
    return Block([call], True, found.end)


def _resume(found: Decoded) -> int:
    # A lost quote makes a string of all that follows; the block after it must not be lost with it.
    return found.end if found.whole else found.start


register_format("mistral", parse_mistral)
