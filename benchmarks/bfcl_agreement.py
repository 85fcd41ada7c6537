"""`python -m benchmarks.bfcl_agreement`: the process score and the reference rule beside BFCL's own AST checker.

Every row of every AST category of the installed `bfcl-eval`, its gold as calls and each corruption of
:mod:`benchmarks.corruptions`. The checker is given the calls; ours are given the text with the calls in it, which they
parse and whose schemas they check. Printed: where the three verdicts fall, every class of disagreement with one
example, and items a second, timed in turn. Beside the three stand the checker with the decoding that it leaves to
BFCL's model handlers, and `json.loads` of the calls' JSON alone, the floor of whoever starts from text with the
standard library. Gold and schemas are read once, before the clock starts, as a trainer reads them once a row; what that
costs is printed too.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bfcl_items import Item, make_items
from benchmarks.bfcl_speed import GROUP, SCORERS, preparation, rollouts, speed
from benchmarks.corruptions import CORRUPTIONS

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


def report(
    golden: Sequence[Item], corrupted: Sequence[Item], rates: dict[str, dict[str, float]], preparing: float
) -> dict[str, Any]:
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
        "microseconds_to_prepare_a_row": preparing,
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
    console.print(f"reading a row's gold and schemas, once: {figures['microseconds_to_prepare_a_row']:.0f} us")


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
        f"gold, groups of {GROUP}": speed(rollouts(golden), chosen.rounds // 2 or 1),
        "corruptions": speed(corrupted, chosen.rounds // 2 or 1),
    }
    figures = report(golden, corrupted, rates, preparation(golden, chosen.rounds // 2 or 1))
    show(figures, chosen.categories)
    if chosen.out:
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "bfcl_agreement.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
