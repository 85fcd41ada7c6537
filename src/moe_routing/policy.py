"""Policy objectives weighted by routing consistency, two of the variants that the paper compares."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from credit._safe import (
    MAX_LOG_RATIO,
    as_mask,
    bit_mask,
    compute_dtype,
    keep,
    keep_,
    keep_bits,
    on_processor,
    require_shape,
    select,
)


def kappa_advantage_objective(
    log_ratio: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    kappa: Float[Tensor, "*tokens"],
    mask: Shaped[Tensor, "*tokens"],
    *,
    clip: float = 0.2,
) -> Float[Tensor, "*tokens"]:
    """Clipped policy objective of each token with its advantage weighted by kappa.

    ``min(r A', clip(r, 1 - c, 1 + c) A')`` with ``A' = kappa A``

    Args:
        log_ratio: ``log pi - log pi_old``, the only argument that gets a gradient.
        advantages: advantage of each token.
        kappa: ``consensus_overlap`` of each token, 1 outside fields.
        mask: generated tokens; the objective is 0 elsewhere, with zero gradient.
        clip: clipping range.

    Returns:
        The objective, to be maximised, before the base loss's own reduction.

    Raises:
        ValueError: if shapes disagree.

    Reference: paper appendix B.4.

    >>> one = torch.ones(1)
    >>> kappa_advantage_objective(0 * one, 2 * one, 0.5 * one, one > 0)
    tensor([1.])
    """
    keep = _keeper(log_ratio, advantages, kappa, mask)
    dtype = compute_dtype(log_ratio)
    weighted = kappa.detach().to(dtype) * advantages.detach().to(dtype)
    return _clipped(_ratio(keep(log_ratio)), weighted, as_mask(mask), clip)


def kappa_ratio_objective(
    log_ratio: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    kappa: Float[Tensor, "*tokens"],
    mask: Shaped[Tensor, "*tokens"],
    *,
    clip: float = 0.2,
) -> Float[Tensor, "*tokens"]:
    """Clipped policy objective of each token with its probability ratio weighted by kappa, before the clipping.

    ``min(r' A, clip(r', 1 - c, 1 + c) A)`` with ``r' = kappa r``

    Arguments, returns and errors as for :func:`kappa_advantage_objective`. Reference: paper appendix B.4.

    >>> one = torch.ones(1)
    >>> kappa_ratio_objective(0 * one, 2 * one, 0.5 * one, one > 0)
    tensor([1.])
    """
    keep = _keeper(log_ratio, advantages, kappa, mask)
    dtype = compute_dtype(log_ratio)
    weighted = kappa.detach().to(dtype) * _ratio(keep(log_ratio))
    return _clipped(weighted, advantages.detach().to(dtype), as_mask(mask), clip)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.to(compute_dtype(log_ratio)).clamp(max=MAX_LOG_RATIO).exp()


def _clipped(ratio: Tensor, advantages: Tensor, present: Tensor, clip: float) -> Tensor:
    if on_processor(ratio):
        value: Tensor = _Clipped.apply(ratio, advantages, present, clip)[0]  # type: ignore[no-untyped-call]
        return value
    return select(present, torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages))


def _keeper(log_ratio: Tensor, advantages: Tensor, kappa: Tensor, mask: Tensor) -> Callable[[Tensor], Tensor]:
    """Check shapes; silence what lies under the mask: around a chain, neither a value nor a gradient gets out."""
    shape, like = tuple(log_ratio.shape), f"log_ratio of shape {tuple(log_ratio.shape)}"
    for name, tensor in (("advantages", advantages), ("kappa", kappa), ("mask", mask)):
        require_shape(name, tensor, shape, like)
    return partial(keep, as_mask(mask))


class _Clipped(torch.autograd.Function):
    """The masked minimum of both products: one set of bits holds where the unclipped one, or neither, is above."""

    generate_vmap_rule = True

    @staticmethod
    def forward(ratio: Tensor, advantages: Tensor, present: Tensor, clip: float) -> tuple[Tensor, Tensor]:
        whole, bounded = ratio * advantages, ratio.clamp(1 - clip, 1 + clip).mul_(advantages)
        # Not `<=`: the gradient of a NaN is a NaN, where it is not masked.
        bits = bit_mask(~(whole > bounded) & present, ratio.dtype)
        return keep_(torch.minimum(whole, bounded), bit_mask(present, ratio.dtype)), bits

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[1], output[1])

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
        advantages, bits = ctx.saved_tensors
        return keep_bits(slope * advantages, bits), None, None, None
