"""Checks of the kernels against themselves: the same rows again far down in memory, the same call in a graph."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.gpu_cases import ROUTERS, make_call
from benchmarks.gpu_checks import Gradient, Outcome, on_device, same_bits

Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]
FAR = 2**31  # elements that 32 bits cannot count


def beyond_int32(kernel: Gradient, device: str, period: int = 65536) -> Outcome:
    """More than 2**31 elements: one call's rows over and over must give one result over and over, bit for bit.

    Ids recur with the data, so that each field's maximum is the same, and no pair crosses from one copy to the next.
    """
    router = ROUTERS[2]
    once = make_call(router, period, torch.bfloat16, device)
    copies = FAR // (period * router.experts) + 2
    names = ("logits", "grad_in", "field", "selected")
    many = replace(once, **{n: getattr(once, n).repeat(copies, *[1] * (getattr(once, n).dim() - 1)) for n in names})
    found, expected = kernel(many), kernel(once)
    same = all(bool(same_bits(part, expected).all()) for part in found.view(copies, *expected.shape))
    size = f"{many.size[0]}×{router.experts}, {found.numel() / 2**31:.2f}·2³¹ elements"
    return Outcome("beyond 2³¹ elements", size, 0.0, 1.0, "" if same else "rows far down differ from the first ones")


def replayed(kernel: Gradient, capture: Capture, device: str, tokens: int = 4096) -> Outcome:
    """A captured call, replayed with other gradients and numbers, must give what a new call gives, bit for bit.

    The gradients shrink: a replay that did not clear its memory would find the highest norms of the one before.
    """
    call = on_device(make_call(ROUTERS[0], tokens, torch.bfloat16, device, holes=True))
    kernel(call)  # compiles and chooses, which cannot be done inside
    found, replay = capture(lambda: kernel(call))
    problem = ""
    for shrunk, turn in ((1.0, 1.0), (2.0**-6, 1.0), (1.0, 0.5)):
        call.grad_in.mul_(shrunk)
        call.lambda_turn.mul_(turn)
        replay()
        if not bool(same_bits(found, kernel(call)).all()):
            problem = problem or "a replay differs from a call"
    changed = float((found != call.grad_in).any(-1).float().mean())
    return Outcome("captured in a CUDA graph", f"{tokens}×{call.size[1]}, replayed", 0.0, changed, problem)


def cuda_graph(call: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """The result of a captured call, and what replays it; the call must be warmed up."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return found, graph.replay
