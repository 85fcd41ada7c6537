"""Random routing cases that are ugly on purpose: gaps in the field ids, prompts in between, runs of length one."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

seeds = st.integers(0, 2**31 - 1)
TARGETS = ("previous_topk", "uniform_topk", "overlap", "mass")
ACTIVATIONS = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Case:
    logits: Tensor
    grad_in: Tensor
    field: Tensor
    selected: Tensor
    labels: Tensor
    num_fields: int

    @property
    def experts(self) -> int:
        return self.logits.shape[1]

    @property
    def k(self) -> int:
        return self.selected.shape[1]

    def tokens_of_field(self) -> Tensor:
        return torch.tensor([int((self.field == f).sum()) for f in range(self.num_fields)])

    def eligible(self) -> Tensor:
        return self.tokens_of_field() > 0


def make_case(seed: int, *, max_fields: int = 14, max_experts: int = 8, scale: float = 2.0) -> Case:
    """A case of random size, in float64. Consecutive selections share all, some or none of their experts."""
    rng = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=rng))

    experts = draw(2, max_experts)
    k = draw(1, min(experts, 4))
    runs: list[int] = []
    next_id = 0
    for _ in range(draw(0, max_fields)):
        next_id += draw(1, 3)
        runs += [-1] * draw(0, 2) + [next_id - 1] * draw(1, 5)
    field = torch.tensor(runs + [-1] * draw(0, 1), dtype=torch.long)
    tokens, num_fields = field.numel(), next_id + draw(0, 2)
    rows: list[list[int]] = []
    for t in range(tokens):
        fresh = torch.randperm(experts, generator=rng).tolist()
        kept = rows[t - 1][: draw(0, k)] if t else []
        row = kept + [e for e in fresh if e not in kept]
        rows.append([row[i] for i in torch.randperm(k, generator=rng).tolist()])
    return Case(
        logits=scale * torch.randn(tokens, experts, generator=rng, dtype=torch.float64),
        grad_in=torch.randn(tokens, experts, generator=rng, dtype=torch.float64),
        field=field,
        selected=torch.tensor(rows, dtype=torch.long).reshape(tokens, k),
        labels=torch.rand(num_fields, draw(1, 3), generator=rng) < 0.5,
        num_fields=num_fields,
    )


def rich_case(seed: int) -> Case:
    """The first case from ``seed`` on with turns enough for a signal, close pairs, and tokens outside fields."""
    return next(
        case
        for case in map(make_case, range(seed, seed + 10_000))
        if int(case.eligible().sum()) >= 8
        and case.k >= 2
        and case.experts >= case.k + 2
        and (case.field < 0).any()
        and (case.tokens_of_field() > 2).any()
        and (case.tokens_of_field() == 0).any()
    )
