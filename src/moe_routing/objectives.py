"""Token-level control: keep the previous token's experts when the current selection is already close to them."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit._safe import on_processor, require_matrix, require_shape, safe_divide, select
from moe_routing.blocks import select_rows
from moe_routing.fields import check_selection, check_tokens, count_pairs, shift_rows
from moe_routing.metrics import changed_experts
from moe_routing.router import Activation, router_log_probs, usable_rows

Target = Literal["previous_topk", "uniform_topk", "overlap", "mass"]


def token_consistency_loss(
    logits: Float[Tensor, "tokens experts"],
    selected: Int[Tensor, "tokens k"],
    field: Int[Tensor, " tokens"],
    *,
    gap_threshold: float = 0.5,
    target: Target = "previous_topk",
    activation: Activation = "softmax",
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """Gated loss of each token against its predecessor in the same field; only the current token gets a gradient.

    With ``gate_t = 1[gap_t <= gap_threshold]`` and ``S = S_{t-1}``:

    * ``previous_topk`` (ours): ``-sum_{e in S} q(e) log p_t(e)``, ``q`` = ``p_{t-1}`` renormalised on S
    * ``uniform_topk``: the same with ``q = 1/k``
    * ``overlap``: ``1 - <p_{t-1}, p_t>``
    * ``mass``: ``-log sum_{e in S} p_t(e)``

    Args:
        logits: raw router logits.
        selected: distinct experts of each token; a row with a negative id was not recorded and forms no pair.
        field: field id per token, -1 outside generated fields.
        gap_threshold: 0 still acts on pairs with equal sets, a negative value acts on none.
        target: what the current distribution is pulled towards.
        activation: the router's own score function.

    Returns:
        The loss, 0 where the gate is closed, and the pairs it is a mean over: *all* within-field pairs, whatever
        their gap, so that the mean is ``loss.sum() / valid.sum()``. A pair that touches a row with NaN or +inf
        logits, or a target that a pruned (-inf) expert makes unreachable, is not valid.

    Raises:
        ValueError: if shapes disagree, ``k`` exceeds the number of experts, an expert does not exist, or the
            target or activation is unknown.

    Reference: paper section 3.2, eq. 3.4; the form of ``previous_topk`` and the other targets are ours.

    >>> loss, valid = token_consistency_loss(torch.zeros(2, 4), torch.tensor([[0, 1], [0, 1]]), torch.tensor([0, 0]))
    >>> loss
    tensor([0.0000, 1.3863])
    """
    like = f"logits of shape {tuple(logits.shape)}"
    require_matrix("selected", selected, "[tokens, k]")
    check_tokens("selected", selected, logits.shape[0], like)
    require_shape("field", field, (logits.shape[0],), like)
    check_selection(selected, logits.shape[1], like)
    check_target(target)
    usable = usable_rows(logits)
    log_probs = router_log_probs(select_rows(usable, logits), activation)
    pairs = close_pairs(selected, field, gap_threshold).among(usable)
    if target == "overlap":
        loss = 1 - (shift_rows(log_probs).detach().exp() * log_probs.exp()).sum(-1)
        reachable = torch.ones_like(pairs.valid)
    else:
        current = log_probs.gather(1, pairs.previous)
        earlier = previous_scores(log_probs.detach(), pairs.previous)
        weights, reachable = target_weights(current.detach(), earlier, target)
        current = torch.where(reachable[:, None], current, torch.zeros_like(current))
        if target == "mass":
            loss = -torch.logsumexp(current, dim=-1)
        else:
            # A pruned expert has log p = -inf, and a weight of 0 would make it NaN.
            loss = -(weights * select(weights > 0, current)).sum(-1)
    valid = pairs.valid & reachable
    return select(valid & pairs.close, loss), valid


def token_objective(
    logits: Float[Tensor, "tokens experts"],
    selected: Int[Tensor, "tokens k"],
    field: Int[Tensor, " tokens"],
    num_pairs: int | Int[Tensor, ""] | None = None,
    *,
    gap_threshold: float = 0.5,
    target: Target = "previous_topk",
    activation: Activation = "softmax",
) -> Float[Tensor, ""]:
    """Token-level objective, to be maximised: ``J_token = -sum_t loss_t / num_pairs``.

    ``num_pairs`` is a count over the whole batch of all ranks, so that shards add up: within-field pairs
    (``count_pairs``, the default, of this shard) or turns (``count_fields``). Other arguments and errors as for
    :func:`token_consistency_loss`.

    Reference: paper section 3.2.

    >>> token_objective(torch.zeros(2, 4), torch.tensor([[0, 1], [0, 1]]), torch.tensor([0, 0]))
    tensor(-1.3863)
    """
    loss, _ = token_consistency_loss(
        logits, selected, field, gap_threshold=gap_threshold, target=target, activation=activation
    )
    pairs = count_pairs(field) if num_pairs is None else torch.as_tensor(num_pairs, device=loss.device)
    return -safe_divide(loss.sum(), pairs.to(loss.dtype))


def check_target(target: str) -> None:
    """Raise ``ValueError`` for a target that this package does not know."""
    if target not in ("previous_topk", "uniform_topk", "overlap", "mass"):
        raise ValueError(f"target must be 'previous_topk', 'uniform_topk', 'overlap' or 'mass', got {target!r}")


class ClosePairs(NamedTuple):
    """Within-field pairs, those whose gap is within the threshold, and the experts of the previous token."""

    valid: Bool[Tensor, " tokens"]
    close: Bool[Tensor, " tokens"]
    previous: Int[Tensor, "tokens k"]

    def among(self, usable: Bool[Tensor, " tokens"]) -> "ClosePairs":
        """Without the pairs that touch a token that is not usable."""
        both = usable & shift_rows(usable)
        return ClosePairs(self.valid & both, self.close & both, self.previous)


def close_pairs(selected: Int[Tensor, "tokens k"], field: Int[Tensor, " tokens"], gap_threshold: float) -> ClosePairs:
    """Pairs of neighbours and whether the token term acts on them."""
    changed, valid = changed_experts(selected, field)
    gap = changed.float() / max(selected.shape[-1], 1)
    return ClosePairs(valid, valid & (gap <= gap_threshold), shift_rows(selected).clamp(min=0).long())


def previous_scores(
    scores: Float[Tensor, "tokens experts"], previous: Int[Tensor, "tokens k"]
) -> Float[Tensor, "tokens k"]:
    """Scores of the previous token at its own experts."""
    # Gathered before the shift: k numbers of each row move, not all of them.
    return shift_rows(scores.gather(1, previous.roll(-1, 0)))


def target_weights(
    current: Float[Tensor, "tokens k"], earlier: Float[Tensor, "tokens k"], target: Target
) -> tuple[Float[Tensor, "tokens k"], Bool[Tensor, " tokens"]]:
    """Weights ``q`` on the previous experts such that the loss has derivative ``p_t - q`` at softmax logits.

    ``current`` and ``earlier`` are log-probabilities of the two tokens at those experts, up to a constant per row:
    renormalising takes it out, and is done in log space, since the selected probabilities of a biased router may
    all underflow. The second value is False where the loss is infinite: some weight lies on an expert that the
    current token has pruned.
    """
    if target == "uniform_topk":
        weights = torch.full_like(current, 1.0 / max(current.shape[-1], 1))
    else:
        weights = _short_softmax(current if target == "mass" else earlier)
    if on_processor(current) and bool(torch.isfinite(current.sum() + earlier.sum())):
        return weights, torch.ones_like(current[:, 0], dtype=torch.bool)
    # Not finite when a weight meets log p = -inf, or is NaN itself because every candidate was pruned.
    reachable = torch.isfinite((weights + select(weights > 0, current)).sum(-1))
    return select(reachable[:, None], weights), reachable


def _short_softmax(x: Float[Tensor, "tokens k"]) -> Float[Tensor, "tokens k"]:
    """Softmax of short rows by columns: a row shorter than a vector register is worked through number by number."""
    return torch.softmax(x.T.contiguous(), dim=0).T
