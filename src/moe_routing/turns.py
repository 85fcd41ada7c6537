"""Turn-level control: the table that tells each field which experts its operations go with, and its objective."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit._safe import require_shape, safe_divide, select, statistics_dtype
from moe_routing.blocks import select_rows
from moe_routing.fields import check_labels
from moe_routing.information import TurnStatistics, check_turns, finite_turns

MIN_TURNS = 8
Reduction = Literal["sum", "mean"]


def check_reduction(reduction: str) -> None:
    """Raise ``ValueError`` for a reduction that this package does not know."""
    if reduction not in ("sum", "mean"):
        raise ValueError(f"reduction must be 'sum' or 'mean', got {reduction!r}")


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
    check_labels(labels, labels.shape[0], "the table")
    fields, operations = labels.shape
    require_shape("tokens", tokens, (fields,), f"labels of shape {tuple(labels.shape)}")
    if pmi.shape[-3] != operations:
        raise ValueError(
            f"pmi has shape {tuple(pmi.shape)}, but labels of shape {tuple(labels.shape)} ask for "
            f"{operations} operations"
        )
    row = per_turn_pmi(pmi, labels, reduction)
    turns = torch.as_tensor(num_turns, device=pmi.device)
    # The product of two int32 counts may not be one.
    control = safe_divide(row, (turns * tokens.long()).to(pmi.dtype)[:, None])
    return select((turns >= min_turns).expand_as(control), control)


def per_turn_pmi(
    pmi: Float[Tensor, "*layers operations 2 experts"],
    labels: Bool[Tensor, "fields operations"],
    reduction: Reduction = "sum",
) -> Float[Tensor, "*layers fields experts"]:
    """``sum_o pmi_o(e, y_io)`` of each field, or the mean over operations."""
    check_reduction(reduction)
    absent, present = pmi.unbind(-2)
    # In float64, which autocast leaves alone: it would run a float32 product in half precision.
    wide = statistics_dtype(pmi)
    row = (labels.to(wide) @ (present - absent).to(wide)).to(pmi.dtype) + absent.sum(-2, keepdim=True)
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
    check_turns(usage, labels, eligible)
    whole = TurnStatistics.from_usage(usage.detach(), labels, eligible) if statistics is None else statistics
    row = per_turn_pmi(whole.pmi(eps, clamp).detach(), labels, reduction).to(usage.dtype)
    counted = eligible & finite_turns(usage)
    score = select_rows(counted.expand(usage.shape[:-1]), usage) * row
    turns = whole.num_turns.to(usage.dtype)
    return select(whole.num_turns >= min_turns, safe_divide(score.sum((-2, -1)), turns))
