"""Calls written as Python: `[f(a=1), g(b="x")]`, the style of BFCL's prompts, Llama 3.2 and Llama 4."""

import ast
import re
from typing import Any

from rewards._json import MAX_DEPTH
from rewards.calls import MAX_ATTEMPTS, ParsedCalls, Places, Span, Status, Think, ToolCall, register_format
from rewards.formats._blocks import after_reasoning, failed

_NAME = r"[^\W\d][\w.\-/]{0,255}(?: [\w.\-/]{1,64}){0,8}"
_BEGINS = re.compile(rf"\s*(?:<\|python_(?:start|tag)\|>\s*)?(?=\[\s*{_NAME}\()")
_TAGGED = re.compile(r"\s*<\|python_(?:start|tag)\|>\s*")
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"[^"\\\n]*(?:\\.[^"\\\n]*)*"|'[^'\\\n]*(?:\\.[^'\\\n]*)*')"""
    r"""|(?P<number>-?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|-?\.[0-9]+(?:[eE][+-]?[0-9]+)?)"""
    rf"""|(?P<name>{_NAME})|(?P<mark>[()\[\]{{}}:,=]))""",
    re.DOTALL,
)
# What Python reads as it stands, escapes of one character aside; ten times sooner than `ast` does.
_ODD = re.compile(r"[\0\r\ud800-\udfff]|\\[0-7xNuU]")
_PLAIN_ESCAPES = {"\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r",
                  "t": "\t", "v": "\v"}  # fmt: skip
# Python keeps the backslash of an escape that it does not know, and warns.
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_KNOWN_ESCAPES = frozenset("\n\\'\"abfnrtv01234567xNuU")
# No honest text comes near it; reading them costs a microsecond each.
_MOST_VALUES = 100_000
_CONSTANTS = {"True": True, "False": False, "None": None}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class _WrongError(ValueError):
    def __init__(self, status: Status, reason: str, at: int) -> None:
        super().__init__(reason)
        self.status, self.at = status, at


def parse_pythonic(text: str, think: Think = "reasoning") -> ParsedCalls:
    """Read `[f(a=1), g(b="x")]`, with or without `<|python_start|>` or `<|python_tag|>` before it.

    The list stands at the beginning of the answer and is one block; a fault anywhere in it leaves no call. Names may
    hold dots, dashes, slashes and single spaces. Arguments have names. Values are what JSON can say, as Python writes
    it: strings, numbers, True, False, None, lists, tuples (read as lists) and dictionaries with strings for keys. Sets,
    bytes, expressions and calls as values are invalid. Nothing is evaluated; each string literal alone is read by
    `ast.literal_eval`.

    Args:
        text: what the model wrote in one turn.
        think: as in `parse_tool_calls`; an answer that begins with a call holds no reasoning.

    Returns:
        The attempts in order. Bad text never raises and costs linear time.

    Example:
        >>> [(call.name, call.arguments) for call in parse_pythonic('[math.add(a=1, b=[2, None]), now()]').valid]
        [('math.add', {'a': 1, 'b': [2, None]}), ('now', {})]
        >>> parse_pythonic("[f(a={1, 2})]").calls[0].reason
        'a set is not JSON'

    Reference: BFCL's prompt format; ours.
    """
    start = after_reasoning(text, think, _BEGINS)
    begins = _BEGINS.match(text, start) or _TAGGED.match(text, start)
    if begins is None:
        return ParsedCalls()
    reader = _Reader(text, begins.end())
    try:
        calls = reader.calls()
    except _WrongError as error:
        return ParsedCalls((failed(error.status, str(error), (begins.end(), error.at), 0),), 1, 0)
    if not calls:
        return ParsedCalls()
    span = (begins.end(), reader.at)
    made = [ToolCall(name, arguments, span=span, _places=places) for name, arguments, places in calls]
    return ParsedCalls(tuple(made), 1, 1)


class _Reader:
    """Reads tokens left to right, each once."""

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at = text, at
        self.kind: str | None = None
        self.token, self.values = "", 0
        self.found: re.Match[str] | None = None

    @property
    def span(self) -> Span:
        """Characters of the token."""
        return (self.at, self.at) if self.found is None else self.found.span(self.found.lastindex or 0)

    def next(self) -> str:
        found = _TOKEN.match(self.text, self.at)
        if found is None:
            rest = self.text[self.at : self.at + 20].strip()
            cut = not self.text[self.at :].strip() or rest[:1] in ("'", '"')
            raise _WrongError("unclosed" if cut else "invalid_syntax", f"unexpected {rest or 'end'!r}", self.at)
        self.found, self.at = found, found.end()
        self.kind = found.lastgroup
        self.token = token = found[found.lastindex or 0]
        return token

    def wrong(self, reason: str) -> _WrongError:
        return _WrongError("invalid_syntax", reason, self.span[1])

    def expect(self, *tokens: str) -> str:
        if self.next() not in tokens or self.kind == "string":
            raise self.wrong(f"expected {' or '.join(tokens)}, got {self.token[:20]!r}")
        return self.token

    def calls(self) -> list[tuple[str, dict[str, Any], Places]]:
        self.expect("[")
        calls: list[tuple[str, dict[str, Any], Places]] = []
        while True:
            if self.next() == "]" and self.kind == "mark":
                return calls
            if self.kind != "name":
                raise self.wrong(f"expected a name, got {self.token[:20]!r}")
            if len(calls) == MAX_ATTEMPTS:
                raise self.wrong(f"more than {MAX_ATTEMPTS} calls in one list")
            calls.append(self.call(self.token, self.span))
            if self.expect(",", "]") == "]":
                return calls

    def call(self, name: str, name_span: Span) -> tuple[str, dict[str, Any], Places]:
        self.expect("(")
        arguments: dict[str, Any] = {}
        keys: dict[str, Span] = {}
        while self.next() != ")" or self.kind != "mark":
            key, key_span = self.token, self.span
            if self.kind != "name" or not key.isidentifier():
                raise self.wrong("every argument needs a name")
            if key in arguments:
                raise self.wrong(f"argument {key[:40]!r} twice")
            self.expect("=")
            self.next()
            arguments[key], keys[key] = self.value(2), key_span
            if self.expect(",", ")") == ")":
                break
        return name, arguments, Places(name_span, keys)

    def value(self, depth: int) -> Any:
        """The value that begins with the token just read."""
        if depth > MAX_DEPTH:
            raise self.wrong(f"nested deeper than {MAX_DEPTH}")
        self.values += 1
        if self.values > _MOST_VALUES:
            raise self.wrong(f"more than {_MOST_VALUES} values in one list of calls")
        if self.kind == "string":
            return _string(self)
        if self.kind == "number":
            return _number(self)
        if self.kind == "name" and self.token in _CONSTANTS:
            return _CONSTANTS[self.token]
        if self.token == "{":
            return self.dictionary(depth)
        if self.token in ("[", "("):
            return self.sequence(_CLOSING[self.token], depth)
        raise self.wrong(f"{self.token[:20]!r} is no value")

    def sequence(self, end: str, depth: int) -> list[Any]:
        items: list[Any] = []
        comma = end == "]"
        while self.next() != end or self.kind != "mark":
            items.append(self.value(depth + 1))
            if self.expect(",", end) == end:
                break
            comma = True
        if items and not comma:
            raise self.wrong("an expression in parentheses is no value")
        return items

    def dictionary(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self.next() != "}" or self.kind != "mark":
            if self.kind == "string":
                key = _string(self)
            else:
                self.value(depth + 1)
                key = None
            if self.expect(":", ",", "}") != ":":
                raise self.wrong("a set is not JSON")
            if key is None:
                raise self.wrong("a key that is not a string")
            if key in found:
                raise self.wrong(f"duplicate key {key[:40]!r}")
            self.next()
            found[key] = self.value(depth + 1)
            if self.expect(",", "}") == "}":
                break
        return found


def _string(reader: _Reader) -> str:
    if "\\" not in reader.token and reader.token.isprintable():
        return reader.token[1:-1]
    if not _ODD.search(reader.token):
        return _ESCAPE.sub(_unescaped, reader.token[1:-1])
    try:
        value = ast.literal_eval(_ESCAPE.sub(_kept, reader.token))
        value.encode()
    except (ValueError, SyntaxError, MemoryError) as error:
        raise reader.wrong("half of a surrogate pair" if isinstance(error, UnicodeError) else str(error)) from None
    return str(value)


def _unescaped(escape: "re.Match[str]") -> str:
    return _PLAIN_ESCAPES.get(escape[1], escape[0])


def _kept(escape: "re.Match[str]") -> str:
    return escape[0] if escape[1] in _KNOWN_ESCAPES else "\\" + escape[0]


def _number(reader: _Reader) -> int | float:
    digits = reader.token
    if digits.lstrip("-").isdigit():
        # Python bounds the digits of a decimal integer, and refuses a leading zero.
        if len(digits) > 4300 or (len(digits.lstrip("-")) > 1 and digits.lstrip("-")[0] == "0"):
            raise reader.wrong("number out of range" if len(digits) > 4300 else "a leading zero")
        return int(digits)
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise reader.wrong("number out of range")
    return value


register_format("pythonic", parse_pythonic)
