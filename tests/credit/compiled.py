"""Run as a script, without the type checker: credit and loss compiled, on two batches of different size.

Arguments: the backend, and "core" or "more" for which of the cases. Each is compiled whole and once: no graph break,
no second compilation when the batch has another size. Values and gradients are those of eager mode.
"""

import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from credit import (
    ClipStatistics,
    aggregate_loss,
    assign_credit,
    clip_statistics,
    format_weighted_ce,
    group_advantage,
    kl_k3,
    policy_loss,
    run_ids,
    segment_statistics,
    tool_summary_segments,
)

Batch = dict[str, Tensor]


def make_batch(rows: int, tokens: int, seed: int) -> Batch:
    """Log-probabilities whose ratios reach every clip; NaN wherever nothing may be read; one row without a token."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    mask = torch.rand(rows, tokens, generator=random) < 0.6
    mask[2] = False
    segments = torch.where(mask, (torch.arange(tokens) > tokens // 2).long(), -1)
    hole = torch.where(mask, 0.0, torch.nan)
    old = normal(rows, tokens) - 2
    return {
        "logp": old + normal(rows, tokens) + hole, "old": old, "ref": old + 0.1 * normal(rows, tokens),
        "advantages": normal(rows, tokens) + hole, "rewards": normal(rows), "mask": mask, "segments": segments,
        "weight": torch.rand(rows, tokens, generator=random, dtype=torch.float64) + hole,
        "group": torch.randint(0, 3, (rows,), generator=random) * 10**9, "protocol": mask & (old > -2),
        "runs": run_ids(mask), "per_run": normal(rows, tokens, 1), "parts": normal(rows, 2),
        "matrix": torch.tensor([[1.0, 0.5], [0.0, 2.0]], dtype=torch.float64),
    }  # fmt: skip


STATISTICS = [field.name for field in fields(ClipStatistics)]


def loss(b: Batch, **options: Any) -> list[Tensor]:
    result = policy_loss(b["logp"], b["old"], b["advantages"], b["mask"], **options)
    return [result.loss, *(getattr(result.stats, name) for name in STATISTICS)]


Function = Callable[[Batch], list[Tensor]]
# For each case, what receives the gradient.
CORE: dict[str, tuple[str, Function]] = {
    "assign_credit": ("parts", lambda b: [assign_credit(b["parts"], b["segments"], b["matrix"])]),
    "policy_loss": ("logp", loss),
    "policy_loss, sequences": ("logp", lambda b: loss(b, mode="seq_mean_token_mean", ratio_weight=b["weight"])),
    "kl_k3": ("logp", lambda b: [aggregate_loss(kl_k3(b["logp"], b["ref"]), b["mask"])]),
}
MORE: dict[str, tuple[str, Function]] = {
    "assign_credit, weights": ("matrix", lambda b: [assign_credit(b["parts"], b["segments"], b["matrix"])]),
    "assign_credit, runs": (
        "per_run",
        lambda b: [assign_credit(b["per_run"], b["segments"], b["matrix"][:, :1], runs=b["runs"])],
    ),
    "group_advantage": ("rewards", lambda b: [group_advantage(b["rewards"], b["group"], b["mask"].any(1))]),
    "policy_loss, plain clip": ("logp", lambda b: loss(b, dual_clip=None, mode="seq_mean_token_sum")),
    "policy_loss, global count": ("logp", lambda b: loss(b, mode="seq_mean_token_sum_norm", denominator=7, horizon=50)),
    "policy_loss, one advantage a row": (
        "logp",
        lambda b: [policy_loss(b["logp"], b["old"], b["rewards"], b["mask"]).loss],
    ),
    "aggregate_loss": (
        "logp",
        lambda b: [aggregate_loss(b["logp"], b["mask"], "seq_mean_token_sum_norm", 4.0)],
    ),
    "format_weighted_ce": ("logp", lambda b: [format_weighted_ce(b["logp"], b["mask"], b["protocol"])]),
}
# Without a gradient.
IDS: dict[str, Function] = {
    "run_ids": lambda b: [run_ids(b["mask"])],
    "tool_summary_segments": lambda b: [tool_summary_segments(b["mask"])],
    "tool_summary_segments, cut": lambda b: [tool_summary_segments(b["mask"], final="unless_followed")],
    "clip_statistics": lambda b: list(
        vars(clip_statistics(b["logp"], b["old"], b["advantages"], b["segments"])).values()
    ),
    "segment_statistics": lambda b: list(vars(segment_statistics(b["advantages"], b["segments"])).values()),
}


def forward_backward(function: Function, batch: Batch, wanted: str) -> list[Tensor]:
    if not wanted:
        return function(batch)
    leaf = batch[wanted].clone().requires_grad_()
    out = function({**batch, wanted: leaf})
    weight = torch.linspace(1, 2, out[0].numel(), dtype=out[0].dtype).view(out[0].shape)
    (out[0] * weight).sum().backward()
    assert leaf.grad is not None
    return [*(value.detach() for value in out), leaf.grad]


def main(backend: str, which: str) -> None:
    more = {**MORE, **{name: ("", function) for name, function in IDS.items()}}
    for name, (wanted, function) in (CORE if which == "core" else more).items():
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
        graphs = 0
        for seed, size in enumerate(((6, 9), (11, 20), (7, 33))):
            batch = make_batch(*size, seed)
            pairs = zip(forward_backward(compiled, batch, wanted), forward_backward(function, batch, wanted))
            for got, expected in pairs:
                torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9, msg=lambda t, n=name: f"{n}: {t}")
            # The compiler may begin again within the first call; after that, any graph is a recompilation.
            graphs = graphs or counter.frame_count
        assert counter.frame_count == graphs, f"{name}: {counter.frame_count - graphs} recompilations"
        sys.stdout.write(f"same {name}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
