"""Injection of the routing control into the gradient that arrives at the router logits.

``g_out = g_in - gate * rho_t * (lambda_turn dJ_turn/dz - lambda_token d(mean loss)/dz)``

The forward is untouched, bit for bit; weight and input get the change by the chain rule. ``fused`` is the kernel twin.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from credit._safe import on_processor, select, statistics_dtype
from moe_routing.arguments import check_numbers, check_router_gradient, check_router_shapes, switched_off
from moe_routing.backend import use_kernel
from moe_routing.blocks import replace_rows_
from moe_routing.fused import fused_router_gradient
from moe_routing.objectives import Target
from moe_routing.rho import row_norm
from moe_routing.router import Activation
from moe_routing.steering import Steering
from moe_routing.sums import SumCount


def router_gradient(
    logits: Float[Tensor, "tokens experts"],
    grad_in: Float[Tensor, "tokens experts"],
    *,
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
) -> Float[Tensor, "tokens experts"]:
    """Gradient at the router logits with the turn-level and token-level control added.

    ``g_out = g_in - gate rho_t (lambda_turn p*(s - <p,s>) - lambda_token (p_t - q) / num_pairs)`` for softmax
    routers, the bracket times ``1 - sigmoid(z)`` for sigmoid routers, with ``s = control[field]`` and
    ``rho_t = |g_in,t| / max_{same field} |g_in|``.

    Args:
        logits: raw router logits of one forward, rows of the batch flattened.
        grad_in: the whole gradient that reaches them.
        field: field id per token, -1 for tokens that take no part; ids need not be contiguous.
        control: row ``f`` is the control row of field id ``f``, from ``turn_control``.
        selected: distinct experts of each token; rows with a negative id form no pair.
        num_pairs: within-field pairs of the whole batch on all ranks; 0 switches the token term off.
        lambda_turn: weight of the turn term, which is maximised.
        lambda_token: weight of the token term, a loss, which is minimised.
        gap_threshold: as in ``token_consistency_loss``.
        gate: the entropy gate. A factor on the loss (a GradScaler's scale, say) belongs in here too. Like both weights
            it may be a tensor on the device, which is read there: new values wait for nothing and compile nothing.
        activation: the router's own score function.
        target: as in ``token_consistency_loss``.
        rho: False replaces rho by 1, which makes the injection the exact gradient of the objective.

    Returns:
        The new gradient in the dtype of ``grad_in``. It is ``grad_in`` itself when the gate or both weights are
        the number 0 (a tensor is not looked at), equals it bit for bit in every token that gets no injection, and is
        finite wherever ``grad_in`` is: a row whose logits or gradient are not finite gets no injection and is left out
        of its field's maximum.

    Raises:
        ValueError: if shapes disagree, a number is a tensor of more than one, ``k`` exceeds the number of experts, a
            field id has no control row, an expert does not exist, or an option is unknown. ``torch.compile`` and the
            kernel look at no id.

    Reference: paper appendix C.5 and algorithm 1; rho's norm and its maximum over the field are ours.

    >>> zeros = torch.zeros(2, 2)
    >>> router_gradient(zeros, zeros + 1, field=torch.tensor([0, -1]), control=torch.tensor([[1.0, 0.0]]),
    ...                 selected=torch.tensor([[0], [1]]), num_pairs=0, lambda_turn=1.0)
    tensor([[0.7500, 1.2500],
            [1.0000, 1.0000]])
    """
    fused = use_kernel(logits, grad_in, selected)
    check = check_router_shapes if fused else check_router_gradient
    check(logits, grad_in, field, control, selected, activation, target)
    check_numbers(num_pairs=num_pairs, lambda_turn=lambda_turn, lambda_token=lambda_token, gate=gate)
    if switched_off(gate, lambda_turn, lambda_token):
        return grad_in
    arguments = (
        logits, grad_in, field, control, selected, num_pairs, lambda_turn, lambda_token, gap_threshold, gate,
        activation, target, rho,
    )  # fmt: skip
    if fused:
        return fused_router_gradient(*arguments)[0]
    with torch.no_grad():
        return steer(logits, grad_in, Steering.of(*arguments))


@torch.no_grad()
def router_injection(
    logits: Float[Tensor, "tokens experts"],
    grad_in: Float[Tensor, "tokens experts"],
    *,
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
) -> Float[Tensor, "tokens experts"]:
    """What :func:`router_gradient` adds to ``grad_in``, in float32 or wider and before any rounding.

    Arguments as there; shapes and ids are not checked again. Rows without injection are exactly 0.

    Reference: paper appendix C.5 and algorithm 1.

    >>> router_injection(torch.zeros(1, 2), torch.ones(1, 2), field=torch.tensor([0]),
    ...                  control=torch.tensor([[1.0, 0.0]]), selected=torch.tensor([[0]]), num_pairs=0,
    ...                  lambda_turn=1.0)
    tensor([[-0.2500,  0.2500]])
    """
    steering = Steering.of(
        logits, grad_in, field, control, selected, num_pairs, lambda_turn, lambda_token, gap_threshold, gate,
        activation, target, rho,
    )  # fmt: skip
    injected = torch.empty(grad_in.shape, dtype=steering.table.dtype, device=grad_in.device)
    # rho is 0, and with it the scale, where the gradient is not finite.
    finite = torch.ones_like(steering.active) if rho else torch.isfinite(row_norm(grad_in))
    for tokens, injection, active in steering.blocks(logits):
        if injection is None:
            injected[tokens] = 0
        else:
            out = torch.mul(injection, steering.scale[tokens, None], out=injected[tokens])
            counted = active & finite[tokens] & torch.isfinite(out.sum(-1))
            replace_rows_(out, ~counted, out.new_zeros(()).expand_as(out))
    return injected


def steer(
    logits: Float[Tensor, "tokens experts"], grad_in: Float[Tensor, "tokens experts"], steering: Steering
) -> Float[Tensor, "tokens experts"]:
    """:func:`router_gradient` of arguments that were checked."""
    grad_out = torch.empty_like(grad_in)
    for tokens, injection, active in steering.blocks(logits):
        if injection is None:
            grad_out[tokens] = grad_in[tokens]
        else:
            _add(grad_in[tokens], injection, steering.scale[tokens], active, grad_out[tokens])
    return grad_out


def steer_and_count(
    logits: Float[Tensor, "tokens experts"], grad_in: Float[Tensor, "tokens experts"], steering: Steering
) -> tuple[Float[Tensor, "tokens experts"], SumCount]:
    """:func:`steer`, and its :func:`injection_survival` from the blocks as they pass."""
    grad_out, nothing = torch.empty_like(grad_in), grad_in.new_zeros((), dtype=statistics_dtype(grad_in))
    survival = SumCount(nothing, nothing)
    for tokens, injection, active in steering.blocks(logits):
        g, out, scale = grad_in[tokens], grad_out[tokens], steering.scale[tokens]
        if injection is None:
            out.copy_(g)
        else:
            added = _add(g, injection, scale, active, out)
            replace_rows_(injection.mul_(scale[:, None]), ~added, injection.new_zeros(()).expand_as(injection))
            survival = survival + injection_survival(g, out, injection)
    return grad_out, survival


def add_injection(
    grad_in: Float[Tensor, "tokens experts"], injection: Float[Tensor, "tokens experts"]
) -> Float[Tensor, "tokens experts"]:
    """``grad_in + injection`` in the dtype of ``grad_in``; a row whose sum might not be finite stays as it is.

    They are added in the wider of their dtypes.

    Reference: ours.

    >>> add_injection(torch.tensor([[1.0, 2.0], [1.0, float("nan")]]), torch.full((2, 2), 0.5))
    tensor([[1.5000, 2.5000],
            [1.0000,    nan]])
    """
    grad_out = (grad_in + injection).to(grad_in.dtype)
    _restore(grad_in, torch.promote_types(grad_in.dtype, injection.dtype), _moving(injection), grad_out)
    return grad_out


def _moving(injection: Tensor) -> Tensor:
    """Rows with a number that is not 0; of one that is not finite nothing is promised."""
    # One number of each row usually settles it, and norms take longer than the addition.
    if on_processor(injection) and injection.numel() and bool(injection[:, 0].all()):
        return torch.ones_like(injection[:, 0], dtype=torch.bool)
    return row_norm(injection) > 0


def _add(grad_in: Tensor, injection: Tensor, scale: Tensor, active: Tensor, out: Tensor) -> Tensor:
    """Write the sum in the active rows and ``grad_in`` in the others and where it is not finite; return where it is."""
    if out.dtype == injection.dtype:
        torch.addcmul(grad_in, injection, scale[:, None], out=out)
    else:
        out.copy_(torch.addcmul(grad_in.to(injection.dtype), injection, scale[:, None]))
    return _restore(grad_in, injection.dtype, active, out)


def _restore(grad_in: Tensor, dtype: torch.dtype, active: Tensor, out: Tensor) -> Tensor:
    """Take inactive rows and those that are not finite back to ``grad_in``; return the others."""
    # If one sum over all is finite, every entry is.
    if not (on_processor(out) and math.isfinite(out.sum(dtype=dtype).item())):
        active = active & torch.isfinite(out).all(-1)
    replace_rows_(out, ~active, grad_in)
    return active


def injection_survival(
    grad_in: Float[Tensor, "tokens experts"],
    grad_out: Float[Tensor, "tokens experts"],
    injection: Float[Tensor, "tokens experts"],
) -> SumCount:
    """Share of the injected mass that changed a value, ``sum |d| 1[g_out != g_in] / sum |d|``.

    In bfloat16 an addition below ``2**-9 |g_in|`` is rounded away; a router in float32 makes the share 1.

    Returns:
        The two sums; ``compute()`` divides, 0 when nothing was injected.

    Reference: ours.

    >>> g, d = torch.ones(1, 2, dtype=torch.bfloat16), torch.tensor([[0.5, 0.001]])
    >>> round(float(injection_survival(g, add_injection(g, d), d).compute()), 3)
    0.998
    """
    dtype = statistics_dtype(injection)
    # The sign of a difference is 0 where rounding ate the addition; comparing and selecting costs ten times as much.
    changed = torch.sign(grad_out.to(injection.dtype) - grad_in)
    survived = (injection * changed).abs_().sum(-1)
    # The difference of infinities is NaN; such a row gets no injection.
    survived = select(torch.isfinite(survived), survived)
    return SumCount(survived.sum(dtype=dtype), injection.abs().sum(-1).sum(dtype=dtype))
