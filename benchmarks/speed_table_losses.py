"""Rows of `credit` from the credit per token on: policy loss, aggregation, divergence, supervised loss, statistics."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed import gradient, peer
from benchmarks.speed_cases import CLIP, DUAL, loss_candidates, trajectories
from benchmarks.speed_table_case import Case, Made, gradient_of, size_of
from benchmarks.speed_table_credit import TOKENS, estimators
from credit import (
    aggregate_loss,
    clip_statistics,
    format_weighted_ce,
    kl_k3,
    policy_loss,
    segment_statistics,
    tool_summary_segments,
)

BOOLEANS = "comparisons with a boolean result, which PyTorch takes one entry at a time"


class Batch:
    """Log-probabilities and what belongs to them."""

    def __init__(self, rows: int) -> None:
        random = torch.Generator().manual_seed(2)
        self.mask = trajectories(rows, TOKENS)
        self.segments = tool_summary_segments(self.mask)
        self.old = torch.randn(rows, TOKENS, generator=random) - 2
        self.logp = self.old + 0.3 * torch.randn(rows, TOKENS, generator=random)
        self.advantages = torch.randn(rows, TOKENS, generator=random)
        self.protocol = self.mask & (torch.rand(rows, TOKENS, generator=random) < 0.2)


def policy_case(rows: int) -> Made:
    forwards, given = loss_candidates(rows, TOKENS, peer("trl.trainer.grpo_trainer", "its loss is"))
    logp, old, advantages, mask, _ = given
    calls = {name: lambda f=forward: gradient(f, logp) for name, forward in forwards.items()}
    peers = {name: call for name, call in calls.items() if "_compute_loss" in name}
    return Made(calls["ours"], calls["TRL, expression"], size_of(logp, old, advantages, mask, logp), peers)


def sequence_case(rows: int) -> Made:
    batch, mode = Batch(rows), "seq_mean_token_mean"

    def composed(x: Tensor) -> Tensor:
        ratio = torch.exp(x - batch.old)
        held = torch.clamp(ratio, max=DUAL) * batch.advantages
        each = -torch.min(held, torch.clamp(ratio, 1 - CLIP, 1 + CLIP) * batch.advantages) * batch.mask
        return (each.sum(1) / batch.mask.sum(1).clamp(min=1)).mean()

    ours = gradient_of(lambda x: policy_loss(x, batch.old, batch.advantages, batch.mask, mode=mode).loss, batch.logp)
    traffic = size_of(batch.logp, batch.old, batch.advantages, batch.mask, batch.logp)
    return Made(ours, gradient_of(composed, batch.logp), traffic)


def aggregate_case(rows: int) -> Made:
    batch = Batch(rows)
    peers = {}
    if estimators() is not None:
        whole = batch.mask.float()
        peers["verl, `agg_loss`"] = gradient_of(lambda x: estimators().agg_loss(x, whole, "token-mean"), batch.logp)
    return Made(
        gradient_of(lambda x: aggregate_loss(x, batch.mask), batch.logp),
        gradient_of(lambda x: (x * batch.mask).sum() / batch.mask.sum(), batch.logp),
        size_of(batch.logp, batch.mask, batch.logp),
        peers,
    )


def kl_case(rows: int) -> Made:
    batch = Batch(rows)
    peers = {}
    if estimators() is not None:
        peers["verl, `kl_penalty_forward`"] = gradient_of(
            lambda x: estimators().kl_penalty_forward(x, batch.old, "low_var_kl").sum(), batch.logp
        )
    return Made(
        gradient_of(lambda x: kl_k3(x, batch.old).sum(), batch.logp),
        gradient_of(lambda x: (torch.exp(batch.old - x) - (batch.old - x) - 1).sum(), batch.logp),
        size_of(batch.logp, batch.old, batch.logp, batch.logp),
        peers,
    )


def ce_case(rows: int) -> Made:
    batch = Batch(rows)

    def composed(x: Tensor) -> Tensor:
        plain = -(x * batch.mask).sum() / batch.mask.sum()
        return plain - 0.5 * (x * batch.protocol).sum() / batch.protocol.sum()

    return Made(
        gradient_of(lambda x: format_weighted_ce(x, batch.mask, batch.protocol), batch.logp),
        gradient_of(composed, batch.logp),
        size_of(batch.logp, batch.mask, batch.protocol, batch.logp),
    )


def clip_case(rows: int) -> Made:
    batch = Batch(rows)

    def ours() -> list[Tensor]:
        stats = clip_statistics(batch.logp, batch.old, batch.advantages, batch.segments)
        return [stats.tokens, stats.clipped_low, stats.clipped_high, stats.clipped_dual, stats.ratio_max]

    def by_segment() -> list[Tensor]:
        found = []
        for segment in (0, 1):
            chosen = batch.segments == segment
            ratio, credit = (batch.logp - batch.old)[chosen].exp(), batch.advantages[chosen]
            falls = credit < 0
            low, high, dual = falls & (ratio < 1 - CLIP), (credit > 0) & (ratio > 1 + CLIP), falls & (ratio > DUAL)
            found.append([chosen.sum(), low.sum(), high.sum(), dual.sum(), ratio.max()])
        return [torch.stack(column) for column in zip(*found)]

    return Made(ours, by_segment, size_of(batch.logp, batch.old, batch.advantages, batch.segments))


def segment_case(rows: int) -> Made:
    batch = Batch(rows)

    def ours() -> list[Tensor]:
        found = segment_statistics(batch.advantages, batch.segments).compute()
        return [found["mean"], found["std"], found["token_share"]]

    def by_segment() -> list[Tensor]:
        parts = [batch.advantages[batch.segments == segment] for segment in (0, 1)]
        tokens = torch.tensor([float(len(part)) for part in parts])
        means = torch.stack([part.mean() for part in parts])
        return [means, torch.stack([part.std(correction=0) for part in parts]), tokens / tokens.sum()]

    return Made(ours, by_segment, size_of(batch.advantages, batch.segments))


def _case(name: str, make: Callable[[int], Made], naive: str, note: str, **more: Any) -> Case:
    return Case(
        covers=(f"credit.{name}",), make=make, largest=4096, unit="rollouts of 256 tokens", naive=naive, note=note,
        **more,
    )  # fmt: skip


CASES: tuple[Case, ...] = (
    _case("policy_loss", policy_case, "TRL's expression",
          f"an exponential for the loss, another for the KL estimate, and {BOOLEANS}: six of them count the clips"),
    _case("policy_loss", sequence_case, "composed", f"as above; {BOOLEANS}", what="seq_mean_token_mean"),
    _case("aggregate_loss", aggregate_case, "`(x * m).sum() / m.sum()`",
          "`where`, which branches at every entry on a CPU, where the twin multiplies NaN into the sum"),
    _case("kl_k3", kl_case, "TRL's expression", "`expm1`, and a choice by `where` where 0 meets NaN"),
    _case("format_weighted_ce", ce_case, "two weighted sums", "`where`, which branches at every entry on a CPU"),
    _case("clip_statistics", clip_case, "masked selections", f"six sums or maxima by segment in float64; {BOOLEANS}"),
    _case("segment_statistics", segment_case, "masked selections", "four sums by segment in float64, block by block"),
)  # fmt: skip
