"""Putting the injection into a backward pass: as a tensor hook, or as an operation in the forward.

Hugging Face blocks discard a replaced return value, so there a hook on the recorded tensor is the way in; code that
owns its forward can use :func:`steer_router` instead. Both leave every forward value as it was.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from moe_routing.arguments import check_numbers, check_router_gradient, check_router_shapes, switched_off
from moe_routing.backend import use_kernel
from moe_routing.fused import fused_router_gradient
from moe_routing.injection import steer, steer_and_count
from moe_routing.objectives import Target
from moe_routing.router import Activation
from moe_routing.steering import Steering
from moe_routing.sums import SumCount
from moe_routing.survival import SurvivalTotal

Report = Callable[[SumCount], None]


@dataclass(frozen=True)
class RouterInjection:
    """Everything one router needs to steer one backward pass; the fields are those of ``router_gradient``.

    Attributes:
        scale: factor between the gradient at hand and that of the plain loss: a GradScaler's scale, times the
            number of ranks where gradients are averaged rather than added.

    Reference: paper appendix C.5 and algorithm 1.

    >>> steer = RouterInjection(torch.tensor([0]), torch.tensor([[1.0, 0.0]]), torch.tensor([[0]]), 0, lambda_turn=1.0)
    >>> z = torch.zeros(1, 2, requires_grad=True)
    >>> logits = z * 1
    >>> handle = register_injection(logits, steer)
    >>> logits.sum().backward()
    >>> z.grad
    tensor([[0.7500, 1.2500]])
    """

    field: Int[Tensor, " tokens"]
    control: Float[Tensor, "fields experts"]
    selected: Int[Tensor, "tokens k"]
    num_pairs: int | Int[Tensor, ""]
    lambda_turn: float | Float[Tensor, ""] = 2e-6
    lambda_token: float | Float[Tensor, ""] = 2e-7
    gap_threshold: float = 0.5
    gate: float | Float[Tensor, ""] = 1.0
    activation: Activation = "softmax"
    target: Target = "previous_topk"
    rho: bool = True
    scale: float | Float[Tensor, ""] = 1.0

    @property
    def closed(self) -> bool:
        """Whether Python numbers alone tell that the backward pass is the baseline's, bit for bit."""
        return switched_off(self.gate, self.lambda_turn, self.lambda_token)

    def __call__(
        self,
        logits: Float[Tensor, "*batch experts"],
        grad_in: Float[Tensor, "*batch experts"],
        report: Report | None = None,
    ) -> Float[Tensor, "*batch experts"]:
        """The gradient to pass on in place of ``grad_in``; leading axes are flattened to tokens and restored.

        ``report`` is called with the two sums of ``injection_survival``; a ``SurvivalTotal`` lets the kernel add to it.

        Raises:
            ValueError: as ``router_gradient``. On an accelerator the ids are not looked at, which would make every
                router of every backward pass wait for the device.
        """
        z, g = logits.detach().reshape(-1, logits.shape[-1]), grad_in.reshape(-1, grad_in.shape[-1])
        check = check_router_gradient if z.device.type == "cpu" else check_router_shapes
        check(z, g, self.field, self.control, self.selected, self.activation, self.target)
        weights = {"lambda_turn": self.lambda_turn, "lambda_token": self.lambda_token}
        check_numbers(num_pairs=self.num_pairs, gate=self.gate, scale=self.scale, **weights)
        if self.closed:
            return grad_in
        with torch.no_grad():
            grad_out, survival = self._steered(z, g, report)
        if report is not None and survival is not None:
            report(survival)
        return grad_out.reshape(grad_in.shape)

    def _steered(self, z: Tensor, g: Tensor, report: Report | None) -> tuple[Tensor, SumCount | None]:
        inputs = (z, g, self.field, self.control, self.selected, self.num_pairs)
        weights = (self.lambda_turn, self.lambda_token, self.gap_threshold)
        options = (self.activation, self.target, self.rho)
        if use_kernel(z, g, self.selected):
            sums = report.sums(z.device) if isinstance(report, SurvivalTotal) else None
            count = report is not None if sums is None else sums
            return fused_router_gradient(*inputs, *weights, self.gate, *options, scale=self.scale, survival=count)
        steering = Steering.of(*inputs, *weights, self.gate * self.scale, *options)
        return (steer(z, g, steering), None) if report is None else steer_and_count(z, g, steering)


def register_injection(
    logits: Float[Tensor, "*batch experts"], injection: RouterInjection, report: Report | None = None
) -> RemovableHandle | None:
    """Steer the gradient that arrives at ``logits`` with a tensor hook.

    Returns:
        The handle that removes the hook, or None where no gradient will ever arrive: evaluation, and the first
        pass of reentrant checkpointing, whose recompute calls this again.

    Reference: paper appendix C.5; the hook is ours.

    >>> steer = RouterInjection(torch.tensor([0]), torch.tensor([[1.0, 0.0]]), torch.tensor([[0]]), 0, lambda_turn=1.0)
    >>> weight = torch.zeros(1, 2, requires_grad=True)
    >>> z = 1.0 * weight
    >>> handle = register_injection(z, steer)
    >>> z.sum().backward()
    >>> weight.grad
    tensor([[0.7500, 1.2500]])
    """
    if not logits.requires_grad:
        return None
    # A detached alias: the hook lives in the graph node, and the tensor itself would close a reference cycle.
    values = logits.detach()
    handle: RemovableHandle = logits.register_hook(lambda grad: injection(values, grad, report))  # type: ignore[no-untyped-call]
    return handle


def steer_router(
    logits: Float[Tensor, "*batch experts"], injection: RouterInjection, report: Report | None = None
) -> Float[Tensor, "*batch experts"]:
    """``logits`` unchanged, whose backward pass injects the control: the paper's custom autograd operation.

    The result must replace ``logits`` in everything that follows, or the injection never sees its gradient.

    Reference: paper appendix C.5.

    >>> steer = RouterInjection(torch.tensor([0]), torch.tensor([[1.0, 0.0]]), torch.tensor([[0]]), 0, lambda_turn=1.0)
    >>> z = torch.zeros(1, 2, requires_grad=True)
    >>> steer_router(z, steer).sum().backward()
    >>> z.grad
    tensor([[0.7500, 1.2500]])
    """
    steered: Tensor = _Steer.apply(logits, injection, report)  # type: ignore[no-untyped-call]
    return steered


class _Steer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, injection: RouterInjection, report: Report | None) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.injection, ctx.report = injection, report
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad_in: Tensor) -> tuple[Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        return ctx.injection(logits, grad_in, ctx.report), None, None
