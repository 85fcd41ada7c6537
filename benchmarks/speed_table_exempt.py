"""Public names that have no row in the table of primitives, each with the reason."""

_SUMS = "sums and counts, a few numbers each, built by calls that have a row"
_NAMES = "names for integers"
_HOOKS = "hands what it holds to `router_gradient`; its cost in a step is in the section on routing control"
_ONCE = "once for each model or run, on as many entries as there are experts"
_TEXT = "reads the text of one turn, a few kilobytes"
_RECORD = "a record, a protocol or an error"
_WAITS = "waits for a language model, or for a process of its own, which costs a thousand times what it adds"
_DATA = "prepares a data set, once before training"
_WITHIN = "part of the rows of `rewards`, which spend their time in it"
_FEW = "a few numbers of one rollout"

_REWARDS = {
    _RECORD: (
        "Accepted", "ActionScore", "ContextAction", "EndpointError", "Gold", "GoldCall", "GoldError", "GuardedScore",
        "JudgeCounts", "JudgeItem", "JudgeResult", "LenientCalls", "Mocker", "ParsedCalls", "PlannerScore", "Problem",
        "ProcessScore", "ProcessWeights", "Repair", "RowError", "ToolCall", "ToolResponse", "ToolSchemaError",
        "Trajectory",
    ),
    _WAITS: (
        "ChatEndpoint", "CompletenessJudge", "LLMMocker", "SolvedJudge", "SummaryJudge", "outcome_reward",
        "verify_answer", "verify_answers",
    ),
    _DATA: (
        "ToolPool", "WithinContext", "decompose", "hard_candidates", "opening", "random_candidates", "read_bfcl",
        "read_chat", "read_hermes", "read_slca", "read_toucan", "read_xlam", "register_format", "split_by_conversation",
        "standard_types",
    ),
    _WITHIN: ("ToolSet", "as_gold", "loose_match", "parse_chat", "parse_message", "type_arguments", "validate_call"),
    _FEW: ("count_results", "guard_omission", "parse_rating", "unified_total"),
    "answers in the rollout's place, on the processors of the environment": (
        "DeterministicMocker", "answer_calls", "simulate",
    ),
    "reads the text of one rollout; no twin gives the same values": ("RuleJudge", "parse_lenient"),
}  # fmt: skip

EXEMPT: dict[str, str] = {
    "credit.ClipStatistics": _SUMS,
    "credit.PolicyLoss": _SUMS,
    "credit.SegmentStatistics": _SUMS,
    "credit.CreditRule": "a protocol",
    "credit.Field": _NAMES,
    "credit.Owner": _NAMES,
    "credit.Segment": _NAMES,
    "moe_routing.FieldKind": _NAMES,
    "moe_routing.LoadBalance": _SUMS,
    "moe_routing.RoutingDrift": _SUMS,
    "moe_routing.SumCount": _SUMS,
    "moe_routing.RoutingSummary": "its parts have rows: counts, histogram, load, entropy",
    "moe_routing.EntropyGate": "compares one number a step with a range",
    "moe_routing.RouterInjection": _HOOKS,
    "moe_routing.register_injection": _HOOKS,
    "moe_routing.steer_router": _HOOKS,
    "moe_routing.expert_groups": _ONCE,
    "moe_routing.expert_tiers": _ONCE,
    "moe_routing.OperationRules": _TEXT,
    "moe_routing.code_api_names": _TEXT,
    "moe_routing.tool_call_names": _TEXT,
    "moe_routing.routing_report": "writes a page and its pictures",
    **{f"rewards.{name}": why for why, names in _REWARDS.items() for name in names},
}
