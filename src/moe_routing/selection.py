"""Which experts each field of a batch selected: the counts behind the load, usage by operation and specialization."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit._safe import require_shape, statistics_dtype
from moe_routing.fields import check_labels
from moe_routing.metrics import coefficient_of_variation, selection_counts, shift_histogram
from moe_routing.similarity import PairSimilarity
from moe_routing.sums import SumCount


@dataclass(frozen=True)
class FieldSelection:
    """Sums over one forward; the forwards of a batch add up, a field lying in one of them.

    Attributes:
        counts: selections of each expert in each field.
        shifts: within-field pairs that changed 0, 1, ..., k experts.
        router_entropy: entropy of the router in nats, summed over tokens of fields whose logits define one.
    """

    counts: Int[Tensor, "layers fields experts"]
    shifts: Int[Tensor, "layers shifts"]
    router_entropy: SumCount

    @classmethod
    def of(
        cls,
        selected: Int[Tensor, "tokens k"],
        entropy: Float[Tensor, " tokens"],
        field: Int[Tensor, " tokens"],
        num_fields: int,
        num_experts: int,
    ) -> "FieldSelection":
        """What one router selected; ids are not checked, since that would make an accelerator wait at every router.

        Args:
            selected: distinct experts of each token; rows with a negative id are ignored.
            entropy: of the router's distribution over all experts; one that is not finite is left out.
            field: field id per token, -1 outside fields.

        >>> one = FieldSelection.of(torch.tensor([[0], [2]]), torch.zeros(2), torch.tensor([0, 0]), 1, 3)
        >>> one.counts.tolist(), one.shifts.tolist()
        ([[[1, 0, 1]]], [[0, 1]])
        """
        counts = selection_counts(selected, field, num_fields, num_experts).to(torch.int32)
        certain = SumCount.of(entropy[None], ((field >= 0) & torch.isfinite(entropy))[None])
        return cls(counts[None], shift_histogram(selected, field)[None], certain)

    @classmethod
    def stack(cls, layers: Sequence["FieldSelection"]) -> "FieldSelection":
        """The routers of one model in order, on the device of the first.

        Raises:
            ValueError: if they differ in experts or k.
        """
        shapes = {(layer.shifts.shape[-1] - 1, layer.counts.shape[-1]) for layer in layers}
        if len(shapes) > 1:
            raise ValueError(f"the routers differ in [k, experts]: {sorted(shapes)}; record a submodel")

        def joined(parts: Sequence[Tensor]) -> Tensor:
            return torch.cat([part.to(parts[0].device) for part in parts])

        return cls(
            joined([layer.counts for layer in layers]),
            joined([layer.shifts for layer in layers]),
            SumCount(
                joined([layer.router_entropy.total for layer in layers]),
                joined([layer.router_entropy.count for layer in layers]),
            ),
        )

    def __add__(self, other: "FieldSelection") -> "FieldSelection":
        return FieldSelection(
            self.counts + other.counts, self.shifts + other.shifts, self.router_entropy + other.router_entropy
        )

    def usage(self, labels: Bool[Tensor, "fields operations"]) -> Int[Tensor, "layers operations experts"]:
        """Selections of each expert by the fields of each operation."""
        # In floating point, exact up to 2**53: integers have no matrix product on CUDA.
        dtype = statistics_dtype(self.counts)
        return torch.einsum("fo,lfm->lom", labels.to(self.counts.device, dtype), self.counts.to(dtype)).long()

    def load_cv(self, trajectory: Int[Tensor, " fields"]) -> SumCount:
        """Coefficient of variation of the load of each trajectory, summed over those that selected anything."""
        ids, dense = torch.unique(trajectory.to(self.counts.device), return_inverse=True)
        layers, _, experts = self.counts.shape
        load = torch.zeros(layers, ids.numel(), experts, dtype=torch.long, device=self.counts.device)
        load = load.index_add(1, dense, self.counts.long())
        return SumCount.of(coefficient_of_variation(load), (load.sum(-1) > 0) & (ids >= 0))

    def specialization(
        self,
        labels: Bool[Tensor, "fields operations"],
        eligible: Bool[Tensor, " fields"],
        process_groups: Sequence[Any] = (None,),
    ) -> Float[Tensor, " layers"]:
        """:func:`moe_routing.specialization_gap` over the eligible fields of all ranks, each layer's gathered in turn.

        Every rank compares its own fields to those of all, so that neither memory nor work grows with the square
        of the number of ranks.
        """
        fields = self.counts.shape[1]
        check_labels(labels, fields, f"counts of shape {tuple(self.counts.shape)}")
        require_shape("eligible", eligible, (fields,), f"counts {tuple(self.counts.shape)}")
        kept = eligible.to(self.counts.device)
        return PairSimilarity.over_ranks(self.counts[:, kept], labels.to(kept.device)[kept], process_groups).gap()
