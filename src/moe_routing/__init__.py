"""Measure and steer expert selection in mixture-of-experts models."""

from moe_routing.api_names import tool_call_names
from moe_routing.balance import LoadBalance, load_balancing_loss, router_z_loss
from moe_routing.code_names import code_api_names
from moe_routing.consensus import consensus_agreement, consensus_experts, consensus_overlap
from moe_routing.fields import FieldKind, count_fields, count_pairs, field_ids
from moe_routing.gate import EntropyGate
from moe_routing.hooks import RouterInjection, register_injection, steer_router
from moe_routing.information import TurnStatistics, turn_usage
from moe_routing.injection import add_injection, injection_survival, router_gradient, router_injection
from moe_routing.interventions import (
    consensus_selection,
    expert_groups,
    expert_tiers,
    low_rank_mix,
    recorded_selection,
    replayed_selection,
    selected_weights,
    tiered_topk,
)
from moe_routing.metrics import (
    coefficient_of_variation,
    entropy,
    expert_counts,
    expert_set_gap,
    jaccard_similarity,
    load_cv,
    load_entropy,
    router_entropy,
    shift_histogram,
)
from moe_routing.objectives import token_consistency_loss, token_objective
from moe_routing.operations import OperationRules
from moe_routing.policy import kappa_advantage_objective, kappa_ratio_objective
from moe_routing.report import routing_report
from moe_routing.router import router_log_probs, router_probs
from moe_routing.specialization import RoutingDrift, routing_drift, specialization_gap
from moe_routing.summary import RoutingSummary
from moe_routing.sums import SumCount
from moe_routing.turns import turn_control, turn_objective
from moe_routing.variants import outlier_reg, routing_reg, switch_reg, turn_switch_reg

__all__ = [
    "EntropyGate",
    "FieldKind",
    "LoadBalance",
    "OperationRules",
    "RouterInjection",
    "RoutingDrift",
    "RoutingSummary",
    "SumCount",
    "TurnStatistics",
    "add_injection",
    "code_api_names",
    "coefficient_of_variation",
    "consensus_agreement",
    "consensus_experts",
    "consensus_overlap",
    "consensus_selection",
    "count_fields",
    "count_pairs",
    "entropy",
    "expert_counts",
    "expert_groups",
    "expert_set_gap",
    "expert_tiers",
    "field_ids",
    "injection_survival",
    "jaccard_similarity",
    "kappa_advantage_objective",
    "kappa_ratio_objective",
    "load_balancing_loss",
    "load_cv",
    "load_entropy",
    "low_rank_mix",
    "outlier_reg",
    "recorded_selection",
    "register_injection",
    "replayed_selection",
    "router_entropy",
    "router_gradient",
    "router_injection",
    "router_log_probs",
    "router_probs",
    "router_z_loss",
    "routing_drift",
    "routing_reg",
    "routing_report",
    "selected_weights",
    "shift_histogram",
    "specialization_gap",
    "steer_router",
    "switch_reg",
    "tiered_topk",
    "token_consistency_loss",
    "token_objective",
    "tool_call_names",
    "turn_control",
    "turn_objective",
    "turn_switch_reg",
    "turn_usage",
]
