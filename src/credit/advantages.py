"""Group-relative advantages: a rollout is judged against the other rollouts of its group.

Groups are found by id, never by position. Rows that are absent take part in nothing, whatever they hold.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from credit._safe import (
    as_mask,
    on_processor,
    require_finite,
    require_floating,
    require_shape,
    safe_divide,
    safe_sqrt,
    select,
    statistics_dtype,
)

Scale = Literal["std", "none"]


def group_advantage(
    rewards: Float[Tensor, " batch"],
    group: Int[Tensor, " batch"],
    present: Shaped[Tensor, " batch"] | None = None,
    *,
    eps: float = 1e-6,
    correction: int = 1,
    scale: Scale = "std",
    min_size: int = 2,
) -> Float[Tensor, " batch"]:
    r"""Normalise rewards within their group, over the rows that are present.

    .. math:: \hat A_i = \frac{r_i - \mu_{g(i)}}{\sigma_{g(i)} + \epsilon}

    A row that is absent, or whose group has fewer than ``min_size`` present rows, gets exactly 0, never the raw reward;
    so does a group that leaves no degree of freedom to its standard deviation.
    A group whose present rewards are all equal gets exactly 0 for any value (a float residue over a tiny ``eps`` would
    otherwise pass for an advantage).

    Args:
        rewards: one reward per rollout; absent rows may hold anything, NaN included.
        group: any integers, in any order; rows with the same id form a group.
        present: which rows take part (SLCA eq. 17); all by default.
        eps: numerical floor added to the standard deviation.
        correction: degrees of freedom taken off the count; 1 as in TRL and verl.
        scale: ``"std"`` divides by the standard deviation, ``"none"`` only centres.
        min_size: smallest number of present rows for which a group is judged.

    Returns:
        Advantages in the dtype of ``rewards``; differentiable in ``rewards``.

    Raises:
        ValueError: shapes differ, ``rewards`` are integers or ``group`` is not, ``scale`` is unknown, ``eps`` is
            negative, or a present reward is not finite (the row is named; the check is left out under
            ``torch.compile``).

    Example:
        >>> group_advantage(torch.tensor([0.0, 1.0, 5.0]), torch.tensor([7, 7, 9]))
        tensor([-0.7071,  0.7071,  0.0000])

    Reference:
        SLCA eqs. 2 and 18; RIVET's group advantage with its :math:`\epsilon_A` = 1e-6.
    """
    if scale not in ("std", "none"):
        raise ValueError(f"scale must be 'std' or 'none', got {scale!r}")
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    if rewards.dim() != 1:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}, but [batch] is wanted")
    require_floating("rewards", rewards)
    require_shape("group", group, tuple(rewards.shape), "rewards")
    if group.dtype.is_floating_point:
        raise ValueError(f"group of shape {tuple(group.shape)} has dtype {group.dtype}, but integers are wanted")
    taking_part = torch.ones_like(rewards, dtype=torch.bool) if present is None else as_mask(present)
    require_shape("present", taking_part, tuple(rewards.shape), "rewards")
    require_finite("rewards", rewards, taking_part)

    values = select(taking_part, rewards).to(statistics_dtype(rewards))
    index, groups = _numbered(group)
    count = _group_sum(taking_part.to(values.dtype), index, groups)
    mean = safe_divide(_group_sum(values, index, groups), count)
    centred = select(taking_part, values - _of_rows(mean, index))
    high = _group_max(torch.where(taking_part, values.detach(), -torch.inf), index, groups)
    low = -_group_max(torch.where(taking_part, -values.detach(), -torch.inf), index, groups)
    # Squares are taken of deviations between -1 and 1, so that none overflows or vanishes. The largest is that of an
    # extreme; a group without a present row has no extreme and no reach.
    reach = torch.maximum(high - mean.detach(), mean.detach() - low).clamp(min=0)
    unit = centred / _of_rows(_nonzero(reach), index)
    freedom = (count - correction).clamp(min=0)
    spread = reach * safe_sqrt(safe_divide(_group_sum(unit * unit, index, groups), freedom))
    judged = taking_part & _of_rows((count >= min_size) & (high != low), index)
    divisor = torch.where(freedom > 0, spread + eps, 0.0)
    scaled = centred if scale == "none" else centred / _of_rows(_nonzero(divisor), index)
    return select(judged, scaled).to(rewards.dtype)


def dense_ids(ids: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Renumber ids as 0, 1, 2, … in sorted order, at a cost that depends on their number only.

    Unlike ``torch.unique`` the result has a fixed shape at every step, which ``torch.compile`` needs.

    >>> dense_ids(torch.tensor([200_000_000, -3, 200_000_000]))
    tensor([1, 0, 1])
    """
    ordered, order = torch.sort(ids)
    rank = torch.cat([ordered.new_zeros(ordered[:1].shape), (ordered[1:] != ordered[:-1]).long()]).cumsum(0)
    return torch.empty_like(rank).scatter(0, order, rank)


def compact_ids(ids: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """Ids from 0 to below their number, equal where ``ids`` are equal; without a sort if they are close on a CPU.

    >>> compact_ids(torch.tensor([5, 3, 5])), compact_ids(torch.tensor([500, 3, 500]))
    (tensor([2, 0, 2]), tensor([1, 0, 1]))
    """
    # Reading the bounds would hold up an accelerator and break a compiled graph.
    if on_processor(ids) and ids.numel():
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if high - low < ids.numel():
            return ids.long() - low
    return dense_ids(ids.flatten()).view(ids.shape)


def _numbered(group: Int[Tensor, " batch"]) -> tuple[Int[Tensor, " batch"], int]:
    """Compact ids and a number above them all: the largest plus one on a CPU, else the number of rows."""
    index = compact_ids(group)
    return index, int(index.max()) + 1 if on_processor(index) and index.numel() else index.shape[0]


def _group_sum(values: Float[Tensor, " batch"], index: Int[Tensor, " batch"], groups: int) -> Float[Tensor, " groups"]:
    return values.new_zeros(groups).index_add(0, index, values)


def _group_max(values: Float[Tensor, " batch"], index: Int[Tensor, " batch"], groups: int) -> Float[Tensor, " groups"]:
    return values.new_full((groups,), -torch.inf).scatter_reduce(0, index, values, "amax")


def _nonzero(divisor: Float[Tensor, " groups"]) -> Float[Tensor, " groups"]:
    """Infinity for 0, over which every row is 0 with zero gradient: one choice a group, none a row."""
    return torch.where(divisor != 0, divisor, torch.inf)


def _of_rows(per_group: Shaped[Tensor, " groups"], index: Int[Tensor, " batch"]) -> Shaped[Tensor, " batch"]:
    """Each row's value of its group; three times as fast as ``per_group[index]``."""
    return per_group.index_select(0, index)
