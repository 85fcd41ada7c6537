"""Supervised fine-tuning: cross-entropy that puts more weight on the tokens of the tool-call protocol."""

from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from credit._safe import as_mask, bit_mask, compute_dtype, keep_, require_shape, row_blocks, safe_divide


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
        if int(torch.count_nonzero(outside)):  # `any` takes several times as long on a CPU
            row, column = outside.nonzero()[0].tolist()
            raise ValueError(f"format_mask[{row}, {column}] is set, but mask[{row}, {column}] is not")
    dtype = compute_dtype(logp)
    shares = _share(target, denominator, dtype), weight * _share(protocol, format_denominator, dtype)
    loss: Tensor = _WeightedCE.apply(logp, target, protocol, *shares)  # type: ignore[no-untyped-call]
    return loss


def _share(mask: Tensor, denominator: int | float | Tensor | None, dtype: torch.dtype) -> Float[Tensor, ""]:
    count = torch.count_nonzero(mask).to(dtype)
    total = count if denominator is None else torch.as_tensor(denominator, dtype=dtype, device=mask.device)
    return safe_divide(torch.ones_like(total), total)


class _WeightedCE(torch.autograd.Function):
    """-Σ weight · logp, whose derivative is -weight whatever ``logp`` holds."""

    @staticmethod
    def forward(ctx: Any, logp: Tensor, mask: Tensor, protocol: Tensor, share: Tensor, extra: Tensor) -> Tensor:
        dtype, sums = share.dtype, []
        weight = torch.empty_like(logp, dtype=dtype)
        for values, every, some, weights, trained, room in row_blocks(
            logp, mask, protocol, weight, spare=2, dtype=dtype
        ):
            bits = bit_mask(every, dtype, out=room)
            keep_(trained.copy_(values), bits)
            weights.view(bits.dtype).copy_(bits.bitwise_and_(share.view(bits.dtype)))
            bit_mask(some, dtype, out=room).bitwise_and_(extra.view(bits.dtype))
            sums.append(trained.mul_(weights.add_(room)).sum())
        ctx.save_for_backward(weight)
        ctx.dtype = logp.dtype
        return -torch.stack(sums).sum().to(logp.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return (weight * -grad.to(weight.dtype)).to(ctx.dtype), None, None, None, None
