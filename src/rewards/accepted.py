"""Gold values that have alternatives or may be left out, as objects and as the JSON of a data set's column."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Accepted:
    """A gold value that has alternatives, or may be left out.

    As plain JSON (a data set's column) it is `{"$accepted": [values…], "$optional": true}`; `"$optional"` may be
    missing. Wherever a gold argument, or a value inside one, may stand, either form may stand.

    Attributes:
        values: the accepted values; empty only if `optional`, and then leaving it out is the only right answer.
        optional: leaving it out is right too.

    Example:
        >>> from rewards import as_gold
        >>> gold = [[{"name": "weather", "arguments": {"unit": Accepted(("C", "celsius"), optional=True)}}]]
        >>> as_gold(gold).to_json()
        '[[{"name": "weather", "arguments": {"unit": {"$accepted": ["C", "celsius"], "$optional": true}}}]]'
    """

    values: tuple[Any, ...]
    optional: bool = False


def as_value(value: Any) -> Any:
    """A gold value with the JSON form of `Accepted` read, at any depth."""
    if isinstance(value, Accepted):
        if not value.values and not value.optional:
            raise ValueError("no accepted value")
        return Accepted(tuple(_present(item) for item in value.values), value.optional)
    if isinstance(value, Mapping):
        if "$accepted" in value:
            return as_value(_from_json(value))
        return {key: as_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_present(item) for item in value]
    return value


def _present(value: Any) -> Any:
    """A gold value where nothing can be left out: in a list, or among accepted values."""
    found = as_value(value)
    if isinstance(found, Accepted) and not found.values:
        raise ValueError("no accepted value, and what stands in a list cannot be left out")
    return found


def _from_json(value: Mapping[str, Any]) -> Accepted:
    values, optional = value["$accepted"], value.get("$optional", False)
    known = not set(value) - {"$accepted", "$optional"}
    if not (known and isinstance(values, (list, tuple)) and isinstance(optional, bool)):
        raise ValueError('expected {"$accepted": [values], "$optional": true or false}')
    return Accepted(tuple(values), optional)
