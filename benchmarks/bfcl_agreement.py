"""`python -m benchmarks.bfcl_agreement`: the process score and the reference rule beside BFCL's own AST checker.

Every row of every AST category of the installed `bfcl-eval`, its gold as calls and each corruption of
:mod:`benchmarks.corruptions`. The checker is given the calls; ours are given the text with the calls in it, which they
parse and whose schemas they check. Printed: where the three verdicts fall, every class of disagreement with one
example, and items a second, timed in turn.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bfcl import BfclRow, read_category
from benchmarks.bfcl_checker import bfcl_valid
from benchmarks.bfcl_source import as_written
from benchmarks.corruptions import CORRUPTIONS, Call, Case
from rewards import Gold, ToolSet, as_gold, process_score, reference_rule

CATEGORIES = (
    "simple_python",
    "simple_java",
    "simple_javascript",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
)
_PERFECT = 1 - 1e-9
GROUP = 8
SCORERS = ("BFCL checker", "process score", "reference rule")


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


def agreement(items: Iterable[Item], says: str, ours: int) -> tuple[int, int]:
    """Same verdicts and all, where both definitions (the checker's and the one at place `ours`) say `says`."""
    wanted = [i for i in items if CORRUPTIONS[i.corruption].says[0] == CORRUPTIONS[i.corruption].says[ours] == says]
    return sum(item.verdict[0] == item.verdict[ours] for item in wanted), len(wanted)


def disagreements(items: Iterable[Item]) -> dict[tuple[str, str], list[Item]]:
    """Items whose three verdicts differ, by corruption and verdict, the most frequent first."""
    classes: dict[tuple[str, str], list[Item]] = {}
    for item in items:
        if len(set(item.verdict)) > 1:
            classes.setdefault((item.corruption, item.verdict), []).append(item)
    return dict(sorted(classes.items(), key=lambda pair: -len(pair[1])))


def speed(items: Sequence[Item], rounds: int) -> dict[str, float]:
    """Median items a second, the three timed in turn on the same items."""
    from benchmarks.timing import interleave

    def over(method: Callable[[Item], object]) -> Callable[[], object]:
        return lambda: [method(item) for item in items]

    timed = interleave(dict(zip(SCORERS, map(over, (Item.checked, Item.total, Item.ruled)))), rounds, warmup=1)
    return {name: len(items) / timed.time(name).median for name in SCORERS}


def report(golden: Sequence[Item], corrupted: Sequence[Item], rates: dict[str, dict[str, float]]) -> dict[str, Any]:
    """All figures, as JSON."""
    items = [*golden, *corrupted]
    table: dict[str, dict[str, Counter[str]]] = {}
    for item in items:
        table.setdefault(item.corruption, {}).setdefault(item.row.category, Counter())[item.verdict] += 1
    rejected = [item.row.id for item in golden if item.verdict[0] == "F"]
    return {
        "rows": len(golden),
        "items": len(items),
        "gold": {name: sum(i.verdict[place] == "T" for i in golden) for place, name in enumerate(SCORERS)},
        "gold_rejected_by_checker": rejected,
        "agreement": {
            name: {
                side: dict(zip(("same", "of"), agreement(corrupted, says, place)))
                for side, says in (("both define as wrong", "F"), ("both define as right", "T"))
            }
            for place, name in ((1, "process score"), (2, "reference rule"))
        },
        "confusion": table,
        "disagreements": [
            {
                "corruption": corruption,
                "verdict": verdict,
                "defined": verdict == CORRUPTIONS[corruption].says,
                "count": len(found),
                "categories": Counter(item.row.category for item in found),
                "example": {
                    "id": found[0].row.id,
                    "turns": found[0].turns,
                    "ground_truth": found[0].row.ground_truth,
                },
            }
            for (corruption, verdict), found in disagreements(items).items()
        ],
        "items_per_second": rates,
    }


def show(figures: dict[str, Any], categories: Sequence[str]) -> None:
    """Print the tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=200)
    table = Table(title="Verdicts: BFCL checker, process score = 1, reference rule (T accepts); items by category")
    for column in ("corruption", "defined", "n", "found", *categories):
        table.add_column(column.replace("_", " "), overflow="fold")
    for corruption, by_category in figures["confusion"].items():
        found = sum(by_category.values(), Counter())
        cells = [_cell(by_category.get(category, Counter())) for category in categories]
        defined = CORRUPTIONS[corruption].says
        table.add_row(corruption, defined, str(sum(found.values())), _cell(found), *cells)
    console.print(table)
    classes = Table(title="Where the verdicts differ", show_lines=True)
    for column in ("corruption", "verdict", "by definition", "n", "example"):
        classes.add_column(column, overflow="fold")
    for found in figures["disagreements"]:
        example = f"{found['example']['id']}: {found['example']['turns']}"
        defined = "yes" if found["defined"] else "no"
        classes.add_row(found["corruption"], found["verdict"], defined, str(found["count"]), example[:300])
    console.print(classes, markup=False)
    console.print(f"{figures['rows']} rows, {figures['items']} items; gold accepted: {figures['gold']}")
    console.print(f"gold that the checker rejects: {figures['gold_rejected_by_checker']}", markup=False)
    for name, sides in figures["agreement"].items():
        for side, count in sides.items():
            share = count["same"] / count["of"] if count["of"] else 1.0
            console.print(f"{name} and checker, {side}: {count['same']} of {count['of']} agree ({share:.3%})")
    for what, rates in figures["items_per_second"].items():
        console.print(f"items/s, {what}: " + ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items()))


def _cell(found: Counter[str]) -> str:
    return " ".join(f"{verdict} {count}" for verdict, count in found.most_common())


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge, time, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bfcl_agreement", description=__doc__)
    parser.add_argument("--categories", nargs="+", default=list(CATEGORIES), choices=CATEGORIES)
    parser.add_argument("--limit", type=int, help="rows of each category; all without it")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="where to write bfcl_agreement.json")
    chosen = parser.parse_args(arguments)

    golden, corrupted = make_items(chosen.categories, chosen.limit)
    rates = {
        "gold, one answer a row": speed(golden, chosen.rounds),
        # As a trainer scores a group: the row's schemas and gold are still in the processor's cache.
        f"gold, groups of {GROUP}": speed([item for item in golden for _ in range(GROUP)], chosen.rounds // 2 or 1),
        "corruptions": speed(corrupted, chosen.rounds // 2 or 1),
    }
    figures = report(golden, corrupted, rates)
    show(figures, chosen.categories)
    if chosen.out:
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "bfcl_agreement.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
