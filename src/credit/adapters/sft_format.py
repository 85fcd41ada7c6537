"""Which characters of an assistant turn belong to the tool-call protocol, and which tokens hold them."""

import re
from collections.abc import Callable, Iterator, Sequence
from json import JSONDecoder

import torch

from credit.alignment import char_spans_to_mask

FormatSpans = Callable[[str], Sequence[tuple[int, int]]]

_TAG = re.compile(r"<think>|<tool_call>")
_CLOSING = re.compile(r"\s*</tool_call>")
_MARK = re.compile(r'"(?:[^"\\]|\\.)*"|[{}]')
_JSON = JSONDecoder()
_COLON = re.compile(r"\s*:")
_NEXT_VALUE = re.compile(r"[\s,]*(?=[{\[])")
_ARGUMENTS = ("arguments", "parameters")


def tool_call_format_spans(text: str, *, names: bool = True, argument_keys: bool = True) -> list[tuple[int, int]]:
    """Characters of the Hermes/Qwen tool-call protocol in the text of an assistant turn.

    They are the tags, the keys ``"name"`` and ``"arguments"``, the tools' names and the argument keys: what makes a
    call a call, without the values. A tag inside a JSON string is text, and inside ``<think>…</think>`` nothing is
    protocol. Of a block whose JSON is broken only the opening tag counts.

    Args:
        text: what the assistant wrote.
        names: count the tools' names.
        argument_keys: count the top-level keys of the arguments.

    Returns:
        ``(start, stop)`` characters, half open, in order, none overlapping.

    Example:
        >>> call = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
        >>> [call[a:b] for a, b in tool_call_format_spans(call)]
        ['<tool_call>', '"name"', 'add', '"arguments"', '"x"', '</tool_call>']

    Reference:
        RIVET stage II: "tool-call delimiters, tool identifiers, and required argument fields".
    """
    spans: list[tuple[int, int]] = []
    at = 0
    while (tag := _TAG.search(text, at)) is not None:
        at = tag.end()
        if tag.group() == "<think>":
            end = text.find("</think>", at)
            at = len(text) if end < 0 else end
            continue
        spans.append(tag.span())
        for kind, start, stop in _json_fields(text, at):
            if kind == "end":
                at = stop
            elif kind == "key" or (kind == "name" and names) or (kind == "argument" and argument_keys):
                spans.append((start, stop))
        if (closing := _CLOSING.match(text, at)) is not None:
            at = closing.end()
            spans.append((at - len("</tool_call>"), at))
    return spans


def _json_fields(text: str, at: int) -> Iterator[tuple[str, int, int]]:
    """Protocol fields of the JSON values from ``at`` on, and after each value its end; stops at broken JSON."""
    while (value := _NEXT_VALUE.match(text, at)) is not None:
        at, objects, key = value.end(), 0, ""
        try:
            _, end = _JSON.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        # The value is whole, so that braces and strings can be taken as they come.
        for mark in _MARK.finditer(text, at, end):
            start, stop = mark.span()
            if text[start] != '"':
                objects += {"{": 1, "}": -1}[text[start]]
            elif _COLON.match(text, stop) is None:
                if objects == 1 and key == "name":
                    yield "name", start + 1, stop - 1
            elif objects == 1:
                key = text[start + 1 : stop - 1]
                if key in ("name", *_ARGUMENTS):
                    yield "key", start, stop
            elif objects == 2 and key in _ARGUMENTS:
                yield "argument", start, stop
        at = end
        yield "end", at, at


def format_mask(
    text: str, offsets: Sequence[Sequence[int]], assistant: Sequence[int], spans: FormatSpans = tool_call_format_spans
) -> list[int]:
    """Tokens of the protocol, among those the assistant wrote.

    Each stretch of assistant tokens is searched on its own, so that a call quoted by the system prompt or the user is
    none. A token that a span begins or ends in counts whole.

    Args:
        text: the rendered conversation.
        offsets: ``(start, stop)`` characters of each token.
        assistant: 1 on the tokens the assistant wrote, its end-of-turn token among them.
        spans: protocol characters of one assistant turn.

    Returns:
        0 or 1 for each token; 1 only where ``assistant`` is.

    Raises:
        ValueError: ``offsets`` and ``assistant`` differ in length.

    Example:
        >>> turn = "hi<tool_call>"
        >>> format_mask(turn, [(0, 1), (1, 2), (2, 13)], [0, 1, 1])
        [0, 0, 1]

    Reference:
        ours.
    """
    if len(offsets) != len(assistant):
        raise ValueError(f"offsets has {len(offsets)} tokens, assistant has {len(assistant)}")
    written = torch.tensor(list(assistant), dtype=torch.bool)
    found: list[tuple[int, int]] = []
    for start, stop in _stretches(written):
        begin, end = offsets[start][0], offsets[stop - 1][1]
        found += [(begin + a, begin + b) for a, b in spans(text[begin:end])]
    marked: list[int] = (char_spans_to_mask([(a, b) for a, b in offsets], found) & written).int().tolist()
    return marked


def _stretches(mask: torch.Tensor) -> list[tuple[int, int]]:
    edges = torch.nn.functional.pad(mask.int(), (1, 1)).diff().nonzero()[:, 0]
    return [(start, stop) for start, stop in edges.reshape(-1, 2).tolist()]
