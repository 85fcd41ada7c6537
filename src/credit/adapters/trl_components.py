"""From TRL's reward functions to the components a credit rule reads.

TRL calls reward functions and hands back one column for each; a rule wants one reward for each component.
The plan says which function feeds which component, with which weight.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from credit._safe import select
from credit.advantages import dense_ids
from credit.rules import CreditRule


@dataclass(frozen=True)
class RewardPlan:
    """Which reward function feeds which component of a credit rule.

    Attributes:
        components: component names, in the order of the columns of ``weights``.
        functions: the reward functions, each once, however many components it feeds.
        weights: weight of each function in each component; 0 where it does not feed it.
    """

    components: tuple[str, ...]
    functions: tuple[Any, ...]
    weights: Float[Tensor, "functions components"]

    def __call__(
        self, rewards: Float[Tensor, "batch functions"], group: Int[Tensor, " batch"]
    ) -> dict[str, Float[Tensor, " batch"]]:
        """Weighted sum of the functions of each component.

        ``R_c = Σ_f w_fc · r_f``. A component for which every function returned ``None`` is absent (NaN). Where
        only some did, the missing ones count as the mean of their group, so that they neither lift nor
        lower the rollout; as 0, which is TRL's way, they would reward or punish it for not having been scored.

        Args:
            rewards: one column for each function, NaN where it returned ``None``.
            group: id of the prompt group of each row.

        Returns:
            one reward for each component and row, NaN where absent.

        Raises:
            ValueError: infinities leave a component without a sum; as NaN the row would pass for an absent one.
        """
        scored = ~rewards.isnan()
        filled = torch.where(scored, rewards, _group_means(rewards, group))
        # Not a matrix product, in which equal rows may come out different by a bit.
        weights = self.weights.to(rewards)
        # Selected, not multiplied by 0: an infinity in a function that does not count would make a NaN of the total.
        totals = select(weights != 0, filled.unsqueeze(-1) * weights).sum(dim=1)
        present = (scored.unsqueeze(-1) & (weights != 0)).any(dim=1)
        if bool((present & totals.isnan()).any()):
            row, column = (present & totals.isnan()).nonzero()[0].tolist()
            raise ValueError(
                f"components[{self.components[column]!r}] of row {row} has no sum, because reward functions returned "
                f"infinities: {rewards[row].tolist()}; return None where there is no score"
            )
        totals = torch.where(present, totals, torch.nan)
        return dict(zip(self.components, totals.unbind(dim=1)))


def reward_plan(components: Mapping[str, Any], weights: Mapping[str, Sequence[float]] | None = None) -> RewardPlan:
    """List each reward function once, with its weight in each component.

    Args:
        components: reward function, or list of them, for each component name.
        weights: one weight for each function of a component; a component left out has weights 1. A function
            of weight 0 is called and logged, and counts nowhere.

    Raises:
        ValueError: an empty component, or weights that do not fit; the message names it.

    Example:
        >>> plan = reward_plan({"tool": [len, sum], "summary": sum}, {"tool": [1.0, 0.5]})
        >>> plan.functions == (len, sum), plan.weights.tolist()
        (True, [[1.0, 0.0], [0.5, 1.0]])
    """
    unknown = [name for name in weights or {} if name not in components]
    if unknown:
        raise ValueError(f"component_weights: unknown {unknown}; the components are {list(components)}")
    functions: list[Any] = []
    table: list[dict[str, float]] = []
    for name, given in components.items():
        column = list(given) if isinstance(given, list | tuple) else [given]
        if not column:
            raise ValueError(f"components[{name!r}] is empty; give it a reward function or leave it out")
        for function, weight in zip(column, _column_weights(name, weights, len(column)), strict=True):
            place = next((i for i, known in enumerate(functions) if _same(known, function)), len(functions))
            if place == len(functions):
                functions.append(function)
                table.append({})
            table[place][name] = table[place].get(name, 0.0) + weight
    names = tuple(components)
    rows = [[row.get(name, 0.0) for name in names] for row in table]
    return RewardPlan(names, tuple(functions), torch.tensor(rows, dtype=torch.float32))


def _same(one: Any, other: Any) -> bool:
    # A method is a new object each time it is named, and a model's name stands for one model.
    return one is other or (isinstance(other, str | MethodType) and bool(one == other))


def _column_weights(name: str, weights: Mapping[str, Sequence[float]] | None, count: int) -> list[float]:
    column = [float(weight) for weight in (weights or {}).get(name, [1.0] * count)]
    if len(column) != count:
        raise ValueError(f"component_weights[{name!r}] has {len(column)} weights for {count} reward functions")
    if not all(math.isfinite(weight) for weight in column) or not any(column):
        raise ValueError(f"component_weights[{name!r}] must be finite and not all 0, got {column}")
    return column


def _group_means(
    rewards: Float[Tensor, "batch functions"], group: Int[Tensor, " batch"]
) -> Float[Tensor, "batch functions"]:
    """Mean over the scored rows of each row's group, 0 where there is none.

    Taken as lowest + mean excess, so that the mean of equal rewards is that reward to the last bit: a residue
    would make a group of equal rewards look spread.
    """
    scored = ~rewards.isnan()
    place = dense_ids(group).unsqueeze(1).expand_as(rewards)
    groups = rewards.new_zeros((len(group), rewards.shape[1]))
    lowest = torch.full_like(groups, torch.inf).scatter_reduce(
        0, place, torch.where(scored, rewards, torch.inf), "amin"
    )
    excess = torch.where(scored, rewards - lowest.gather(0, place), 0.0)
    counts = groups.scatter_add(0, place, scored.to(rewards.dtype))
    means = lowest + groups.scatter_add(0, place, excess) / counts.clamp(min=1)
    return torch.where(counts > 0, means, 0.0).gather(0, place)


def environment_reward(environments: Sequence[Any], **_: Any) -> list[float | None]:
    """Reward function that asks each rollout's environment; ``None`` from one without ``get_reward``."""
    return [env.get_reward() if hasattr(env, "get_reward") else None for env in environments]


