"""rho: how much of the injection a token gets, by the gradient that reaches it anyway."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit._safe import compute_dtype, on_processor, safe_divide, select
from moe_routing.blocks import row_blocks


def gradient_share(
    grad_in: Float[Tensor, "tokens experts"], field: Int[Tensor, " tokens"], num_fields: int
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """``rho_t = |g_t| / max_{t' in the same field} |g_t'|`` in [0, 1], and where it is positive.

    Rows outside fields, with a zero gradient or with one that is not finite have rho 0; the last kind does not
    enter the maximum, so one NaN cannot silence a field.

    >>> gradient_share(torch.tensor([[3.0, 4.0], [0.0, 1.0], [9.0, 9.0]]), torch.tensor([2, 2, -1]), 3)[0]
    tensor([1.0000, 0.2000, 0.0000])
    """
    norm = row_norm(grad_in)
    counted = (field >= 0) & torch.isfinite(norm) & (norm > 0)
    norm = select(counted, norm)
    row = field.clamp(min=0).long()
    highest = norm.new_zeros(max(num_fields, 1)).scatter_reduce(0, row, norm, "amax")
    return select(counted, safe_divide(norm, highest[row])), counted


def row_norm(x: Float[Tensor, "tokens experts"]) -> Float[Tensor, " tokens"]:
    """L2 norm of each row in float32 or wider, not finite where the row is not and only there.

    >>> row_norm(torch.tensor([[3e30, 4e30], [3e-30, 4e-30], [float("inf"), 0.0]]))
    tensor([5.0000e+30, 5.0000e-30,        nan])
    """
    return torch.cat([_block_norm(x[rows]) for rows in row_blocks(x)])


def _block_norm(x: Float[Tensor, "tokens experts"]) -> Float[Tensor, " tokens"]:
    wide = x.to(compute_dtype(x))
    if not on_processor(x):
        return _scaled_norm(wide)
    norm: Tensor = torch.linalg.vector_norm(wide, dim=-1)
    # Squares have left the range of the dtype, or have lost digits near its lower end.
    range_of = torch.finfo(wide.dtype)
    lost = ~((norm > range_of.tiny**0.5 / range_of.eps) & (norm <= range_of.max))
    index = lost.nonzero()[:, 0]
    return norm.index_copy_(0, index, _scaled_norm(wide.index_select(0, index))) if index.numel() else norm


def _scaled_norm(x: Float[Tensor, "tokens experts"]) -> Float[Tensor, " tokens"]:
    """In units of the row's largest entry, whose square neither underflows nor overflows."""
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0])
    size = x.abs()
    peak = size.amax(-1)
    finite = torch.isfinite(peak)
    unit = torch.where(finite & (peak > 0), peak, torch.ones_like(peak))
    norm = torch.linalg.vector_norm(size.div_(unit[:, None]), dim=-1) * unit
    return torch.where(finite, norm.clamp(max=torch.finfo(x.dtype).max), torch.nan)
