"""Tool calls in a model's text: every attempt, in order, with its place and what is wrong with it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

from rewards._frozen import frozen
from rewards._json import decode, scan_plainly, skip_space
from rewards._places import members, string_offsets

Span = tuple[int, int]
Status = Literal[
    "ok", "invalid_json", "invalid_syntax", "not_an_object", "missing_name", "invalid_arguments", "unclosed"
]
Think = Literal["reasoning", "text"]
# No honest text comes near it; what matching and answering cost grows with the number of calls.
MAX_ATTEMPTS = 4096


class Places(NamedTuple):
    """Where a call that is not JSON has its name and its keys; without keys, its arguments are JSON at `_start`."""

    name: Span | None
    keys: Mapping[str, Span] | None


@dataclass(frozen=True)
class ToolCall:
    """One attempt at a tool call. `ToolCall("f", {"x": 1})` makes one by hand.

    Attributes:
        name: the tool's name; "" where none could be read.
        arguments: the decoded arguments; {} where none were given or none could be read.
        status: "ok", or why the attempt is not a call; only "ok" ones are predicted calls to a scorer.
        reason: the same in words, None for "ok".
        span: characters of the block, its tags included; calls that share a block share it.
        block: number of the block in its text.
        notes: what was read that the format does not name: "parameters" (the alias of `arguments`),
            "string" (arguments given as a JSON string), "list" (one of a list of calls in one tag), "untyped" (the
            format writes every value as text; see `type_arguments`).
    """

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    status: Status = "ok"
    reason: str | None = None
    span: Span = (0, 0)
    block: int = 0
    notes: tuple[str, ...] = ()
    _text: str = field(default="", repr=False, compare=False)
    _start: int = field(default=-1, repr=False, compare=False)
    _places: Places | None = field(default=None, repr=False, compare=False)
    # Decoding has bounded the depth of these very arguments. No field: a copy with other arguments must not have it.
    _bounded: ClassVar[bool] = False

    @cached_property
    def name_span(self) -> Span | None:
        """Characters of the name in the text, without its quotes; None where it has no place in a text."""
        if self._places is not None:
            return self._places.name
        at = self._members().get("name")
        return None if at is None or not self.name else (at + 1, scan_plainly(self._text, at)[1] - 1)

    @cached_property
    def key_spans(self) -> dict[str, Span]:
        """Characters of each top-level argument key in the text, without their quotes."""
        if self._places is not None and self._places.keys is not None:
            return dict(self._places.keys)
        outer = {"arguments": self._start} if self._places is not None else self._members()
        at = outer.get("arguments", outer.get("parameters"))
        if at is None or not self.arguments:
            return {}
        if self._text[at] != '"':
            return {key: (first, last) for key, first, last, _ in members(self._text, at)}
        # The object stands inside a JSON string: find the keys in the decoded string and carry them back.
        inner, end = scan_plainly(self._text, at)
        offsets = string_offsets(self._text, at + 1, end - 1)
        return {key: (offsets[i], offsets[j]) for key, i, j, _ in members(inner, skip_space(inner, 0))}

    def _members(self) -> dict[str, int]:
        """Where the value of each key of the call begins."""
        if self._start < 0:
            return {}
        return {key: begin for key, _, _, begin in members(self._text, self._start)}


def made(
    name: str,
    arguments: Mapping[str, Any],
    status: Status,
    reason: str | None,
    span: Span,
    block: int,
    notes: tuple[str, ...] = (),
    text: str = "",
    start: int = -1,
    places: Places | None = None,
) -> ToolCall:
    """A `ToolCall`, for parsers, which make thousands."""
    fields = {
        "name": name, "arguments": arguments, "status": status, "reason": reason, "span": span, "block": block,
        "notes": notes, "_text": text, "_start": start, "_places": places,
    }  # fmt: skip
    return frozen(ToolCall, fields)


@dataclass(frozen=True)
class ParsedCalls:
    """Every attempt in a text, and the number of opening and closing tags outside reasoning and JSON strings."""

    calls: tuple[ToolCall, ...] = ()
    num_open: int = 0
    num_close: int = 0

    @cached_property
    def valid(self) -> tuple[ToolCall, ...]:
        """The attempts that are calls."""
        return tuple([call for call in self.calls if call.status == "ok"])


FormatParser = Callable[[str, Think], ParsedCalls]
_FORMATS: dict[str, FormatParser] = {}


def register_format(name: str, parser: FormatParser) -> None:
    """Teach `parse_tool_calls` a format.

    Args:
        name: what `format=` will say; a known name is replaced.
        parser: takes the text and the think rule; must return, whatever the text, in linear time.

    Example:
        >>> register_format("none", lambda text, think: ParsedCalls())
        >>> parse_tool_calls("anything", format="none")
        ParsedCalls(calls=(), num_open=0, num_close=0)

    Reference: ours.
    """
    _FORMATS[name] = parser


def parse_tool_calls(text: str, format: str = "hermes", think: Think = "reasoning") -> ParsedCalls:
    """Read the tool calls of one assistant text.

    Hermes, the format of Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. JSON is decoded from the tag
    on, so a tag inside a JSON string is text. One tag may hold one call, several values, or a list of calls.
    Duplicate keys, NaN, trailing commas, single quotes and nesting beyond 128 are invalid; nothing is repaired.

    Args:
        text: what the model wrote in one turn.
        format: "hermes", "chat", "qwen3_coder", "llama3_json", "mistral", "pythonic", or one that was registered.
        think: "reasoning": what stands in `<think>…</think>`, in an unclosed `<think>`, or before a `</think>` that
            the prompt opened is reasoning, and a call there is no call. "text": think tags are ordinary text.

    Returns:
        The attempts in order, with the counts of tags. Bad text never raises and costs linear time.

    Raises:
        ValueError: the format is not registered, or `think` is neither of the two.

    Example:
        >>> text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        >>> call = parse_tool_calls(text).calls[0]
        >>> call.name, call.arguments, call.status
        ('add', {'a': 1}, 'ok')
        >>> text[slice(*call.key_spans["a"])]
        'a'

    Reference: ours; the counts are those of SLCA eq. 23.
    """
    if think not in ("reasoning", "text"):
        raise ValueError(f"think: expected 'reasoning' or 'text', got {think!r}")
    return format_parser(format)(text, think)


def format_parser(format: str) -> FormatParser:
    """The parser of a registered format."""
    parser = _FORMATS.get(format)
    if parser is None:
        raise ValueError(f"format: {format!r} is not registered; known: {', '.join(sorted(_FORMATS))}")
    return parser


def read_call(value: object) -> tuple[str, Mapping[str, Any], Status, str | None, tuple[str, ...]]:
    """Name, arguments, status, reason and notes of one decoded call."""
    if type(value) is not dict and not isinstance(value, Mapping):
        return "", {}, "not_an_object", f"a call is an object, not {type(value).__name__}", ()
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return "", {}, "missing_name", "no name" if name in (None, "") else "the name is not a string", ()
    notes: tuple[str, ...] = ()
    arguments = value.get("arguments")
    if "arguments" not in value and "parameters" in value:
        arguments, notes = value["parameters"], ("parameters",)
    if isinstance(arguments, str) and arguments.strip():
        unwrapped = decode(arguments)
        if unwrapped.reason is not None:
            return name, {}, "invalid_arguments", f"the string of arguments: {unwrapped.reason}", notes
        arguments, notes = unwrapped.value, (*notes, "string")
    elif isinstance(arguments, str):
        arguments = None
    if arguments is None:
        return name, {}, "ok", None, notes
    if type(arguments) is not dict and not isinstance(arguments, Mapping):
        return name, {}, "invalid_arguments", f"arguments are {type(arguments).__name__}, not an object", notes
    return name, arguments, "ok", None, notes
