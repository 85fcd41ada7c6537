"""Strict JSON for text that a model wrote: one value from a position on, in linear time, or the reason why not."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

# Deeper values exist only in attacks. The bound stands far under Python's recursion limit, so a verdict does not
# depend on how deep the caller's own stack is, and the schema validator (native code) cannot overflow its stack.
MAX_DEPTH = 128

_SCALARS = frozenset((str, int, float, bool, type(None)))
_SPACE = re.compile(r"[ \t\n\r]*")
_MARKS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]:,]', re.DOTALL)
_TOO_DEEP = f"nested deeper than {MAX_DEPTH}"


class _RefusedError(ValueError):
    """JSON that Python reads and the standard, or a scorer, must not."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _RefusedError(f"duplicate key {twice[:40]!r}")
    return found


def _constant(name: str) -> float:
    raise _RefusedError(f"{name} is not JSON")


def _float(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise _RefusedError("number out of range")
    return value


# The scanner that `raw_decode` wraps: it starts anywhere without copying the text.
_strict = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
_loose = json.JSONDecoder(parse_float=str, parse_int=str)
_scan: Callable[[str, int], tuple[Any, int]] = _strict.scan_once  # type: ignore[attr-defined]
_scan_loosely: Callable[[str, int], tuple[Any, int]] = _loose.scan_once  # type: ignore[attr-defined]


class Decoded(NamedTuple):
    """A value or the reason why there is none.

    Attributes:
        value: the value; None where there is a reason.
        reason: None, or what is wrong.
        start: where decoding began.
        end: where the value ends or, if `whole` is False, where decoding stopped.
        whole: the end of the value is known, be it refused or not.
        cut: the text ended inside a string, the one error that more text can cure.
    """

    value: Any
    reason: str | None
    start: int
    end: int
    whole: bool = True
    cut: bool = False


def depth_exceeds(value: object, limit: int = MAX_DEPTH) -> bool:
    """Whether lists and objects nest deeper than `limit`; iterative, so no depth can overflow it."""
    if type(value) is dict and limit > 0 and _SCALARS.issuperset(map(type, value.values())):
        return False
    level: list[Any] = [value]
    for _ in range(limit + 1):
        inner: list[Any] = []
        for item in level:
            kind = type(item)
            if kind in _SCALARS:
                continue
            if kind is dict:
                inner.extend(item.values())
            elif isinstance(item, (list, tuple)):
                inner.extend(item)
            elif isinstance(item, Mapping):
                inner.extend(item.values())
        if not inner:
            return False
        level = inner
    return True


def _fault(text: str, value: Any, start: int, end: int) -> str | None:
    """What the grammar allows and a scorer cannot use: endless nesting, halves of a surrogate pair."""
    if text.count("{", start, end) + text.count("[", start, end) > MAX_DEPTH and depth_exceeds(value):
        return _TOO_DEEP
    if text.find("\\u", start, end) >= 0 or not text.isascii():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return "half of a surrogate pair"
    return None


def skip_space(text: str, start: int) -> int:
    """The first position from `start` on that is not JSON white space."""
    return _SPACE.match(text, start).end()  # type: ignore[union-attr]  # the pattern matches the empty string


def decode_at(text: str, start: int) -> Decoded:
    """Decode the one value that begins at `start`.

    >>> decode_at('{"a": 1} rest', 0)
    Decoded(value={'a': 1}, reason=None, start=0, end=8, whole=True, cut=False)
    >>> decode_at('{"a": 1, "a": 2}', 0).reason
    "duplicate key 'a'"
    """
    try:
        value, end = _scan(text, start)
    except StopIteration as stop:
        return _broken("a JSON value was expected", start, int(stop.value))
    except json.JSONDecodeError as error:
        return _broken(error.msg, start, error.pos)
    except RecursionError:
        return _broken(_TOO_DEEP, start, start)
    except ValueError as error:
        return _refused(text, start, str(error))
    fault = _fault(text, value, start, end)
    return Decoded(None if fault else value, fault, start, end)


def _broken(reason: str, start: int, stop: int) -> Decoded:
    return Decoded(None, reason, start, stop, whole=False, cut=reason.startswith("Unterminated string"))


def _refused(text: str, start: int, reason: str) -> Decoded:
    """Find where a refused value ends, so that a tag inside one of its strings stays text."""
    try:
        return Decoded(None, reason, start, _scan_loosely(text, start)[1])
    except json.JSONDecodeError as error:
        return _broken(error.msg, start, error.pos)
    except (StopIteration, RecursionError):
        return _broken(reason, start, start)


def decode(text: str) -> Decoded:
    """Decode a text that holds one value and nothing else."""
    found = decode_at(text, skip_space(text, 0))
    rest = skip_space(text, found.end)
    if found.reason is None and rest != len(text):
        return Decoded(None, "text after the value", found.start, rest, whole=False)
    return found


def canonical(value: Any) -> str:
    """The one JSON text of a value: keys sorted, no spaces, 2.0 written as 2 (one number to a schema)."""
    return json.dumps(_integral(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _integral(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _integral(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_integral(item) for item in value]
    return value


def members(text: str, start: int) -> Iterator[tuple[str, int, int, int, int]]:
    """Members of the valid object at `start`: key, the key's span between its quotes, its value's [start, end)."""
    depth, key, key_span, value_start = 0, "", (0, 0), -1
    for mark in _MARKS.finditer(text, start):
        sign = mark.group()[0]
        if depth == 1 and value_start < 0 and sign == '"':
            key, key_span = json.loads(mark.group(), strict=False), (mark.start() + 1, mark.end() - 1)
        elif depth == 1 and value_start < 0 and sign == ":":
            value_start = skip_space(text, mark.end())
        elif depth == 1 and value_start >= 0 and sign in ",}":
            yield key, *key_span, value_start, len(text[value_start : mark.start()].rstrip()) + value_start
            value_start = -1
        if sign in "{[":
            depth += 1
        elif sign in "}]":
            depth -= 1
            if depth == 0:
                return


def elements(text: str, start: int) -> Iterator[int]:
    """Where each element of the valid list at `start` begins."""
    depth = 0
    for mark in _MARKS.finditer(text, start):
        sign = mark.group()[0]
        if sign in "{[":
            depth += 1
        elif sign in "}]":
            depth -= 1
            if depth == 0:
                return
        if (depth == 1 and sign in "[,") and text[(begin := skip_space(text, mark.end()))] != "]":
            yield begin


def string_offsets(text: str, start: int, end: int) -> list[int]:
    """For a JSON string whose characters between the quotes are [start, end): where each decoded one begins.

    One more entry closes the list, so that characters [i, j) of the decoded string lie in [o[i], o[j]).
    """
    offsets, at = [], start
    while at < end:
        offsets.append(at)
        if text[at] != "\\":
            at += 1
        elif text[at + 1] != "u":
            at += 2
        else:
            # Two escapes of a surrogate pair are one character.
            pair = text[at + 2 : at + 4].lower() in ("d8", "d9", "da", "db") and text[at + 6 : at + 8] == "\\u"
            at += 12 if pair else 6
    return [*offsets, end]
