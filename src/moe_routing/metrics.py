"""How expert selection behaves: between neighbouring tokens, over a trajectory, and at the router.

Per-token functions return ``(value[N], valid[N])``: ``SumCount.of(value, valid)`` adds up over micro-batches and
ranks. Histograms and expert counts are sums already.
"""

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from credit._safe import as_mask, compute_dtype, on_processor, require_matrix, require_shape, safe_divide, select
from moe_routing.blocks import row_blocks, select_rows
from moe_routing.fields import check_ids, check_selection, neighbours, recorded_rows, shift_rows
from moe_routing.sums import SumCount


def expert_set_gap(
    selected: Int[Tensor, "tokens k"], field: Int[Tensor, " tokens"]
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """Share of the experts that changed since the previous token of the same field.

    ``gap_t = 1 - |S_{t-1} & S_t| / k``

    Args:
        selected: distinct expert ids per token; a row with a negative id was not recorded and takes no part.
        field: field id per token, -1 outside generated fields.

    Returns:
        The gap in float32 and where it exists; 0 and False at the first token of a field and outside fields.

    Raises:
        ValueError: if the two disagree on the number of tokens.

    Reference: paper section 3.2.

    >>> gap, valid = expert_set_gap(torch.tensor([[0, 1], [1, 2], [1, 2]]), torch.tensor([5, 5, 6]))
    >>> gap.tolist(), valid.tolist()
    ([0.0, 0.5, 0.0], [False, True, False])
    """
    changed, valid = changed_experts(selected, field)
    # (k - i) / k rather than 1 - i / k: the latter turns 3/10 into 0.30000000000000004, past a threshold of 0.3.
    return changed.float() / max(selected.shape[-1], 1), valid


def jaccard_similarity(
    selected: Int[Tensor, "tokens k"], field: Int[Tensor, " tokens"]
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """Jaccard similarity of neighbouring expert sets, ``|S_{t-1} & S_t| / |S_{t-1} | S_t| = (1-gap)/(1+gap)``.

    Arguments, returns and errors as for :func:`expert_set_gap`. Reference: paper section 4.3.

    >>> similarity, valid = jaccard_similarity(torch.tensor([[0, 1], [1, 2]]), torch.tensor([0, 0]))
    >>> similarity
    tensor([0.0000, 0.3333])
    """
    changed, valid = changed_experts(selected, field)
    k = selected.shape[-1]
    similarity = (k - changed).float() / (k + changed).clamp(min=1).float()
    return select(valid, similarity), valid


def shift_histogram(selected: Int[Tensor, "tokens k"], field: Int[Tensor, " tokens"]) -> Int[Tensor, " shifts"]:
    """How many within-field pairs changed 0, 1, ..., k experts: ``k + 1`` counts that add up over shards.

    Arguments and errors as for :func:`expert_set_gap`. Reference: paper figure 12.

    >>> shift_histogram(torch.tensor([[0, 1], [1, 2], [1, 2]]), torch.tensor([0, 0, 0])).tolist()
    [1, 1, 0]
    """
    changed, valid = changed_experts(selected, field)
    histogram = changed.new_zeros(selected.shape[-1] + 1)
    return histogram.scatter_add(0, changed, valid.to(histogram.dtype))


def changed_experts(
    selected: Int[Tensor, "tokens k"], field: Int[Tensor, " tokens"]
) -> tuple[Int[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """Number of experts of token ``t`` that token ``t-1`` of the same field did not select, and where it exists."""
    require_matrix("selected", selected, "[tokens, k]")
    require_shape("field", field, (selected.shape[0],), f"selected of shape {tuple(selected.shape)}")
    recorded = recorded_rows(selected)
    valid = neighbours(field) & recorded & shift_rows(recorded)
    return select(valid, _lost_experts(selected)), valid


def _lost_experts(selected: Int[Tensor, "tokens k"]) -> Int[Tensor, " tokens"]:
    """Number of experts of each row that the row before does not hold; the first row is compared with the last."""
    tokens, k = selected.shape
    if k == 0:
        return selected.new_zeros(tokens, dtype=torch.long)
    # Tokens innermost: the k x k comparisons of each token would be short runs.
    narrow = on_processor(selected) and 0 <= int(selected.amax()) < 2**15 if tokens else False
    own = selected.T.to(torch.int16 if narrow else torch.int32).contiguous()
    before = own.roll(1, 1)
    lost = own.new_empty(tokens)
    for part in row_blocks(selected, k * k):
        # Equal ids differ in no bit: the least difference is 0 when the row before holds the expert.
        difference = (own[:, None, part] ^ before[None, :, part]).amin(1)
        torch.sum(difference.clamp_(max=1), 0, dtype=lost.dtype, out=lost[part])
    return lost.long()


def expert_counts(
    selected: Int[Tensor, "tokens k"], group: Int[Tensor, " tokens"], num_groups: int, num_experts: int
) -> Int[Tensor, "groups experts"]:
    """Selections of each expert by the tokens of each group (a field, a turn, a trajectory); adds over shards.

    Tokens of a negative group and rows with a negative expert are ignored.

    Raises:
        ValueError: if the two disagree on the number of tokens, ``k > num_experts``, or an id is out of range.

    Reference: ours.

    >>> expert_counts(torch.tensor([[0, 2], [0, 1], [1, 2]]), torch.tensor([0, 0, -1]), 1, 4).tolist()
    [[2, 1, 1, 0]]
    """
    require_matrix("selected", selected, "[tokens, k]")
    require_shape("group", group, (selected.shape[0],), f"selected of shape {tuple(selected.shape)}")
    check_selection(selected, num_experts, f"num_experts={num_experts}")
    check_ids("group", group, num_groups, f"num_groups={num_groups}")
    return selection_counts(selected, group, num_groups, num_experts)


def selection_counts(
    selected: Int[Tensor, "tokens k"], group: Int[Tensor, " tokens"], num_groups: int, num_experts: int
) -> Int[Tensor, "groups experts"]:
    """:func:`expert_counts` of ids known to be in range, without a look at the data."""
    counted = (group >= 0) & recorded_rows(selected)
    # One spare row takes what is ignored, so that no index is data dependent in shape.
    cell = torch.where(counted[:, None], group[:, None].long() * num_experts + selected, num_groups * num_experts)
    flat = cell.new_zeros(num_groups * num_experts + 1)
    flat = flat.scatter_add(0, cell.reshape(-1), torch.ones_like(cell).reshape(-1))
    return flat[:-1].reshape(num_groups, num_experts)


def load_cv(
    selected: Int[Tensor, "tokens k"], trajectory: Int[Tensor, " tokens"], num_experts: int
) -> Float[Tensor, " trajectories"]:
    """Coefficient of variation of the expert load of each trajectory, for one layer.

    ``CV = std_e(c_e) / mean_e(c_e)`` over all experts, the idle ones included, with the population std. It is 0
    exactly when the load is uniform, and at most ``sqrt(M/k - 1)``, when every token picks the same k.

    Args:
        selected: expert ids per token; rows with a negative id are ignored.
        trajectory: trajectory id per token, -1 for tokens that do not count (prompt, tool results, padding).
        num_experts: experts of the layer.

    Returns:
        One value for each trajectory that has tokens, in ascending order of its id; average them over
        trajectories and layers. Shards that split a trajectory add :func:`expert_counts` and call
        :func:`coefficient_of_variation`.

    Raises:
        ValueError: if shapes disagree, ``k > num_experts``, or an expert id is out of range.

    Reference: paper appendix A.3.

    >>> load_cv(torch.tensor([[0], [0], [0], [1]]), torch.tensor([0, 0, 4, 4]), num_experts=2)
    tensor([1., 0.])
    """
    return coefficient_of_variation(_present_counts(selected, trajectory, num_experts))


def load_entropy(
    selected: Int[Tensor, "tokens k"], trajectory: Int[Tensor, " tokens"], num_experts: int
) -> Float[Tensor, " trajectories"]:
    """Entropy in nats of the expert load of each trajectory, ``-sum_e l_e log l_e`` with ``l_e = c_e / sum c``.

    Arguments, order of the values and errors as for :func:`load_cv`. Reference: paper appendix D, ours in detail.

    >>> load_entropy(torch.tensor([[0], [0], [0], [1]]), torch.tensor([0, 0, 4, 4]), num_experts=2)
    tensor([0.0000, 0.6931])
    """
    counts = _present_counts(selected, trajectory, num_experts).float()
    share = safe_divide(counts, counts.sum(-1, keepdim=True))
    return entropy(share)


def coefficient_of_variation(counts: Int[Tensor, "... experts"]) -> Float[Tensor, "..."]:
    """Population std over mean of the counts along the last axis, in float32; 0 where nothing was counted.

    Reference: paper appendix A.3.

    >>> coefficient_of_variation(torch.tensor([[4, 0], [2, 2], [0, 0]]))
    tensor([1., 0., 0.])
    """
    rows = counts.reshape(counts.shape[:-1].numel(), counts.shape[-1]).long()  # narrower counts times M may not fit
    spread = torch.empty(rows.shape[0], device=counts.device)
    for part in row_blocks(rows, 2 * rows.shape[-1]):
        # In units of the total, M * c - sum c is an exact integer, so a uniform load gives an exact 0.
        deviation = torch.sub(rows[part] * rows.shape[-1], rows[part].sum(-1, keepdim=True)).float()
        spread[part] = deviation.square().mean(-1).sqrt()
    return safe_divide(spread.reshape(counts.shape[:-1]), counts.sum(-1).float())


def router_entropy(probs: Float[Tensor, "tokens experts"], mask: Shaped[Tensor, " tokens"]) -> Float[Tensor, ""]:
    """Mean entropy in nats of the router's distribution over the masked tokens, ``-sum_e p_e log p_e``.

    Args:
        probs: router probabilities.
        mask: tokens that count; what lies under a False, NaN too, does not matter.

    Returns:
        A scalar, 0 when no token counts. ``SumCount.of(entropy(probs), mask)`` is the form that adds up.

    Raises:
        ValueError: if the two disagree on the number of tokens.

    Reference: paper appendix D.2.

    >>> router_entropy(torch.full((2, 4), 0.25), torch.tensor([True, False]))
    tensor(1.3863)
    """
    require_shape("mask", mask, (probs.shape[0],), f"probs of shape {tuple(probs.shape)}")
    wide = probs.to(compute_dtype(probs))
    counted = as_mask(mask)
    # A gradient must not meet what lies under the mask; a value is masked in the sum.
    clean = select_rows(counted, wide) if wide.requires_grad else wide
    return SumCount.of(entropy(clean), counted).compute().to(wide.dtype)


def entropy(probs: Float[Tensor, "... experts"]) -> Float[Tensor, "..."]:
    """Entropy in nats along the last axis, ``0 log 0 = 0`` with a finite gradient.

    Reference: ours.

    >>> entropy(torch.tensor([0.5, 0.5, 0.0]))
    tensor(0.6931)
    """
    # A floor instead of a case for 0: x log x is 0 there all the same. Subtracted so that certainty reads 0, not -0.
    return 0 - (probs * probs.clamp(min=torch.finfo(probs.dtype).tiny).log()).sum(-1)


def entropy_(probs: Float[Tensor, "... experts"], log_probs: Float[Tensor, "... experts"]) -> Float[Tensor, "..."]:
    """:func:`entropy` where the logarithms are at hand, without a gradient; overwrites ``log_probs``.

    >>> log_probs = torch.tensor([0.0, 0.0, -torch.inf]).log_softmax(-1)
    >>> entropy_(log_probs.exp(), log_probs)
    tensor(0.6931)
    """
    # 0 * -inf is no number; and no product of matrices, which autocast would round.
    return 0 - log_probs.clamp_(min=torch.finfo(log_probs.dtype).min).mul_(probs).sum(-1)


def _present_counts(
    selected: Int[Tensor, "tokens k"], trajectory: Int[Tensor, " tokens"], num_experts: int
) -> Int[Tensor, "trajectories experts"]:
    """Expert counts of the trajectories that occur, so that an id without tokens is not a perfect balance."""
    require_matrix("selected", selected, "[tokens, k]")
    require_shape("trajectory", trajectory, (selected.shape[0],), f"selected of shape {tuple(selected.shape)}")
    counted = (trajectory >= 0) & recorded_rows(selected)
    ids, dense = torch.unique(trajectory[counted], return_inverse=True)
    return expert_counts(selected[counted], dense, ids.numel(), num_experts)
