"""Strict JSON for text that a model wrote: one value from a position on, in linear time, or the reason why not."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# Deeper values exist only in attacks. The bound stands far under Python's recursion limit, so a verdict does not
# depend on how deep the caller's own stack is, and the schema validator (native code) cannot overflow its stack.
MAX_DEPTH = 128

_SCALARS = frozenset((str, int, float, bool, type(None)))
_SPACE = re.compile(r"[ \t\n\r]*")
_COLONS = ('":', " :", "\n:", "\t:", "\r:")
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
_plain = json.JSONDecoder(parse_constant=_constant, parse_float=_float)
_loose = json.JSONDecoder(parse_float=str, parse_int=str)
scan_plainly: Callable[[str, int], tuple[Any, int]] = _plain.scan_once  # type: ignore[attr-defined]
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
    if may_nest(text, start, end) and depth_exceeds(value):
        return _TOO_DEEP
    try:
        if text.find("\\u", start, end) >= 0:
            json.dumps(value, ensure_ascii=False).encode()
        elif not text.isascii():
            text[start:end].encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair"
    return None


def may_nest(text: str, start: int, end: int) -> bool:
    """False if no value in this part of the text can be nested too deep; True if that is not sure."""
    return end - start > 2 * MAX_DEPTH and text.count("{", start, end) + text.count("[", start, end) > MAX_DEPTH


def is_encodable(text: str) -> bool:
    """True if no half of a surrogate pair can be in this text; False if that is not sure."""
    if "\\u" in text and ("\\ud" in text or "\\uD" in text):
        return False
    return text.isascii() or _encodes(text)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def keys_differ(text: str, value: Any, start: int, end: int) -> bool:
    """True if no object in a decoded value had a key twice; False if that is not sure.

    A decoded object has each key once, and each key of the text has a colon. So as many keys as colons means that none
    was lost. Colons inside strings make it unsure, unless only those that a quote or a space precedes are counted.
    """
    colons = text.count(":", start, end)
    return _has_keys(value, colons) or _has_keys(value, sum([text.count(mark, start, end) for mark in _COLONS]))


def _has_keys(value: Any, number: int) -> bool:
    if type(value) is not dict:
        level, count = [value], 0
    else:
        level, count = list(value.values()), len(value)
    if count == number:
        return True
    for item in level:  # grows while it is read
        if type(item) is dict:
            count += len(item)
            if count >= number:
                break
            level += item.values()
        elif type(item) is list:
            level += item
    return count == number


def skip_space(text: str, start: int) -> int:
    """The first position from `start` on that is not JSON white space."""
    if text[start : start + 1] > " ":
        return start
    return _SPACE.match(text, start).end()  # type: ignore[union-attr]  # the pattern matches the empty string


def decode_at(text: str, start: int) -> Decoded:
    """Decode the one value that begins at `start`.

    >>> decode_at('{"a": 1} rest', 0)
    Decoded(value={'a': 1}, reason=None, start=0, end=8, whole=True, cut=False)
    >>> decode_at('{"a": 1, "a": 2}', 0).reason
    "duplicate key 'a'"
    """
    try:
        value, end = scan_plainly(text, start)
    except (ValueError, StopIteration, RecursionError) as error:
        # Where no object ended before the fault, none can have had a key twice.
        if type(error) is json.JSONDecodeError and text.find("}", start, error.pos) < 0:
            return _broken(error.msg, start, error.pos)
        return _decode_strictly(text, start)
    if not keys_differ(text, value, start, end):
        return _decode_strictly(text, start)
    fault = _fault(text, value, start, end)
    return Decoded(None if fault else value, fault, start, end)


def _decode_strictly(text: str, start: int) -> Decoded:
    """Decode a value whose keys are looked at one by one, or say what is wrong with it."""
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
    try:
        text = _written(value)
    except TypeError:  # a mapping that is no dict
        return _written(_integral(value))
    # Without these two no number in it can be a whole one written as a fraction.
    return _written(_integral(value)) if ".0" in text or "e+" in text else text


def _written(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _integral(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _integral(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_integral(item) for item in value]
    return value
