"""Checks of what the router gradient is given, with and without a look at the data."""

from jaxtyping import Float, Int
from torch import Tensor

from credit._safe import require_shape
from moe_routing.fields import check_ids, check_tokens, check_width
from moe_routing.objectives import check_target
from moe_routing.router import check_activation


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
