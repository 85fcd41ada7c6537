"""What each package exports, and what every public name says of itself."""

import importlib
import inspect
import re

import pytest

import credit

PUBLIC = {
    "credit": [
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
    ],
    "moe_routing": [
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
    ],
    "rewards": [
        "Accepted",
        "ActionScore",
        "ChatEndpoint",
        "CompletenessJudge",
        "ContextAction",
        "DeterministicMocker",
        "EndpointError",
        "Gold",
        "GoldCall",
        "GoldError",
        "GuardedScore",
        "JudgeCounts",
        "JudgeItem",
        "JudgeResult",
        "LLMMocker",
        "LenientCalls",
        "Mocker",
        "ParsedCalls",
        "PlannerScore",
        "Problem",
        "ProcessScore",
        "ProcessWeights",
        "Repair",
        "RowError",
        "RuleJudge",
        "SolvedJudge",
        "SummaryJudge",
        "ToolCall",
        "ToolPool",
        "ToolResponse",
        "ToolSchemaError",
        "ToolSet",
        "Trajectory",
        "WithinContext",
        "action_score",
        "answer_calls",
        "as_gold",
        "count_results",
        "decompose",
        "guard_omission",
        "hard_candidates",
        "loose_match",
        "opening",
        "outcome_reward",
        "parse_chat",
        "parse_hermes",
        "parse_lenient",
        "parse_llama3_json",
        "parse_message",
        "parse_mistral",
        "parse_pythonic",
        "parse_qwen3_coder",
        "parse_rating",
        "parse_tool_calls",
        "planner_score",
        "process_score",
        "random_candidates",
        "read_bfcl",
        "read_chat",
        "read_hermes",
        "read_slca",
        "read_toucan",
        "read_xlam",
        "reference_rule",
        "register_format",
        "simulate",
        "split_by_conversation",
        "standard_types",
        "type_arguments",
        "unified_total",
        "validate_call",
        "verify_answer",
        "verify_answers",
    ],
}


@pytest.mark.parametrize("package", PUBLIC)
def test_the_exports_are_these(package):
    module = importlib.import_module(package)
    assert module.__all__ == PUBLIC[package]
    assert all(hasattr(module, name) for name in module.__all__)


def names(*packages: str) -> list[tuple[str, str]]:
    return [(package, name) for package in packages for name in PUBLIC[package]]


@pytest.mark.parametrize(("package", "name"), names(*PUBLIC))
def test_every_public_name_has_a_summary(package, name):
    public = getattr(importlib.import_module(package), name)
    text = public.__doc__
    assert text, "no docstring"
    assert not text.startswith(f"{name}("), "the docstring is the one that dataclass writes"
    summary = inspect.cleandoc(text).split("\n\n")[0]
    assert summary.endswith((".", ":")), summary
    # The import hook and dataclasses hide a module; the definition must still be in this package.
    assert public.__module__.split(".")[0] == package


def refuses(function) -> bool:
    return re.search(r"\braise\b|require_|_require", inspect.getsource(inspect.unwrap(function))) is not None


FUNCTIONS = [name for name in PUBLIC["credit"] if inspect.isroutine(getattr(credit, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_of_credit_is_documented_whole(name):
    function = getattr(credit, name)
    text = inspect.cleandoc(function.__doc__)
    assert ">>> " in text, "no example"
    assert "Reference:" in text
    if refuses(function):
        assert "Raises:" in text
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"^ +{parameter}:", text, re.M), f"{parameter} is not described"
    assert "Returns:" in text


@pytest.mark.parametrize(
    ("package", "name"),
    [
        (package, name)
        for package, name in names(*PUBLIC)
        if inspect.isroutine(getattr(importlib.import_module(package), name))
    ],
)
def test_every_function_has_an_example_and_a_source(package, name):
    text = inspect.cleandoc(getattr(importlib.import_module(package), name).__doc__)
    assert re.search(r">>> |See `\w+`", text), "no example"
    assert "Reference:" in text


@pytest.mark.parametrize("name", ["GRPO", "RLTR", "SLCA", "SupportControl", "ToolPO"])
def test_every_rule_has_an_example_and_a_source(name):
    text = inspect.cleandoc(getattr(credit, name).__doc__)
    assert ">>> " in text
    assert "Reference:" in text
