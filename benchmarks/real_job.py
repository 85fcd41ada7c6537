"""The stages of the job on real input; each returns what the ledger keeps of it."""

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.real_ledger import Clock, Ledger

EVALUATED = {
    "pretrained": "pretrained",
    "after_sft": "+ format-weighted SFT",
    "after_grpo": "+ SFT + GRPO",
    "after_slca": "+ SFT + SLCA",
}
# What GRPO leaves of its time, so that SLCA can make as many steps even if each takes a little longer.
HEADROOM = 0.92

Report = Callable[[float, str], None]


class Job:
    """The stages; each returns what the ledger keeps."""

    def __init__(self, options: argparse.Namespace, sizes: Any, ledger: Ledger) -> None:
        self.options, self.sizes, self.ledger = options, sizes, ledger
        self._rows: tuple[list[Any], list[Any]] | None = None

    def run(self, stage: str, clock: Clock, report: Report) -> dict[str, Any]:
        """Do one stage."""
        if stage in EVALUATED:
            return self._evaluate(stage, clock, report)
        return self._prepare(report) if stage == "prepare" else self._train(stage, clock, report)

    def folder(self, stage: str) -> Path:
        """Where the model of a training stage lies when it is done; for "prepare", the pretrained one."""
        if stage != "prepare":
            return Path(self.options.out) / stage / "final"
        from benchmarks.smollm import converted_smollm

        return Path(self.options.model) if self.options.model else converted_smollm(Path(self.options.cache))

    def rows(self, tokenizer: Any) -> tuple[list[Any], list[Any]]:
        """Train and held-out rows within the length limits, in an order drawn by the seed."""
        if self._rows is None:
            from benchmarks.bfcl import fits, load_rows

            rows = [
                row
                for row in load_rows(self.options.categories)
                if fits(row, tokenizer, self.options.max_prompt, self.options.max_call)
            ]
            random.Random(self.options.seed).shuffle(rows)
            self._rows = [r for r in rows if not r.held_out], [r for r in rows if r.held_out]
        return self._rows

    def _prepare(self, report: Report) -> dict[str, Any]:
        from benchmarks.smollm import bf16_is_faster, load_model

        report(0.1, "converting the model")
        folder = self.folder("prepare")
        report(0.7, "reading BFCL")
        model, tokenizer = load_model(folder)
        train, held_out = self.rows(tokenizer)
        counts = {name: sum(row.category == name for row in train + held_out) for name in self.options.categories}
        return {
            "parameters": model.num_parameters(),
            "train": len(train),
            "held_out": len(held_out),
            "categories": counts,
            "bf16": bf16_is_faster(),
        }

    def _model(self, stage: str) -> tuple[Any, Any]:
        from benchmarks.smollm import load_model

        return load_model(self.folder(stage))

    def _train(self, stage: str, clock: Clock, report: Report) -> dict[str, Any]:
        from benchmarks.real_training import Stage, reinforce, supervise
        from credit import GRPO, SLCA

        model, tokenizer = self._model("prepare" if stage == "sft" else "sft")
        train, _ = self.rows(tokenizer)
        folder, seed = Path(self.options.out) / stage, self.options.seed
        place = Stage(stage, self.ledger, clock, report, folder, seed, self._bf16())
        if stage == "sft":
            return supervise(place, model, tokenizer, train, self.sizes)
        if stage == "grpo":
            clock.seconds *= HEADROOM
            return reinforce(place, model, tokenizer, train, GRPO(), self.sizes, self.options.max_steps)
        done = self.ledger.result("grpo")
        assert done is not None  # stages run in order
        return reinforce(place, model, tokenizer, train, SLCA(), self.sizes, max(1, done["steps"]))

    def _evaluate(self, stage: str, clock: Clock, report: Report) -> dict[str, Any]:
        import torch

        from benchmarks.real_eval import evaluate

        model, tokenizer = self._model({"pretrained": "prepare"}.get(stage, stage.removeprefix("after_")))
        held_out = self.rows(tokenizer)[1][: self.options.eval_rows]
        first = self.ledger.result("pretrained")
        if first is not None:
            # The first evaluation measures how many rows the time allows; the others look at no more than those.
            held_out = held_out[: len(first["records"])]
        records = evaluate(
            model.to(torch.bfloat16) if self._bf16() else model,
            tokenizer,
            held_out,
            clock,
            report,
            Path(self.options.out) / "evaluation",
            self.sizes,
            batch=self.options.eval_batch,
            done=self.ledger.notes(stage).get("records", []),
            keep=lambda records: self.ledger.note(stage, records=records),
        )
        return {"records": records}

    def _bf16(self) -> bool:
        prepared = self.ledger.result("prepare")
        return bool(prepared and prepared["bf16"])
