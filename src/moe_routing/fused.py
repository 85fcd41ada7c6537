"""Launches the fused kernels: the twin of ``router_gradient`` on a GPU."""

import threading
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_routing.cleared import Cleared
from moe_routing.kernels import kernels
from moe_routing.objectives import Target
from moe_routing.router import Activation
from moe_routing.sums import SumCount

# Survival sums go to one of these, so that the programs do not all queue at one address.
SLOTS = 64
# Tokens times experts from which the autotuner looks again: below it, launches cost more than memory.
LARGE = 1 << 22
# Each device has a backward thread of its own, and Triton's autotuner keeps the arguments of a call on itself: a second
# call meanwhile would end the first one with an error, or restore the first one's gradient from a copy of its own.
_LAUNCH = threading.Lock()
_CLEARED = Cleared()


def fused_router_gradient(
    logits: Float[Tensor, "tokens experts"],
    grad_in: Float[Tensor, "tokens experts"],
    field: Int[Tensor, " tokens"],
    control: Float[Tensor, "fields experts"],
    selected: Int[Tensor, "tokens k"],
    num_pairs: int | Int[Tensor, ""],
    lambda_turn: float | Float[Tensor, ""] = 2e-6,
    lambda_token: float | Float[Tensor, ""] = 2e-7,
    gap_threshold: float = 0.5,
    gate: float | Float[Tensor, ""] = 1.0,
    activation: Activation = "softmax",
    target: Target = "previous_topk",
    rho: bool = True,
    *,
    scale: float | Float[Tensor, ""] = 1.0,
    out: Float[Tensor, "tokens experts"] | None = None,
    survival: bool | Float[Tensor, " sums"] = False,
    block: int = 16,
) -> tuple[Float[Tensor, "tokens experts"], SumCount | None]:
    """``router_gradient`` in two launches, with nothing that waits for the device.

    Arguments as there, with no check of shapes or ids: a token whose field has no control row gets no injection, and
    one that selects an expert that does not exist forms no pair. Numbers that are tensors on the device are read there.

    The highest norm of each field is kept in memory that was cleared for many calls at once (``moe_routing.cleared``).

    Args:
        scale: a factor on the gate. If both are tensors, their product is one more operation on the device.
        out: where to write, ``grad_in`` itself included; by default a new tensor.
        survival: True returns the sums of ``injection_survival`` as well, which takes one more operation on the device.
            Memory from :func:`survival_sums` gets them added without one, and nothing is returned.
        block: tokens per program under the interpreter; on a device the autotuner chooses.

    Raises:
        ImportError: without Triton.

    Reference: ours.
    """
    built, device = kernels(), logits.device
    tokens, experts = logits.shape
    k = selected.shape[1]
    out = torch.empty_like(grad_in) if out is None else out
    gate, gate_at = _product(gate, scale, device)
    pairs, pairs_at = _number(num_pairs, device)
    turn, turn_at = _number(lambda_turn, device)
    token, token_at = _number(lambda_token, device)
    shape = {"M": experts, "K": k, "BLOCK_M": _power_of_two(experts)}
    size = int(tokens * experts >= LARGE)
    if built.interpreted:
        norms, inject, shape = built.norms, built.inject, shape | {"BLOCK_N": block}
    else:
        norms, inject = built.tuned_norms, built.tuned_inject

    def grid(options: dict[str, Any]) -> tuple[int]:
        return (-(-tokens // options["BLOCK_N"]),)

    with _LAUNCH, torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        highest = _CLEARED.take((control.shape[0] + 1) // 2, device)
        sums = survival_sums(device) if survival is True else highest[:0] if survival is False else survival
        if tokens:
            norm = torch.empty(tokens, dtype=torch.float32, device=device)
            norms[grid](
                grad_in, field, norm, highest.view(torch.int32), tokens, control.shape[0], size,
                *grad_in.stride(), field.stride(0), **shape,
            )  # fmt: skip
            inject[grid](
                logits, grad_in, out, field, selected, control, norm, highest.view(torch.float32), sums,
                gate_at, pairs_at, turn_at, token_at, gate, pairs, turn, token, float(gap_threshold),
                torch.finfo(grad_in.dtype).max, tokens, control.shape[0], size,
                *logits.stride(), *grad_in.stride(), *out.stride(), field.stride(0),
                *selected.stride(), *control.stride(),
                BLOCK_K=_power_of_two(k), TARGET=target, SIGMOID=activation == "sigmoid", RHO=rho,
                SURVIVAL=survival is not False, SLOTS=SLOTS, **shape,
            )  # fmt: skip
    return out, sum_survival(sums) if survival is True else None


def survival_sums(device: torch.device) -> Float[Tensor, " sums"]:
    """Memory in which :func:`fused_router_gradient` adds up survival, for the stream that is current."""
    return _CLEARED.take(2 * SLOTS, device)


def sum_survival(sums: Float[Tensor, " sums"]) -> SumCount:
    """What was added up there."""
    kept, total = sums.view(SLOTS, 2).sum(0).unbind()
    return SumCount(kept, total)


def _number(value: int | float | Tensor, device: torch.device) -> tuple[float, Tensor | None]:
    """The number or, if it lives on a device, 1 and the tensor that holds it, which is never read here."""
    if isinstance(value, Tensor) and (value.device == device or value.device.type != "cpu"):
        return 1.0, value.to(device)
    return float(value), None


def _product(
    one: int | float | Tensor, other: int | float | Tensor, device: torch.device
) -> tuple[float, Tensor | None]:
    (left, left_at), (right, right_at) = _number(one, device), _number(other, device)
    if left_at is not None and right_at is not None:
        return 1.0, left_at * right_at
    return left * right, right_at if left_at is None else left_at


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
