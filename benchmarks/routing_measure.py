"""How a model routes its own rollouts of the held-out tasks: the routing rows of the closing table."""

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.rollouts import Batch
from benchmarks.routing_arm import operations, record_old_policy

ROUTING_METRICS = {
    "routing/jaccard": ("Jaccard of adjacent tokens", "{:.3f}"),
    "routing/mean_shift": ("experts changed a token", "{:.3f}"),
    "routing/information": ("turn MI, nats, mean of kinds", "{:.4f}"),
    "routing/information_tool": ("  TOOL fields", "{:.4f}"),
    "routing/information_think": ("  THINK fields", "{:.4f}"),
    "routing/specialization_gap": ("specialization gap", "{:.3f}"),
    "routing/specialization_gap_tool": ("  TOOL fields", "{:.3f}"),
    "routing/specialization_gap_think": ("  THINK fields", "{:.3f}"),
    "routing/load_cv": ("load CV", "{:.3f}"),
    "routing/router_entropy": ("router entropy, nats", "{:.3f}"),
    "routing/policy_entropy": ("policy entropy, nats", "{:.3f}"),
    "routing/gate_open": ("gate open, share of steps", "{:.2f}"),
    "routing/survived": ("injection that survived", "{:.3f}"),
}


def measure_routing(model: Any, tokenizer: Any, batch: Batch, *, own_tools: bool = False) -> dict[str, Any]:
    """Routing metrics of a batch of rollouts, read off one forward of the model that made them.

    Fields, operations and formulas are those that training steers by; nothing is steered here.

    Args:
        model: a mixture of experts; nothing in it changes.
        tokenizer: its tokenizer.
        batch: rollouts of the model.
        own_tools: see `benchmarks.routing_arm.operations`.

    Returns:
        What `TurnRouting.metrics` calls `routing/…`, without the prefix; the information and the specialization gap
        also as means over both kinds of field; `policy_entropy`; and under `summary` the sums that the pictures are
        drawn from, as lists.
    """
    from credit import run_ids
    from moe_routing.adapters.transformers import RoutingControl
    from moe_routing.adapters.trl import TurnRouting

    with RoutingControl(model, gate=None) as control:
        routing = TurnRouting(control, operations(own_tools))
        field = routing.label(batch.completion_ids, run_ids(batch.learnable), tokenizer)
        entropy = record_old_policy(model, batch, field, routing)
    found = {name.removeprefix("routing/"): value for name, value in routing.metrics().items()}
    for name in ("information", "specialization_gap"):
        found[name] = (found[f"{name}_think"] + found[f"{name}_tool"]) / 2
    return {**found, "policy_entropy": entropy, "summary": to_plain(routing.summaries["last"])}


def to_plain(summary: Any) -> dict[str, Any]:
    """A `RoutingSummary` as lists, for a queue and for JSON."""
    return {
        "usage": summary.usage.tolist(),
        "shifts": summary.shifts.tolist(),
        "load_cv": [summary.load_cv.total.tolist(), summary.load_cv.count.tolist()],
        "router_entropy": [summary.router_entropy.total.tolist(), summary.router_entropy.count.tolist()],
    }


def from_plain(plain: dict[str, Any]) -> Any:
    """The inverse of `to_plain`."""
    from moe_routing import RoutingSummary, SumCount

    load, certain = (
        SumCount(*(torch.tensor(part, dtype=torch.float64) for part in plain[name]))
        for name in ("load_cv", "router_entropy")
    )
    return RoutingSummary(torch.tensor(plain["usage"]), torch.tensor(plain["shifts"]), load, certain)


def routing_of(measured: Mapping[str, Any]) -> dict[str, float]:
    """The routing metrics of one measurement, without the sums behind the pictures."""
    return {f"routing/{name}": value for name, value in measured["routing"].items() if name != "summary"}


def steered_of(run: Mapping[str, Any]) -> dict[str, float]:
    """Share of steps with an open gate, and the mean over the open ones of the share that survived rounding."""
    logged = {
        title: [step[name] for step in run["curve"] if name in step]
        for title, name in (("routing/gate_open", "routing/gate"), ("routing/survived", "routing/survived"))
    }
    return {title: sum(values) / len(values) for title, values in logged.items() if values}
