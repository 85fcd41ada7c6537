"""The mutual information between experts and operations, as sums over turns.

Everything is per layer and per kind of field: ``eligible`` picks the turns of one kind, and the statistics are
sums, so micro-batches and ranks add up and every rank ends with the same table.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit._safe import compute_dtype, require_shape, safe_divide, select, statistics_dtype
from moe_routing.blocks import row_blocks, select_rows
from moe_routing.fields import check_ids, check_labels
from moe_routing.sums import all_reduce_sums


def turn_usage(
    probs: Float[Tensor, "*layers tokens experts"], field: Int[Tensor, " tokens"], num_fields: int
) -> tuple[Float[Tensor, "*layers fields experts"], Int[Tensor, " fields"]]:
    """Mean router distribution of each field, ``q_i(e) = (1/|T_i|) sum_{j in T_i} p_j(e)``.

    Args:
        probs: router probabilities.
        field: field id per token, -1 outside generated fields; ids need not be contiguous.
        num_fields: rows of the result, above every id.

    Returns:
        The usage (0 for a field without tokens), differentiable in ``probs``, and the tokens of each field. A
        NaN stays in its own field.

    Raises:
        ValueError: if shapes disagree or an id has no row.

    Reference: paper section 3.1.

    >>> usage, tokens = turn_usage(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]), torch.tensor([1, 1, -1]), 2)
    >>> usage.tolist(), tokens.tolist()
    ([[0.0, 0.0], [0.5, 0.5]], [0, 2])
    """
    require_shape("field", field, (probs.shape[-2],), f"probs of shape {tuple(probs.shape)}")
    check_ids("field", field, num_fields, f"num_fields={num_fields}")
    return field_means(probs, field, num_fields)


def field_means(
    probs: Float[Tensor, "*layers tokens experts"], field: Int[Tensor, " tokens"], num_fields: int
) -> tuple[Float[Tensor, "*layers fields experts"], Int[Tensor, " fields"]]:
    """:func:`turn_usage` of ids known to be in range, without a look at the data."""
    wide = probs.to(compute_dtype(probs))
    # Tokens outside fields add into a spare row that is dropped, NaN and all.
    row = torch.where(field >= 0, field, num_fields).long()
    sums = wide.new_zeros(*wide.shape[:-2], num_fields + 1, wide.shape[-1]).index_add(-2, row, wide)[..., :-1, :]
    tokens = torch.zeros_like(row).new_zeros(num_fields + 1).index_add(0, row, torch.ones_like(row))[:-1]
    return safe_divide(sums, tokens.to(wide.dtype)[:, None]), tokens


@dataclass(frozen=True)
class TurnStatistics:
    """Sufficient statistics of the plug-in mutual information of experts and operations.

    Attributes:
        usage_sum: ``sum_i q_i``.
        joint_sum: ``sum_i q_i y_io``.
        label_count: ``sum_i y_io``.
        num_turns: ``N_f``, the number of turns in the sums.

    Reference: paper section 3.1, eq. 3.1 to 3.3.

    >>> usage = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> labels = torch.tensor([[True], [False]])
    >>> TurnStatistics.from_usage(usage, labels, torch.tensor([True, True])).information()
    tensor([0.6931], dtype=torch.float64)
    """

    usage_sum: Float[Tensor, "*layers experts"]
    joint_sum: Float[Tensor, "*layers operations experts"]
    label_count: Float[Tensor, " operations"]
    num_turns: Int[Tensor, ""]

    @classmethod
    def from_usage(
        cls,
        usage: Float[Tensor, "*layers fields experts"],
        labels: Bool[Tensor, "fields operations"],
        eligible: Bool[Tensor, " fields"],
    ) -> "TurnStatistics":
        """Add up the eligible turns.

        A turn whose usage is not finite in some layer takes no part in any: one NaN logit must not reach the
        table that every token shares. Sums are float64, because ``P(e, absent)`` is a difference of two of
        them, and float32 noise there is larger than the epsilon of :meth:`pmi`.

        Raises:
            ValueError: if the three disagree on the number of fields.
        """
        check_turns(usage, labels, eligible)
        counted = eligible & finite_turns(usage)
        weights = torch.cat([counted[:, None], labels & counted[:, None]], dim=1).to(statistics_dtype(usage))
        learns = usage.requires_grad and torch.is_grad_enabled()
        # In blocks, the copy in float64 never leaves the cache.
        blocks = [slice(None)] if learns else row_blocks(counted, 2 * usage[..., :1, :].numel())
        sums = _weighted_sums(usage[..., blocks[0], :], counted[blocks[0]], weights[blocks[0]])
        for rows in blocks[1:]:
            sums = sums + _weighted_sums(usage[..., rows, :], counted[rows], weights[rows])
        return cls(sums[..., 0, :], sums[..., 1:, :], weights[:, 1:].sum(0), counted.sum())

    def __add__(self, other: "TurnStatistics") -> "TurnStatistics":
        if self.joint_sum.shape != other.joint_sum.shape:
            raise ValueError(
                f"statistics of shape {tuple(other.joint_sum.shape)} (layers, operations, experts) "
                f"do not add to {tuple(self.joint_sum.shape)}"
            )
        return TurnStatistics(*(a + b for a, b in zip(self._sums(), other._sums())))

    def _sums(self) -> list[Tensor]:
        return [self.usage_sum, self.joint_sum, self.label_count, self.num_turns]

    def reduce(self, process_group: Any = None) -> "TurnStatistics":
        """Add up over the ranks of ``process_group`` with one all-reduce of ``L (O + 1) M`` numbers."""
        return TurnStatistics(*all_reduce_sums(self._sums(), process_group))

    def joint(self) -> Float[Tensor, "*layers operations 2 experts"]:
        """``P(e, y)`` for y = absent, present; all zeros without turns."""
        absent = (self.usage_sum[..., None, :] - self.joint_sum).clamp(min=0)
        return safe_divide(torch.stack([absent, self.joint_sum], dim=-2), self._turns())

    def pmi(self, eps: float = 1e-12, clamp: float = 20.0) -> Float[Tensor, "*layers operations 2 experts"]:
        """``pmi_o(e, y) = clamp(log((P(e,y) + eps) / (P(e) P(y) + eps)), -clamp, clamp)``.

        An operation of all turns or of none tells nothing: its rows are exactly 0.
        """
        turns = self._turns()
        present = safe_divide(self.label_count, turns)
        share = torch.stack([1 - present, present], dim=-1)
        expected = safe_divide(self.usage_sum, turns)[..., None, None, :] * share[..., None]
        value = torch.log((self.joint() + eps) / (expected + eps)).clamp(-clamp, clamp)
        telling = (self.label_count > 0) & (self.label_count < turns)
        return select(telling[:, None, None], value)

    def information(self) -> Float[Tensor, "*layers operations"]:
        """``I(E; Y_o) = sum_{e,y} P(e,y) pmi_o(e,y)`` in nats, differentiable in the usage."""
        return (self.joint() * self.pmi()).sum((-2, -1))

    def _turns(self) -> Float[Tensor, ""]:
        return self.num_turns.to(self.usage_sum.dtype)


def check_turns(usage: Tensor, labels: Tensor, eligible: Tensor) -> None:
    """Raise ``ValueError`` if the three disagree on the number of fields."""
    like = f"usage of shape {tuple(usage.shape)}"
    check_labels(labels, usage.shape[-2], like)
    require_shape("eligible", eligible, (usage.shape[-2],), like)


def _weighted_sums(
    usage: Float[Tensor, "*layers fields experts"],
    counted: Bool[Tensor, " fields"],
    weights: Float[Tensor, "fields columns"],
) -> Float[Tensor, "*layers columns experts"]:
    """``sum_i w_i q_i`` over the turns that count, for each column of weights."""
    return weights.T @ select_rows(counted.expand(usage.shape[:-1]), usage.to(weights.dtype))


def finite_turns(usage: Float[Tensor, "*layers fields experts"]) -> Bool[Tensor, " fields"]:
    """True for the turns whose usage is finite in every layer."""
    # Entries lie in [0, 1], so that their sum is finite just where all of them are.
    finite = torch.isfinite(usage.detach().sum(-1))
    return finite if finite.dim() == 1 else finite.flatten(0, -2).all(0)
