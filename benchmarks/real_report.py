"""The closing table of the job on real input, and what it does and does not show."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHARES = {"called": "calls a tool", "success": "Success@0.9", "bfcl": "BFCL checker"}


def print_report(results: Mapping[str, Any], path: Path) -> None:
    """Table, one answer of each model to the same question, and the closing sentences."""
    from rich.console import Console
    from rich.table import Table

    # A log file has no width of its own, and a table cut to 80 columns cannot be read.
    console = Console() if Console().is_terminal else Console(width=130)
    table = Table(title="Tool use on held-out BFCL rows (95% intervals in brackets)")
    for name in ("model", "rows", *SHARES.values(), "process score", "summary", "redundant calls"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for label, row in results["models"].items():
        shares = [interval(row[key], percent=True) for key in SHARES]
        rest = [interval(row["process"]), f"{row['summary']['mean']:.2f}", f"{row['redundant']['mean']:.2f}"]
        table.add_row(label, str(row["rows"]), *shares, *rest)
    console.print(table)
    for label, records in results["records"].items():
        for record in records[:1]:
            said = " ⏎ ".join(f"{m['role']}: {m['content']}" for m in record["messages"])
            console.print(f"{label}, row {record['id']}: {textwrap.shorten(said, 300)}", markup=False, highlight=False)
    for line in closing(results):
        console.print(line, markup=False, highlight=False)
    console.print(f"Every number and every answer: {path}", markup=False, highlight=False)


def interval(value: Mapping[str, float], *, percent: bool = False) -> str:
    """ "0.42 [0.31, 0.53]", or the same in percent."""
    if percent:
        return f"{100 * value['mean']:.0f}% [{100 * value['low']:.0f}, {100 * value['high']:.0f}]"
    return f"{value['mean']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"


def closing(results: Mapping[str, Any]) -> list[str]:
    """What was done, and what it shows: computed from the numbers, whichever way they fell."""
    prepare, training, seconds = results["prepare"], results["training"], results["seconds"]
    grpo, slca = training["grpo"], training["slca"]
    rows = next(iter(results["models"].values()))["rows"]
    lines = [
        f"{prepare['train']} train and {prepare['held_out']} held-out rows fit the length limits; all models answered "
        f"the same {rows} held-out rows, greedily. SFT: {training['sft']['steps']} steps, {training['sft']['rows']} "
        f"rows, {seconds['sft']:.0f} s. GRPO: {grpo['steps']} steps, {grpo['rollouts']} rollouts, "
        f"{seconds['grpo']:.0f} s. SLCA: {slca['steps']} steps, {slca['rollouts']} rollouts, {seconds['slca']:.0f} s.",
    ]
    if rows == 0:
        return [*lines, "Not one batch of held-out rows fitted the time: give it more --minutes."]
    test = results["sign_test"]["bfcl"]
    half = max(row["bfcl"]["high"] - row["bfcl"]["low"] for row in results["models"].values()) / 2
    before, after = (list(results["models"].values())[at]["called"]["mean"] for at in (0, 1))
    lines.append(
        f"What this shows: calls on {100 * before:.0f}% of the rows before SFT and {100 * after:.0f}% after it, and "
        f"both rules trained through TRL on real rows. What it does not show: which rule is better. By BFCL's checker "
        f"GRPO's model alone is right on {test['only_first']:.0f} rows and SLCA's alone on {test['only_second']:.0f} "
        f"(exact sign test p = {test['p']:.2f}); {rows} rows leave up to ±{100 * half:.0f} points around a share, and "
        f"{min(grpo['steps'], slca['steps'])} step(s) with one seed are far too few to separate two rules."
    )
    return lines
