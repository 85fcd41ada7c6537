"""Divergence of the policy from a reference."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit._safe import MAX_LOG_RATIO, bit_mask, compute_dtype, keep_, on_processor, require_shape, row_blocks, select


def kl_k3(
    logp: Float[Tensor, "batch tokens"], ref_logp: Float[Tensor, "batch tokens"]
) -> Float[Tensor, "batch tokens"]:
    r"""Low-variance KL estimate of each sampled token.

    .. math:: k_3 = e^{d} - d - 1 \ge 0, \qquad d = \log\pi_{ref} - \log\pi

    with the exponent held within ±20. Give it to :func:`credit.aggregation.aggregate_loss` with the mask: where the
    aggregate takes nothing, a NaN here reaches neither the loss nor the gradient.

    Args:
        logp: log-probabilities under the current policy; receives the gradient.
        ref_logp: log-probabilities under the reference, a constant.

    Returns:
        Nats per token, in the dtype of ``logp``.

    Raises:
        ValueError: shapes differ.

    Example:
        >>> kl_k3(torch.tensor([[0.0, -1.0]]), torch.tensor([[0.0, 0.0]]))
        tensor([[0.0000, 0.7183]])

    Reference:
        SLCA's per-token KL penalty (beta = 0.001 there; RIVET uses none).
    """
    require_shape("ref_logp", ref_logp, tuple(logp.shape), "logp")
    value: Tensor = _K3.apply(logp, ref_logp)  # type: ignore[no-untyped-call]
    return value


class _K3(torch.autograd.Function):
    """exp(d) - d - 1 through expm1, which keeps small divergences, and a backward that 0 switches off entirely."""

    @staticmethod
    def forward(ctx: Any, logp: Tensor, ref_logp: Tensor) -> Tensor:
        dtype = compute_dtype(logp)
        value, slope, finite = torch.empty_like(logp), torch.empty_like(logp), logp.dtype is not torch.float16
        tables = (logp, ref_logp, value, slope)
        for new, ref, out, kept, apart, growth in row_blocks(*tables, spare=2, dtype=dtype):
            far = _far(torch.sub(ref.to(dtype), new.to(dtype), out=apart))
            torch.expm1(apart if far is None else apart.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO), out=growth)
            torch.sub(growth, apart, out=out).clamp_(min=0.0)
            torch.mul(growth, -1, out=kept)
            if far is not None:
                kept.copy_(select(~far, kept))
                finite = False
        ctx.save_for_backward(slope)
        ctx.finite = finite
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        product = grad * slope
        return product if ctx.finite else keep_(product, bit_mask(grad != 0, grad.dtype)), None


def _far(apart: Float[Tensor, "rows tokens"]) -> Bool[Tensor, "rows tokens"] | None:
    """Where the exponent is held; None if that is nowhere and nothing is NaN, which is looked up on a CPU only."""
    if on_processor(apart) and apart.numel():
        lowest, highest = apart.aminmax()
        if lowest.item() >= -MAX_LOG_RATIO and highest.item() <= MAX_LOG_RATIO:
            return None
    return apart.abs() > MAX_LOG_RATIO