def require_fit(rule: CreditRule, plan: RewardPlan, *, guarded: bool) -> None:
    """Raise ``ValueError`` unless ``rule`` can work with the components of ``plan``.

    Args:
        rule: the credit rule.
        plan: the caller's components.
        guarded: whether the omission guard is on, which needs a tool and a summary component.
    """
    names, reader = list(plan.components), type(rule).__name__
    unknown = [name for name in names if name not in rule.components]
    if unknown:
        raise ValueError(f"components: unknown {unknown}; {reader} reads {list(rule.components)}")
    if guarded and not {"tool", "summary"} <= set(names):
        raise ValueError(f"tool_required needs the components 'tool' and 'summary', got {names}")
    one = torch.zeros(1, dtype=torch.int64)
    try:  # which of its components a rule can do without, only the rule knows
        rule({name: torch.zeros(1) for name in names}, one, one[:, None])
    except (KeyError, ValueError) as error:
        raise ValueError(f"components {names} do not fit {reader}: {error}") from error


def refuse_options(args: Any) -> None:
    """Raise ``ValueError`` on options of ``GRPOConfig`` that have no effect here, or would undo the routing."""
    if args.scale_rewards != "group" or args.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            "scale_rewards and multi_objective_aggregation have no effect: the rule normalises. Leave them alone "
            "and set `scale` on the rule, as in SLCA(scale='none')"
        )
    if args.reward_weights is not None:
        raise ValueError("reward_weights is given; weigh reward functions with component_weights instead")
    if args.importance_sampling_level == "sequence" and args.loss_type not in ("cispo", "vespo"):
        raise ValueError(
            "importance_sampling_level='sequence' hands every token the average advantage of its row, which "
            f"undoes the routing; use 'token' with loss_type={args.loss_type!r}"
        )
