"""API names that a turn uses: read from its tool calls, in JSON or in the tags of Qwen3-Coder."""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_THINK_TAG = re.compile(r"</?think>")
_TAG = "<tool_call>"
_FUNCTION = re.compile(r"<function=([^<>\s]+)>")
_FUNCTION_END = "</function>"
_NAME_KEYS = ("name", "tool_name", "tool")


def tool_call_names(turn: object) -> list[str]:
    """Tool names of a turn's calls, in order, repetitions included.

    Args:
        turn: calls as mappings (``{"name": ...}`` or OpenAI's ``{"function": {"name": ...}}``), alone or in
            sequences, or text: ``<tool_call>`` tags, each with one object, several, or a list, or with
            Qwen3-Coder's ``<function=name>``; or either without tags. Text inside ``<think>`` is reasoning and
            holds no calls, and other formats hold none.

    Raises:
        TypeError: for anything but text, mappings, sequences of these, and None.

    Reference: paper appendix C.6; the reading of calls is ours.

    >>> tool_call_names('<think><tool_call>{"name": "no"}</tool_call></think><tool_call>{"name": "yes"}</tool_call>')
    ['yes']
    """
    if turn is None:
        return []
    if isinstance(turn, str):
        return _names_of_text(blank_reasoning(turn, _THINK))
    if isinstance(turn, Mapping):
        return _names_of_value(turn)
    if isinstance(turn, (list, tuple)):
        return [name for call in turn for name in tool_call_names(call)]
    raise TypeError(f"calls of a turn must be text, mappings or a sequence of them, got {type(turn).__name__}")


def _names_of_text(text: str) -> list[str]:
    """Names in what stands behind each tag, or in the whole text when there is no tag."""
    names: list[str] = []
    at = text.find(_TAG)
    if at < 0:
        return _names_from(text, 0)[0]
    while at >= 0:
        found, stop = _names_from(text, at + len(_TAG))
        names += found
        # Decoding says where the call ends: a tag quoted inside an argument is not the next call.
        at = text.find(_TAG, stop)
    return names


def _names_from(text: str, start: int) -> tuple[list[str], int]:
    """Names of the calls from ``start`` on, and where the last of them ends."""
    values = list(_call_values(text, start))
    return [name for value, _ in values for name in _names_of_value(value)], values[-1][1] if values else start


def _call_values(text: str, start: int) -> Iterator[tuple[Any, int]]:
    """Calls that follow one another from ``start`` on, each with the place where it ends."""
    decoder, stop = json.JSONDecoder(), start
    while True:
        while stop < len(text) and (text[stop].isspace() or text[stop] == ","):
            stop += 1
        function = _FUNCTION.match(text, stop)
        if function is not None:
            # What a parameter quotes lies before the end; a call that was cut off is all that follows.
            end = text.find(_FUNCTION_END, function.end())
            stop = end + len(_FUNCTION_END) if end >= 0 else len(text)
            yield {"name": function[1]}, stop
            continue
        try:
            value, stop = decoder.raw_decode(text, stop)
        except (ValueError, RecursionError):
            return
        yield value, stop


def blank_reasoning(text: str, reasoning: re.Pattern[str]) -> str:
    """``text`` with blanks, as many, in place of what ``reasoning`` finds; a tag inside a call is not one.

    >>> thought = re.compile("<think>.*?</think>")
    >>> blank_reasoning('<think>a</think><tool_call>{"name": "b", "arguments": ["<think>"]}</think>', thought).strip()
    '<tool_call>{"name": "b", "arguments": ["<think>"]}</think>'
    """
    if not _THINK_TAG.search(text):
        return text
    quoted = [tag.span() for start, stop in _calls(text) for tag in _THINK_TAG.finditer(text, start, stop)]
    return _blank(text, [found.span() for found in reasoning.finditer(_blank(text, quoted))])


def _calls(text: str) -> Iterator[tuple[int, int]]:
    """Where what is called behind each tag begins and ends."""
    at = text.find(_TAG)
    while at >= 0:
        start = stop = at + len(_TAG)
        for value, end in _call_values(text, start):
            if not isinstance(value, (dict, list)):  # the tag itself was quoted: what follows is no call
                break
            stop = end
        yield start, stop
        at = text.find(_TAG, stop)


def _blank(text: str, spans: list[tuple[int, int]]) -> str:
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    pieces = [text[start:stop] for start, stop in pairwise(edges)]
    return "".join(" " * len(piece) if odd % 2 else piece for odd, piece in enumerate(pieces))


def _names_of_value(value: Any) -> list[str]:
    if isinstance(value, list):
        return [name for item in value for name in _names_of_value(item)]
    if not isinstance(value, Mapping):
        return []
    function = value.get("function")
    if isinstance(function, Mapping):
        return _names_of_value(function)
    if isinstance(value.get("tool_calls"), list):
        return _names_of_value(value["tool_calls"])
    named = [value[key] for key in _NAME_KEYS if isinstance(value.get(key), str)]
    return named[:1]
