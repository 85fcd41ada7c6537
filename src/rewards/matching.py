"""When a predicted value is as good as the gold one: gold is read once, then matched many times."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from rewards.accepted import Accepted, as_value

# JSON's own numbers, so that "007", "1_000" and "٣" stay what they are: names.
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,5})?", re.ASCII)
_DIGITS = frozenset("-0123456789")
# Python refuses to read longer integers, and "1e99999" written out would be one.
_MOST_DIGITS = 4300
_NONE: Mapping[str, Any] = {}
# Types whose equal values match, whatever the schema.
SCALARS = frozenset((str, int, float, bool))
NULL, NULL_TEXT = ("null", None), ("text", "null")

Schema = Mapping[str, Any] | bool | None
_Key = tuple[str, Any]


def loose_match(predicted: Any, gold: Any, schema: Schema = None) -> bool:
    """Whether a predicted value means the same as the gold one.

    Text: case and surrounding space do not matter. Numbers compare by value across int, float and numeric text (a text
    that is a JSON number), integers of any size exactly. `true` equals the text "true" and no number. null equals the
    text "null", and a missing key of an object, only where the schema allows null. Lists compare in order, objects key
    by key. NaN equals nothing. On values without null this is symmetric and transitive.

    Args:
        predicted: a decoded JSON value.
        gold: a decoded JSON value; it, or any value inside it, may be `Accepted` or its JSON form.
        schema: JSON Schema of the value, if known.

    Returns:
        Whether they match; for `Accepted`, whether any of its values does.

    Raises:
        ValueError: `gold` holds an `Accepted` without values, or its JSON form is malformed.

    Example:
        >>> loose_match(" Paris ", "paris"), loose_match("5", 5.0), loose_match(True, 1)
        (True, True, False)
        >>> loose_match([12, 15], [12.0, 15.0]), loose_match([15, 12], [12, 15])
        (True, False)
        >>> loose_match("C", Accepted(("celsius", "C")))
        True

    Reference: the indicator of SLCA eq. 26; the paper leaves the details open, these are ours.
    """
    return _matches(predicted, _wanted(as_value(gold)), schema)


class Wanted(NamedTuple):
    """What one gold value accepts.

    Attributes:
        keys: what the accepted scalars mean.
        lists: the accepted lists.
        objects: the accepted objects.
    """

    keys: frozenset[_Key]
    lists: tuple[tuple["Wanted", ...], ...]
    objects: tuple[tuple["WantedMember", ...], ...]


class WantedMember(NamedTuple):
    """What gold wants under one key of an object.

    Attributes:
        key: the key.
        optional: leaving it out is right too.
        kind: the type of `values`; None if there are none of one type only.
        values: accepted scalars, which match whatever the schema; a value that is not among them may match too.
        wanted: all that is accepted.
        null: null is accepted, so that leaving the key out may be right.
    """

    key: str
    optional: bool
    kind: type | None
    values: tuple[Any, ...]
    wanted: Wanted
    null: bool


def wanted_object(gold: Mapping[str, Any]) -> tuple[WantedMember, ...]:
    """The arguments of a gold call, or any gold object read by `as_value`, ready to be matched."""
    return tuple([_wanted_member(key, value) for key, value in gold.items()])


def _wanted_member(key: str, gold: Any) -> WantedMember:
    # NaN is found by identity in a tuple, and equals nothing.
    plain = tuple([value for value in _alternatives(gold) if type(value) in SCALARS and value == value])
    kinds = set(map(type, plain))
    optional = isinstance(gold, Accepted) and gold.optional
    null = None in gold.values if isinstance(gold, Accepted) else gold is None
    return WantedMember(key, optional, kinds.pop() if len(kinds) == 1 else None, plain, _wanted(gold), null)


def _wanted(gold: Any) -> Wanted:
    values = list(_alternatives(gold))
    return Wanted(
        keys=frozenset([key for key in map(meaning, values) if key is not None]),
        lists=tuple([tuple(map(_wanted, value)) for value in values if isinstance(value, list)]),
        objects=tuple([wanted_object(value) for value in values if isinstance(value, dict)]),
    )


def _alternatives(gold: Any) -> Iterator[Any]:
    if isinstance(gold, Accepted):
        for value in gold.values:
            yield from _alternatives(value)
    else:
        yield gold


def _matches(predicted: Any, wanted: Wanted, schema: Schema) -> bool:
    scalar = predicted is None or type(predicted) in SCALARS
    if not scalar and isinstance(predicted, (list, tuple)):
        return any(_lists_match(predicted, items, schema) for items in wanted.lists)
    if not scalar and isinstance(predicted, Mapping):
        return any(compare_arguments(predicted, members, schema) is EXACT for members in wanted.objects)
    if isinstance(predicted, str) and len(predicted) > _MOST_DIGITS:
        # A text longer than all that is accepted: folding case shortens none, and takes time.
        length = len(predicted.strip())
        if length > _MOST_DIGITS and all(kind != "text" or len(text) < length for kind, text in wanted.keys):
            return False
    key = meaning(predicted)
    if key in wanted.keys:
        return True
    other = NULL_TEXT if key == NULL else NULL if key == NULL_TEXT else None
    return other in wanted.keys and _allows_null(schema)


def _lists_match(predicted: Sequence[Any], wanted: Sequence[Wanted], schema: Schema) -> bool:
    return len(predicted) == len(wanted) and all(
        _matches(p, w, _item(schema, i)) for i, (p, w) in enumerate(zip(predicted, wanted))
    )


def meaning(value: Any) -> _Key | None:
    """What a scalar means: equal keys, equal values; None equals nothing."""
    if value is None:
        return NULL
    if isinstance(value, bool):
        return "text", "true" if value else "false"
    if isinstance(value, int):
        return "number", value
    if isinstance(value, float):
        return None if math.isnan(value) else ("number", value)
    if not isinstance(value, str):
        return None
    text = value.strip()
    number = _NUMBER.fullmatch(text) if text[:1] in _DIGITS else None
    if number is None or len(text) > _MOST_DIGITS:
        return "text", text.casefold()
    if not number[2] and not number[3]:
        return "number", int(text)
    exact = Decimal(text)
    if exact and abs(exact.adjusted()) > _MOST_DIGITS:
        return "text", text.casefold()
    return "number", int(exact) if exact == exact.to_integral_value() else float(exact)


class Pair(NamedTuple):
    """One predicted object beside one gold object; or several beside one, and then the parts are arrays.

    Attributes:
        key: Jaccard index of the key sets (SLCA eq. 25); both empty = 1.
        value: share of gold keys whose value matches (SLCA eq. 26); no gold key = 1.
        missed_required: keys that may not be left out and are missing, or do not match.
    """

    key: float | Any
    value: float | Any
    missed_required: int | Any


EXACT = Pair(1.0, 1.0, 0)


def compare_arguments(predicted: Mapping[str, Any], gold: Sequence[WantedMember], schema: Schema) -> Pair:
    """Compare the keys and the values of two objects."""
    shared = wrong = missed = left_out = extra = 0
    for key, optional, kind, values, wanted, null in gold:
        if key in predicted:
            shared += 1
            given = predicted[key]
            # Most right values are right to the letter.
            if type(given) is kind and given in values:
                continue
            if not _matches(given, wanted, _member(schema, key)):
                wrong += 1
                missed += not optional
        elif not optional and not (null and _may_be_missing(schema, key)):
            left_out += 1
    if len(predicted) > shared:
        extra = _count_extra(predicted, gold, schema)
    if not (wrong or left_out or extra):
        return EXACT
    expected = shared + left_out
    value = (shared - wrong) / expected if expected else 1.0
    return Pair(shared / (expected + extra), value, missed + left_out)


def _count_extra(predicted: Mapping[str, Any], gold: Sequence[WantedMember], schema: Schema) -> int:
    """Given keys that gold does not have; null for a key that may be missing is none."""
    known = {member.key for member in gold}
    surplus = [key for key in predicted if key not in known]
    return sum([not (predicted[key] is None and _may_be_missing(schema, key)) for key in surplus])


def _member(schema: Schema, key: str) -> Schema:
    member: Schema = schema.get("properties", _NONE).get(key) if isinstance(schema, dict) else None
    return member


def _item(schema: Schema, index: int) -> Schema:
    if not isinstance(schema, dict):
        return None
    first: Sequence[Schema] = schema.get("prefixItems") or ()
    items: Schema = first[index] if index < len(first) else schema.get("items")
    return items


def _may_be_missing(schema: Schema, key: str) -> bool:
    if not isinstance(schema, dict) or key in (schema.get("required") or ()):
        return False
    return _allows_null(_member(schema, key))


def _allows_null(schema: Schema) -> bool:
    if not isinstance(schema, dict):
        return schema is True
    if schema.get("nullable") is True:
        return True
    if "const" in schema or "enum" in schema:
        return None in schema.get("enum", [schema.get("const")])
    for some in ("anyOf", "oneOf"):
        if some in schema:
            return any(_allows_null(branch) for branch in schema[some])
    # A reference is not followed: what it allows is not known here.
    types = schema.get("type", "" if "$ref" in schema or "allOf" in schema else "null")
    return "null" in ([types] if isinstance(types, str) else types)
