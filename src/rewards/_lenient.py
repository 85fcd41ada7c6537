"""Almost-JSON, as models and Python's `str` write it: read in one pass, each repair noted, or refused."""

import json
import re
import string
from typing import Any, NamedTuple

from rewards._json import MAX_DEPTH

_SPACE = re.compile(r"\s*")
_LINE = re.compile(r"(?://|#)[^\n]*")
# Nobody writes longer ones in a call, and looking for the end of each to the end of the text would cost its square.
_LONGEST_COMMENT = 4096
# No honest call comes near it, and each value costs far more here than in the strict decoder.
MOST_VALUES = 100_000
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SINGLE = re.compile(r"'[^'\\]*(?:\\.[^'\\]*)*'", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![\w.])")
_WORD = re.compile(r"[^\W\d][\w.\-]*")
_CONTROL = re.compile(r"[\x00-\x1f]")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|U[0-9a-fA-F]{8}|u[0-9a-fA-F]{4}|[0-7]{1,3}|.)|([\x00-\x1f\"])", re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_CLOSING = {"{": "}", "[": "]"}
# What begins neither white space nor a comment, for the most part: a look is cheaper than two patterns.
_SIGNS = frozenset("{}[]:,\"'-" + string.ascii_letters + string.digits)


class Repair(NamedTuple):
    """One thing that was not JSON and was read all the same.

    Attributes:
        kind: "single quotes", "trailing comma", "missing brace", "extra brace", "missing closing tag", "comment",
            "python literal", "unquoted key", "control character" or "code fence".
        at: the character where it stands.
    """

    kind: str
    at: int


class RefusedError(ValueError):
    """Text that no repair makes JSON without a guess."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(reason)
        self.at = at


class LenientReader:
    """Reads one value from `at` on; `stop` is the tag at which an unfinished value ends.

    `left` is the number of values, keys and comments that may still be read.
    """

    def __init__(self, text: str, at: int = 0, stop: str = "", left: int = MOST_VALUES) -> None:
        self.text, self.at, self.stop, self.left = text, at, stop, left
        self.repairs: list[Repair] = []
        self.string = (at, at)

    def value(self, depth: int = 1) -> Any:
        """The value at `at`.

        Raises:
            RefusedError: sets, tuples, NaN, duplicate keys, halves of strings and all else that is not JSON.
        """
        self.space()
        self._spend()
        sign = self.text[self.at : self.at + 1]
        if sign == '"' or sign == "'":
            return self._string(sign)
        if sign == "{" or sign == "[":
            if depth > MAX_DEPTH:
                raise RefusedError(f"nested deeper than {MAX_DEPTH}", self.at)
            return self._object(depth) if sign == "{" else self._list(depth)
        if number := _NUMBER.match(self.text, self.at):
            return self._number(number)
        return self._word(sign)

    def space(self) -> None:
        """Skip white space and comments."""
        while self.text[self.at : self.at + 1] not in _SIGNS:
            self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]  # matches the empty string
            end = -1
            if self.text.startswith("/*", self.at):
                end = self.text.find("*/", self.at + 2, self.at + _LONGEST_COMMENT) + 2
            elif line := _LINE.match(self.text, self.at):
                end = line.end()
            if end <= self.at:
                return
            self._spend()
            self._repair("comment")
            self.at = end

    def _spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise RefusedError(f"more than {MOST_VALUES} values", self.at)

    def _repair(self, kind: str) -> None:
        self.repairs.append(Repair(kind, self.at))

    def _over(self) -> bool:
        """The text, or the block, ends here."""
        return self.at >= len(self.text) or (bool(self.stop) and self.text.startswith(self.stop, self.at))

    def _after(self, opening: str) -> bool:
        """Whether another item follows one of a list or object; reads the comma or the end."""
        self.space()
        text, closing = self.text, _CLOSING[opening]
        sign = text[self.at : self.at + 1]
        if sign == closing:
            self.at += 1
            return False
        if sign != ",":
            if self._over():
                self._repair("missing brace")
                return False
            raise RefusedError(f"expected a comma or {closing}, got {sign!r}", self.at)
        comma, self.at = self.at, self.at + 1
        self.space()
        sign = text[self.at : self.at + 1]
        if sign == closing or (sign not in _SIGNS and self._over()):
            self.repairs.append(Repair("trailing comma", comma))
            return self._after(opening)
        return True

    def _first(self, opening: str) -> bool:
        """Whether a list or object that begins here has any item."""
        self.at += 1
        self.space()
        return not (self._over() or self.text[self.at] == _CLOSING[opening]) or self._after(opening)

    def _list(self, depth: int) -> list[Any]:
        items: list[Any] = []
        more = self._first("[")
        while more:
            items.append(self.value(depth + 1))
            more = self._after("[")
        return items

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        text, more = self.text, self._first("{")
        while more:
            begin = self.at
            key = self._key(depth)
            if text[self.at : self.at + 1] != ":":
                self.space()
            if not text.startswith(":", self.at):
                raise RefusedError("a set is not JSON" if text[self.at : self.at + 1] in (",", "}") else
                                   "a key without a value", self.at)  # fmt: skip
            if not isinstance(key, str):
                raise RefusedError("a key that is not a string", begin)
            if key in found:
                raise RefusedError(f"duplicate key {key[:40]!r}", begin)
            self.at += 1
            found[key] = self.value(depth + 1)
            more = self._after("{")
        return found

    def _key(self, depth: int) -> Any:
        quoted = self.text[self.at : self.at + 1] in ('"', "'")
        word = None if quoted else _WORD.match(self.text, self.at)
        key = word[0] if word else ""
        if word is None or key in _WORDS:
            return self.value(depth + 1)
        self._spend()
        self._repair("unquoted key")
        self.at = word.end()
        return key

    def _string(self, quote: str) -> str:
        token = (_STRING if quote == '"' else _SINGLE).match(self.text, self.at)
        if token is None:
            raise RefusedError("a string without its end", self.at)
        inner = token[0][1:-1]
        if quote == "'":
            self._repair("single quotes")
        elif _CONTROL.search(inner):
            self._repair("control character")
        value = inner if inner.isprintable() and "\\" not in inner else self._unescaped(inner)
        self.string, self.at = token.span(), token.end()
        return value

    def _unescaped(self, inner: str) -> str:
        try:
            value: str = json.loads(f'"{_ESCAPE.sub(_json_escape, inner)}"')
            value.encode()
        except UnicodeEncodeError:
            raise RefusedError("half of a surrogate pair", self.at) from None
        except ValueError:
            raise RefusedError("an escape that is not one", self.at) from None
        return value

    def resume(self, error: RefusedError) -> int:
        """Where to look for the next tag: at the fault, or in the string before it.

        A lost quote makes a string of all that follows; the block after it must not be lost with it.
        """
        begin, end = self.string
        return begin + 1 if begin < end <= error.at and not self.text[end : error.at].strip() else error.at

    def _number(self, number: "re.Match[str]") -> int | float:
        digits = number[0]
        whole = digits.lstrip("-").isdigit()
        if (whole and len(digits) > 4300) or (not whole and abs(float(digits)) == float("inf")):
            raise RefusedError("number out of range", self.at)
        self.at = number.end()
        return int(digits) if whole else float(digits)

    def _word(self, sign: str) -> Any:
        word = _WORD.match(self.text, self.at)
        if word and word[0] in _WORDS:
            if word[0][0].isupper():
                self._repair("python literal")
            self.at = word.end()
            return _WORDS[word[0]]
        if sign == "(":
            raise RefusedError("a tuple is not JSON", self.at)
        if self._over():
            raise RefusedError("no value before the end", self.at)
        raise RefusedError(f"{word[0][:40] if word else sign!r} is not JSON", self.at)


def _json_escape(found: "re.Match[str]") -> str:
    """The JSON escape of a Python or JSON escape, or of a character that JSON strings may not hold bare."""
    escape, bare = found.groups()
    if bare is not None:
        return f"\\u{ord(bare):04x}"
    if escape[0] == "x" and len(escape) == 3:
        return f"\\u00{escape[1:]}"
    if escape[0] == "U" and len(escape) == 9:
        number = int(escape[1:], 16)
        return json.dumps(chr(number))[1:-1] if number < 0x110000 else "\\U"
    if escape == "'":
        return "'"
    if escape == "\n":
        return ""
    return f"\\u{int(escape, 8):04x}" if escape in ("0", "00", "000") else f"\\{escape}"


def read_json_or_repr(text: str) -> Any:
    """The value of a text that is JSON, or what Python's `str` made of a JSON value.

    Raises:
        ValueError: it is neither.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        reader = LenientReader(text)
        value = reader.value()
        reader.space()
        strange = {repair.kind for repair in reader.repairs} - {"single quotes", "python literal"}
        if strange or reader.at < len(text):
            raise ValueError(f"neither JSON nor Python's str of it: {min(strange, default='text after it')}") from None
        return value
