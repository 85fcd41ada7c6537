"""Turn-level control: the mutual information between experts and operations, and its control table.

Everything is per layer and per kind of field: ``eligible`` picks the turns of one kind, and the statistics are
sums, so micro-batches and ranks add up and every rank ends with the same table.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit._safe import compute_dtype, require_shape, safe_divide, select, statistics_dtype
from moe_routing.fields import check_ids, check_tokens
from moe_routing.sums import all_reduce_sums

MIN_TURNS = 8
Reduction = Literal["sum", "mean"]


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
    check_tokens("field", field, probs.shape[-2], f"probs of shape {tuple(probs.shape)}")
    check_ids("field", field, num_fields, f"num_fields={num_fields}")
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
        fields = usage.shape[-2]
        check_tokens("labels", labels, fields, f"usage of shape {tuple(usage.shape)}")
        require_shape("eligible", eligible, (fields,), f"usage of shape {tuple(usage.shape)}")
        dtype = statistics_dtype(usage)
        counted = eligible & torch.isfinite(usage).all(-1).reshape(-1, fields).all(0)
        q = select(counted[:, None], usage.to(dtype))
        y = (labels & counted[:, None]).to(dtype)
        return cls(q.sum(-2), y.T @ q, y.sum(0), counted.sum())

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


def turn_control(
    pmi: Float[Tensor, "*layers operations 2 experts"],
    labels: Bool[Tensor, "fields operations"],
    tokens: Int[Tensor, " fields"],
    num_turns: int | Int[Tensor, ""],
    *,
    min_turns: int = MIN_TURNS,
    reduction: Reduction = "sum",
) -> Float[Tensor, "*layers fields experts"]:
    """Control row of each field: the derivative of ``J_turn`` at the probabilities of any of its tokens.

    ``s_i(e) = (1 / (N_f |T_i|)) sum_o pmi_o(e, y_io)``

    Args:
        pmi: from :meth:`TurnStatistics.pmi` over the whole batch of all ranks.
        labels: operations of each field.
        tokens: tokens of each field *in the whole batch*. A row with 0 tokens is all zeros: give 0 for the
            fields that the statistics left out, such as those of the other kind.
        num_turns: ``N_f`` of the same statistics.
        min_turns: fewer turns than this give no signal.
        reduction: ``"sum"`` over operations (the paper) or ``"mean"`` (ours).

    Returns:
        The table; row ``f`` belongs to field id ``f``.

    Raises:
        ValueError: if shapes disagree or the reduction is unknown.

    Reference: paper section 3.1 and appendix C.5.

    >>> pmi = torch.tensor([[[0.0, 0.0], [2.0, -2.0]]])
    >>> turn_control(pmi, torch.tensor([[True], [False]]), torch.tensor([1, 1]), 8)
    tensor([[ 0.2500, -0.2500],
            [ 0.0000,  0.0000]])
    """
    fields, operations = labels.shape
    require_shape("tokens", tokens, (fields,), f"labels of shape {tuple(labels.shape)}")
    if pmi.shape[-3] != operations:
        raise ValueError(
            f"pmi has shape {tuple(pmi.shape)}, but labels of shape {tuple(labels.shape)} ask for "
            f"{operations} operations"
        )
    row = per_turn_pmi(pmi, labels, reduction)
    turns = torch.as_tensor(num_turns, device=pmi.device)
    control = safe_divide(row, (turns * tokens).to(pmi.dtype)[:, None])
    return select((turns >= min_turns).expand_as(control), control)


def per_turn_pmi(
    pmi: Float[Tensor, "*layers operations 2 experts"],
    labels: Bool[Tensor, "fields operations"],
    reduction: Reduction = "sum",
) -> Float[Tensor, "*layers fields experts"]:
    """``sum_o pmi_o(e, y_io)`` of each field, or the mean over operations."""
    if reduction not in ("sum", "mean"):
        raise ValueError(f"reduction must be 'sum' or 'mean', got {reduction!r}")
    absent, present = pmi.unbind(-2)
    row = labels.to(pmi.dtype) @ (present - absent) + absent.sum(-2, keepdim=True)
    return row / max(labels.shape[-1], 1) if reduction == "mean" else row


def turn_objective(
    usage: Float[Tensor, "*layers fields experts"],
    labels: Bool[Tensor, "fields operations"],
    eligible: Bool[Tensor, " fields"],
    statistics: TurnStatistics | None = None,
    *,
    min_turns: int = MIN_TURNS,
    reduction: Reduction = "sum",
    eps: float = 1e-12,
    clamp: float = 20.0,
) -> Float[Tensor, "*layers"]:
    """Stabilised turn-level objective, to be maximised, differentiable in ``usage`` with pmi held constant.

    ``J_turn = sum_o sum_{e,y} P(e,y) pmi_o(e,y) = (1/N_f) sum_i <q_i, sum_o pmi_o(., y_io)>``

    Where nothing is clamped, holding pmi constant loses nothing: the plug-in information has this gradient.

    Args:
        usage: ``q_i``, from :func:`turn_usage`.
        labels: operations of each field.
        eligible: fields of the kind at hand that own a token.
        statistics: of the whole batch of all ranks, so that the values of shards add up to ``J_turn``; those of
            the arguments when absent.
        min_turns, reduction: as in :func:`turn_control`.
        eps, clamp: as in :meth:`TurnStatistics.pmi`.

    Returns:
        One value per layer, 0 with zero gradient below ``min_turns``.

    Raises:
        ValueError: if shapes disagree or the reduction is unknown.

    Reference: paper section 3.1, eq. 3.3.

    >>> usage = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat(4, 1)
    >>> labels = torch.tensor([[True], [False]]).repeat(4, 1)
    >>> turn_objective(usage, labels, torch.ones(8, dtype=torch.bool))
    tensor(0.6931)
    """
    own = TurnStatistics.from_usage(usage.detach(), labels, eligible)
    whole = own if statistics is None else statistics
    row = per_turn_pmi(whole.pmi(eps, clamp).detach(), labels, reduction).to(usage.dtype)
    counted = eligible & torch.isfinite(usage).all(-1).reshape(-1, usage.shape[-2]).all(0)
    score = select(counted[:, None], usage) * row
    turns = whole.num_turns.to(usage.dtype)
    return select(whole.num_turns >= min_turns, safe_divide(score.sum((-2, -1)), turns))
