"""Launches the fused kernels: the twin of ``router_gradient`` on a GPU."""

import threading
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

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


def fused_router_gradient(
    logits: Float[Tensor, "tokens experts"],
    grad_in: Float[Tensor, "tokens experts"],
    field: Int[Tensor, " tokens"],
    control: Float[Tensor, "fields experts"],
    selected: Int[Tensor, "tokens k"],
    num_pairs: int | Int[Tensor, ""],
    lambda_turn: float = 2e-6,
    lambda_token: float = 2e-7,
    gap_threshold: float = 0.5,
    gate: float | Float[Tensor, ""] = 1.0,
    activation: Activation = "softmax",
    target: Target = "previous_topk",
    rho: bool = True,
    *,
    out: Float[Tensor, "tokens experts"] | None = None,
    survival: bool = False,
    block: int = 16,
) -> tuple[Float[Tensor, "tokens experts"], SumCount | None]:
    """``router_gradient`` in two launches and one cleared buffer, with nothing that waits for the device.

    Arguments as there, with no check of shapes or ids: a token whose field has no control row gets no injection, and
    one that selects an expert that does not exist forms no pair.

    Args:
        out: where to write, ``grad_in`` itself included; by default a new tensor.
        survival: whether to return the sums of ``injection_survival`` as well.
        block: tokens per program under the interpreter; on a device the autotuner chooses.

    Raises:
        ImportError: without Triton.

    Reference: ours.
    """
    built = kernels()
    tokens, experts = logits.shape
    k = selected.shape[1]
    out = torch.empty_like(grad_in) if out is None else out
    # One buffer, one clearing: the survival sums, then the highest norm of each field.
    state = torch.zeros(2 * SLOTS + (control.shape[0] + 1) // 2, dtype=torch.float64, device=logits.device)
    sums, highest = state[: 2 * SLOTS], state[2 * SLOTS :]
    gate, gate_at = _number(gate, logits.device)
    pairs, pairs_at = _number(num_pairs, logits.device)
    shape = {"M": experts, "K": k, "BLOCK_M": _power_of_two(experts)}
    size = int(tokens * experts >= LARGE)
    if built.interpreted:
        norms, inject, shape = built.norms, built.inject, shape | {"BLOCK_N": block}
    else:
        norms, inject = built.tuned_norms, built.tuned_inject

    def grid(options: dict[str, Any]) -> tuple[int]:
        return (-(-tokens // options["BLOCK_N"]),)

    if tokens:
        with _LAUNCH, torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
            norm = torch.empty(tokens, dtype=torch.float32, device=logits.device)
            norms[grid](
                grad_in, field, norm, highest.view(torch.int32), tokens, control.shape[0], size,
                *grad_in.stride(), field.stride(0), **shape,
            )  # fmt: skip
            inject[grid](
                logits, grad_in, out, field, selected, control, norm, highest.view(torch.float32), sums,
                gate_at, pairs_at, gate, pairs, float(lambda_turn), float(lambda_token), float(gap_threshold),
                torch.finfo(grad_in.dtype).max, tokens, control.shape[0], size,
                *logits.stride(), *grad_in.stride(), *out.stride(), field.stride(0),
                *selected.stride(), *control.stride(),
                BLOCK_K=_power_of_two(k), TARGET=target, SIGMOID=activation == "sigmoid", RHO=rho,
                SURVIVAL=survival, SLOTS=SLOTS, **shape,
            )  # fmt: skip
    if not survival:
        return out, None
    kept, total = sums.view(SLOTS, 2).sum(0).unbind()
    return out, SumCount(kept, total)


def _number(value: int | float | Tensor, device: torch.device) -> tuple[float, Tensor | None]:
    """A factor and, for a number that lives on the device, the tensor to multiply it by: it is never read here."""
    if isinstance(value, Tensor) and value.device == device:
        return 1.0, value
    return float(value), None


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
