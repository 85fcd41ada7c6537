"""Credit that lands on the right tokens of a multi-turn trajectory."""

from credit.advantages import group_advantage
from credit.aggregation import aggregate_loss
from credit.assignment import assign_credit
from credit.divergence import kl_k3
from credit.guard import omission_guard
from credit.losses import PolicyLoss, policy_loss
from credit.rules import GRPO, RLTR, SLCA, CreditRule, SupportControl, ToolPO
from credit.segments import (
    Field,
    Owner,
    Segment,
    has_segment,
    run_ids,
    spans_to_segments,
    tool_summary_segments,
)
from credit.stats import ClipStatistics, SegmentStatistics, clip_statistics, segment_statistics
from credit.supervised import format_weighted_ce
from credit.temporal import step_advantage, turn_returns

__all__ = [
    "GRPO",
    "RLTR",
    "SLCA",
    "ClipStatistics",
    "CreditRule",
    "Field",
    "Owner",
    "PolicyLoss",
    "Segment",
    "SegmentStatistics",
    "SupportControl",
    "ToolPO",
    "aggregate_loss",
    "assign_credit",
    "clip_statistics",
    "format_weighted_ce",
    "group_advantage",
    "has_segment",
    "kl_k3",
    "omission_guard",
    "policy_loss",
    "run_ids",
    "segment_statistics",
    "spans_to_segments",
    "step_advantage",
    "tool_summary_segments",
    "turn_returns",
]
