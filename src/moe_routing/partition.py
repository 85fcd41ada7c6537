"""The log-partition of router logits on a processor, in one pass for its value and one for its gradient."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from credit._safe import select
from moe_routing.blocks import row_blocks, select_rows


def log_partition(
    logits: Float[Tensor, "*layers tokens experts"],
) -> tuple[Float[Tensor, "*layers tokens"], Bool[Tensor, "*layers tokens"]]:
    """``log sum_e exp z(e)`` of each usable row, and which rows are; the others get 0 and an exact 0 as gradient.

    ``logsumexp`` takes its exponentials in the backward once more, and each of its steps is a pass over the table.

    >>> log_partition(torch.tensor([[0.0, 0.0], [float("nan"), 0.0]]))
    (tensor([0.6931, 0.0000]), tensor([ True, False]))
    """
    value, usable, _, _ = _LogPartition.apply(logits)  # type: ignore[no-untyped-call]
    return value, usable


class _LogPartition(torch.autograd.Function):
    """:func:`log_partition` with the gradient ``p``."""

    @staticmethod
    def forward(
        logits: Float[Tensor, "*layers tokens experts"],
    ) -> tuple[Float[Tensor, "*layers tokens"], Bool[Tensor, "*layers tokens"], Tensor, Tensor]:
        """Reduce block by block. The highest logit of a row and its sum of exponentials are what the gradient needs."""
        table = logits.reshape(-1, logits.shape[-1])
        top, total, blocks = table.new_empty(len(table)), table.new_empty(len(table)), row_blocks(table)
        space = table.new_empty(blocks[0].stop, table.shape[1])
        for rows in blocks:
            torch.amax(table[rows], -1, out=top[rows])
            below = torch.sub(table[rows], top[rows, None], out=space[: rows.stop - rows.start])
            torch.sum(below.exp_(), -1, out=total[rows])
        usable = torch.isfinite(top)
        value = select(usable, top + total.log())
        shape = logits.shape[:-1]
        return value.reshape(shape), usable.reshape(shape), top.reshape(shape), total.reshape(shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        """Keep numbers of each row, no table."""
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(inputs[0], *output[1:])

    @staticmethod
    def backward(ctx: Any, slope: Float[Tensor, "*layers tokens"], *_: Any) -> Float[Tensor, "*layers tokens experts"]:
        """``p`` times the slope; through a softmax of its own if this is to be differentiated again."""
        logits: Tensor
        logits, usable, top, total = ctx.saved_tensors
        if torch.is_grad_enabled():
            probs = torch.softmax(select_rows(usable, logits), dim=-1)
            return select_rows(usable, probs) * slope[..., None]
        table = logits.reshape(-1, logits.shape[-1])
        gradient, top, share = torch.empty_like(table), top.reshape(-1), (slope / total).reshape(-1)
        for rows in row_blocks(table):
            torch.sub(table[rows], top[rows, None], out=gradient[rows]).exp_().mul_(share[rows, None])
        unusable = (~usable).reshape(-1).nonzero()[:, 0]
        if unusable.numel():
            gradient.index_fill_(0, unusable, 0)
        return gradient.reshape(logits.shape)
