"""The policy loss: importance ratio, clip, dual clip, aggregate.

It is one custom autograd function that keeps a single ``[batch, tokens]`` tensor for the backward pass, the derivative
itself. Tokens outside the mask are selected away before any arithmetic.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit._safe import (
    MAX_LOG_RATIO,
    as_mask,
    bit_mask,
    compute_dtype,
    keep_,
    require_matrix,
    require_shape,
    statistics_dtype,
)
from credit.aggregation import Aggregation, row_weights
from credit.stats import ClipStatistics


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss and, detached, the statistics of its tokens."""

    loss: Float[Tensor, ""]
    stats: ClipStatistics


def policy_loss(
    logp: Float[Tensor, "batch tokens"],
    old_logp: Float[Tensor, "batch tokens"],
    advantages: Float[Tensor, "batch *tokens"],
    mask: Shaped[Tensor, "batch tokens"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    mode: Aggregation = "token_mean",
    denominator: int | float | Shaped[Tensor, ""] | None = None,
    horizon: int | None = None,
    ratio_weight: Float[Tensor, "batch tokens"] | None = None,
) -> PolicyLoss:
    r"""Clipped policy-gradient loss with dual clip.

    With :math:`r = \exp(\mathrm{clamp}(\log\pi - \log\pi_{old}, \pm 20))` and
    :math:`s = \min(rA, \mathrm{clip}(r, 1-\epsilon_{low}, 1+\epsilon_{high})A)` the loss of a token is :math:`-s` where
    :math:`A \ge 0` and :math:`-\max(s, cA)` where :math:`A < 0`. Both cases are :math:`-A\,\bar r` with the ratio held
    between the bounds of its sign, which is what is computed.

    Args:
        logp: log-probabilities under the current policy; the only argument that receives a gradient.
        old_logp: log-probabilities under the policy that sampled.
        advantages: ``[B]`` or ``[B, T]``, constants.
        mask: learnable tokens, boolean or 0/1. Elsewhere every argument may hold NaN or infinities.
        clip_low: :math:`\epsilon_{low}`.
        clip_high: :math:`\epsilon_{high}`.
        dual_clip: :math:`c > 1`, or None for plain PPO clip.
        mode: see :func:`credit.aggregation.aggregate_loss`, like ``denominator`` and ``horizon``.
        denominator: global count, for exact micro-batches.
        horizon: for ``seq_mean_token_sum_norm``.
        ratio_weight: a constant that multiplies the ratio before the clip, as in the routing paper's
            consistency-weighted ratio. Its other variant weights the advantage: pass ``advantages * weight``.

    Returns:
        The loss in the dtype of ``logp``, and :class:`credit.stats.ClipStatistics` of the batch.

    Raises:
        ValueError: shapes differ, ``dual_clip`` is not above 1, or a clip width is negative.

    Example:
        >>> logp = torch.tensor([[0.0, 0.5]], requires_grad=True)
        >>> result = policy_loss(logp, torch.zeros(1, 2), torch.tensor([1.0]), torch.ones(1, 2))
        >>> result.loss.backward(); logp.grad
        tensor([[-0.5000, -0.0000]])

    Reference:
        SLCA eq. 5; dual clip as in both papers (c = 3).
    """
    learnable = as_mask(mask)
    require_matrix("logp", logp)
    weighted = () if ratio_weight is None else (("ratio_weight", ratio_weight),)
    for name, value in (("old_logp", old_logp), ("mask", learnable), *weighted):
        require_shape(name, value, tuple(logp.shape), "logp")
    per_row = advantages.dim() == 1
    require_shape("advantages", advantages, tuple(logp.shape[:1] if per_row else logp.shape), "logp")
    credit = advantages[:, None].expand(logp.shape) if per_row else advantages
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1 or None, got {dual_clip}")
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(f"clip_low and clip_high must not be negative, got {clip_low} and {clip_high}")
    weight = row_weights(learnable, mode, denominator, horizon=horizon, dtype=compute_dtype(logp))
    bounds = (1 - clip_low, 1 + clip_high, torch.inf if dual_clip is None else dual_clip)
    loss, sums = _Surrogate.apply(logp, old_logp, credit, learnable, weight, ratio_weight, bounds)  # type: ignore[no-untyped-call]
    return PolicyLoss(loss, ClipStatistics(*sums.unbind(0)))


class _Surrogate(torch.autograd.Function):
    """Σ_b w_b Σ_t -A·r̄ with its derivative -A·r where the ratio lies between its bounds, else 0. Kept: A·r."""

    @staticmethod
    def forward(
        ctx: Any,
        logp: Tensor,
        old_logp: Tensor,
        advantages: Tensor,
        mask: Tensor,
        weight: Tensor,
        ratio_weight: Tensor | None,
        bounds: tuple[float, float, float],
    ) -> tuple[Tensor, Tensor]:
        floor, ceiling, dual = bounds
        dtype = compute_dtype(logp)
        learnable = bit_mask(mask, dtype)
        credit = keep_(advantages.to(dtype, copy=True), learnable)
        change = keep_(logp.to(dtype) - old_logp.to(dtype), learnable)
        # Results go into buffers whose content is spent: touching fresh memory costs more than this arithmetic does.
        spare = change.abs()
        far = spare > MAX_LOG_RATIO
        unweighted = keep_(torch.exp(change.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO), out=spare), learnable)
        ratio_max = unweighted.new_zeros(()) if unweighted.numel() == 0 else unweighted.amax()
        spare = torch.expm1(change)
        kl_sum = spare.sub_(change).sum()
        ratio = unweighted if ratio_weight is None else keep_(ratio_weight.to(dtype, copy=True), learnable)
        ratio = ratio if ratio_weight is None else ratio.mul_(unweighted)

        falls = credit < 0
        low, high, dualled = (ratio < floor) & falls, (ratio > ceiling) & ~falls, (ratio > dual) & falls
        # Each sign of the credit meets the ratio between its own bounds; the other sign is 0 there.
        gain = torch.clamp(ratio, max=ceiling, out=change).mul_(torch.clamp(credit, min=0, out=spare)).sum(dim=1)
        gain += torch.clamp(ratio, floor, dual, out=change).mul_(torch.clamp(credit, max=0, out=spare)).sum(dim=1)
        counts = [torch.count_nonzero(which) for which in (mask, low, high & (credit > 0), dualled)]
        # A NaN on a learnable token must stay loud in the gradient too: a NaN ratio is neither below nor above, and a
        # stopped ratio is zeroed before it meets the advantage, which may be NaN.
        stopped = low.logical_or_(high).logical_or_(dualled).logical_or_(far)
        slope = keep_(ratio, learnable.copy_(stopped.logical_not_()).neg_()).mul_(credit)
        ctx.save_for_backward(slope.to(logp.dtype), weight)
        wide = statistics_dtype(ratio)
        sums = torch.stack([figure.to(wide) for figure in (*counts, kl_sum, ratio_max)])
        ctx.mark_non_differentiable(sums)
        # No dot product: autocast would run one in half precision.
        return (-gain * weight).sum().to(logp.dtype), sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        slope, weight = ctx.saved_tensors
        grad = (slope * -(grad_loss.to(weight.dtype) * weight)[:, None]).to(slope.dtype)
        return grad, None, None, None, None, None, None
