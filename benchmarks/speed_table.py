"""The table of `make bench`: every public primitive beside a naive twin, its peers and the traffic it cannot avoid.

Every row first checks that all sides give the same values, then times them in turn within rounds (see
:mod:`benchmarks.timing`). A peer that is not installed is left out. The section replaces the one of its name.
"""

import argparse
import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.sections import write_section
from benchmarks.speed_table_case import Case, exponent, require_same
from benchmarks.speed_table_control import CASES as CONTROL
from benchmarks.speed_table_credit import CASES as CREDIT
from benchmarks.speed_table_exempt import EXEMPT
from benchmarks.speed_table_losses import CASES as LOSSES
from benchmarks.speed_table_replay import CASES as REPLAY
from benchmarks.speed_table_rewards import CASES as REWARDS
from benchmarks.speed_table_routing import CASES as ROUTING
from benchmarks.timing import Spread, interleave, machine, versions

TITLE = "Every primitive"
CASES: tuple[Case, ...] = (*CREDIT, *LOSSES, *ROUTING, *REPLAY, *CONTROL, *REWARDS)
FLOOR, NAIVE = "floor", "naive"
ENOUGH = 2.0
LINEAR = 1.25  # growth up to here is that of caches
EVEN = 0.95  # a twin that takes this share of the time is no faster than rounds differ


@dataclass(frozen=True)
class Row:
    """What was found for one primitive."""

    case: Case
    size: int
    time: Spread
    floors: Spread | None
    naive: Spread
    naive_size: int
    peers: dict[str, Spread]
    growth: float

    def cells(self) -> list[str]:
        """One row of the table."""
        at = f" at {self.naive_size:,}" if self.naive_size != self.size else ""
        peers = "; ".join(f"{name} {ratio(found)}" for name, found in self.peers.items())
        far = self.floors is not None and self.floors.median > ENOUGH
        slow = far or self.growth > LINEAR or self.naive.median < EVEN
        return [
            self.case.name,
            f"{self.size:,} {self.case.unit}",
            f"{self.time.median * 1e3:.2f}",
            "" if self.floors is None else ratio(self.floors),
            f"{ratio(self.naive)}, {self.case.naive}{at}",
            peers,
            f"{self.growth:.2f}",
            (self.case.note or "**not explained**") if slow else "",
        ]


def copy_of(traffic: int) -> Callable[[], object]:
    """A copy between two buffers that reads and writes ``traffic`` bytes together."""
    source = torch.ones(max(traffic // 2, 1), dtype=torch.uint8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def measure(case: Case, rounds: int, scale: float = 1.0) -> Row:
    """Compare, then time: ours at four sizes, the floor, peers and a fast twin in the same rounds."""
    sizes = case.sizes(scale)
    made = [case.make(size) for size in sizes]
    whole, largest = made[-1], sizes[-1]
    apart = case.naive_at is not None and case.naive_at < largest
    small_size = min(case.naive_at or largest, largest)
    small = case.make(small_size) if apart else whole
    require_same(case, small)
    candidates = {str(size): each.ours for size, each in zip(sizes, made, strict=True)} | dict(whole.peers)
    if whole.traffic:
        candidates[FLOOR] = copy_of(whole.traffic)
    if not apart:
        candidates[NAIVE] = whole.naive
    timed = interleave(candidates, rounds, warmup=1)
    loop = interleave({"ours": small.ours, NAIVE: small.naive}, min(rounds, 3), warmup=0) if apart else None
    return Row(
        case=case,
        size=largest,
        time=timed.time(str(largest)),
        floors=timed.ratio(str(largest), FLOOR) if whole.traffic else None,
        naive=loop.ratio(NAIVE, "ours") if loop else timed.ratio(NAIVE, str(largest)),
        naive_size=small_size,
        peers={name: timed.ratio(name, str(largest)) for name in whole.peers},
        growth=exponent(sizes, [timed.time(str(size)).median for size in sizes]),
    )


def ratio(value: Spread) -> str:
    """Three figures of a median, with the smallest and largest in brackets."""
    return f"{value.median:.3g} ({value.low:.3g} to {value.high:.3g})"


def render(rows: Sequence[Row], rounds: int) -> str:
    """The section's text."""
    measured = [row for row in rows if row.floors is not None]
    near = sum(row.floors is not None and row.floors.median <= ENOUGH for row in measured)
    head = ["primitive", "size", "ms", "floors", "naive / ours", "peer / ours", "growth", "what stands in the way"]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *(row.cells() for row in rows))]
    left_out = "\n".join(f"* {', '.join(f'`{name}`' for name in names)}: {why}" for why, names in _reasons().items())
    today = datetime.date.today().isoformat()
    return f"""Written by `python -m benchmarks.speed_table` on {today}. Medians over {rounds}
rounds in which the candidates take turns (a twin that runs at a smaller size: 3), the smallest and largest ratio in
brackets.

* Machine: {machine()}
* Versions: {versions(("torch", "verl", "trl", "transformers", "bfcl-eval"))}
* Floors: time over that of a copy, between two buffers that are there, of as many bytes as the primitive must read
  and write once. {near} of {len(measured)} are within {ENOUGH:g}; the others, growth above {LINEAR:g}
  and rows slower than their twin say what stands in the way.
* Naive: a plain loop, or the composition of PyTorch calls that a user would write. It gives the same values.
* Growth: exponent of the time over a decade of sizes, fitted on logarithms: 1 is linear.
* Losses are timed forward and backward.

{chr(10).join(lines)}

Not in the table:

{left_out}
"""


def _reasons() -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for name, why in EXEMPT.items():
        reasons.setdefault(why, []).append(name)
    return reasons


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the section."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed_table", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on every largest size")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--threads", type=int, default=1, help="1 times processor seconds, more the wall clock")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS.md"))
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    rows = []
    for case in CASES:
        if chosen.only in case.name:
            rows.append(measure(case, chosen.rounds, chosen.scale))
            print(" | ".join(rows[-1].cells()), flush=True)
    if not chosen.only:
        write_section(chosen.output, TITLE, render(rows, chosen.rounds))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
