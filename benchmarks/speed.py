"""`make bench`: credit and loss beside the estimators of verl, the loss of TRL and the traffic they cannot avoid.

Every comparison first checks that both sides give the same numbers, then times them in turn (see
:mod:`benchmarks.timing`). A peer that is not installed is skipped with a message. The floor of a credit call is one
copy: it reads the segments once and writes the credit once, into a buffer that is already there.
"""

import argparse
import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.sections import write_section
from benchmarks.speed_cases import FLOOR, credit_candidates, loss_candidates
from benchmarks.timing import Rounds, Spread, bandwidth, bytes_for_backward, interleave, machine, versions

TITLE = "Speed"


@dataclass(frozen=True)
class Aim:
    """A ratio that is wanted, at least or at most."""

    name: str
    found: Spread
    bound: float
    at_least: bool

    def row(self) -> str:
        """One row of the table of aims."""
        met = self.found.median >= self.bound if self.at_least else self.found.median <= self.bound
        sign = "≥" if self.at_least else "≤"
        return f"| {self.name} | {sign} {self.bound:g} | {spread(self.found)} | {'met' if met else '**missed**'} |"


def peer(module: str, why: str) -> Any:
    """A neighbour's module, or None with a printed message."""
    try:
        return import_module(module)
    except ImportError as error:
        print(f"{module} is not available ({error}): {why} skipped")
        return None


def gradient(forward: Callable[[], Tensor], logp: Tensor) -> Tensor:
    """One forward and backward pass."""
    logp.grad = None
    forward().backward()
    assert logp.grad is not None
    return logp.grad


def require_agreement(results: dict[str, Tensor], tolerance: float) -> None:
    """Refuse to time functions that do not compute the same thing."""
    for name, result in results.items():
        torch.testing.assert_close(
            result, results["ours"], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def bench_credit(size: tuple[int, int], rounds: int, estimators: Any, aims: list[Aim]) -> str:
    """Tables of the credit calls at one size."""
    parts = []
    calls = ("`group_advantage` + `assign_credit`, one advantage", "the same, a tool and a summary advantage")
    for title, candidates in zip(calls, credit_candidates(*size, estimators), strict=True):
        require_agreement({name: fn() for name, fn in candidates.items() if name != FLOOR}, 1e-4)
        timed = interleave({name: fn for name, fn in candidates.items() if name != "verl, loop"}, rounds)
        at = f"{title}, {size[0]}×{size[1]}"
        aims.append(Aim(f"{at}: ours / floor", timed.ratio("ours", FLOOR), 3, at_least=False))
        parts.append(f"### {title}, {size[0]}×{size[1]}\n\n{table(timed)}")
        if estimators is not None:
            aims.append(Aim(f"{at}: vectorised / ours", timed.ratio("verl, vectorised", "ours"), 3, at_least=True))
            # The loop takes a hundred times longer: rounds of its own, few of them.
            slow = interleave({name: candidates[name] for name in ("ours", "verl, loop")}, min(rounds, 5), warmup=1)
            aims.append(Aim(f"{at}: loop / ours", slow.ratio("verl, loop", "ours"), 10, at_least=True))
            parts.append(table(slow))
            most = timed.ratio("verl, vectorised", FLOOR)
            parts.append(
                f"The vectorised estimator takes {spread(most)} floors; no call at the floor beats it by more."
            )
    return "\n\n".join(parts)


def bench_loss(size: tuple[int, int], rounds: int, trainer: Any, aims: list[Aim]) -> str:
    """Table of the loss at one size, with the bytes kept for backward."""
    forwards, given = loss_candidates(*size, trainer)
    require_agreement({name: forward().detach() for name, forward in forwards.items()}, 1e-6)
    require_agreement({name: gradient(forward, given[0]) for name, forward in forwards.items()}, 1e-6)
    timed = interleave({name: lambda f=forward: gradient(f, given[0]) for name, forward in forwards.items()}, rounds)
    kept = {name: bytes_for_backward(forward, given) for name, forward in forwards.items()}
    at = f"`policy_loss` forward + backward, {size[0]}×{size[1]}"
    for name in forwards:
        if name != "ours":
            share = kept["ours"] / kept[name]
            aims.append(Aim(f"{at}: {name} / ours", timed.ratio(name, "ours"), 1.5, at_least=True))
            aims.append(Aim(f"{at}: bytes, ours / {name}", Spread(share, share, share), 0.5, at_least=False))
    return f"### {at}\n\n{table(timed, kept)}"


def spread(value: Spread) -> str:
    """Median with the smallest and largest in brackets."""
    return f"{value.median:.2f} ({value.low:.2f} to {value.high:.2f})"


def table(timed: Rounds, kept: dict[str, int] | None = None) -> str:
    """Times and ratios to ours as a Markdown table."""
    names = ["", "ms", "time / ours", *(["MB for backward"] if kept else [])]
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    for name in timed.seconds:
        time = timed.time(name)
        milliseconds = spread(time.scaled(1e3))
        bytes_cell = f" {kept[name] / 1e6:.2f} |" if kept else ""
        lines.append(f"| {name} | {milliseconds} | {spread(timed.ratio(name, 'ours'))} |{bytes_cell}")
    return "\n".join(lines)


def pair(text: str) -> tuple[int, int]:
    """`2048x1024` as rows and tokens."""
    rows, tokens = text.lower().split("x")
    return int(rows), int(tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("--sizes", type=pair, nargs="+", default=[(2048, 1024), (8192, 256)], help="rows x tokens")
    parser.add_argument("--loss-size", type=pair, default=(64, 8192))
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=1, help="1 times processor seconds, more the wall clock")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS.md"))
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)

    estimators = peer("verl.trainer.ppo.core_algos", "its rows are")
    trainer = peer("trl.trainer.grpo_trainer", "its own `_compute_loss` is")
    aims: list[Aim] = []
    before = bandwidth()
    parts = [bench_credit(size, chosen.rounds, estimators, aims) for size in chosen.sizes]
    parts.append(bench_loss(chosen.loss_size, chosen.rounds, trainer, aims))
    report = _report(parts, aims, before, bandwidth(), chosen.rounds)
    write_section(chosen.output, TITLE, report)
    print(f"# {TITLE}\n\n{report}")
    return 0


def _report(parts: list[str], aims: list[Aim], before: Spread, after: Spread, rounds: int) -> str:
    copies = " and ".join(
        f"{value.median / 1e9:.1f} ({value.low / 1e9:.1f} to {value.high / 1e9:.1f})" for value in (before, after)
    )
    head = f"""Written by `make bench` on {datetime.date.today().isoformat()}. Every cell is a median with the
smallest and largest in brackets, over {rounds} rounds in which the candidates take turns (the loop: at most 5);
ratios are taken within a round. Quote ratios, not times.

* Machine: {machine()}
* Versions: {versions(("torch", "verl", "trl", "transformers"))}
* A plain copy moves {copies} GB/s, read and written, before and after the tables.
* Floor: `buffer.copy_(segments)`, int64 read and float32 written once into memory that is already there.
* The results of all candidates are compared before they are timed. verl scores tokens in two calls where there are two
  advantages; its group ids are integers, its cheapest kind. Whole rules find out which rows have a segment as well.
  TRL's `_compute_loss` is TRL's own, on a stand-in trainer, and logs its metrics; ours returns its statistics.
"""
    wanted = "\n".join(["| ratio | aim | found | |", "| --- | --- | --- | --- |", *(aim.row() for aim in aims)])
    return f"{head}\n## Aims\n\n{wanted}\n\n## Tables\n\n" + "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
