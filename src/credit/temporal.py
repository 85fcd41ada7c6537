"""Credit over time inside a segment: one advantage per run instead of one per rollout.

These compose with :func:`credit.assignment.assign_credit`, which takes advantages ``[batch, runs, components]``.
"""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from credit._safe import (
    as_mask,
    require_finite,
    require_floating,
    require_matrix,
    require_shape,
    select,
    statistics_dtype,
)
from credit.advantages import Scale, compact_ids, group_advantage


def turn_returns(
    rewards: Float[Tensor, "batch runs"], present: Shaped[Tensor, "batch runs"], *, discount: float = 1.0
) -> Float[Tensor, "batch runs"]:
    r"""Discounted reward-to-go of every run.

    .. math:: G_{i,r} = \sum_{r' \ge r} \gamma^{r' - r} R_{i,r'}

    Args:
        rewards: reward earned at each run; positions where ``present`` is false may hold anything.
        present: which runs exist.
        discount: :math:`\gamma` in [0, 1].

    Returns:
        Returns, exactly 0 where ``present`` is false.

    Raises:
        ValueError: shapes differ, ``rewards`` are integers, or ``discount`` lies outside [0, 1].

    Example:
        >>> turn_returns(torch.tensor([[1.0, 2.0]]), torch.tensor([[True, True]]), discount=0.5)
        tensor([[2., 2.]])

    Reference:
        The standard discounted return; composition with segments is ours.
    """
    if not 0.0 <= discount <= 1.0:
        raise ValueError(f"discount must lie in [0, 1], got {discount}")
    exists = as_mask(present)
    require_matrix("rewards", rewards, "[batch, runs]")
    require_floating("rewards", rewards)
    require_shape("present", exists, tuple(rewards.shape), "rewards")
    step = torch.arange(rewards.shape[1], device=rewards.device)
    ahead = step[:, None] - step[None, :]  # rows: the run that earns; columns: the run that is credited
    base = torch.tensor(discount, dtype=statistics_dtype(rewards), device=rewards.device)
    weight = select(ahead >= 0, base ** ahead.clamp(min=0))
    return select(exists, (select(exists, rewards).to(weight.dtype) @ weight).to(rewards.dtype))


def step_advantage(
    returns: Float[Tensor, "batch runs"],
    group: Int[Tensor, " batch"],
    present: Shaped[Tensor, "batch runs"],
    *,
    anchor: Int[Tensor, "batch runs"] | None = None,
    eps: float = 1e-6,
    correction: int = 1,
    scale: Scale = "std",
    min_size: int = 2,
) -> Float[Tensor, "batch runs"]:
    """Group-relative advantage of every run.

    By default all runs of a group are judged together, with one mean and one standard deviation. With ``anchor``, runs
    are judged against the runs of their group that began in the same anchor state (GiGPO's step groups).

    Using the turn number as anchor normalises each turn index on its own. That is *biased* when the policy chooses when
    to stop: late turns exist only in rollouts that went on, so their mean is taken over a population the policy
    selects. It is therefore not the default.

    Args:
        returns: one value per run, for example from :func:`turn_returns`.
        group: group id of each rollout.
        present: which runs exist.
        anchor: id of the state in which each run began; compared within a group only.
        eps: see :func:`credit.advantages.group_advantage`, as ``correction``, ``scale`` and ``min_size``.
        correction: degrees of freedom.
        scale: ``"std"`` or ``"none"``.
        min_size: smallest step group that is judged.

    Returns:
        Advantages, exactly 0 where ``present`` is false.

    Raises:
        ValueError: shapes differ, ``returns`` are integers, or a present return is not finite (its row and run are
            named).

    Example:
        >>> group, here = torch.tensor([0, 0]), torch.tensor([[True, True], [True, False]])
        >>> step_advantage(torch.tensor([[3.0, 1.0], [2.0, 0.0]]), group, here)
        tensor([[ 1.0000, -1.0000],
                [ 0.0000,  0.0000]])

    Reference:
        GiGPO's anchor-state groups; the pooled default is ours.
    """
    exists = as_mask(present)
    require_matrix("returns", returns, "[batch, runs]")
    require_floating("returns", returns)
    require_shape("present", exists, tuple(returns.shape), "returns")
    require_shape("group", group, tuple(returns.shape[:1]), "returns")
    require_finite("returns", returns, exists)
    ids = compact_ids(group)[:, None].expand(returns.shape)
    if anchor is not None:
        require_shape("anchor", anchor, tuple(returns.shape), "returns")
        # Compact ids are below the number of runs, so the pair fits one int64 without collision.
        ids = ids * max(returns.numel(), 1) + compact_ids(anchor)
    flat = group_advantage(
        returns.flatten(),
        ids.flatten(),
        exists.flatten(),
        eps=eps,
        correction=correction,
        scale=scale,
        min_size=min_size,
    )
    return flat.view(returns.shape)
