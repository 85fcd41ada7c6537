"""Divergence of the policy from a reference."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit._safe import MAX_LOG_RATIO, bit_mask, compute_dtype, keep_, require_shape


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
        apart = ref_logp.to(dtype) - logp.to(dtype)
        inside = ~(apart.abs() > MAX_LOG_RATIO)
        bounded = apart.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        growth = torch.expm1(bounded)
        value = torch.sub(growth, bounded, out=bounded).clamp_(min=0.0)
        ctx.save_for_backward(keep_(growth.neg_(), bit_mask(inside, dtype)).to(logp.dtype))
        return value.to(logp.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return keep_(grad * slope, bit_mask(grad != 0, grad.dtype)), None
