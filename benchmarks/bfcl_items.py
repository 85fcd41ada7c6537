"""Answers to BFCL's rows, right and corrupted, ready for BFCL's checker and for the scores, with their verdicts."""

import json
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.bfcl import BfclRow, read_category
from benchmarks.bfcl_checker import bfcl_valid, decoded_calls
from benchmarks.bfcl_source import as_written
from benchmarks.corruptions import CORRUPTIONS, Call, Case
from rewards import Gold, ToolSet, as_gold, process_score, reference_rule

_PERFECT = 1 - 1e-9


class Item(NamedTuple):
    """One answer to one row, ready for both sides; `verdict` is (checker, process score of 1, rule) as letters."""

    row: BfclRow
    corruption: str
    turns: list[str]
    calls: list[Call]
    gold: Gold
    tools: ToolSet
    verdict: str = ""

    def checked(self) -> bool:
        """BFCL's verdict."""
        return bfcl_valid(self.row.functions, self.calls, self.row.ground_truth, self.row.category)

    def checked_from_text(self) -> bool:
        """BFCL's verdict, and what its handler pays for the calls."""
        decoded_calls(self.turns)
        return self.checked()

    def total(self) -> float:
        """The process score."""
        return process_score(self.turns, self.gold, self.tools).total

    def ruled(self) -> bool:
        """The reference rule's verdict."""
        return reference_rule(self.turns, self.gold, self.tools)

    def judged(self) -> "Item":
        """With the three verdicts."""
        verdicts = (self.checked(), self.total() >= _PERFECT, self.ruled())
        return self._replace(verdict="".join("T" if verdict else "F" for verdict in verdicts))


def as_text(calls: Sequence[Call], one_tag: bool = False) -> str:
    """One assistant turn in the Hermes format."""
    bodies = [list(calls)] if one_tag else list(calls)
    return "\n".join(f"<tool_call>\n{json.dumps(body)}\n</tool_call>" for body in bodies) or "I cannot call anything."


def make_items(categories: Iterable[str], limit: int | None) -> tuple[list[Item], list[Item]]:
    """Judged items: all rows' gold, and the corruptions of those rows whose gold the checker accepts."""
    golden, corrupted = [], []
    for category in categories:
        for row in read_category(category)[:limit]:
            gold, tools = as_gold(row.gold), ToolSet(row.tools)
            for name, corruption in CORRUPTIONS.items():
                # Seeded by row and corruption, so that a new corruption changes no other.
                case = corruption.make(row, random.Random(f"{row.id}/{name}"))
                if case is None:
                    continue
                item = _item(row, name, case, gold, tools).judged()
                (golden if name == "gold" else corrupted).append(item)
                if name == "gold" and item.verdict[0] == "F":
                    break
    return golden, corrupted


def _item(row: BfclRow, name: str, case: Case, gold: Gold, tools: ToolSet) -> Item:
    turns = [as_text(calls, case.one_tag) for calls in case.turns]
    calls = as_written([call for turn in case.turns for call in turn], row.functions, row.category)
    return Item(row, name, turns, calls, as_gold(case.gold) if case.gold else gold, tools)
