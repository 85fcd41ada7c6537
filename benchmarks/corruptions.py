"""Gold answers of BFCL rows, and systematic corruptions of them, with what each definition of a right answer says.

A verdict is written as three letters: BFCL's checker, a process score of 1, the reference rule; `T` accepts, `F`
rejects. Corruptions whose letters differ are those on which the definitions differ; docs/rewards.md says why.
"""

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks.bfcl import BfclRow

Call = dict[str, Any]
NOWHERE = "zq unrelated"
# Texts that a schema may list one by one, any other, or both.
ENUM, FREE, ANY = (True,), (False,), (True, False)


class Case(NamedTuple):
    """What was called, by turn; `gold` where it is not the row's own; `one_tag`: a turn's calls listed in one tag."""

    turns: list[list[Call]]
    gold: list[list[Call]] | None = None
    one_tag: bool = False


Make = Callable[[BfclRow, random.Random], Case | None]


class Corruption(NamedTuple):
    """One way to change an answer: what the three definitions say of it, and the change (None: nothing to change)."""

    says: str
    make: Make


def _sites(calls: list[Call], row: BfclRow, fits: Callable[[Any], bool]) -> Iterator[tuple[int, str, list[Any]]]:
    """Arguments whose value fits, with their accepted values."""
    for index, call in enumerate(calls):
        for key, value in call["arguments"].items():
            if fits(value):
                yield index, key, row.gold[0][index]["arguments"][key]["$accepted"]


def _value(fits: Callable[[Any], bool], change: Callable[[Any], Any], listed: tuple[bool, ...] = ANY) -> Make:
    """Change one argument that may not be left out, to a value that is not among the accepted ones."""

    def make(row: BfclRow, rng: random.Random) -> Case | None:
        calls = copy.deepcopy(row.answer)
        found = []
        for index, key, accepted in _sites(calls, row, fits):
            new = change(calls[index]["arguments"][key])
            # As text: [1] and [1.0] are equal to Python.
            if json.dumps(new) not in map(json.dumps, accepted) and _has_enum(row, calls[index]["name"], key) in listed:
                found.append((index, key, new))
        if found:
            index, key, new = rng.choice(found)
            calls[index]["arguments"][key] = new
        return Case([calls]) if found else None

    return make


def _has_enum(row: BfclRow, name: str, key: str) -> bool:
    """Whether the schema of an argument lists its values."""
    functions = (tool["function"] for tool in row.tools)
    parameters = next(function["parameters"] for function in functions if function["name"] == name)
    return '"enum"' in json.dumps(parameters.get("properties", {}).get(key, {}))


def _arguments(change: Callable[[Call, str], None]) -> Make:
    """Change the arguments of one call at one of its keys."""

    def make(row: BfclRow, rng: random.Random) -> Case | None:
        calls = copy.deepcopy(row.answer)
        sites = list(_sites(calls, row, lambda value: True))
        if not sites:
            return None
        index, key, _ = rng.choice(sites)
        change(calls[index]["arguments"], key)
        return Case([calls])

    return make


def _renamed(arguments: Call, key: str) -> None:
    arguments[f"{key}_zq"] = arguments.pop(key)


def _name(choose: Callable[[BfclRow, str], str | None]) -> Make:
    """Give one call another name."""

    def make(row: BfclRow, rng: random.Random) -> Case | None:
        calls = copy.deepcopy(row.answer)
        call = rng.choice(calls)
        name = choose(row, call["name"])
        call["name"] = name
        return None if name is None else Case([calls])

    return make


def _other_tool(row: BfclRow, name: str) -> str | None:
    return next((function["name"] for function in row.functions if function["name"] != name), None)


def _swapped_case(row: BfclRow, name: str) -> str | None:
    return name.swapcase() if name.swapcase() != name else None


def _filled(pick: int, optional: bool) -> Make:
    """Every argument with its first or last accepted value, those that may be left out given or not."""

    def value(gold: Any) -> Any:
        if isinstance(gold, dict) and "$accepted" in gold:
            return value(gold["$accepted"][pick])
        if isinstance(gold, dict):
            return {key: value(item) for key, item in gold.items() if _given(item)}
        return [value(item) for item in gold] if isinstance(gold, list) else gold

    def make(row: BfclRow, rng: random.Random) -> Case | None:
        calls = [
            {
                "name": call["name"],
                "arguments": {
                    key: value(gold)
                    for key, gold in call["arguments"].items()
                    if _given(gold) and (optional or not gold.get("$optional"))
                },
            }
            for call in row.gold[0]
        ]
        return Case([calls]) if calls != row.answer else None

    return make


def _given(gold: Any) -> bool:
    return not (isinstance(gold, dict) and gold.get("$accepted") == [])


def _wrong_optional(row: BfclRow, rng: random.Random) -> Case | None:
    calls = copy.deepcopy(row.answer)
    for call, gold in zip(calls, row.gold[0]):
        for key, accepted in gold["arguments"].items():
            texts = [value for value in accepted["$accepted"] if isinstance(value, str)]
            if accepted.get("$optional") and texts and key not in call["arguments"]:
                call["arguments"][key] = NOWHERE
                return Case([calls])
    return None


def _calls(least: int, change: Callable[[list[Call], BfclRow], Case | None]) -> Make:
    """Change the list of calls, where there are at least so many."""
    return lambda row, rng: change(copy.deepcopy(row.answer), row) if len(row.answer) >= least else None


