"""Injection of the routing control into the gradient that arrives at the router logits.

``g_out = g_in - gate * rho_t * (lambda_turn dJ_turn/dz - lambda_token d(mean loss)/dz)``

The forward pass is untouched, bit for bit; the router's weight and its input get the changed gradient by the chain
rule. This is the PyTorch reference, the twin of the fused kernel.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from credit._safe import compute_dtype, require_shape, safe_divide, select, statistics_dtype
from moe_routing.fields import check_ids, check_selection, check_tokens, shift_rows
from moe_routing.objectives import Target, check_target, close_pairs, target_weights
from moe_routing.rho import gradient_share, unit_share
from moe_routing.router import Activation, check_activation, logit_slope, router_scores, row_dot, usable_rows
from moe_routing.sums import SumCount


def router_gradient(
    logits: Float[Tensor, "tokens experts"],
    grad_in: Float[Tensor, "tokens experts"],
    *,
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
        gate: the entropy gate. A factor on the loss (a GradScaler's scale, say) belongs in here too.
        activation: the router's own score function.
        target: as in ``token_consistency_loss``.
        rho: False replaces rho by 1, which makes the injection the exact gradient of the objective.

    Returns:
        The new gradient in the dtype of ``grad_in``. It is ``grad_in`` itself when the gate or both weights are
        0, equals it bit for bit in every token that gets no injection, and is finite wherever ``grad_in`` is: a
        row whose logits or gradient are not finite gets no injection and is left out of its field's maximum.

    Raises:
        ValueError: if shapes disagree, ``k`` exceeds the number of experts, a field id has no control row, an
            expert does not exist, or an option is unknown. Data are read for this, except under
            ``torch.compile``.

    Reference: paper appendix C.5 and algorithm 1; rho's norm and its maximum over the field are ours.

    >>> zeros = torch.zeros(2, 2)
    >>> router_gradient(zeros, zeros + 1, field=torch.tensor([0, -1]), control=torch.tensor([[1.0, 0.0]]),
    ...                 selected=torch.tensor([[0], [1]]), num_pairs=0, lambda_turn=1.0)
    tensor([[0.7500, 1.2500],
            [1.0000, 1.0000]])
    """
    check_router_gradient(logits, grad_in, field, control, selected, activation, target)
    if (isinstance(gate, (int, float)) and gate == 0) or (lambda_turn == 0 and lambda_token == 0):
        return grad_in
    with torch.no_grad():
        injection, active = _injection(
            logits, grad_in, field, control, selected, num_pairs, lambda_turn, lambda_token, gap_threshold, gate,
            activation, target, rho,
        )  # fmt: skip
        return _add_(injection, grad_in, active)


@torch.no_grad()
def router_injection(
    logits: Float[Tensor, "tokens experts"],
    grad_in: Float[Tensor, "tokens experts"],
    *,
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
) -> Float[Tensor, "tokens experts"]:
    """What :func:`router_gradient` adds to ``grad_in``, in float32 or wider and before any rounding.

    Arguments as there; shapes and ids are not checked again. Rows without injection are exactly 0.

    >>> router_injection(torch.zeros(1, 2), torch.ones(1, 2), field=torch.tensor([0]),
    ...                  control=torch.tensor([[1.0, 0.0]]), selected=torch.tensor([[0]]), num_pairs=0,
    ...                  lambda_turn=1.0)
    tensor([[-0.2500,  0.2500]])
    """
    injection, active = _injection(
        logits, grad_in, field, control, selected, num_pairs, lambda_turn, lambda_token, gap_threshold, gate,
        activation, target, rho,
    )  # fmt: skip
    return select((active & torch.isfinite(injection.sum(-1)))[:, None], injection)


