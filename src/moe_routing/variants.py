"""The token-level variants that the paper compares with ``token_consistency_loss``, with the same interface.

Each takes ``(logits, selected, field)`` and returns ``(loss[N], valid[N])`` to be minimised:
``SumCount.of(loss, valid)`` adds up over shards.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit._safe import compute_dtype, require_matrix, require_shape, safe_divide, select
from moe_routing.blocks import select_rows
from moe_routing.consensus import consensus_experts, consensus_mask
from moe_routing.fields import check_selection, check_tokens, neighbours, recorded_rows, shift_rows
from moe_routing.overlap import neighbour_overlap
from moe_routing.router import Activation, router_log_probs, router_probs, usable_rows
from moe_routing.sums import SumCount


def routing_reg(
    logits: Float[Tensor, "tokens experts"],
    selected: Int[Tensor, "tokens k"],
    field: Int[Tensor, " tokens"],
    *,
    size: int | None = None,
    activation: Activation = "softmax",
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """Cross-entropy of every token to the uniform distribution over its field's consensus.

    ``loss_t = -(1/K) sum_{e in C} log p_t(e)``

    Args:
        logits: raw router logits.
        selected: distinct experts of each token; rows with a negative id have no vote.
        field: field id per token, -1 outside generated fields.
        size: K, the members of the consensus; k when absent.
        activation: the router's own score function.

    Returns:
        The loss and the tokens it is a mean over: those of a field with a consensus whose loss is finite.

    Raises:
        ValueError: if shapes disagree, an expert does not exist, or ``size`` does not lie in 1..M.

    Reference: paper appendix B.1.

    >>> routing_reg(torch.zeros(1, 4), torch.tensor([[0, 1]]), torch.tensor([0]))[0]
    tensor([1.3863])
    """
    z, usable, consensus = _prepare(logits, selected, field, size)
    log_probs = router_log_probs(z, activation)
    reachable = (torch.isfinite(log_probs) | ~consensus).all(-1)
    valid = usable & reachable & consensus.any(-1)
    share = safe_divide(consensus.to(log_probs.dtype), consensus.sum(-1, keepdim=True).to(log_probs.dtype))
    return -(share * select(consensus & valid[:, None], log_probs)).sum(-1), valid


def switch_reg(
    logits: Float[Tensor, "tokens experts"],
    selected: Int[Tensor, "tokens k"],
    field: Int[Tensor, " tokens"],
    *,
    activation: Activation = "softmax",
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """Probability that draws of two neighbours disagree; both ends get a gradient.

    ``loss_t = 1 - <p_{t-1}, p_t>``. Identical distributions still pay ``1 - |p|^2``. The selection is not used.

    Other arguments, returns and errors as for :func:`routing_reg`; valid are the within-field pairs.

    Reference: paper appendix B.2.

    >>> switch_reg(torch.zeros(2, 4), torch.tensor([[0], [1]]), torch.tensor([0, 0]))[0]
    tensor([0.0000, 0.7500])
    """
    z, usable = _usable(logits, selected, field)
    probs = router_probs(z, activation)
    valid = neighbours(field) & usable & shift_rows(usable)
    return select(valid, 1 - neighbour_overlap(probs)), valid


def outlier_reg(
    logits: Float[Tensor, "tokens experts"],
    selected: Int[Tensor, "tokens k"],
    field: Int[Tensor, " tokens"],
    *,
    size: int,
    activation: Activation = "softmax",
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """Probability of the selected experts outside the consensus; only their logits get a gradient.

    ``loss_t = sum_{e in S_t, e not in C} p_t(e)`` with the normaliser of ``p`` held constant (ours), so that
    ``d loss / d z_e = p_e`` at an outlier (times ``1 - sigmoid(z_e)`` for sigmoid routers) and 0 elsewhere.

    Arguments, returns and errors as for :func:`routing_reg`; the paper tries ``size`` 8 and 16.

    Reference: paper appendix B.3.

    >>> z = torch.zeros(3, 4, requires_grad=True)
    >>> loss, valid = outlier_reg(z, torch.tensor([[0], [0], [2]]), torch.tensor([0, 0, 0]), size=1)
    >>> loss.sum().backward()
    >>> z.grad[2]
    tensor([0.0000, 0.0000, 0.2500, 0.0000])
    """
    z, usable, consensus = _prepare(logits, selected, field, size)
    valid = usable & recorded_rows(selected) & consensus.any(-1)
    chosen = torch.zeros_like(consensus).scatter(1, selected.clamp(min=0).long(), True)
    outlier = chosen & ~consensus & valid[:, None]
    wide = z.to(compute_dtype(z))
    scores = torch.nn.functional.logsigmoid(wide) if activation == "sigmoid" else wide
    log_norm = torch.logsumexp(scores.detach(), dim=-1, keepdim=True)
    return torch.exp(select(outlier, scores - log_norm)).where(outlier, wide.new_zeros(())).sum(-1), valid


def turn_switch_reg(
    usage: Float[Tensor, "*layers fields experts"],
    trajectory: Int[Tensor, " fields"],
    tokens: Int[Tensor, " fields"],
) -> SumCount:
    """PA-MoE's switching penalty between consecutive environment steps, on the routing of whole turns.

    ``mean over consecutive turns of 1 - <q_{i-1}, q_i>``; both ends get a gradient.

    Args:
        usage: mean router distribution of each turn (``turn_usage``), the fields of one kind in turn order.
        trajectory: trajectory of each row.
        tokens: tokens of each row; a row without tokens is no turn and breaks no pair apart.

    Returns:
        Sum and count of each layer, to be minimised through ``compute()``.

    Raises:
        ValueError: if shapes disagree.

    Reference: after PA-MoE (Yang et al., 2026) as the paper describes it; the form is ours.

    >>> usage = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    >>> turn_switch_reg(usage, torch.tensor([0, 0, 0]), torch.tensor([3, 2, 9])).compute()
    tensor(0.5000, dtype=torch.float64)
    """
    like = f"usage of shape {tuple(usage.shape)}"
    require_shape("trajectory", trajectory, (usage.shape[-2],), like)
    require_shape("tokens", tokens, (usage.shape[-2],), like)
    present = (tokens > 0).nonzero(as_tuple=True)[0]
    q, owner = usage.index_select(-2, present), trajectory[present]
    finite = torch.isfinite(q).all(-1)
    clean = select(finite[..., None], q)
    pair = (owner[1:] == owner[:-1]) & finite[..., 1:] & finite[..., :-1]
    return SumCount.of(1 - (clean[..., 1:, :] * clean[..., :-1, :]).sum(-1), pair)


def _usable(logits: Tensor, selected: Tensor, field: Tensor) -> tuple[Tensor, Tensor]:
    """Logits without unusable rows, and the rows that are usable."""
    like = f"logits of shape {tuple(logits.shape)}"
    require_matrix("selected", selected, "[tokens, k]")
    check_tokens("selected", selected, logits.shape[0], like)
    require_shape("field", field, (logits.shape[0],), like)
    check_selection(selected, logits.shape[1], like)
    usable = usable_rows(logits)
    return select_rows(usable, logits), usable


def _prepare(logits: Tensor, selected: Tensor, field: Tensor, size: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`_usable`, and the consensus as a mask over experts."""
    z, usable = _usable(logits, selected, field)
    experts = logits.shape[1]
    members = consensus_experts(selected, field, experts, selected.shape[-1] if size is None else size)
    return z, usable, consensus_mask(field, members, experts)
