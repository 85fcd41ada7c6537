"""Whether turns of one operation share experts, and whether two engines route the same tokens alike."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from credit._safe import (
    as_mask,
    compute_dtype,
    masked_sum,
    require_matrix,
    require_shape,
    safe_divide,
    select,
    statistics_dtype,
)
from moe_routing.fields import check_labels, check_selection, check_tokens, recorded_rows
from moe_routing.similarity import PairSimilarity
from moe_routing.sums import all_reduce_sums


def specialization_gap(
    counts: Shaped[Tensor, "*layers fields experts"],
    labels: Bool[Tensor, "fields operations"],
    eligible: Bool[Tensor, " fields"] | None = None,
) -> Float[Tensor, "*layers"]:
    """How much more alike turns of a common operation are than turns without one.

    ``sim(i, j) = sum_e min(h_i(e), h_j(e))`` for the normalised selection counts ``h``;
    ``gap = mean sim over pairs that share an operation - mean sim over pairs that share none``.

    Args:
        counts: selections (or summed probabilities) of each expert in each field, from ``expert_counts``.
        labels: operations of each field.
        eligible: fields to compare, for instance those of one kind; a field without counts never is.

    Returns:
        One gap per layer, 0 when either kind of pair is missing. Pairs cross shards, so it does not add up:
        ``FieldSelection.specialization`` is the form for ranks.

    Raises:
        ValueError: if the three disagree on the number of fields.

    Reference: motivated by paper appendix A.1; the form is ours.

    >>> counts = torch.tensor([[4, 0], [4, 0], [0, 4]])
    >>> specialization_gap(counts, torch.tensor([[True, False], [True, False], [False, True]]))
    tensor(1.)
    """
    fields = counts.shape[-2]
    check_labels(labels, fields, f"counts of shape {tuple(counts.shape)}")
    if eligible is not None:
        require_shape("eligible", eligible, (fields,), f"counts of shape {tuple(counts.shape)}")
        counts = select(eligible[:, None], counts)
    gap = PairSimilarity.of(counts, labels, counts, labels).gap()
    return gap.to(compute_dtype(counts) if counts.is_floating_point() else torch.float32)


@dataclass(frozen=True)
class RoutingDrift:
    """Sums of :func:`routing_drift`; add shards, then read the means.

    ``exact_match``: share of tokens whose two expert sets are equal. ``jaccard``: mean Jaccard similarity.
    ``selected_mass``: share of the probability of the current selection that the recorded one holds too.
    """

    exact_sum: Float[Tensor, ""]
    jaccard_sum: Float[Tensor, ""]
    mass_sum: Float[Tensor, ""]
    tokens: Float[Tensor, ""]

    def __add__(self, other: "RoutingDrift") -> "RoutingDrift":
        return RoutingDrift(*(a + b for a, b in zip(self._sums(), other._sums())))

    def _sums(self) -> list[Tensor]:
        return [self.exact_sum, self.jaccard_sum, self.mass_sum, self.tokens]

    def reduce(self, process_group: Any = None) -> "RoutingDrift":
        """Add up over the ranks of ``process_group``."""
        return RoutingDrift(*all_reduce_sums(self._sums(), process_group))

    @property
    def exact_match(self) -> Float[Tensor, ""]:
        return safe_divide(self.exact_sum, self.tokens)

    @property
    def jaccard(self) -> Float[Tensor, ""]:
        return safe_divide(self.jaccard_sum, self.tokens)

    @property
    def selected_mass(self) -> Float[Tensor, ""]:
        return safe_divide(self.mass_sum, self.tokens)


def routing_drift(
    recorded: Int[Tensor, "tokens k"],
    selected: Int[Tensor, "tokens k"],
    probs: Float[Tensor, "tokens experts"],
    mask: Shaped[Tensor, " tokens"],
) -> RoutingDrift:
    """Compare two recordings of the same tokens: the rollout engine's selection and the trainer's.

    Per token: ``1[R = S]``, ``|R & S| / |R | S|`` and ``sum_{e in R & S} p(e) / sum_{e in S} p(e)``, which is
    ``|R & S| / k`` where the probability of all of ``S`` has underflowed.

    Args:
        recorded: experts ``R`` recorded by the rollout engine.
        selected: experts ``S`` selected by the trainer.
        probs: the trainer's router probabilities.
        mask: tokens to compare; rows with a negative id in either recording, or without a finite probability of
            what was selected, are left out as well.

    Returns:
        Sums and the token count.

    Raises:
        ValueError: if shapes disagree, ``k`` exceeds the number of experts, or an expert does not exist.

    Reference: paper appendix D (R3); the three measures are ours.

    >>> drift = routing_drift(torch.tensor([[0, 1], [0, 1]]), torch.tensor([[1, 0], [1, 2]]),
    ...                       torch.tensor([[0.5, 0.3, 0.2]] * 2), torch.tensor([True, True]))
    >>> round(float(drift.exact_match), 3), round(float(drift.jaccard), 3), round(float(drift.selected_mass), 3)
    (0.5, 0.667, 0.8)
    """
    require_matrix("selected", selected, "[tokens, k]")
    require_shape("recorded", recorded, tuple(selected.shape), "selected")
    check_tokens("probs", probs, selected.shape[0], f"selected of shape {tuple(selected.shape)}")
    require_shape("mask", mask, (selected.shape[0],), f"selected of shape {tuple(selected.shape)}")
    for ids in (recorded, selected):
        check_selection(ids, probs.shape[-1], f"probs of shape {tuple(probs.shape)}")
    dtype, k = statistics_dtype(probs), selected.shape[-1]
    mass = probs.to(dtype).gather(1, selected.clamp(min=0).long())
    finite = torch.isfinite(mass.sum(-1))
    valid = as_mask(mask) & recorded_rows(recorded) & recorded_rows(selected) & finite
    kept = (selected[:, :, None] == recorded[:, None, :]).any(-1)
    same = kept.sum(-1)
    total = mass.sum(-1)
    shared = torch.where(total > 0, safe_divide(select(kept, mass).sum(-1), total), same / max(k, 1))
    return RoutingDrift(
        exact_sum=(valid & (same == k)).sum().to(dtype),
        jaccard_sum=masked_sum(same.to(dtype) / (2 * k - same).clamp(min=1), valid),
        mass_sum=masked_sum(shared, valid),
        tokens=valid.sum().to(dtype),
    )
