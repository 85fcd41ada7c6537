"""Agreement of neighbouring rows on a processor: no shifted copy of the table, and one pass for the gradient."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from credit._safe import on_processor
from moe_routing.blocks import row_blocks
from moe_routing.fields import shift_rows


def neighbour_overlap(probs: Float[Tensor, "tokens experts"]) -> Float[Tensor, " tokens"]:
    """``<p_{t-1}, p_t>`` of each row with the one before; what row 0 gets, no pair ever reads.

    >>> neighbour_overlap(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))[1]
    tensor(0.5000)
    """
    if on_processor(probs) and probs.numel():
        value: Tensor = _Overlap.apply(probs)  # type: ignore[no-untyped-call]
        return value
    return (shift_rows(probs) * probs).sum(-1)


class _Overlap(torch.autograd.Function):
    """:func:`neighbour_overlap` with 0 in row 0."""

    @staticmethod
    def forward(probs: Float[Tensor, "tokens experts"]) -> Float[Tensor, " tokens"]:
        blocks = row_blocks(probs[1:])
        value, space = probs.new_zeros(len(probs)), probs.new_empty(blocks[0].stop, probs.shape[1])
        for rows in blocks:
            product = torch.mul(probs[:-1][rows], probs[1:][rows], out=space[: rows.stop - rows.start])
            torch.sum(product, -1, out=value[1:][rows])
        return value

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, slope: Float[Tensor, " tokens"]) -> Float[Tensor, "tokens experts"]:
        """Each row meets the one before it and the one after it."""
        (probs,) = ctx.saved_tensors
        pairs = slope[1:, None]
        if torch.is_grad_enabled():
            nothing = torch.zeros_like(probs[:1])
            return torch.cat([nothing, pairs * probs[:-1]]) + torch.cat([pairs * probs[1:], nothing])
        gradient = torch.empty_like(probs)
        gradient[:1] = 0
        for rows in row_blocks(probs[1:]):
            torch.mul(probs[:-1][rows], pairs[rows], out=gradient[1:][rows])
            gradient[:-1][rows].addcmul_(probs[1:][rows], pairs[rows])
        return gradient
