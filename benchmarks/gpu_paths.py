"""The ways to compute one call of the router gradient that `benchmarks.gpu_router_gradient` compares."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_cases import Call
from benchmarks.gpu_timing import Budget, told
from moe_routing.injection import steer
from moe_routing.steering import Steering


def kernel(call: Call) -> Tensor:
    """The Triton kernels, without the checks of ids that read data and hence wait for the GPU."""
    from moe_routing.fused import fused_router_gradient

    return fused_router_gradient(call.logits, call.grad_in, **call.keywords())[0]


def kernel_into(call: Call, out: Tensor) -> Tensor:
    """The same, into memory that is there; the gradient itself is allowed."""
    from moe_routing.fused import fused_router_gradient

    return fused_router_gradient(call.logits, call.grad_in, **call.keywords(), out=out)[0]


@contextmanager
def configuration(number: int | None) -> Iterator[None]:
    """Hold the autotuner to one of its configurations, counted in a circle; None lets it choose."""
    from moe_routing.kernels import kernels

    tuners = [] if number is None else [kernels().tuned_norms, kernels().tuned_inject]
    before = [tuner.configs for tuner in tuners]
    try:
        for tuner in tuners:
            tuner.configs = [tuner.configs[(number or 0) % len(tuner.configs)]]
        yield
    finally:
        for tuner, configs in zip(tuners, before, strict=True):
            tuner.configs = configs


def kernel_counting(call: Call) -> Callable[[], Tensor]:
    """The same as a router's backward pass calls it, adding up the share of the injection that survives rounding.

    In one configuration that suits all routers: launches are counted here, and tuning would take time from the times.
    """
    from moe_routing.fused import fused_router_gradient, survival_sums

    sums = survival_sums(call.logits.device)

    def run() -> Tensor:
        with configuration(-1):
            return fused_router_gradient(call.logits, call.grad_in, **call.keywords(), survival=sums)[0]

    return run


def eager(call: Call) -> Tensor:
    """PyTorch, operation by operation, without those checks either."""
    return _pytorch(call.logits, call.grad_in, **call.keywords())


def _pytorch(logits: Tensor, grad_in: Tensor, **keywords: Any) -> Tensor:
    return steer(logits, grad_in, Steering.of(logits, grad_in, **keywords))


SHARE_FOR_TIMES = 0.2  # of the time, which no compilation may eat into: the other candidates want it


class Compiled:
    """PyTorch under torch.compile, one compilation for all numbers of tokens of a router."""

    def __init__(self, enabled: bool, budget: Budget) -> None:
        self.budget = budget
        self.problem = "" if enabled else "left out by --no-compile"
        self.seconds: list[float] = []
        self.ready: dict[tuple[object, ...], Callable[[Call], Tensor] | None] = {}
        torch._dynamo.config.recompile_limit = 64  # every router and dtype is one more version of the same function

    def __call__(self, call: Call) -> Callable[[Call], Tensor] | None:
        """The compiled function, warmed up, or None where it is left out or fails."""
        key = (*call.size[1:], call.logits.dtype, call.activation)
        if key not in self.ready:
            self.ready[key] = self._compile(call)
        return self.ready[key]

    def _compile(self, call: Call) -> Callable[[Call], Tensor] | None:
        expected = 1.2 * max(self.seconds, default=20) + SHARE_FOR_TIMES * self.budget.seconds
        name = f"torch.compile at {call.size[1]} experts, {call.logits.dtype}"
        if self.problem or not self.budget.allows(name, expected):
            return None
        for tensor in (call.logits, call.grad_in, call.field, call.control, call.selected):
            torch._dynamo.mark_dynamic(tensor, 0)
        compiled = torch.compile(_pytorch, fullgraph=True)
        began = time.monotonic()
        try:
            compiled(call.logits, call.grad_in, **call.keywords())
        except Exception as error:  # whatever a compiler throws: the other candidates are still worth timing
            self.problem = told(error)
            return None
        self.seconds.append(time.monotonic() - began)
        return lambda given: compiled(given.logits, given.grad_in, **given.keywords())
