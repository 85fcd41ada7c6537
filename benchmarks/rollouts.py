"""Real rollouts for training, evaluation and the exact experiment, all through TRL's own trainer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.scoring import ProcessReward, RolloutScore, ScoreLog, SummaryReward


@dataclass(frozen=True)
class Sizes:
    """One step of the race: how many prompts, rollouts of each, and how fast to learn from them."""

    prompts: int = 8
    group: int = 8
    learning_rate: float = 3e-4
    completion: int = 128
    tool_turns: int = 4

    @property
    def rollouts(self) -> int:
        return self.prompts * self.group


@dataclass(frozen=True)
class Batch:
    """Rollouts of one batch with their clean scores; `[B, T]` tensors are padded on the right, prompts on the left."""

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    learnable: Tensor
    segments: Tensor
    group: Tensor
    scores: list[RolloutScore]
    messages: list[Any]
    rows: list[dict[str, Any]]

    @property
    def tool_reward(self) -> Tensor:
        return torch.tensor([score.process for score in self.scores], dtype=torch.float64)

    @property
    def summary_reward(self) -> Tensor:
        return torch.tensor([score.summary for score in self.scores], dtype=torch.float64)


def make_trainer(
    model: Any,
    tokenizer: Any,
    rows: Sequence[dict[str, Any]],
    *,
    rule: Any,
    sizes: Sizes,
    sigma: float = 0.0,
    steps: int = 1,
    seed: int = 0,
    own_tools: bool = False,
    output: str | Path = "out",
    callbacks: Sequence[Any] = (),
    routing: Any = None,
) -> Any:
    """A `CreditGRPOTrainer` with both rewards and a `ScoreLog` (its attribute `score_log`).

    Args:
        model: policy, trained in place.
        tokenizer: with a chat template that renders tools.
        rows: dataset rows; see `benchmarks.scoring` for their columns.
        rule: the credit rule of this arm.
        sizes: batch, group, learning rate, length.
        sigma: standard deviation of the noise on the summary reward.
        steps: optimiser steps; each makes one batch of rollouts and uses it once.
        seed: of prompts' order, sampling and noise.
        own_tools: rows bring their own tools, answered by the simulator; otherwise the office's, through TRL.
        output: folder of the trainer.
        callbacks: of the trainer.
        routing: routing control attached to `model`; see `benchmarks.routing_arm.make_routing`.
    """
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig

    from credit.adapters.trl import CreditGRPOTrainer

    args = GRPOConfig(
        output_dir=str(output),
        max_steps=steps,
        learning_rate=sizes.learning_rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=sizes.rollouts,
        per_device_eval_batch_size=sizes.rollouts,
        num_generations=sizes.group,
        max_completion_length=sizes.completion,
        max_tool_calling_iterations=sizes.tool_turns,
        beta=0.0,
        delta=3.0,
        loss_type="dapo",
        temperature=1.0,
        seed=seed,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        activation_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    log = ScoreLog()
    trainer = CreditGRPOTrainer(
        model,
        rule=rule,
        components={"tool": [ProcessReward(), log], "summary": [SummaryReward(sigma, seed)]},
        component_weights={"tool": [1.0, 0.0]},
        tool_required="tool_required",
        args=args,
        train_dataset=Dataset.from_list(list(rows)),
        processing_class=tokenizer,
        callbacks=list(callbacks),
        routing=routing,
        **_answering(own_tools, sizes.tool_turns),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.score_log = log
    return trainer


def _answering(own_tools: bool, turns: int) -> dict[str, Any]:
    if not own_tools:
        from benchmarks.office import TOOLS

        return {"tools": list(TOOLS)}
    from benchmarks.bfcl import respond
    from credit.adapters.trl_rollout import ToolRollout

    return {"rollout_func": ToolRollout(respond, max_turns=turns)}


def collect(trainer: Any, rows: Sequence[dict[str, Any]], *, copies: int, seed: int) -> Batch:
    """Sample `copies` rollouts of each row from the trainer's model, as one batch; no parameter is changed.

    Args:
        trainer: of `make_trainer`.
        rows: one group each.
        copies: rollouts per row.
        seed: of the sampling.
    """
    from transformers import set_seed

    state = torch.get_rng_state()
    set_seed(seed)
    trainer.model.eval()
    trainer.num_generations_eval = copies
    inputs = [dict(row) for row in rows for _ in range(copies)]
    with torch.no_grad():
        output = trainer._generate_and_score_completions(inputs)
    trainer.model.train()
    torch.set_rng_state(state)
    held = {key: value.cpu() for key, value in output.items() if isinstance(value, torch.Tensor)}
    shown = held["completion_mask"].bool()
    return Batch(
        prompt_ids=held["prompt_ids"],
        prompt_mask=held["prompt_mask"].bool(),
        completion_ids=held["completion_ids"],
        completion_mask=shown,
        learnable=shown & held["tool_mask"].bool() if "tool_mask" in held else shown,
        segments=held["segments"],
        group=torch.arange(len(rows)).repeat_interleave(copies),
        scores=trainer.score_log.scores,
        messages=trainer.score_log.messages,
        rows=inputs,
    )
