"""Checks of what the router gradient is given, with and without a look at the data."""

from jaxtyping import Float, Int
from torch import Tensor

from credit._safe import require_shape
from moe_routing.fields import check_ids, check_tokens, check_width
from moe_routing.objectives import check_target
from moe_routing.router import check_activation

Number = int | float | Tensor


def check_router_gradient(
    logits: Float[Tensor, "tokens experts"],
    grad_in: Float[Tensor, "tokens experts"],
    field: Int[Tensor, " tokens"],
    control: Float[Tensor, "fields experts"],
    selected: Int[Tensor, "tokens k"],
    activation: str,
    target: str,
) -> None:
    """Raise ``ValueError`` for arguments of ``router_gradient`` that do not fit each other."""
    check_router_shapes(logits, grad_in, field, control, selected, activation, target)
    check_ids("field", field, control.shape[0], f"control of shape {tuple(control.shape)}")
    check_ids("selected", selected, logits.shape[1], f"logits of shape {tuple(logits.shape)}")


def check_router_shapes(
    logits: Float[Tensor, "tokens experts"],
    grad_in: Float[Tensor, "tokens experts"],
    field: Int[Tensor, " tokens"],
    control: Float[Tensor, "fields experts"],
    selected: Int[Tensor, "tokens k"],
    activation: str,
    target: str,
) -> None:
    """The part of :func:`check_router_gradient` that reads no data."""
    like = f"logits of shape {tuple(logits.shape)}"
    require_shape("grad_in", grad_in, tuple(logits.shape), like)
    check_tokens("field", field, logits.shape[0], like)
    check_tokens("selected", selected, logits.shape[0], like)
    check_width(selected, logits.shape[1], like)
    require_shape("control", control, (*control.shape[:1], logits.shape[1]), like)
    # A kernel reads another GPU's memory without complaint, or faults.
    for name, tensor in (("grad_in", grad_in), ("field", field), ("control", control), ("selected", selected)):
        if tensor.device != logits.device:
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} is on {tensor.device}, {like} on {logits.device}")
    check_activation(activation)
    check_target(target)


def check_numbers(**numbers: Number) -> None:
    """Raise ``ValueError`` for one that is a tensor with an axis: a kernel would read its first entry alone."""
    for name, value in numbers.items():
        if isinstance(value, Tensor):
            require_shape(name, value, (), "a number")


def switched_off(gate: Number, lambda_turn: Number, lambda_token: Number) -> bool:
    """Whether nothing is injected, as far as Python numbers tell: to look at a tensor would wait for its device.

    >>> import torch
    >>> switched_off(1.0, 0.0, 0.0), switched_off(torch.zeros(()), 0.0, torch.zeros(()))
    (True, False)
    """
    gate_off, turn_off, token_off = (not isinstance(x, Tensor) and x == 0 for x in (gate, lambda_turn, lambda_token))
    return gate_off or (turn_off and token_off)
