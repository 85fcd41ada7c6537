"""Per-segment statistics as TRL logs them: numbers by name, over all ranks."""

import math
from dataclasses import fields
from functools import reduce
from operator import add
from typing import Any

import torch

from credit.segments import Segment
from credit.stats import ClipStatistics, SegmentStatistics

_ADVANTAGE = {"mean": "advantage_mean", "std": "advantage_std", "zero": "advantage_zero"}


def segment_metrics(statistics: SegmentStatistics | ClipStatistics) -> dict[str, float]:
    """Values by ``credit/segment/name``; NaN, which TRL leaves out of its averages, for a segment without tokens.

    Example:
        >>> from credit.stats import segment_statistics
        >>> stats = segment_statistics(torch.tensor([[2.0, 2.0, 9.0]]), torch.tensor([[0, 0, -1]]))
        >>> metrics = segment_metrics(stats)
        >>> metrics["credit/tool/advantage_mean"], metrics["credit/summary/token_share"]
        (2.0, 0.0)
    """
    computed = {name: values.tolist() for name, values in statistics.compute().items()}
    return {
        f"credit/{segment.name.lower()}/{_ADVANTAGE.get(name, name)}": (
            values[segment] if name == "token_share" or statistics.tokens[segment] > 0 else math.nan
        )
        for segment in (Segment.TOOL, Segment.SUMMARY)
        for name, values in computed.items()
    }


def clip_limits(trainer: Any) -> dict[str, Any]:
    """The clip of the trainer's loss, as :func:`credit.stats.clip_statistics` takes it.

    Losses without PPO's clip bound the ratio in ways of their own, which TRL logs; here nothing is clipped.
    """
    if trainer.loss_type not in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        return {"clip_low": math.inf, "clip_high": math.inf, "dual_clip": None}
    limits = {"clip_low": trainer.epsilon_low, "clip_high": trainer.epsilon_high}
    return {**limits, "dual_clip": trainer.args.delta}


def over_ranks(statistics: ClipStatistics, accelerator: Any) -> ClipStatistics:
    """Join the statistics of all ranks."""
    local = torch.stack([getattr(statistics, field.name) for field in fields(statistics)])
    return reduce(add, (ClipStatistics(*rank) for rank in accelerator.gather(local.unsqueeze(0))))
