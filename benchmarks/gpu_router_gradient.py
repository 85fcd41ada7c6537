"""The router gradient's kernels on a GPU: are they right, and how fast are they? One command, under five minutes.

    python -m benchmarks.gpu_router_gradient
    PYTHONPATH=src python benchmarks/gpu_router_gradient.py

First the kernels are compared with the PyTorch reference in float64 at many shapes. Then they are timed beside eager
PyTorch, torch.compile and a copy of the bytes that have to move, at the sizes of real routers, where they must agree
again. What fails is named in the report, does not keep the rest from it, and makes the status 1. Writes a CSV, a PNG
and a Markdown report. Needs torch, triton, einops and jaxtyping;
matplotlib draws a better picture. ``--device cpu`` runs all of it on tiny sizes under Triton's interpreter: that
shows that the script works, and its times mean nothing.
"""

import argparse
import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

if __package__ in (None, ""):  # run as a file: its own folder is on the path, and the one above it is wanted
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.gpu_again import beyond_int32, cuda_graph, replayed
from benchmarks.gpu_checks import Check, Outcome, checks, run_check
from benchmarks.gpu_figure import draw, write_csv
from benchmarks.gpu_paths import configuration, eager, kernel, kernel_into
from benchmarks.gpu_prepare import jobs, prepare
from benchmarks.gpu_race import Race
from benchmarks.gpu_report import check_table, report
from benchmarks.gpu_timing import Budget, told
from benchmarks.sections import write_section

TITLE = "Router-gradient kernel: on a GPU"
# The ends first, so that a run that is short of time knows them.
TIMED = {"full": (524288, 8192, 131072, 32768, 2048), "quick": (65536, 8192), "cpu": (24, 8)}
# The autotuner keeps for all small sizes what it chose at the first of them, and one token would tell it nothing.
CHECKED = {"full": (4096, 1, 1000, 65537, 524288), "quick": (1000, 65537), "cpu": (1, 37)}
FAR_ROWS_NEED = 32 << 30  # bytes
SHARE_FOR_COMPILING, SHARE_FOR_CHECKS = 0.2, 0.5  # of the time, from the beginning


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_router_gradient", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller sizes")
    parser.add_argument("--seconds", type=float, default=270, help="time that the run may take")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--output", type=Path, default=Path("out/gpu_router_gradient"))
    parser.add_argument("--results", type=Path, help="also put the report into this file, as a section of its own")
    chosen = parser.parse_args(arguments)
    budget = Budget(chosen.seconds)
    os.environ["MOE_ROUTING_KERNEL"] = "torch"  # the kernel is called by its own name, all else is to be PyTorch
    problem = _cannot_run(chosen.device)
    if problem:
        print(problem)
        return 2
    scale = "cpu" if chosen.device == "cpu" else "quick" if chosen.quick else "full"

    if chosen.device == "cuda":
        print(_prepared(budget), flush=True)
    outcomes = list(_outcomes(chosen.device, scale, budget))
    table = check_table(outcomes)
    wrong = sum(bool(outcome.problem) for outcome in outcomes)
    print(f"{table}\n\n{len(outcomes)} checks, {wrong} failed, {budget.spent():.0f} s\n", flush=True)

    race = Race(chosen.device, budget, with_compile=not chosen.no_compile)
    race.run(TIMED[scale])
    chosen.output.mkdir(parents=True, exist_ok=True)
    write_csv(chosen.output / "router_gradient.csv", race.timings)
    title = f"Router gradient, {_device_name(chosen.device)}"
    drawn = draw(chosen.output / "router_gradient.png", race.timings, title) if race.timings else "missing: no times"
    text = report(_head(chosen.device, len(outcomes), wrong, budget), race, f"The picture is {drawn}", table)
    for path in filter(None, (chosen.output / "router_gradient.md", chosen.results)):
        write_section(path, TITLE, text)
    print(f"{text}\nwritten to {chosen.output}")
    return int(wrong > 0 or bool(race.problems))


def _cannot_run(device: str) -> str:
    """Why nothing can be run here, or nothing."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which has not happened yet
    if find_spec("triton") is None:
        return "triton is not installed: there is no kernel to run"
    if device == "cuda" and not torch.cuda.is_available():
        return "no GPU is available; --device cpu tries the script under Triton's interpreter"
    return ""


def _prepared(budget: Budget) -> str:
    try:
        major, minor = torch.cuda.get_device_capability()
        return prepare(10 * major + minor, jobs(), seconds=SHARE_FOR_COMPILING * budget.seconds)
    except Exception as error:  # nothing but time is lost: a launch compiles what is missing
        return f"nothing was compiled ahead of time: {told(error)}"


def _outcomes(device: str, scale: str, budget: Budget) -> Iterator[Outcome]:
    """Outcome of every check for which there is time, with memory given back between them."""
    limit = Budget(SHARE_FOR_CHECKS * budget.seconds, budget.began, budget.left_out)
    longest = 0.0
    free = torch.cuda.mem_get_info()[0] if scale == "full" else 0
    for check in checks(device, CHECKED[scale], full=device == "cuda"):
        if limit.allows(f"check: {check.name}", longest):
            began = time.monotonic()
            yield _outcome(check.name, lambda check=check: _held(check))
            longest = max(longest, time.monotonic() - began)
    if device == "cuda" and limit.allows("check: captured in a CUDA graph", longest):
        yield _outcome("captured in a CUDA graph", lambda: replayed(kernel, cuda_graph, device))
    if 0 < free < FAR_ROWS_NEED:
        budget.left_out.append(f"check: beyond 2³¹ elements needs 32 GiB, {free / 2**30:.0f} are free")
    elif scale == "full" and limit.allows("check: beyond 2³¹ elements", 5 + longest):
        yield _outcome("beyond 2³¹ elements", lambda: beyond_int32(kernel, device))


def _outcome(name: str, check: Callable[[], Outcome]) -> Outcome:
    try:
        return check()
    except Exception as error:  # a launch that fails is an outcome, and the other checks tell where it begins
        return Outcome(name, "", float("nan"), 0.0, told(error))


def _held(check: Check) -> Outcome:
    with configuration(check.number):
        return run_check(check, kernel_into, eager)


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "the processor, under Triton's interpreter"


def _head(device: str, count: int, wrong: int, budget: Budget) -> str:
    from benchmarks.timing import versions

    today = datetime.date.today().isoformat()
    verdict = f"**{wrong} failed**" if wrong else "none failed"
    lines = [
        f"Written by `python -m benchmarks.gpu_router_gradient` on {today}, in {budget.spent():.0f} s.",
        f"\n* Device: {_device_name(device)}; {versions(('torch', 'triton'))}",
        f"* {count} checks against float64 before anything was timed, {verdict}.",
    ]
    if device == "cpu":
        lines.append("* **No GPU: the times below show that the script runs, and nothing else.**")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
