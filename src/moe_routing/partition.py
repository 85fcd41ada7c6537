"""The log-partition of router logits on a processor: one softmax serves its value and its gradient."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_routing.blocks import row_blocks, select_rows
from moe_routing.router import usable_rows


def log_partition(
    logits: Float[Tensor, "*layers tokens experts"],
) -> tuple[Float[Tensor, "*layers tokens"], Bool[Tensor, "*layers tokens"]]:
    """``log sum_e exp z(e)`` of each usable row, and which rows are; the others get 0 and an exact 0 as gradient.

    ``logsumexp`` takes its exponentials in the backward once more, and each of its steps is a pass over the table.

    >>> log_partition(torch.tensor([[0.0, 0.0], [float("nan"), 0.0]]))
    (tensor([0.6931, 0.0000]), tensor([ True, False]))
    """
    value, usable, _ = _LogPartition.apply(logits)  # type: ignore[no-untyped-call]
    return value, usable


class _LogPartition(torch.autograd.Function):
    """:func:`log_partition` with the gradient ``p``."""

    @staticmethod
    def forward(
        logits: Float[Tensor, "*layers tokens experts"],
    ) -> tuple[Float[Tensor, "*layers tokens"], Bool[Tensor, "*layers tokens"], Tensor]:
        """Take the softmax block by block; its largest entry is ``exp(max z - log sum exp z)``."""
        table = logits.reshape(-1, logits.shape[-1])
        probs, top, largest = torch.empty_like(table), table.new_empty(len(table)), table.new_empty(len(table))
        for rows in row_blocks(table):
            torch.softmax(table[rows], dim=-1, out=probs[rows])
            torch.amax(table[rows], -1, out=top[rows])
            torch.amax(probs[rows], -1, out=largest[rows])
        usable = torch.isfinite(top)
        unusable = (~usable).nonzero()[:, 0]
        if unusable.numel():
            probs.index_fill_(0, unusable, 0)
        value = top.sub_(largest.log_()).index_fill_(0, unusable, 0).reshape(logits.shape[:-1])
        return value, usable.reshape(value.shape), probs.reshape(logits.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keep the probabilities, which stand for a derivative and have none themselves."""
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(inputs[0], output[2])

    @staticmethod
    def backward(ctx: Any, slope: Float[Tensor, "*layers tokens"], *_: Any) -> Float[Tensor, "*layers tokens experts"]:
        """``p`` times the slope; through a softmax of its own if this is to be differentiated again."""
        logits: Tensor
        probs: Tensor
        logits, probs = ctx.saved_tensors
        if torch.is_grad_enabled():
            probs = torch.softmax(select_rows(usable_rows(logits), logits), dim=-1)
            return select_rows(usable_rows(logits), probs) * slope[..., None]
        return probs * slope[..., None]
