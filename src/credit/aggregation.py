"""From a loss per token to one number, so that micro-batches and ranks add up to the full batch exactly."""

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from credit._safe import as_mask, compute_dtype, require_floating, require_matrix, require_shape, safe_divide, select

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


def aggregate_loss(
    loss: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
    mode: Aggregation = "token_mean",
    denominator: int | float | Shaped[Tensor, ""] | None = None,
    *,
    horizon: int | None = None,
) -> Float[Tensor, ""]:
    r"""Aggregate a loss per token over the tokens where ``mask`` is true.

    ``token_mean`` is :math:`\sum_{i,t} \ell / N`; ``seq_mean_token_mean`` the mean over rows of the mean of a row;
    ``seq_mean_token_sum`` the mean over rows of the sum of a row; ``seq_mean_token_sum_norm`` that divided by
    ``horizon``. A row without a token counts in no mean of rows.

    Args:
        loss: loss per token; masked tokens may hold anything.
        mask: boolean or 0/1.
        mode: see above.
        denominator: the global count of what the mode averages over: tokens for ``token_mean``, rows with a token
            for the others. With it, the values of the parts of any split add up to the value of the whole. Counted
            from ``mask`` by default.
        horizon: for ``seq_mean_token_sum_norm``; the width of ``mask`` by default. Give a constant where parts
            differ in width.

    Returns:
        A scalar; 0 with zero gradient where nothing is left to average.

    Raises:
        ValueError: shapes differ, ``loss`` holds integers, ``mode`` is unknown, ``denominator`` is a negative number
            or ``horizon`` below 1.

    Example:
        >>> loss, mask = torch.tensor([[1.0, 2.0], [6.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
        >>> aggregate_loss(loss, mask), aggregate_loss(loss, mask, "seq_mean_token_mean")
        (tensor(3.), tensor(3.7500))

    Reference:
        ``token_mean`` is SLCA eq. 5 and RIVET's objective.
    """
    chosen = as_mask(mask)
    require_matrix("loss", loss)
    require_floating("loss", loss)
    require_shape("mask", chosen, tuple(loss.shape), "loss")
    weight = row_weights(chosen, mode, denominator, horizon=horizon, dtype=compute_dtype(loss))
    return (select(chosen, loss).to(weight.dtype).sum(dim=1) * weight).sum().to(loss.dtype)


def row_weights(
    mask: Bool[Tensor, "batch tokens"],
    mode: Aggregation,
    denominator: int | float | Shaped[Tensor, ""] | None = None,
    *,
    horizon: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, " batch"]:
    """What one token of each row weighs in the aggregate; every mode is a weighted sum with constant rows.

    >>> row_weights(torch.tensor([[True, True], [True, False]]), "seq_mean_token_mean")
    tensor([0.2500, 0.5000])
    """
    if mode not in get_args(Aggregation):
        raise ValueError(f"mode must be one of {get_args(Aggregation)}, got {mode!r}")
    if isinstance(denominator, (int, float)) and not denominator >= 0:
        raise ValueError(f"denominator must not be negative, got {denominator}")
    if horizon is not None and horizon < 1:
        raise ValueError(f"horizon must be at least 1, got {horizon}")
    length = mask.sum(dim=1, dtype=torch.int32).to(dtype)  # several times faster than an int64 sum
    nonempty = (length > 0).to(dtype)
    counted = length.sum() if mode == "token_mean" else nonempty.sum()
    total = counted if denominator is None else torch.as_tensor(denominator, dtype=dtype, device=mask.device)
    share = safe_divide(nonempty, total.expand_as(nonempty))
    if mode == "seq_mean_token_mean":
        return safe_divide(share, length)
    if mode == "seq_mean_token_sum_norm":
        return share / max(mask.shape[1] if horizon is None else horizon, 1)
    return share
