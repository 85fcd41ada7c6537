"""Public names that have no row in the table of primitives, each with the reason."""

_SUMS = "sums and counts, a few numbers each, built by calls that have a row"
_NAMES = "names for integers"
_HOOKS = "hands what it holds to `router_gradient`; its cost in a step is in the section on routing control"
_ONCE = "once for each model or run, on as many entries as there are experts"
_TEXT = "reads the text of one call, before training"

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
}
