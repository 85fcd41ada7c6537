"""The main job on real input: a pretrained SmolLM2-135M learns to call BFCL's functions. `make demo-real`.

    python -m benchmarks.real --minutes 20 --out out/demo-real

Evaluates the pretrained model on held-out rows (it calls nothing), gives it a short format-weighted SFT on the other
half, then GRPO and SLCA steps from that one checkpoint, and evaluates all four models on the same rows, by
`process_score` and by BFCL's own checker. Every stage has a share of the minutes and asks the clock between batches and
steps; a run that is stopped goes on where it was when the same command is given again.
"""

import argparse
import functools
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.real_job import EVALUATED, Job
from benchmarks.real_ledger import Ledger

SHARES = {
    "prepare": 1.0,
    "pretrained": 2.0,
    "sft": 5.5,
    "after_sft": 1.5,
    "grpo": 4.0,
    "slca": 4.0,
    "after_grpo": 1.0,
    "after_slca": 1.0,
}


def run_stages(job: Job, ledger: Ledger, stages: Sequence[str]) -> None:
    """Run what is not done yet, one progress bar a stage."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description:<12}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[now]}")
    with Progress(*columns) as progress:
        for stage in stages:
            bar = progress.add_task(stage, total=1.0, now="")
            if ledger.result(stage) is None:
                report = functools.partial(_show, progress, bar)
                ledger.close(stage, job.run(stage, ledger.open(stage), report))
            progress.update(bar, completed=1.0, now=f"{ledger.seconds(stage):.0f} s")


def _show(progress: Any, bar: Any, share: float, now: str) -> None:
    progress.update(bar, completed=min(share, 0.99), now=now)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="bound on the whole job (default 20)")
    parser.add_argument("--out", default="out/demo-real", help="state, models and results; a rerun continues there")
    parser.add_argument("--cache", default="out/models", help="where the converted model is kept")
    parser.add_argument("--model", default=None, help="folder of another model with a tool template")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--categories", nargs="+", default=["simple_python", "live_simple", "multiple", "parallel"])
    parser.add_argument("--max-prompt", type=int, default=320, help="longest prompt in tokens, schemas included")
    parser.add_argument("--max-call", type=int, default=96, help="longest gold call in tokens")
    parser.add_argument("--max-steps", type=int, default=200, help="most GRPO steps; SLCA makes as many as GRPO did")
    parser.add_argument("--prompts", type=int, default=2, help="prompts a GRPO or SLCA step (default 2)")
    parser.add_argument("--generations", type=int, default=4, help="rollouts a prompt (default 4)")
    parser.add_argument("--eval-rows", type=int, default=200, help="most held-out rows to answer")
    parser.add_argument("--eval-batch", type=int, default=16)
    parser.add_argument("--fresh", action="store_true", help="forget what --out holds")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, sizes: Any = None) -> dict[str, Any]:
    """Run the job and print its table; the same numbers, and more, are in `<out>/results.json`."""
    began = time.monotonic()
    options = parse(argv)
    from benchmarks.race import quiet
    from benchmarks.real_report import print_report
    from benchmarks.real_training import Sizes

    quiet(options.threads)
    sizes = sizes or Sizes(prompts=options.prompts, generations=options.generations)
    out = Path(options.out)
    if options.fresh:
        shutil.rmtree(out, ignore_errors=True)
    ledger = Ledger(out, options.minutes - (time.monotonic() - began) / 60, SHARES, _settings(options, sizes))
    run_stages(Job(options, sizes, ledger), ledger, list(SHARES))
    results = collect(ledger)
    (out / "results.json").write_text(json.dumps(results, indent=1))
    print_report(results, out / "results.json")
    return results


def _settings(options: argparse.Namespace, sizes: Any) -> dict[str, Any]:
    """What a rerun must share with the run it continues."""
    keys = ("model", "seed", "categories", "max_prompt", "max_call", "max_steps", "eval_rows", "eval_batch")
    return {key: getattr(options, key) for key in keys} | asdict(sizes)


def collect(ledger: Ledger) -> dict[str, Any]:
    """Every number of the job. The models are compared on the rows that all of them answered."""
    from benchmarks.real_eval import sign_test, summarise

    records: Mapping[str, list[dict[str, Any]]] = {name: ledger.result(name)["records"] for name in EVALUATED}
    common = min(map(len, records.values()))
    same = {name: rows[:common] for name, rows in records.items()}
    arms = ("after_grpo", "after_slca")
    return {
        "settings": ledger.data["settings"],
        "prepare": ledger.result("prepare"),
        "training": {name: ledger.result(name) for name in ("sft", "grpo", "slca")},
        "seconds": {name: ledger.seconds(name) for name in SHARES},
        "models": {label: summarise(same[name]) for name, label in EVALUATED.items()},
        "sign_test": {
            key: sign_test(*([row[key] for row in same[arm]] for arm in arms)) for key in ("success", "bfcl")
        },
        "records": {EVALUATED[name]: rows for name, rows in same.items()},
    }


if __name__ == "__main__":
    main()
