"""Policy objectives weighted by routing consistency, two of the variants that the paper compares."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from credit._safe import MAX_LOG_RATIO, as_mask, compute_dtype, require_shape, select


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
    log_ratio, advantages, kappa = _prepare(log_ratio, advantages, kappa, mask)
    return select(as_mask(mask), _clipped(log_ratio.exp(), kappa * advantages, clip))


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
    log_ratio, advantages, kappa = _prepare(log_ratio, advantages, kappa, mask)
    return select(as_mask(mask), _clipped(kappa * log_ratio.exp(), advantages, clip))


def _clipped(ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def _prepare(log_ratio: Tensor, advantages: Tensor, kappa: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Check shapes and silence whatever lies under the mask before it is exponentiated."""
    shape, like = tuple(log_ratio.shape), f"log_ratio of shape {tuple(log_ratio.shape)}"
    for name, tensor in (("advantages", advantages), ("kappa", kappa), ("mask", mask)):
        require_shape(name, tensor, shape, like)
    dtype = compute_dtype(log_ratio)
    mask = as_mask(mask)
    safe = select(mask, log_ratio.to(dtype)).clamp(max=MAX_LOG_RATIO)
    return safe, select(mask, advantages.detach().to(dtype)), select(mask, kappa.detach().to(dtype))
