"""Gold calls: what should have been called, by step, with several accepted values where the data has them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from rewards._json import decode
from rewards.accepted import Accepted, as_value
from rewards.matching import WantedMember, wanted_object


class GoldError(ValueError):
    """Gold that the caller brought is not gold; the message names the row and the field."""


class GoldCall(NamedTuple):
    """One call that should have been made."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Gold:
    """Checked gold calls, by step. `as_gold` makes one; every function that takes `gold` takes it.

    Example:
        >>> gold = as_gold([[{"name": "add", "arguments": {"a": Accepted((1, 2))}}]])
        >>> gold.calls()
        [[{'name': 'add', 'arguments': {'a': 1}}]]
    """

    steps: tuple[tuple[GoldCall, ...], ...] = ()

    @cached_property
    def flat(self) -> tuple[GoldCall, ...]:
        """The calls of all steps."""
        return tuple(call for step in self.steps for call in step)

    @cached_property
    def first(self) -> int:
        """Number of calls in the first step that has any."""
        return next((len(step) for step in self.steps if step), 0)

    @cached_property
    def wanted(self) -> dict[str, tuple[tuple[WantedMember, ...], ...]]:
        """The arguments of the calls of each name, ready to be matched; read once for all rollouts of the row."""
        found: dict[str, list[tuple[WantedMember, ...]]] = {}
        for call in self.flat:
            found.setdefault(call.name, []).append(wanted_object(call.arguments))
        return {name: tuple(calls) for name, calls in found.items()}

    def calls(self) -> list[list[dict[str, Any]]]:
        """One right answer as plain calls: the first accepted value of each; what has none is left out."""
        return [[{"name": c.name, "arguments": _first(c.arguments)} for c in step] for step in self.steps]

    def to_json(self) -> str:
        """The JSON text that `as_gold` reads back."""
        steps = [[{"name": c.name, "arguments": _plain(c.arguments)} for c in step] for step in self.steps]
        return json.dumps(steps, ensure_ascii=False)


def as_gold(gold: object, row: str | None = None) -> Gold:
    """Check gold calls and bring them into one form.

    Args:
        gold: `[[{"name": …, "arguments": {…}}, …], …]` by step, its JSON text, or a `Gold`. Empty: no call is right.
            `parameters` is an alias of `arguments`; a call without either has none.
        row: what to call the row in an error.

    Returns:
        The checked calls; empty steps are dropped.

    Raises:
        GoldError: it is not gold; the message names the row and the field.

    Example:
        >>> as_gold([[{"arguments": {}}]], row="train.jsonl:7")
        Traceback (most recent call last):
        rewards.gold.GoldError: train.jsonl:7: gold[0][0].name: expected a non-empty string, got None

    Reference: ours.
    """
    if isinstance(gold, Gold):
        return gold
    where = f"{row}: gold" if row else "gold"
    if isinstance(gold, str):
        found = decode(gold)
        if found.reason is not None:
            raise GoldError(f"{where}: not JSON: {found.reason}")
        gold = found.value
    steps = []
    for i, step in enumerate(_list(gold, where, "steps")):
        calls = [_call(call, f"{where}[{i}][{j}]") for j, call in enumerate(_list(step, f"{where}[{i}]", "calls"))]
        if calls:
            steps.append(tuple(calls))
    return Gold(tuple(steps))


def _list(value: object, where: str, of: str) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        raise GoldError(f"{where}: expected a list of {of}, got {type(value).__name__}")
    return value


def _call(call: object, where: str) -> GoldCall:
    if isinstance(call, GoldCall):
        call = call._asdict()
    if not isinstance(call, Mapping):
        raise GoldError(f"{where}: expected an object, got {type(call).__name__}")
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
    if not isinstance(name, str) or not name:
        raise GoldError(f"{where}.name: expected a non-empty string, got {name!r}")
    if isinstance(arguments, str):
        found = decode(arguments)
        if found.reason is not None:
            raise GoldError(f"{where}.arguments: the string is not JSON: {found.reason}")
        arguments = found.value
    if arguments is None:
        # Read as none, they would make every right call a wrong one.
        other = next((key for key in call if isinstance(call[key], Mapping)), None)
        if other is not None and "arguments" not in call:
            raise GoldError(f"{where}.arguments: missing, and {other!r} is not read")
        return GoldCall(name, {})
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        raise GoldError(f"{where}.arguments: expected an object, got {type(arguments).__name__}")
    checked = {}
    for key, value in arguments.items():
        try:
            checked[key] = as_value(value)
        except ValueError as error:
            raise GoldError(f"{where}.arguments.{key}: {error}") from error
        except RecursionError:
            raise GoldError(f"{where}.arguments.{key}: nested too deep") from None
    return GoldCall(name, checked)


def _plain(value: Any) -> Any:
    if isinstance(value, Accepted):
        return {"$accepted": _plain(value.values)} | ({"$optional": True} if value.optional else {})
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _first(value: Any) -> Any:
    if isinstance(value, Accepted):
        return _first(value.values[0])
    if isinstance(value, Mapping):
        kept = {k: v for k, v in value.items() if not isinstance(v, Accepted) or v.values}
        return {key: _first(item) for key, item in kept.items()}
    return [_first(item) for item in value] if isinstance(value, (list, tuple)) else value
