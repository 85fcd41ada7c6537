"""What `make bench` compares: credit calls and policy losses of ours, verl and TRL on the same numbers."""

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from credit import GRPO, SLCA, assign_credit, group_advantage, policy_loss, tool_summary_segments
from credit.segments import has_segment

GROUP = 8
FLOOR = "floor: one copy"
CLIP, DUAL = 0.2, 3.0
Candidates = dict[str, Callable[[], Any]]


def trajectories(rows: int, tokens: int, seed: int = 0) -> Tensor:
    """Learnable mask of rollouts with at least one tool turn and a summary, of differing length, right padded."""
    random = torch.Generator().manual_seed(seed)
    length = torch.randint(tokens // 4, tokens + 1, (rows, 1), generator=random)
    turn = torch.randint(max(tokens // 16, 2), max(tokens // 4, 3), (rows, 1), generator=random)
    position = torch.arange(tokens)
    return (position < length) & (position % turn < turn * 2 // 3)


def credit_candidates(rows: int, tokens: int, estimators: Any) -> tuple[Candidates, Candidates]:
    """The GRPO-like and the SLCA-like calls, each with its peers and its floor."""
    random = torch.Generator().manual_seed(1)
    segments = tool_summary_segments(trajectories(rows, tokens))
    group = torch.arange(rows) // GROUP
    tool, summary = torch.randn(2, rows, generator=random).unbind()
    uses_tool, answers = has_segment(segments, 0), has_segment(segments, 1)
    shared, locked = torch.ones(2, 1), torch.eye(2)
    buffer = torch.empty(rows, tokens)
    rewards = {"tool": tool, "summary": summary}

    def grpo() -> Tensor:
        return assign_credit(group_advantage(tool, group)[:, None], segments, shared)

    def slca() -> Tensor:
        parts = [group_advantage(tool, group, uses_tool), group_advantage(summary, group, answers)]
        return assign_credit(torch.stack(parts, dim=-1), segments, locked)

    unified: Candidates = {"ours": grpo, "ours, whole rule GRPO()": lambda: GRPO()({"tool": tool}, group, segments)}
    split: Candidates = {"ours": slca, "ours, whole rule SLCA()": lambda: SLCA()(rewards, group, segments)}
    if estimators is not None:
        # Scores on one token and an integer mask, as verl's trainer passes them; its cheapest kind of group index.
        index, mask = group.numpy(), (segments >= 0).long()
        scores = {name: torch.nn.functional.pad(value[:, None], (0, tokens - 1)) for name, value in rewards.items()}
        masks = [(segments == 0).long(), (segments == 1).long()]
        loop, vectorised = (
            estimators.compute_grpo_outcome_advantage,
            estimators.compute_grpo_vectorized_outcome_advantage,
        )
        for name, fn in (("verl, loop", loop), ("verl, vectorised", vectorised)):
            unified[name] = lambda fn=fn: fn(scores["tool"], mask, index)[0]
            split[name] = lambda fn=fn: (
                fn(scores["tool"], masks[0], index)[0] + fn(scores["summary"], masks[1], index)[0]
            )
    for candidates in (unified, split):
        candidates[FLOOR] = lambda: buffer.copy_(segments)
    return unified, split


def loss_candidates(rows: int, tokens: int, trainer: Any) -> tuple[Candidates, tuple[Tensor, ...]]:
    """Forward passes of the policy loss, and the tensors they are given (the log-probabilities first)."""
    random = torch.Generator().manual_seed(2)
    learnable = trajectories(rows, tokens)
    old = torch.randn(rows, tokens, generator=random) - 2
    logp = (old + 0.3 * torch.randn(rows, tokens, generator=random)).requires_grad_()
    segments = tool_summary_segments(learnable)
    advantages = assign_credit(torch.randn(rows, 2, generator=random), segments, torch.eye(2))
    mask = learnable.long()
    count = mask.sum()

    def expression() -> Tensor:
        # What TRL's `_compute_loss` computes for loss_type="dapo" with `delta`, without its metrics.
        ratio = torch.exp(logp - old)
        held = torch.clamp(ratio, max=DUAL) * advantages
        clipped = torch.clamp(ratio, 1 - CLIP, 1 + CLIP) * advantages
        return (-torch.min(held, clipped) * mask).sum() / count.clamp(min=1.0)

    candidates: Candidates = {
        "ours": lambda: (
            policy_loss(logp, old, advantages, learnable, clip_low=CLIP, clip_high=CLIP, dual_clip=DUAL).loss
        ),
        "TRL, expression": expression,
    }
    if trainer is not None:
        inputs = {
            "prompt_ids": mask[:, :1], "prompt_mask": mask[:, :1], "completion_ids": mask, "completion_mask": mask,
            "advantages": advantages, "old_per_token_logps": old, "num_items_in_batch": count,
        }  # fmt: skip
        stand_in = _stand_in(logp)
        candidates["TRL, `_compute_loss`"] = lambda: trainer.GRPOTrainer._compute_loss(stand_in, stand_in.model, inputs)
    return candidates, (logp, old, advantages, learnable, mask)


def _stand_in(logp: Tensor) -> SimpleNamespace:
    """What TRL's loss asks of its trainer, with the forward pass of the model already done."""
    entropies = torch.zeros_like(logp)
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        _get_per_token_logps_and_entropies=lambda *args, **options: (logp, entropies, None),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=SimpleNamespace(delta=DUAL, steps_per_generation=1),
        epsilon_low=CLIP,
        epsilon_high=CLIP,
        beta=0.0,
        loss_type="dapo",
        importance_sampling_level="token",
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