def _injection(
    logits: Tensor,
    grad_in: Tensor,
    field: Tensor,
    control: Tensor,
    selected: Tensor,
    num_pairs: int | Tensor,
    lambda_turn: float,
    lambda_token: float,
    gap_threshold: float,
    gate: float | Tensor,
    activation: Activation,
    target: Target,
    rho: bool,
) -> tuple[Tensor, Tensor]:
    """The injection and the rows in which it counts; elsewhere it may hold anything.

    Rows that are not usable are not cleaned but left out at the end: memory traffic is what this function costs.
    """
    dtype = torch.promote_types(compute_dtype(logits), grad_in.dtype)
    z = logits.to(dtype)
    scores = router_scores(z, activation)
    probs = torch.softmax(scores, dim=-1)
    usable = usable_rows(logits)
    pairs = close_pairs(selected, field, usable, gap_threshold)
    share, active = gradient_share(grad_in, field, control.shape[0]) if rho else unit_share(grad_in, field)
    scale = -gate * share.to(dtype)
    active = active & usable & (scale != 0)
    acting = pairs.close
    if target != "overlap":
        q, reachable = target_weights(scores, pairs.previous, target)
        acting = acting & reachable
    per_pair = safe_divide(z.new_full((), lambda_token), torch.as_tensor(num_pairs, device=z.device).to(dtype))
    weight = scale * select(acting, per_pair.expand(field.shape))

    # In place from here on: allocating N x M floats costs as much as filling them.
    direction = _control_rows(control, field, dtype).mul_((lambda_turn * scale)[:, None])
    if target == "overlap":
        direction.addcmul_(weight[:, None], select(acting[:, None], shift_rows(probs)))
        mean = row_dot(probs, direction)
    else:
        mean = row_dot(probs, direction) + weight
    injection = direction.sub_(mean[:, None]).mul_(probs)
    if target != "overlap":
        injection.scatter_add_(1, pairs.previous, weight[:, None] * q)
    return logit_slope(injection, z, activation), active


def add_injection(
    grad_in: Float[Tensor, "tokens experts"], injection: Float[Tensor, "tokens experts"]
) -> Float[Tensor, "tokens experts"]:
    """``grad_in + injection`` in the dtype of ``grad_in``; a row whose sum might not be finite stays as it is.

    >>> add_injection(torch.tensor([[1.0, 2.0], [1.0, float("nan")]]), torch.full((2, 2), 0.5))
    tensor([[1.5000, 2.5000],
            [1.0000,    nan]])
    """
    return _add_(injection.clone(), grad_in, (injection != 0).any(-1))


def _add_(injection: Tensor, grad_in: Tensor, active: Tensor) -> Tensor:
    """The sum in the active rows; overwrites ``injection``.

    A sum of norms below the largest number of the dtype bounds every entry, and NaN fails the comparison.
    """
    g = grad_in.to(injection.dtype)
    bound = torch.linalg.vector_norm(g, dim=-1) + torch.linalg.vector_norm(injection, dim=-1)
    added = active & (bound < torch.finfo(grad_in.dtype).max)
    # Minus zero is the neutral element of addition; plus zero would turn a -0.0 of grad_in into 0.0.
    return injection.masked_fill_(~added[:, None], -0.0).add_(g).to(grad_in.dtype)


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
    mass = injection.to(statistics_dtype(injection)).abs()
    return SumCount(select(grad_out != grad_in, mass).sum(), mass.sum())


def check_router_gradient(
    logits: Float[Tensor, "tokens experts"],
    grad_in: Float[Tensor, "tokens experts"],
    field: Int[Tensor, " tokens"],
    control: Float[Tensor, "fields experts"],
    selected: Int[Tensor, "tokens k"],
    activation: str,
    target: str,
) -> None:
    """Raise ``ValueError`` for arguments of :func:`router_gradient` that do not fit each other."""
    like = f"logits of shape {tuple(logits.shape)}"
    require_shape("grad_in", grad_in, tuple(logits.shape), like)
    check_tokens("field", field, logits.shape[0], like)
    check_tokens("selected", selected, logits.shape[0], like)
    require_shape("control", control, (*control.shape[:1], logits.shape[1]), like)
    check_ids("field", field, control.shape[0], f"control of shape {tuple(control.shape)}")
    check_selection(selected, logits.shape[1], like)
    check_activation(activation)
    check_target(target)


def _control_rows(control: Tensor, field: Tensor, dtype: torch.dtype) -> Tensor:
    """Control row of each token. Rows of tokens outside fields are never used; a table may have no row at all."""
    if control.shape[0] == 0:
        return torch.zeros(field.shape[0], control.shape[1], dtype=dtype, device=field.device)
    return control.to(dtype).index_select(0, field.clamp(min=0).long())
