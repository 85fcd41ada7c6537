"""Marks of values: which of them match, without comparing each with each."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rewards._json import MAX_DEPTH
from rewards.matching import NULL, NULL_TEXT, SCALARS, Wanted, WantedMember, meaning

# What a value means: of a scalar `meaning`, of a list or an object the marks of its parts.
Mark = tuple[str, Any]
_EITHER_NULL = ("null", "or its text")
# Python hashes integers modulo a known prime, and a hostile text could make thousands of them fall together.
_SPREAD = 1 << 60


def mark_given(arguments: Mapping[str, Any]) -> Mark | None:
    """The mark of predicted arguments; none if they hold a null, whose place in a match hangs on the schema."""
    return _if_sure(mark_value(arguments))


def mark_wanted(gold: Sequence[WantedMember]) -> Mark | None:
    """The mark of gold arguments; none if a part may be left out, has alternatives or is a null.

    Where both have marks, `compare_arguments` is `EXACT` if and only if the marks are equal, whatever the schema.
    """
    return _if_sure(_object(gold))


def mark_value(value: Any, depth: int = 0) -> Mark | None:
    """The mark of a predicted value; none for NaN, for what holds one, and for what is no JSON value."""
    if value is None or type(value) in SCALARS:
        means = meaning(value)
        return None if means is None else _spread(means)
    if depth > MAX_DEPTH:
        return None
    if isinstance(value, (list, tuple)):
        items = [mark_value(item, depth + 1) for item in value]
        return None if None in items else ("list", tuple(items))
    if isinstance(value, Mapping):
        members = [(key, mark_value(item, depth + 1)) for key, item in value.items()]
        return None if any(mark is None for _, mark in members) else ("object", frozenset(members))
    return None


def marks_accepted(wanted: Wanted) -> set[Mark] | None:
    """The marks, loosened, of all that is accepted; none if it takes a comparison to say."""
    marks = [_spread(key) for key in wanted.keys]
    marks += [mark for items in wanted.lists if (mark := _list(items))]
    marks += [mark for members in wanted.objects if (mark := _object(members))]
    sure = len(marks) == len(wanted.keys) + len(wanted.lists) + len(wanted.objects)
    return set(map(loosened, marks)) if sure else None


def loosened(mark: Mark) -> Mark:
    """The mark without what hangs on the schema: values match only if these are equal."""
    kind, inner = mark
    if mark in (NULL, NULL_TEXT):
        return _EITHER_NULL
    if kind == "list":
        return kind, tuple([loosened(item) for item in inner])
    if kind == "object":
        members = [(key, loosened(item)) for key, item in inner]
        return kind, frozenset([member for member in members if member[1] != _EITHER_NULL])
    return mark


def _if_sure(mark: Mark | None) -> Mark | None:
    return mark if mark is not None and loosened(mark) == mark else None


def _only(wanted: Wanted) -> Mark | None:
    """The mark of the one thing that is accepted; none if there are several."""
    if len(wanted.keys) + len(wanted.lists) + len(wanted.objects) != 1:
        return None
    if wanted.keys:
        return _spread(next(iter(wanted.keys)))
    return _list(wanted.lists[0]) if wanted.lists else _object(wanted.objects[0])


def _list(items: Sequence[Wanted]) -> Mark | None:
    marks = [_only(item) for item in items]
    return None if None in marks else ("list", tuple(marks))


def _object(gold: Sequence[WantedMember]) -> Mark | None:
    members = [(member.key, None if member.optional else _only(member.wanted)) for member in gold]
    return None if any(mark is None for _, mark in members) else ("object", frozenset(members))


def _spread(means: Mark) -> Mark:
    kind, value = means
    if kind == "number" and not -_SPREAD < value < _SPREAD and (isinstance(value, int) or math.isfinite(value)):
        return kind, hex(int(value))
    return means
