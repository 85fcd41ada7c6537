"""What a report shows of one batch, as sums: expert usage by operation, shifts, load, router entropy."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit._safe import require_shape, safe_divide, select
from moe_routing.fields import check_tokens
from moe_routing.metrics import entropy, expert_counts, load_cv, shift_histogram
from moe_routing.sums import SumCount, all_reduce_sums


@dataclass(frozen=True)
class RoutingSummary:
    """Expert selection of one batch; summaries of micro-batches and ranks that share no trajectory add up.

    Attributes:
        usage: selections of each expert by tokens of turns with each operation.
        shifts: within-field pairs that changed 0, 1, ..., k experts.
        load_cv: coefficient of variation of the load, summed over trajectories.
        router_entropy: entropy of the router in nats, summed over tokens of fields.

    Reference: paper section 4.3 and figures 2, 12; the form is ours.

    >>> selected = torch.tensor([[[0], [0], [1], [1]]])
    >>> summary = RoutingSummary.of(
    ...     selected, torch.full((1, 4, 2), 0.5), field=torch.tensor([0, 0, 1, 1]),
    ...     labels=torch.tensor([[True, False], [False, True]]), trajectory=torch.zeros(4, dtype=torch.long))
    >>> summary.usage.tolist(), summary.shifts.tolist()
    ([[[2, 0], [0, 2]]], [[2, 0]])
    >>> {key: round(value, 3) for key, value in summary.metrics().items()}
    {'routing/jaccard': 1.0, 'routing/load_cv': 0.0, 'routing/router_entropy': 0.693, 'routing/usage_divergence': 0.693}
    """

    usage: Int[Tensor, "layers operations experts"]
    shifts: Int[Tensor, "layers shifts"]
    load_cv: SumCount
    router_entropy: SumCount

    @classmethod
    def of(
        cls,
        selected: Int[Tensor, "layers tokens k"],
        probs: Float[Tensor, "layers tokens experts"],
        field: Int[Tensor, " tokens"],
        labels: Bool[Tensor, "fields operations"],
        trajectory: Int[Tensor, " tokens"],
    ) -> "RoutingSummary":
        """Summary of one forward.

        Args:
            selected: distinct experts of each token; rows with a negative id are ignored.
            probs: router probabilities.
            field: field id per token, -1 outside generated fields; ids are rows of ``labels``.
            labels: operations of each field.
            trajectory: trajectory id per token; tokens outside fields do not count for the load either.

        Raises:
            ValueError: if shapes disagree or an id is out of range.
        """
        require_shape("selected", selected, (*probs.shape[:2], selected.shape[-1]), f"probs {tuple(probs.shape)}")
        check_tokens("field", field, probs.shape[1], f"probs of shape {tuple(probs.shape)}")
        check_tokens("trajectory", trajectory, probs.shape[1], f"probs of shape {tuple(probs.shape)}")
        inside, experts = field >= 0, probs.shape[-1]
        owner = torch.where(inside, trajectory, -1)
        by_field = torch.stack([expert_counts(layer, field, labels.shape[0], experts) for layer in selected])
        # In float64: exact up to 2**53, and integers have no matrix product on CUDA.
        usage = torch.einsum("fo,lfm->lom", labels.to(by_field.device).double(), by_field.double()).long()
        load = torch.stack([load_cv(layer, owner, experts) for layer in selected]).double()
        certain = entropy(select(inside[None, :, None], probs.float()))
        return cls(
            usage,
            torch.stack([shift_histogram(layer, field) for layer in selected]),
            SumCount.of(load, torch.ones_like(load, dtype=torch.bool)),
            SumCount.of(certain, inside.expand(certain.shape)),
        )

    def __add__(self, other: "RoutingSummary") -> "RoutingSummary":
        return RoutingSummary(
            self.usage + other.usage,
            self.shifts + other.shifts,
            self.load_cv + other.load_cv,
            self.router_entropy + other.router_entropy,
        )

    def reduce(self, process_group: Any = None) -> "RoutingSummary":
        """Add up over ranks; without ``torch.distributed`` the value itself."""
        sums = all_reduce_sums(
            [
                self.load_cv.total, self.load_cv.count, self.router_entropy.total, self.router_entropy.count,
                self.usage, self.shifts,
            ],
            process_group,
        )  # fmt: skip
        return RoutingSummary(sums[4], sums[5], SumCount(sums[0], sums[1]), SumCount(sums[2], sums[3]))

    def usage_share(self) -> Float[Tensor, "layers operations experts"]:
        """Share of each expert in the selections under an operation; a row of zeros where there was none."""
        return safe_divide(self.usage.double(), self.usage.sum(-1, keepdim=True).double())

    def usage_divergence(self) -> Float[Tensor, " layers"]:
        """Jensen-Shannon divergence of the operations' usage in nats: 0 when experts do not tell them apart."""
        share = self.usage_share()
        present = (self.usage.sum(-1) > 0).double()
        weight = safe_divide(present, present.sum(-1, keepdim=True))
        mixed = torch.einsum("lo,lom->lm", weight, share)
        return entropy(mixed) - (weight * entropy(share)).sum(-1)

    def shift_share(self) -> Float[Tensor, " shifts"]:
        """Share of the pairs of all layers that changed 0, 1, ..., k experts."""
        total = self.shifts.sum(0).double()
        return safe_divide(total, total.sum())

    def metrics(self) -> dict[str, float]:
        """Means over layers for the trainer's log; the Jaccard similarity of c changes is ``(k-c)/(k+c)``."""
        changed = torch.arange(self.shifts.shape[-1], device=self.shifts.device).double()
        k = max(self.shifts.shape[-1] - 1, 1)
        found = {
            "jaccard": (self.shift_share() * (k - changed) / (k + changed)).sum(),
            "load_cv": self.load_cv.compute().mean(),
            "router_entropy": self.router_entropy.compute().mean(),
            "usage_divergence": self.usage_divergence().mean(),
        }
        return {f"routing/{name}": float(value) for name, value in found.items()}
