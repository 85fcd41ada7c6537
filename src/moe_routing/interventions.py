"""Interventions on expert selection: replay of a recorded selection, and routers collapsed to a low rank."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from credit._safe import as_mask, compute_dtype, on_processor, require_shape
from moe_routing.consensus import consensus_experts
from moe_routing.fields import check_ids, check_tokens, recorded_rows
from moe_routing.router import chosen_probs

Scoring = Literal["softmax", "topk_softmax", "sigmoid"]
# Below this mass a quotient of probabilities loses its gradient; a live top-k holds at least k/M.
_LOST_MASS = 1e-20


def recorded_selection(
    selected: Int[Tensor, "tokens k"], num_experts: int, mask: Shaped[Tensor, " tokens"] | None = None
) -> Int[Tensor, "tokens k"]:
    """Check one layer of a recorded selection and clear the rows that must not be replayed.

    Args:
        selected: recorded expert ids; a row of -1 was not recorded.
        num_experts: experts of the layer.
        mask: False at padding, whose ids are stale whatever they are.

    Returns:
        The ids in int64, -1 in every row outside ``mask``.

    Raises:
        ValueError: if shapes disagree, k exceeds ``num_experts``, an id is not an expert, a row holds an expert
            twice, or a row is -1 in part.

    Reference: ours (replay of paper appendix D, R3).

    >>> recorded_selection(torch.tensor([[2, 0], [7, 7]]), 3, torch.tensor([True, False])).tolist()
    [[2, 0], [-1, -1]]
    """
    shape = tuple(selected.shape)
    if shape[-1] > num_experts:
        raise ValueError(f"selected of shape {shape} picks k={shape[-1]} experts of num_experts={num_experts}")
    ids = selected.long()
    if mask is not None:
        require_shape("mask", mask, shape[:1], f"selected of shape {shape}")
        ids = torch.where(as_mask(mask)[:, None], ids, -1)
    absent = ids == -1
    outside = (ids < -1) | (ids >= num_experts)
    _refuse(outside.any(-1), f"selected of shape {shape} holds ids outside 0..{num_experts - 1}", ids)
    _refuse(absent.any(-1) & ~absent.all(-1), f"selected of shape {shape} holds rows that are -1 only in part", ids)
    ordered = ids.sort(-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    _refuse(twice.any(-1), f"selected of shape {shape} holds rows with an expert twice", ids)
    return ids


def replayed_selection(recorded: Int[Tensor, "tokens k"], live: Int[Tensor, "tokens k"]) -> Int[Tensor, "tokens k"]:
    """The recorded selection, and the live one in rows of -1.

    Reference: ours (replay of paper appendix D, R3).

    >>> replayed_selection(torch.tensor([[3, 1], [-1, -1]]), torch.tensor([[0, 1], [2, 0]])).tolist()
    [[3, 1], [2, 0]]
    """
    require_shape("recorded", recorded, tuple(live.shape), "the live selection")
    return torch.where(recorded_rows(recorded)[:, None], recorded, live)


def selected_weights(
    logits: Float[Tensor, "tokens experts"],
    selected: Int[Tensor, "tokens k"],
    *,
    scoring: Scoring = "softmax",
    renormalise: bool = True,
    scale: float = 1.0,
) -> Float[Tensor, "tokens k"]:
    """Combining weights of a given selection, from the current logits.

    ``w_e = scale * s_e / sum_{S} s``, or ``scale * s_e`` without renormalisation, with ``s = softmax(z)`` or
    ``sigmoid(z)`` over all experts. ``"topk_softmax"`` is ``softmax(z_S)``. The scores are gathered at the selection
    from all experts, so that the gradient reaches the router wherever the selection came from.

    Args:
        logits: raw router logits.
        selected: expert ids per token, all of them experts.
        scoring: the router's score function.
        renormalise: whether the selected scores are divided by their sum.
        scale: the router's factor on its weights.

    Returns:
        The weights: float32 for ``"softmax"``, otherwise the dtype of the logits, as the library's routers have
        them. A selection whose probability has vanished (below 1e-20 in all) still gets ``softmax(z_S)``, the limit
        of the quotient, instead of 0/0.

    Raises:
        ValueError: if shapes disagree, an expert does not exist, or ``scoring`` is unknown.

    Reference: the routers of transformers; the vanished selection is ours.

    >>> selected_weights(torch.tensor([[0.0, 0.0, 9.0]]), torch.tensor([[0, 1]]))
    tensor([[0.5000, 0.5000]])
    """
    check_tokens("selected", selected, logits.shape[0], f"logits of shape {tuple(logits.shape)}")
    check_ids("selected", selected, logits.shape[-1], f"logits of shape {tuple(logits.shape)}")
    selected = selected.long()  # engines record narrower ids, which do not index
    if scoring == "topk_softmax":
        return scale * torch.softmax(logits.gather(1, selected), dim=-1)
    if scoring == "sigmoid":
        chosen = logits.sigmoid().gather(1, selected)
        return scale * (chosen / (chosen.sum(-1, keepdim=True) + 1e-20) if renormalise else chosen)
    if scoring != "softmax":
        raise ValueError(f"scoring must be 'softmax', 'topk_softmax' or 'sigmoid', got {scoring!r}")
    chosen = chosen_probs(logits, selected)
    if not renormalise:
        return scale * chosen
    total = chosen.sum(-1, keepdim=True)
    if on_processor(total) and total.numel() and total.amin().item() >= _LOST_MASS:
        weights = chosen / total
        return weights if scale == 1 else scale * weights
    lost = total < _LOST_MASS
    # The clamp gives pruned experts (-inf) equal shares where nothing else was selected.
    limit = torch.softmax(logits.float().gather(1, selected).clamp(min=torch.finfo(torch.float32).min), dim=-1)
    return scale * torch.where(lost, limit, chosen / torch.where(lost, 1.0, total))


def consensus_selection(
    selected: Int[Tensor, "tokens k"], field: Int[Tensor, " tokens"], num_experts: int
) -> Int[Tensor, "tokens k"]:
    """Each token's selection replaced by the consensus set of its field; -1 outside fields.

    Args:
        selected: expert ids per token; rows of -1 do not vote.
        field: field id per token, -1 outside generated fields.
        num_experts: experts of the layer.

    Raises:
        ValueError: if shapes disagree or an expert does not exist.

    Reference: paper appendix C.1 (table 5) with the consensus of equation B.1.

    >>> consensus_selection(torch.tensor([[0, 1], [1, 2], [2, 1], [3, 0]]), torch.tensor([0, 0, 0, -1]), 4).tolist()
    [[1, 2], [1, 2], [1, 2], [-1, -1]]
    """
    # An extra row, all -1 as no token owns it, is the one that field -1 points at.
    rows = (int(field.max()) + 2) if field.numel() else 1
    consensus = consensus_experts(selected, field, num_experts, selected.shape[-1], num_fields=rows)
    return consensus[torch.where(field >= 0, field, rows - 1).long()]


def expert_groups(num_experts: int, num_groups: int) -> Int[Tensor, " experts"]:
    """Group of each expert: contiguous runs of indices, ``group(e) = floor(e G / M)``.

    Raises:
        ValueError: if ``num_groups`` does not lie in 1..num_experts.

    Reference: paper appendix C.1; the floor for G that does not divide M is ours.

    >>> expert_groups(6, 2).tolist()
    [0, 0, 0, 1, 1, 1]
    """
    if not 1 <= num_groups <= num_experts:
        raise ValueError(f"num_groups must lie in 1..num_experts={num_experts}, got {num_groups}")
    return torch.arange(num_experts) * num_groups // num_experts


def expert_tiers(num_experts: int, num_groups: int, num_ranks: int) -> Int[Tensor, " experts"]:
    """Order of each expert inside its bucket, the experts of one group on one expert-parallel rank.

    Args:
        num_experts: experts of the layer, ``M``.
        num_groups: groups of the low-rank router.
        num_ranks: expert-parallel ranks; rank ``r`` holds the ``M / num_ranks`` experts from ``r M / num_ranks`` on.

    Raises:
        ValueError: if ``num_groups`` is out of range or ``num_ranks`` does not divide ``num_experts``.

    Reference: paper appendix C.1.

    >>> expert_tiers(8, num_groups=1, num_ranks=4).tolist()
    [0, 1, 0, 1, 0, 1, 0, 1]
    """
    if num_ranks < 1 or num_experts % num_ranks:
        raise ValueError(f"num_ranks must divide num_experts={num_experts}, got {num_ranks}")
    group, expert = expert_groups(num_experts, num_groups), torch.arange(num_experts)
    bucket = group * num_ranks + expert // (num_experts // num_ranks)
    # Both parts grow with the index, so a bucket is a run and its first expert is found by bisection.
    return expert - torch.searchsorted(bucket, bucket)


def low_rank_mix(weight: Shaped[Tensor, "experts *rest"], num_groups: int) -> Shaped[Tensor, "experts *rest"]:
    """Replace each row by the mean row of its group; the result has rank at most ``num_groups``.

    Args:
        weight: router weight ``[experts, hidden]``, or a bias ``[experts]``.
        num_groups: groups, as :func:`expert_groups` cuts them.

    Returns:
        The mixed matrix in the dtype of ``weight``; the mean is taken in float32 or better.

    Raises:
        ValueError: if ``num_groups`` is out of range.

    Reference: paper appendix C.1; a bias is mixed like a column of the matrix (ours).

    >>> low_rank_mix(torch.tensor([[0.0, 1.0], [2.0, 1.0], [5.0, 5.0]]), 2).tolist()
    [[1.0, 1.0], [1.0, 1.0], [5.0, 5.0]]
    """
    group = expert_groups(weight.shape[0], num_groups).to(weight.device)
    size = (group == torch.arange(num_groups, device=weight.device)[:, None]).sum(1, keepdim=True)
    # Groups are runs, so each is gathered and summed in order; adding rows up by index has no order on a GPU.
    place = torch.arange(-(-len(group) // num_groups), device=weight.device)
    member = (size.cumsum(0) - size + place).clamp(max=len(group) - 1)
    rows = weight.reshape(len(group), weight[0].numel()).to(compute_dtype(weight))[member]
    mean = torch.where((place < size)[..., None], rows, 0.0).sum(1) / size
    return mean[group].to(weight.dtype).reshape(weight.shape)


def tiered_topk(
    scores: Float[Tensor, "tokens experts"], tiers: Int[Tensor, " experts"], k: int
) -> Int[Tensor, "tokens k"]:
    """The k best experts in lexicographic order: higher score, then lower tier, then lower index.

    The limit of subtracting an infinitesimal per tier, free of rounding. NaN is the highest score, as for ``topk``.

    Args:
        scores: what the router ranks its experts by.
        tiers: from :func:`expert_tiers`.
        k: experts per token.

    Raises:
        ValueError: if shapes disagree or ``k`` does not lie in 1..experts.

    Reference: paper appendix C.1; the exact order is ours.

    >>> tiered_topk(torch.zeros(1, 8), expert_tiers(8, num_groups=1, num_ranks=4), 4).tolist()
    [[0, 2, 4, 6]]
    """
    require_shape("tiers", tiers, (scores.shape[-1],), f"scores of shape {tuple(scores.shape)}")
    if not 1 <= k <= scores.shape[-1]:
        raise ValueError(f"k must lie in 1..{scores.shape[-1]}, the experts of scores {tuple(scores.shape)}, got {k}")
    order = tiers.to(scores.device).argsort(stable=True)
    return order[scores[:, order].sort(dim=-1, descending=True, stable=True).indices[:, :k]]


def _refuse(rows: Bool[Tensor, " tokens"], message: str, ids: Int[Tensor, "tokens k"]) -> None:
    """Raise ``ValueError`` with the first offending row, which is what one looks for in the recording."""
    if bool(rows.any()):
        row = int(rows.int().argmax())
        raise ValueError(f"{message}, first at token {row}: {ids[row].tolist()}")
