"""Tokens that a router has seen, for the rows of `moe_routing`, and short ways to write a row."""

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed_table_case import Case, Made
from moe_routing import TurnStatistics

EXPERTS, K, FIELD_TOKENS, OPERATIONS = 128, 8, 16, 6


class Routed:
    """Tokens of one layer with 128 experts: fields of 16 tokens, sets that change slowly, as a trained router's do."""

    def __init__(self, tokens: int) -> None:
        random = torch.Generator().manual_seed(4)
        self.tokens, self.fields = tokens, -(-tokens // FIELD_TOKENS)
        self.logits = torch.randn(tokens, EXPERTS, generator=random)
        drift = torch.randn(self.fields, EXPERTS, generator=random).repeat_interleave(FIELD_TOKENS, 0)[:tokens]
        self.selected = (drift + 0.3 * self.logits).topk(K).indices
        self.field = torch.arange(tokens) // FIELD_TOKENS
        self.mask = torch.rand(tokens, generator=random) < 0.8
        self.labels = torch.rand(self.fields, OPERATIONS, generator=random) < 0.3

    @cached_property
    def probs(self) -> Tensor:
        """Probabilities of the router."""
        return self.logits.softmax(-1)

    @cached_property
    def grad_in(self) -> Tensor:
        """A gradient that reaches the logits."""
        return torch.randn(self.tokens, EXPERTS, generator=torch.Generator().manual_seed(5))

    @cached_property
    def load(self) -> Tensor:
        """Counts of each expert."""
        return torch.randint(0, 100, (self.tokens, EXPERTS), generator=torch.Generator().manual_seed(6))

    def pairs(self) -> list[tuple[set[int], set[int]]]:
        """The sets of each token and the one before it, where both are in one field."""
        sets, field = [set(row) for row in self.selected.tolist()], self.field.tolist()
        return [(sets[t - 1], sets[t]) for t in range(1, len(field)) if field[t] == field[t - 1]]

    def valid(self) -> list[bool]:
        """Where :meth:`pairs` has an entry."""
        field = self.field.tolist()
        return [t > 0 and field[t] == field[t - 1] for t in range(len(field))]

    def counts(self) -> Tensor:
        """Selections of each expert in each field, one field after the other."""
        each = [self.selected[self.field == f].flatten() for f in range(self.fields)]
        return torch.stack([torch.bincount(chosen, minlength=EXPERTS) for chosen in each])

    def consensus(self) -> Tensor:
        """The most selected experts of each field."""
        return self.counts().argsort(dim=-1, descending=True, stable=True)[:, :K]


class Turns:
    """Usage and operations of many turns."""

    def __init__(self, turns: int) -> None:
        random = torch.Generator().manual_seed(11)
        self.usage = torch.randn(turns, EXPERTS, generator=random).softmax(-1)
        self.labels = torch.rand(turns, OPERATIONS, generator=random) < 0.3
        self.every = torch.ones(turns, dtype=torch.bool)
        self.tokens, self.trajectory = torch.full((turns,), 16), torch.arange(turns) // 8
        self.statistics = TurnStatistics.from_usage(self.usage, self.labels, self.every)
        self.pmi = self.statistics.pmi().float()

    def rows(self) -> Tensor:
        """Each turn's pmi, operation by operation."""
        total = torch.zeros_like(self.usage)
        for operation in range(OPERATIONS):
            total = total + self.pmi[operation][self.labels[:, operation].long()]
        return total


@lru_cache(maxsize=5)
def routed(tokens: int) -> Routed:
    """The same tokens for every row that asks for as many."""
    return Routed(tokens)


def spread_out(values: Sequence[float], valid: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """One value for each valid token, 0 elsewhere."""
    given = iter(values)
    return torch.tensor([next(given) if here else 0.0 for here in valid]), torch.tensor(valid)


def plain(ours: Callable[[Routed], Any], naive: Callable[[Routed], Any], traffic: Callable[[Routed], int]) -> Any:
    """A case whose calls need nothing but the batch."""

    def make(tokens: int) -> Made:
        it = routed(tokens)
        return Made(lambda: ours(it), lambda: naive(it), traffic(it))

    return make


def case_of(name: str, make: Any, naive: str, largest: int = 32768, note: str = "", **more: Any) -> Case:
    more = {"unit": "tokens", **more}
    return Case(covers=(f"moe_routing.{name}",), make=make, largest=largest, naive=naive, note=note, **more)
