"""Qwen3-Coder's format: XML-like tags around a function's name and each of its parameters, values as text."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rewards._json import decode
from rewards.calls import ParsedCalls, Places, Span, Status, Think, ToolCall, made, register_format
from rewards.formats._blocks import Block, tags, walk
from rewards.schema import ToolSet, as_toolset, is_instance, schema_error

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAGS = tags(_OPEN, closing=_CLOSE)
_FUNCTION = re.compile(r"\s*<function=([^<>]{1,256})>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>]{1,256})>")
_VALUE_END = "</parameter>"
_FUNCTION_END = re.compile(r"\s*</function>")
_BLOCK_END = re.compile(r"\s*</tool_call>")


def parse_qwen3_coder(text: str, think: Think = "reasoning") -> ParsedCalls:
    """Read `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`.

    A value is the text up to `</parameter>`, without one line break at either end. Every value is a text; the schema
    says what it means (`type_arguments`). One tag may hold several functions. A parameter given twice, and any text
    between the tags, makes a call invalid.

    Args:
        text: what the model wrote in one turn.
        think: as in `parse_tool_calls`.

    Returns:
        The attempts in order, noted "untyped". Bad text never raises and costs linear time.

    Example:
        >>> text = "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>"
        >>> parse_qwen3_coder(text).calls[0].arguments
        {'a': '1'}
        >>> tools = [{"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}]
        >>> type_arguments(parse_qwen3_coder(text), tools).calls[0].arguments
        {'a': 1}

    Reference: the chat template of Qwen3-Coder; ours.
    """
    last = text.rfind(_VALUE_END)

    def read(text: str, start: int, at: int, number: int, room: int) -> Block:
        found: list[_Function] = []
        end = None
        while not end:
            one = _function(text, at, last)
            at = one.end
            # One beyond the room says that there are more.
            if len(found) <= room:
                found.append(one)
            if one.status not in ("ok", "invalid_arguments"):
                # Nothing of a broken block is a call; the tag that follows is read anew.
                return Block([_call(f, one.status, one.reason, (start, f.end), number) for f in found], False, at)
            end = _BLOCK_END.match(text, at)
        span = (start, end.end())
        return Block([_call(f, f.status, f.reason, span, number) for f in found], True, end.end())

    return walk(text, think, _TAGS, read, _CLOSE)


class _Function(NamedTuple):
    """One function; `end` is where it ends or, broken, where to go on. One that was not read whole has no places."""

    status: Status
    reason: str | None
    end: int
    name: str = ""
    arguments: Mapping[str, Any] = {}
    places: Places | None = None


def _call(one: _Function, status: Status, reason: str | None, span: Span, number: int) -> ToolCall:
    notes = ("untyped",) if one.places else ()
    return made(one.name, one.arguments, status, reason, span, number, notes, places=one.places)


def _function(text: str, start: int, last: int) -> _Function:
    """The function that begins at `start`."""
    head = _FUNCTION.match(text, start)
    if head is None:
        left = text.find("<", start, start + 64) < 0
        status: Status = "unclosed" if left and len(text) - start < 64 else "missing_name"
        return _Function(status, "no <function=name> after the tag", start)
    name, name_span = _stripped(head)
    at = head.end()
    arguments: dict[str, Any] = {}
    keys: dict[str, Span] = {}
    twice = None
    while parameter := _PARAMETER.match(text, at):
        begin = parameter.end()
        if begin > last:
            return _Function("unclosed", "a parameter without its end", begin)
        end = text.find(_VALUE_END, begin)
        key, span = _stripped(parameter)
        twice = key if key in arguments else twice
        arguments[key], keys[key] = _value(text[begin:end]), span
        at = end + len(_VALUE_END)
    tail = _FUNCTION_END.match(text, at)
    if tail is None:
        unclosed = not text[at : at + 64].strip()
        reason = "no </function>" if unclosed else "text between the parameters"
        return _Function("unclosed" if unclosed else "invalid_syntax", reason, at)
    places = Places(name_span, keys)
    if twice is not None:
        return _Function("invalid_arguments", f"parameter {twice[:40]!r} twice", tail.end(), name, {}, places)
    if not name:
        return _Function("missing_name", "no name", tail.end(), name, arguments, places)
    return _Function("ok", None, tail.end(), name, arguments, places)


def _stripped(tag: "re.Match[str]") -> tuple[str, Span]:
    """What a tag names, without space around it, and where it stands."""
    inner, (start, end) = tag[1], tag.span(1)
    kept = inner.strip()
    if len(kept) < len(inner):
        start, end = start + len(inner) - len(inner.lstrip()), start + len(inner.rstrip())
    return kept, (start, end)


def _value(text: str) -> str:
    text = text[1:] if text.startswith("\n") else text[2:] if text.startswith("\r\n") else text
    return text[:-2] if text.endswith("\r\n") else text[:-1] if text.endswith("\n") else text


def type_arguments(parsed: ParsedCalls, tools: Iterable[Mapping[str, Any]] | ToolSet | None) -> ParsedCalls:
    """Give each value of "untyped" calls the type that its schema asks for.

    A text that fits its schema stays a text. Otherwise it becomes the JSON value that it spells (True, False and None
    are understood) if that fits. A text that neither fits stays, and fails the schema check. Without a schema, objects
    and lists are decoded and all else stays a text.

    Args:
        parsed: calls of one turn, of any format.
        tools: OpenAI-style tool schemas or a `ToolSet`; None: there are no schemas.

    Returns:
        The calls; those that have types already, and all spans and counts, are as before.

    Raises:
        ToolSchemaError: one of the tools is not one.

    Example:
        See `parse_qwen3_coder`.

    Reference: ours.
    """
    if not _untyped(parsed.calls):
        return parsed
    toolset = None if tools is None else as_toolset(tools)
    return replace(parsed, calls=tuple(_typed(call, toolset) for call in parsed.calls))


def _untyped(calls: Sequence[ToolCall]) -> bool:
    # A loop: every score of every format asks, and a generator costs more than the answer.
    for call in calls:  # noqa: SIM110
        if call.notes and "untyped" in call.notes:
            return True
    return False


def _typed(call: ToolCall, tools: ToolSet | None) -> ToolCall:
    if "untyped" not in call.notes:
        return call
    found = tools.parameters(call.name) if tools else None
    parameters = found if isinstance(found, Mapping) else {}
    properties = parameters.get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    arguments = {key: _as_schema(value, schemas.get(key), definitions) for key, value in call.arguments.items()}
    return replace(call, arguments=arguments, notes=tuple(note for note in call.notes if note != "untyped"))


def _as_schema(value: Any, schema: object, definitions: Mapping[str, Any]) -> Any:
    if not isinstance(value, str):
        return value
    spelled = {"True": "true", "False": "false", "None": "null"}.get(value.strip(), value)
    found = decode(spelled)
    if not isinstance(schema, Mapping):
        return found.value if isinstance(found.value, (dict, list)) else value
    whole = {**definitions, **schema}
    if schema_error(whole):
        return value
    fits = is_instance(value, whole) and not (isinstance(found.value, (dict, list)) and is_instance(found.value, whole))
    return value if fits or found.reason is not None or not is_instance(found.value, whole) else found.value


register_format("qwen3_coder", parse_qwen3_coder)
