"""When a predicted value is as good as the gold one, and which predicted call belongs to which gold call."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from rewards.gold import Accepted, as_value

# JSON's own numbers, so that "007", "1_000" and "٣" stay what they are: names.
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,5})?", re.ASCII)
# Python refuses to read longer integers, and "1e99999" written out would be one.
_MOST_DIGITS = 4300
_NONE: Mapping[str, Any] = {}
# Types whose equal values match, whatever the schema. NaN is not equal to itself.
_PLAIN = frozenset((str, int, float, bool))

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
    return _matches(predicted, as_value(gold), schema)


def _same(predicted: Any, gold: Any) -> bool:
    """True if they are equal scalars of one type, the usual case of a match; False decides nothing."""
    kind = type(predicted)
    if kind not in _PLAIN:
        return False
    if type(gold) is Accepted:
        # A loop: a generator costs as much as the rest, and this runs for every argument.
        for value in gold.values:  # noqa: SIM110
            if type(value) is kind and value == predicted:
                return True
        return False
    return type(gold) is kind and bool(gold == predicted)


def _matches(predicted: Any, gold: Any, schema: Schema) -> bool:
    if isinstance(gold, Accepted):
        return any(_matches(predicted, value, schema) for value in gold.values)
    if _same(predicted, gold):
        return True
    if isinstance(gold, dict):
        return isinstance(predicted, Mapping) and _objects_match(predicted, gold, schema)
    if isinstance(gold, list):
        return (
            isinstance(predicted, (list, tuple))
            and len(predicted) == len(gold)
            and all(_matches(p, g, _item(schema, i)) for i, (p, g) in enumerate(zip(predicted, gold)))
        )
    ours, theirs = _key(predicted), _key(gold)
    if ours is None or theirs is None:
        return False
    return ours == theirs or ({ours, theirs} == {("null", None), ("text", "null")} and _allows_null(schema))


def _key(value: Any) -> _Key | None:
    """What a scalar means: equal keys, equal values; None equals nothing."""
    if value is None:
        return "null", None
    if isinstance(value, bool):
        return "text", "true" if value else "false"
    if isinstance(value, int):
        return "number", value
    if isinstance(value, float):
        return None if math.isnan(value) else ("number", value)
    if not isinstance(value, str):
        return None
    text = value.strip()
    number = _NUMBER.fullmatch(text)
    if number is None or len(text) > _MOST_DIGITS:
        return "text", text.casefold()
    if not number[2] and not number[3]:
        return "number", int(text)
    exact = Decimal(text)
    if exact and abs(exact.adjusted()) > _MOST_DIGITS:
        return "text", text.casefold()
    return "number", int(exact) if exact == exact.to_integral_value() else float(exact)


def _objects_match(predicted: Mapping[str, Any], gold: Mapping[str, Any], schema: Schema) -> bool:
    return compare_arguments(predicted, gold, schema).exact


class Pair(NamedTuple):
    """Counts of one predicted object beside one gold object.

    Attributes:
        expected: gold keys, without those that were left out and may be.
        shared: expected keys that were given.
        hits: shared keys whose values match.
        extra: given keys that gold does not have.
        missed_required: keys that may not be left out and are missing, or do not match.
    """

    expected: int
    shared: int
    hits: int
    extra: int
    missed_required: int

    @property
    def exact(self) -> bool:
        """Every expected key was given and matches, and no other was given."""
        return self.hits == self.shared == self.expected and not self.extra

    @property
    def key(self) -> float:
        """Jaccard index of the key sets (SLCA eq. 25); both empty = 1."""
        union = self.expected + self.extra
        return self.shared / union if union else 1.0

    @property
    def value(self) -> float:
        """Share of gold keys whose value matches (SLCA eq. 26); no gold key = 1."""
        return self.hits / self.expected if self.expected else 1.0


def compare_arguments(predicted: Mapping[str, Any], gold: Mapping[str, Any], schema: Schema) -> Pair:
    """Count keys and matching values of two objects."""
    expected = shared = hits = missed = 0
    for key, value in gold.items():
        optional = isinstance(value, Accepted) and value.optional
        if key in predicted:
            given = predicted[key]
            hit = _same(given, value) or _matches(given, value, _member(schema, key))
            shared, hits, expected = shared + 1, hits + hit, expected + 1
            missed += not hit and not optional
        elif not optional and not (_is_null(value) and _may_be_missing(schema, key)):
            expected, missed = expected + 1, missed + 1
    extra = 0
    if len(predicted) > shared:
        surplus = [key for key in predicted if key not in gold]
        extra = sum(not (predicted[key] is None and _may_be_missing(schema, key)) for key in surplus)
    return Pair(expected, shared, hits, extra, missed)


def _is_null(gold: Any) -> bool:
    return gold is None or (isinstance(gold, Accepted) and None in gold.values)


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


def best_pairs(pairs: Sequence[Sequence[Pair]], score: Callable[[Pair], float]) -> list[tuple[int, int]]:
    """The one-to-one assignment of rows (gold) to columns (predicted) with the largest total score."""
    rows, columns = len(pairs), len(pairs[0]) if pairs else 0
    if not rows or not columns:
        return []
    if rows == columns == 1:
        return [(0, 0)]
    if columns == 1:
        return [(max(range(rows), key=lambda i: score(pairs[i][0])), 0)]
    if rows == 1:
        return [(0, max(range(columns), key=lambda j: score(pairs[0][j])))]
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise ImportError("matching calls one to one needs scipy: pip install credit-routing[rewards]") from error
    found = linear_sum_assignment([[score(pair) for pair in row] for row in pairs], maximize=True)
    return [(int(i), int(j)) for i, j in zip(*found)]
