"""Supervised fine-tuning: cross-entropy that puts more weight on the tokens of the tool-call protocol."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from credit._safe import as_mask, bit_mask, compute_dtype, keep_, require_shape, safe_divide


def format_weighted_ce(
    logp: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
    format_mask: Shaped[Tensor, "batch tokens"],
    weight: float = 0.5,
    *,
    denominator: int | float | Shaped[Tensor, ""] | None = None,
    format_denominator: int | float | Shaped[Tensor, ""] | None = None,
) -> Float[Tensor, ""]:
    r"""Cross-entropy over all target tokens plus ``weight`` times the cross-entropy over format tokens.

    .. math:: L = -\frac{1}{N} \sum_{m} \log\pi - \frac{\lambda}{|f|} \sum_{f} \log\pi

    Each term is a mean over its own tokens; without a format token the second is 0. This is one weighted cross-entropy
    with weights ``m / N + weight * f / |f|``.

    Args:
        logp: log-probability of each target token, already shifted: position t scores the token at t. The shift is
            made once, where the logits are.
        mask: target tokens (the end-of-turn token belongs to them); elsewhere ``logp`` may hold anything.
        format_mask: protocol tokens, a part of ``mask``.
        weight: :math:`\lambda`.
        denominator: global number of target tokens, for exact micro-batches; counted from ``mask`` by default.
        format_denominator: global number of format tokens.

    Returns:
        A scalar in the dtype of ``logp``; 0 with zero gradient where no token is trained.

    Raises:
        ValueError: shapes differ, or ``format_mask`` marks a token outside ``mask``.

    Example:
        >>> logp, every = torch.tensor([[-1.0, -3.0]]), torch.tensor([[1, 1]])
        >>> format_weighted_ce(logp, every, torch.tensor([[0, 1]]))
        tensor(3.5000)

    Reference:
        RIVET stage II (lambda = 0.5).
    """
    target, protocol = as_mask(mask), as_mask(format_mask)
    require_shape("mask", target, tuple(logp.shape), "logp")
    require_shape("format_mask", protocol, tuple(logp.shape), "logp")
    if not torch.compiler.is_compiling():
        outside = protocol & ~target
        if bool(outside.any()):
            row, column = outside.nonzero()[0].tolist()
            raise ValueError(f"format_mask[{row}, {column}] is set, but mask[{row}, {column}] is not")
    dtype = compute_dtype(logp)
    per_token = _on(target, _share(target, denominator, dtype))
    per_token += _on(protocol, weight * _share(protocol, format_denominator, dtype))
    loss: Tensor = _WeightedCE.apply(logp, target, per_token)  # type: ignore[no-untyped-call]
    return loss


def _on(mask: Bool[Tensor, "batch tokens"], value: Float[Tensor, ""]) -> Float[Tensor, "batch tokens"]:
    """The value on the tokens of the mask, 0 elsewhere."""
    return keep_(value.expand(mask.shape).clone(), bit_mask(mask, value.dtype))


def _share(mask: Tensor, denominator: int | float | Tensor | None, dtype: torch.dtype) -> Float[Tensor, ""]:
    count = mask.sum().to(dtype)
    total = count if denominator is None else torch.as_tensor(denominator, dtype=dtype, device=mask.device)
    return safe_divide(torch.ones_like(total), total)


class _WeightedCE(torch.autograd.Function):
    """-Σ weight · logp, whose derivative is -weight whatever ``logp`` holds."""

    @staticmethod
    def forward(ctx: Any, logp: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.dtype = logp.dtype
        trained = keep_(logp.to(weight.dtype, copy=True), bit_mask(mask, weight.dtype))
        return -trained.mul_(weight).sum().to(logp.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return (weight * -grad.to(weight.dtype)).to(ctx.dtype), None, None
