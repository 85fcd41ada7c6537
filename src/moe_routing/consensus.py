"""The experts a field agrees on, and how far its tokens follow them."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit._safe import compute_dtype, require_matrix, require_shape, select
from moe_routing.fields import check_ids, recorded_rows
from moe_routing.metrics import expert_counts


def consensus_experts(
    selected: Int[Tensor, "tokens k"],
    field: Int[Tensor, " tokens"],
    num_experts: int,
    size: int,
    num_fields: int | None = None,
) -> Int[Tensor, "fields size"]:
    """Consensus set of each field: its ``size`` most selected experts, ties to the lower index.

    ``C = TopK_e sum_{t in field} 1[e in S_t]``, in order of popularity.

    Args:
        selected: expert ids per token; rows with a negative id are ignored.
        field: field id per token, -1 outside generated fields.
        num_experts: experts of the layer.
        size: members of the set; the paper uses k, and 8 or 16 for ``outlier_reg``.
        num_fields: rows of the result; the highest id plus one when absent (which reads the data).

    Returns:
        Row ``f`` belongs to field id ``f``; it is all -1 for an id without tokens.

    Raises:
        ValueError: if shapes disagree, ``size`` does not lie in 1..num_experts, or an id is out of range.

    Reference: paper appendix B.1.

    >>> consensus_experts(torch.tensor([[3, 1], [1, 2]]), torch.tensor([1, 1]), num_experts=4, size=2).tolist()
    [[-1, -1], [1, 2]]
    """
    if not 1 <= size <= num_experts:
        raise ValueError(f"size must lie in 1..num_experts={num_experts}, got {size}")
    require_matrix("selected", selected, "[tokens, k]")
    require_shape("field", field, (selected.shape[0],), f"selected of shape {tuple(selected.shape)}")
    if num_fields is None:
        num_fields = int(field.max()) + 1 if field.numel() else 0
    counts = expert_counts(selected, field, max(num_fields, 0), num_experts)
    # A stable sort, because topk promises no order among ties.
    ranked = counts.sort(dim=-1, descending=True, stable=True).indices[:, :size]
    return torch.where(counts.sum(-1, keepdim=True) > 0, ranked, -1)


def consensus_overlap(
    selected: Int[Tensor, "tokens k"], field: Int[Tensor, " tokens"], consensus: Int[Tensor, "fields size"]
) -> Float[Tensor, " tokens"]:
    """Share of a token's experts that belong to its field's consensus, ``kappa_t = |S_t & C| / k``.

    Args:
        selected: expert ids per token.
        field: field id per token, -1 outside generated fields.
        consensus: row ``f`` is the set of field id ``f``, as :func:`consensus_experts` returns it.

    Returns:
        ``kappa`` in float32; 1, which changes nothing it multiplies, outside fields and where the selection was
        not recorded.

    Raises:
        ValueError: if shapes disagree or a field id has no row in ``consensus``.

    Reference: paper appendix B.4.

    >>> consensus_overlap(torch.tensor([[0, 1], [1, 2]]), torch.tensor([0, -1]), torch.tensor([[1, 5]]))
    tensor([0.5000, 1.0000])
    """
    require_matrix("selected", selected, "[tokens, k]")
    require_shape("field", field, (selected.shape[0],), f"selected of shape {tuple(selected.shape)}")
    check_ids("field", field, consensus.shape[0], f"consensus of shape {tuple(consensus.shape)}")
    counted = (field >= 0) & recorded_rows(selected)
    members = _rows(consensus, field)
    shared = (selected[:, :, None] == members[:, None, :]).any(-1).sum(-1)
    return torch.where(counted, shared.float() / max(selected.shape[-1], 1), 1.0)


def consensus_agreement(
    probs: Float[Tensor, "tokens experts"],
    field: Int[Tensor, " tokens"],
    consensus: Int[Tensor, "fields size"],
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """Agreement of the router with the uniform distribution over its field's consensus.

    ``a_t = sum_{e in C} min(p_t(e), 1/|C|) = 1 - TV(p_t, uniform on C)``: 1 iff the two are equal, 0 iff no
    probability lies on the consensus.

    Args:
        probs: router probabilities.
        field: field id per token, -1 outside generated fields.
        consensus: row ``f`` is the set of field id ``f``.

    Returns:
        The agreement and where it exists; 0 and False outside fields and for a field without consensus.

    Raises:
        ValueError: if shapes disagree, or an id has no row or no expert.

    Reference: monitored in paper appendix B.1; the form is ours.

    >>> consensus_agreement(torch.tensor([[0.7, 0.1, 0.2]]), torch.tensor([0]), torch.tensor([[0, 1]]))[0]
    tensor([0.6000])
    """
    require_shape("field", field, (probs.shape[0],), f"probs of shape {tuple(probs.shape)}")
    check_ids("field", field, consensus.shape[0], f"consensus of shape {tuple(consensus.shape)}")
    check_ids("consensus", consensus, probs.shape[-1], f"probs of shape {tuple(probs.shape)}")
    # Sets are checked and cleaned before they are spread over tokens; the spare one serves tokens outside fields.
    sets = torch.cat([consensus, consensus.new_full((1, consensus.shape[-1]), -1)]).long()
    row = torch.where(field >= 0, field.long(), consensus.shape[0])
    valid = (sets >= 0).all(-1).index_select(0, row)
    chosen = probs.gather(1, sets.clamp(min=0).index_select(0, row)).to(compute_dtype(probs))
    return select(valid, chosen.clamp(max=1.0 / consensus.shape[-1]).sum(-1)), valid


def consensus_mask(
    field: Int[Tensor, " tokens"], consensus: Int[Tensor, "fields size"], num_experts: int
) -> Bool[Tensor, "tokens experts"]:
    """Membership of every expert in the consensus of each token's field; all False outside fields."""
    members = _rows(consensus, field)
    inside = torch.zeros(field.shape[0], num_experts + 1, dtype=torch.bool, device=field.device)
    return inside.scatter(1, torch.where(members >= 0, members, num_experts), True)[:, :-1]


def _rows(consensus: Int[Tensor, "fields size"], field: Int[Tensor, " tokens"]) -> Int[Tensor, "tokens size"]:
    """Consensus of each token's field, -1 outside fields (also when there is no field at all)."""
    padded = torch.cat([consensus, consensus.new_full((1, consensus.shape[-1]), -1)]).long()
    return padded[torch.where(field >= 0, field.long(), consensus.shape[0])]
