"""SFT, GRPO and SLCA steps on real rows, bounded by a clock and continued from their last checkpoint."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback

from benchmarks.bfcl import BfclRow, respond
from benchmarks.real_ledger import Clock, Ledger
from benchmarks.scoring import ProcessReward, SummaryReward
from rewards.conversation import turn_text

Report = Callable[[float, str], None]

# Seconds between checkpoints: model and Adam's moments are three copies of the weights on disk.
SAVE_EVERY = 90.0
LOGGED = ("loss", "grad_norm", "reward", "rewards/process/mean", "rewards/summary/mean", "completions/mean_length")


@dataclass(frozen=True)
class Sizes:
    """What one step holds. One optimiser step a batch of rollouts: ratios are 1 and nothing is clipped."""

    sft_rows: int = 4
    sft_learning_rate: float = 5e-5
    sft_epochs: int = 2
    prompts: int = 2
    generations: int = 4
    micro: int = 4
    max_tokens: int = 160
    max_turns: int = 2
    learning_rate: float = 1e-5


@dataclass(frozen=True)
class Stage:
    """Where a training stage writes, and how long it may take."""

    name: str
    ledger: Ledger
    clock: Clock
    report: Report
    folder: Path
    seed: int = 0
    bf16: bool = False


COMMON: dict[str, Any] = {
    "use_cpu": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "save_total_limit": 2,
    "report_to": [],
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}


def dataset(rows: Sequence[BfclRow]) -> Any:
    """The rows as TRL takes them; schemas and gold are JSON text, since Arrow would fill them up with nulls."""
    from datasets import Dataset

    return Dataset.from_list([row.columns() for row in rows])


def make_trainer(
    model: Any, tokenizer: Any, rows: Sequence[BfclRow], rule: Any, folder: Path, sizes: Sizes, **options: Any
) -> Any:
    """A `CreditGRPOTrainer` whose rollouts are answered by the schema-guided simulator.

    `options` are TRL's own (`max_steps`, `seed`, `bf16`, `temperature`, …).
    """
    from trl import GRPOConfig

    from credit.adapters.trl import CreditGRPOTrainer
    from credit.adapters.trl_rollout import ToolRollout

    defaults: dict[str, Any] = {
        "per_device_train_batch_size": sizes.micro,
        "gradient_accumulation_steps": sizes.prompts * sizes.generations // sizes.micro,
        "num_generations": sizes.generations,
        "max_completion_length": sizes.max_tokens,
        "learning_rate": sizes.learning_rate,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "delta": 3.0,
        "bf16": False,
    }
    rollout = ToolRollout(respond, max_turns=sizes.max_turns)
    return CreditGRPOTrainer(
        model,
        rule=rule,
        components={"tool": [ProcessReward()], "summary": [SummaryReward()]},
        tool_required="tool_required",
        rollout_func=_bf16_rollout(rollout) if options.get("bf16") else rollout,
        args=GRPOConfig(output_dir=str(folder), **(COMMON | defaults | options)),
        train_dataset=dataset(rows),
        processing_class=tokenizer,
    )


def _bf16_rollout(rollout: Any) -> Any:
    """The rollout in one autocast region: weights are cast once a batch instead of at every token."""

    def roll_out(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return rollout(prompts, trainer)

    return roll_out


class Bounded(TrainerCallback):  # type: ignore[misc]
    """Stops TRL's loop when the clock has no room for another step; saves now and then and tells the ledger."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.clock = stage, stage.clock
        self.history: list[dict[str, float]] = stage.ledger.notes(stage.name).get("history", [])
        self.slowest = 0.0
        self._began = self._saved = self.clock.used

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = self.clock.used

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.slowest = max(self.slowest, self.clock.used - self._began)
        if not self.clock.fits(1.1 * self.slowest):
            control.should_training_stop = True
        elif self.clock.used - self._saved > SAVE_EVERY:
            control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" not in logs:
            return
        # A statistic of a segment that no token is in has no value.
        wanted = {key: value for key, value in logs.items() if key in LOGGED or key.startswith("credit/")}
        kept = {key: float(value) for key, value in wanted.items() if value is not None}
        self.history.append({"step": state.global_step, "seconds": self.clock.used - self._began} | kept)
        now = f"reward {logs['reward']:.2f}" if "reward" in logs else f"loss {logs['loss']:.2f}"
        share = max(self.clock.share, state.global_step / state.max_steps)
        self.stage.report(share, f"step {state.global_step}, {now}")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # TRL calls this when the checkpoint is whole; one that a kill cut short is never noted.
        checkpoint = str(Path(args.output_dir) / f"checkpoint-{state.global_step}")
        self.stage.ledger.note(self.stage.name, checkpoint=checkpoint, history=self.history)
        self._saved = self.clock.used


def supervise(stage: Stage, model: Any, tokenizer: Any, rows: Sequence[BfclRow], sizes: Sizes) -> dict[str, Any]:
    """Format-weighted SFT on the rows answered well; the model ends up in the stage's folder, under "final"."""
    from datasets import Dataset
    from trl import SFTConfig

    from credit.adapters.sft import FormatSFTTrainer

    options: dict[str, Any] = {
        "per_device_train_batch_size": sizes.sft_rows,
        "num_train_epochs": sizes.sft_epochs,
        "learning_rate": sizes.sft_learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 8,
        "assistant_only_loss": True,
        "seed": stage.seed,
        "bf16": stage.bf16,
    }
    trainer = FormatSFTTrainer(
        model,
        SFTConfig(output_dir=str(stage.folder), **(COMMON | options)),
        train_dataset=Dataset.from_list([conversation(row) for row in rows]),
        processing_class=tokenizer,
    )
    done = _run(trainer, Bounded(stage))
    return done | {"rows": done["steps"] * sizes.sft_rows}


def conversation(row: BfclRow) -> dict[str, Any]:
    """The row answered well, calls as the text a model writes: a table would mix the arguments of all calls."""
    messages = [{"role": m["role"], "content": turn_text(m)} for m in row.conversation()]
    return {"messages": messages, "tools": row.columns()["tools"]}


def reinforce(
    stage: Stage, model: Any, tokenizer: Any, rows: Sequence[BfclRow], rule: Any, sizes: Sizes, max_steps: int
) -> dict[str, Any]:
    """Train with one credit rule; the model ends up in the stage's folder, under "final"."""
    options = {"max_steps": max_steps, "seed": stage.seed, "bf16": stage.bf16}
    trainer = make_trainer(model, tokenizer, rows, rule, stage.folder, sizes, **options)
    done = _run(trainer, Bounded(stage))
    return done | {"rollouts": done["steps"] * sizes.prompts * sizes.generations, "sizes": asdict(sizes)}


def _run(trainer: Any, bounded: Bounded) -> dict[str, Any]:
    """Train, from the last noted checkpoint if there is one; keep the model and drop the checkpoints."""
    stage = bounded.stage
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(bounded)
    trainer.train(resume_from_checkpoint=stage.ledger.notes(stage.name).get("checkpoint"))
    trainer.save_model(str(stage.folder / "final"))
    for checkpoint in stage.folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    return {"steps": trainer.state.global_step, "history": bounded.history}
