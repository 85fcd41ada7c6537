"""rho: how much of the injection a token gets, by the gradient that reaches it anyway."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit._safe import compute_dtype, safe_divide, select


def gradient_share(
    grad_in: Float[Tensor, "tokens experts"], field: Int[Tensor, " tokens"], num_fields: int
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """``rho_t = |g_t| / max_{t' in the same field} |g_t'|`` in [0, 1], and where it is positive.

    Rows outside fields, with a zero gradient or with one that is not finite have rho 0; the last kind does not
    enter the maximum, so one NaN cannot silence a field.

    >>> gradient_share(torch.tensor([[3.0, 4.0], [0.0, 1.0], [9.0, 9.0]]), torch.tensor([2, 2, -1]), 3)[0]
    tensor([1.0000, 0.2000, 0.0000])
    """
    dtype = compute_dtype(grad_in)
    size = grad_in.to(dtype).abs()
    peak = size.amax(-1)
    counted = (field >= 0) & torch.isfinite(peak) & (peak > 0)
    peak = torch.where(counted, peak, torch.ones_like(peak))
    # In units of the peak: squares of small gradients underflow, those of large ones overflow.
    norm = torch.linalg.vector_norm(size.div_(peak[:, None]), dim=-1)
    norm = select(counted, (norm * peak).clamp(max=torch.finfo(dtype).max))
    row = field.clamp(min=0).long()
    highest = norm.new_zeros(max(num_fields, 1)).scatter_reduce(0, row, norm, "amax")
    return select(counted, safe_divide(norm, highest[row])), counted


def unit_share(
    grad_in: Float[Tensor, "tokens experts"], field: Int[Tensor, " tokens"]
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """rho = 1 for every token of a field whose gradient is finite."""
    counted = (field >= 0) & torch.isfinite(grad_in).all(-1)
    return counted.to(compute_dtype(grad_in)), counted
