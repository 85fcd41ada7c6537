"""Marks of argument objects: which of them match in every key and value, without comparing each with each."""

from collections.abc import Mapping, Sequence
from typing import Any

from rewards.matching import NULL, NULL_TEXT, WantedMember, meaning

# Equal marks, equal arguments. None: it takes a comparison to say.
Mark = frozenset[tuple[str, Any]] | None


def mark_given(arguments: Mapping[str, Any]) -> Mark:
    """The mark of predicted arguments; none if a value is null, which may count as left out, or no scalar."""
    found = []
    for key, value in arguments.items():
        means = meaning(value)
        if means is None or means == NULL:
            return None
        found.append((key, means))
    return frozenset(found)


def mark_wanted(gold: Sequence[WantedMember]) -> Mark:
    """The mark of gold arguments; none if one may be left out, has alternatives, is null or no scalar.

    Then nothing hangs on the schema, and `compare_arguments` is `EXACT` if and only if the marks are equal.
    """
    found = []
    for key, optional, _, _, wanted, null in gold:
        if optional or null or wanted.lists or wanted.objects or len(wanted.keys) != 1:
            return None
        (means,) = wanted.keys
        if means in (NULL, NULL_TEXT):
            return None
        found.append((key, means))
    return frozenset(found)
