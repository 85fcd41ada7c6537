"""Tensors kept for a hook in the way autograd keeps them, so that checkpointing and offloading apply to them too."""

from typing import Any

import torch
from torch import Tensor


class Stash:
    """Holds detached tensors until the backward pass without owning their memory under checkpointing.

    A closure over the logits would undo what activation checkpointing frees. Tensors saved by an autograd node are
    dropped by non-reentrant checkpointing and come back from its recompute, which is over by the time any gradient
    reaches the logits. The node hangs on a tensor of its own: attached to the logits it would close a cycle that
    passes through C++, which Python's collector cannot see.

    >>> Stash(torch.arange(3.0)).tensors()[0]
    tensor([0., 1., 2.])
    """

    def __init__(self, *tensors: Tensor) -> None:
        with torch.enable_grad():
            anchor = torch.empty(0, requires_grad=True)
            out: Tensor = _Save.apply(anchor, *(tensor.detach() for tensor in tensors))  # type: ignore[no-untyped-call]
        self._node: Any = out.grad_fn

    def tensors(self) -> tuple[Tensor, ...]:
        """What was put in; under checkpointing this may run the recompute."""
        saved: tuple[Tensor, ...] = self._node.saved_tensors
        return saved


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        return (None,) * (1 + len(ctx.saved_tensors))