def _extra(calls: list[Call], row: BfclRow) -> Case | None:
    name = _other_tool(row, calls[0]["name"])
    return Case([[*calls, {"name": name, "arguments": {}}]]) if name else None


def _exchanged(calls: list[Call], row: BfclRow) -> Case | None:
    """Two calls of one tool exchange one value that only one of them may have."""
    gold = row.gold[0]
    for i, one in enumerate(calls):
        for j, other in enumerate(calls[:i]):
            keys = (
                [key for key in one["arguments"] if key in other["arguments"]] if one["name"] == other["name"] else []
            )
            wrong = [k for k in keys if one["arguments"][k] not in gold[j]["arguments"][k]["$accepted"]]
            # With one key exchanged the calls would only have changed places.
            if len(keys) > 1 and len(wrong) > 1:
                key, a, b = wrong[0], one["arguments"], other["arguments"]
                a[key], b[key] = b[key], a[key]
                return Case([calls])
    return None


def _reordered(calls: list[Call], row: BfclRow) -> Case | None:
    return Case([calls[::-1]]) if calls[::-1] != calls else None


def _spread(row: BfclRow, rng: random.Random) -> Case | None:
    """Gold wants one call a step, and all were made in the first."""
    return Case([row.answer], gold=[[call] for call in row.gold[0]]) if len(row.answer) > 1 else None


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in kinds


def _other_type(value: Any) -> Any:
    return {"value": value} if isinstance(value, (str, list)) else [str(value)]


def _nested_wrong(value: dict[str, Any]) -> dict[str, Any]:
    key = next(key for key, item in value.items() if isinstance(item, str))
    return {**value, key: NOWHERE}


def _floats(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, float) and item.is_integer() for item in value)


CORRUPTIONS: dict[str, Corruption] = {
    "gold": Corruption("TTT", lambda row, rng: Case([row.answer])),
    "optional arguments given": Corruption("TTT", _filled(0, optional=True)),
    "last accepted values": Corruption("TTT", _filled(-1, optional=False)),
    "reordered calls": Corruption("TTT", _calls(2, _reordered)),
    "calls listed in one tag": Corruption("TTT", _calls(2, lambda calls, row: Case([calls], one_tag=True))),
    "changed case": Corruption("TTT", _value(_is(str), str.swapcase, FREE)),
    "space around text": Corruption("TTT", _value(_is(str), lambda value: f" {value} ", FREE)),
    "integer for float": Corruption("TTT", _value(lambda v: isinstance(v, float) and v.is_integer(), int)),
    "dropped argument": Corruption("FFF", _arguments(lambda arguments, key: arguments.pop(key))),
    "renamed argument": Corruption("FFF", _arguments(_renamed)),
    "null argument": Corruption("FFF", _value(lambda v: v is not None, lambda v: None)),
    "wrong text": Corruption("FFF", _value(_is(str), lambda v: NOWHERE)),
    "wrong number": Corruption("FFF", _value(_is(int, float), lambda v: v + 1009)),
    "wrong boolean": Corruption("FFF", _value(_is(bool), lambda v: not v)),
    "wrong value in an object": Corruption(
        "FFF", _value(lambda v: isinstance(v, dict) and any(map(_is(str), v.values())), _nested_wrong)
    ),
    "wrong type": Corruption("FFF", _value(lambda v: v is not None, _other_type)),
    "number as text": Corruption("FFF", _value(_is(int, float), str)),
    "boolean as text": Corruption("FFF", _value(_is(bool), lambda v: str(v).lower())),
    "boolean as number": Corruption("FFF", _value(_is(bool), int)),
    "reversed list": Corruption("FFF", _value(_is(list), lambda v: v[::-1])),
    "shortened list": Corruption("FFF", _value(lambda v: isinstance(v, list) and bool(v), lambda v: v[:-1])),
    "unknown tool": Corruption("FFF", _name(lambda row, name: f"{name}_zq")),
    "other tool of the row": Corruption("FFF", _name(_other_tool)),
    "changed case of the name": Corruption("FFF", _name(_swapped_case)),
    "extra call": Corruption("FFF", _calls(1, _extra)),
    "doubled call": Corruption("FFF", _calls(1, lambda calls, row: Case([[*calls, calls[0]]]))),
    "dropped call": Corruption("FFF", _calls(2, lambda calls, row: Case([calls[1:]]))),
    "no call": Corruption("FFF", lambda row, rng: Case([[]])),
    "exchanged values": Corruption("FFF", _calls(2, _exchanged)),
    "split parallel step": Corruption("TFF", _calls(2, lambda calls, row: Case([calls[:1], calls[1:]]))),
    "merged steps": Corruption("TFF", _spread),
    "changed case, enum": Corruption("TFF", _value(_is(str), str.swapcase, ENUM)),
    "space around text, enum": Corruption("TFF", _value(_is(str), lambda value: f" {value} ", ENUM)),
    "punctuation left out": Corruption("TFF", _value(_is(str), lambda v: re.sub("[ ,./_*^-]", "", v))),
    "float for integer": Corruption("FTT", _value(_is(int), float)),
    "integers in a list of floats": Corruption("FTT", _value(_floats, lambda v: [int(i) for i in v])),
    "extra argument": Corruption("FFT", _arguments(lambda arguments, key: arguments.update(zq_extra=1))),
    "wrong optional argument": Corruption("FFT", _wrong_optional),
}
