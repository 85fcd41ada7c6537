"""How alike the experts of two turns are, summed over the pairs of a batch, on one rank or on all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from credit._safe import compute_dtype, safe_divide, select
from moe_routing.gather import RankRows
from moe_routing.sums import SumCount, all_reduce_sums


@dataclass(frozen=True)
class PairSimilarity:
    """Histogram intersection ``sum_e min(h_i(e), h_j(e))``, summed over ordered pairs ``i != j``; shards add up.

    Attributes:
        alike: over pairs that share an operation.
        apart: over pairs that share none.
    """

    alike: SumCount
    apart: SumCount

    @classmethod
    def of(
        cls,
        counts: Shaped[Tensor, "*layers fields experts"],
        labels: Bool[Tensor, "fields operations"],
        every: Shaped[Tensor, "*layers all experts"],
        every_label: Bool[Tensor, "all operations"],
        first: int = 0,
    ) -> "PairSimilarity":
        """Compare fields to all fields, among which they are the rows from ``first`` on.

        A field without counts is in no pair.

        >>> counts, labels = torch.tensor([[4, 0], [2, 2], [0, 4]]), torch.tensor([[True], [True], [False]])
        >>> found = PairSimilarity.of(counts, labels, counts, labels)
        >>> found.alike.compute().item(), found.apart.compute().item(), found.gap().item()
        (0.5, 0.25, 0.25)
        """
        (left, i), (right, j) = _shares(counts), _shares(every)
        # min(a, b) sums to 1 - |a - b|_1 / 2 for distributions; cdist needs no fields x all x experts buffer.
        similarity = 1 - torch.cdist(left, right, p=1.0) / 2
        common = labels.to(left.dtype) @ every_label.to(left.dtype).T > 0
        place = torch.arange(labels.shape[0], device=labels.device)[:, None] + first
        other = place != torch.arange(every_label.shape[0], device=labels.device)
        pair = i[..., :, None] & j[..., None, :] & other
        return cls(
            SumCount.of(similarity.flatten(-2), (pair & common).flatten(-2)),
            SumCount.of(similarity.flatten(-2), (pair & ~common).flatten(-2)),
        )

    @classmethod
    def over_ranks(
        cls,
        counts: Shaped[Tensor, "layers fields experts"],
        labels: Bool[Tensor, "fields operations"],
        process_groups: Sequence[Any] = (None,),
    ) -> "PairSimilarity":
        """All pairs of all ranks. One layer is gathered at a time, and every rank compares its own fields to it."""
        place = RankRows.of(labels, process_groups)
        every_label = place.gather(labels.to(torch.uint8)).bool()
        parts = [cls.of(layer, labels, place.gather(layer), every_label, place.first) for layer in counts.unbind()]
        sums = [
            torch.stack([part.alike.total for part in parts]),
            torch.stack([part.alike.count for part in parts]),
            torch.stack([part.apart.total for part in parts]),
            torch.stack([part.apart.count for part in parts]),
        ]
        for group in process_groups:
            sums = all_reduce_sums(sums, group)
        return cls(SumCount(*sums[:2]), SumCount(*sums[2:]))

    def gap(self) -> Float[Tensor, "*layers"]:
        """Mean similarity of pairs that share an operation minus that of the others; 0 where either is missing."""
        there = (self.alike.count > 0) & (self.apart.count > 0)
        return select(there, self.alike.compute() - self.apart.compute())


def _shares(
    counts: Shaped[Tensor, "*layers fields experts"],
) -> tuple[Float[Tensor, "*layers fields experts"], Bool[Tensor, "*layers fields"]]:
    """Normalised counts, and where there are any."""
    wide = counts.to(compute_dtype(counts) if counts.is_floating_point() else torch.float32)
    total = wide.sum(-1)
    usable = (total > 0) & torch.isfinite(total)
    return safe_divide(select(usable[..., None], wide), select(usable, total)[..., None]), usable
