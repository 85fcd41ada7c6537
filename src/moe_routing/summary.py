"""What a report shows of one batch, as sums: expert usage by operation, shifts, load, router entropy."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit._safe import require_shape, safe_divide, select
from moe_routing.fields import check_ids, check_labels, check_selection
from moe_routing.metrics import entropy
from moe_routing.selection import FieldSelection
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
    {'routing/jaccard': 1.0, 'routing/mean_shift': 0.0, 'routing/load_cv': 0.0, 'routing/router_entropy': 0.693,
     'routing/usage_divergence': 0.693}
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
            trajectory: trajectory id per token, one for all tokens of a field; tokens outside fields do not count
                for the load either.

        Raises:
            ValueError: if shapes disagree or an id is out of range.
        """
        require_shape("selected", selected, (*probs.shape[:2], selected.shape[-1]), f"probs {tuple(probs.shape)}")
        require_shape("field", field, (probs.shape[1],), f"probs of shape {tuple(probs.shape)}")
        require_shape("trajectory", trajectory, (probs.shape[1],), f"probs of shape {tuple(probs.shape)}")
        check_ids("field", field, labels.shape[0], f"labels of shape {tuple(labels.shape)}")
        check_selection(selected, probs.shape[-1], f"probs of shape {tuple(probs.shape)}")
        certain = entropy(select((field >= 0)[None, :, None], probs.float()))
        layers = [
            FieldSelection.of(chosen, sure, field, labels.shape[0], probs.shape[-1])
            for chosen, sure in zip(selected, certain)
        ]
        return cls.from_fields(FieldSelection.stack(layers), labels, field_owner(field, trajectory, labels.shape[0]))

    @classmethod
    def from_fields(
        cls, selection: FieldSelection, labels: Bool[Tensor, "fields operations"], trajectory: Int[Tensor, " fields"]
    ) -> "RoutingSummary":
        """Summary of a batch from the counts of its fields; ``trajectory`` is -1 for those outside the load."""
        fields = selection.counts.shape[1]
        check_labels(labels, fields, f"counts of shape {tuple(selection.counts.shape)}")
        require_shape("trajectory", trajectory, (fields,), f"counts {tuple(selection.counts.shape)}")
        return cls(selection.usage(labels), selection.shifts, selection.load_cv(trajectory), selection.router_entropy)

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
        k, share = max(self.shifts.shape[-1] - 1, 1), self.shift_share()
        found = {
            "jaccard": (share * (k - changed) / (k + changed)).sum(),
            "mean_shift": (share * changed).sum(),
            "load_cv": self.load_cv.compute().mean(),
            "router_entropy": self.router_entropy.compute().mean(),
            "usage_divergence": self.usage_divergence().mean(),
        }
        values = torch.stack(list(found.values())).tolist()
        return {f"routing/{name}": value for name, value in zip(found, values)}


def field_owner(
    field: Int[Tensor, " tokens"], trajectory: Int[Tensor, " tokens"], num_fields: int
) -> Int[Tensor, " fields"]:
    """Trajectory of each field, -1 for fields without tokens.

    >>> field_owner(torch.tensor([-1, 1, 1, 0]), torch.tensor([5, 5, 5, 7]), 3).tolist()
    [7, 5, -1]
    """
    inside = field >= 0
    owner = trajectory.new_full((num_fields,), -1)
    return owner.scatter_reduce(0, field[inside].long(), trajectory[inside], "amax")
