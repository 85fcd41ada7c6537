"""The routing report: what the experts do for which operation, and how it changed, as pictures and as numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_routing.summary import RoutingSummary

CURVES = {
    "routing/jaccard": "Jaccard similarity of neighbouring tokens",
    "routing/mean_shift": "Experts that change from token to token",
    "routing/information_think": "Information of experts about operations in THINK, nats",
    "routing/information_tool": "Information of experts about operations in TOOL, nats",
    "routing/specialization_gap_think": "Specialization gap in THINK",
    "routing/specialization_gap_tool": "Specialization gap in TOOL",
    "routing/load_cv": "Coefficient of variation of the load",
    "routing/router_entropy": "Router entropy, nats",
    "routing/gate_entropy": "Policy entropy at the gate, nats",
    "routing/gate": "Gate (1 open, 0 closed)",
}


@dataclass(frozen=True)
class ReportData:
    """What both the page and the figure draw.

    Attributes:
        usage: share of each expert by operation, by name of the summary.
        shifts: share of pairs by number of changed experts, by name of the summary.
        curves: steps and finite values of each metric that was logged.
        numbers: the same, flat.
    """

    title: str
    layer: int
    operations: tuple[str, ...]
    usage: dict[str, list[list[float]]]
    shifts: dict[str, list[float]]
    curves: dict[str, list[tuple[float, float]]]
    numbers: dict[str, float]


def routing_report(
    summaries: RoutingSummary | Mapping[str, RoutingSummary],
    operations: Sequence[str],
    history: Sequence[Mapping[str, float | int]] = (),
    *,
    layer: int | None = None,
    png: str | Path | None = None,
    html: str | Path | None = None,
    title: str = "Expert routing",
) -> dict[str, float]:
    """Draw expert usage by operation, shifts and the course of training; return the same numbers.

    Args:
        summaries: one batch, or several by name (``{"before": ..., "after": ...}``), drawn side by side.
        operations: names of the columns of the labels, in order.
        history: one flat dictionary a step, as logged: ``"step"`` (else the position counts) and any of
            ``routing/jaccard``, ``mean_shift``, ``information_think``, ``specialization_gap_think`` and those of TOOL,
            ``load_cv``, ``router_entropy``, ``gate``, ``gate_entropy``; a trainer's log history will do. Keys may be
            missing and values may be NaN: such steps are left out of that curve.
        layer: whose usage is drawn; None takes the one whose experts tell operations apart best in the last
            summary, since experts of different layers have nothing in common.
        png: file for the figure; needs matplotlib.
        html: file for the page, which needs nothing beside it and runs no script.
        title: heading of both.

    Returns:
        A flat dictionary of finite floats for the trainer's logger: each summary's metrics, usage shares and shift
        shares under its name, then the last value of each curve and the share of steps with an open gate.

    Raises:
        ValueError: if there is no summary, or the summaries, operations and layer do not fit each other.
        ImportError: if ``png`` is asked for without matplotlib.

    Reference: paper figures 2, 5 and 12; the layout is ours.

    >>> import torch
    >>> summary = RoutingSummary.of(
    ...     torch.tensor([[[0], [1]]]), torch.full((1, 2, 2), 0.5), field=torch.tensor([0, 0]),
    ...     labels=torch.tensor([[True]]), trajectory=torch.tensor([0, 0]))
    >>> numbers = routing_report(summary, ["read"], [{"routing/gate": 1.0}, {"routing/gate": 0.0}])
    >>> numbers["routing/usage/read/expert_1"], numbers["routing/shift/1"], numbers["routing/gate_open_share"]
    (0.5, 1.0, 0.5)
    """
    data = report_data(summaries, operations, history, layer, title)
    if html is not None:
        from moe_routing.report_page import render_page

        Path(html).write_text(render_page(data), encoding="utf-8")
    if png is not None:
        from moe_routing.report_figure import save_figure

        save_figure(data, Path(png))
    return data.numbers


def report_data(
    summaries: RoutingSummary | Mapping[str, RoutingSummary],
    operations: Sequence[str],
    history: Sequence[Mapping[str, float | int]],
    layer: int | None,
    title: str,
) -> ReportData:
    """Everything that :func:`routing_report` draws, without drawing it."""
    named = {"": summaries} if isinstance(summaries, RoutingSummary) else dict(summaries)
    layer = _checked_layer(named, operations, layer)
    usage = {name: summary.usage_share()[layer].tolist() for name, summary in named.items()}
    shifts = {name: summary.shift_share().tolist() for name, summary in named.items()}
    curves = {key: found for key in CURVES if (found := _curve(history, key))}
    numbers: dict[str, float] = {"routing/usage_layer": float(layer)}
    for name, summary in named.items():
        under = f"routing/{name}/" if name else "routing/"
        numbers |= {under + key.removeprefix("routing/"): value for key, value in summary.metrics().items()}
        numbers |= {f"{under}shift/{count}": share for count, share in enumerate(shifts[name])}
        numbers |= {
            f"{under}usage/{operation}/expert_{expert}": share
            for operation, row in zip(operations, usage[name])
            for expert, share in enumerate(row)
        }
    numbers |= {key: points[-1][1] for key, points in curves.items()}
    if gates := curves.get("routing/gate"):
        numbers["routing/gate_open_share"] = sum(value for _, value in gates) / len(gates)
    return ReportData(title, layer, tuple(operations), usage, shifts, curves, numbers)


def _checked_layer(named: Mapping[str, RoutingSummary], operations: Sequence[str], layer: int | None) -> int:
    if not named:
        raise ValueError("summaries is empty: a report needs at least one RoutingSummary")
    shapes = {name: tuple(summary.usage.shape) for name, summary in named.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"summaries differ in layers, operations or experts: usage of shape {shapes}")
    layers, labelled, _ = next(iter(shapes.values()))
    if layers == 0 or labelled == 0:
        raise ValueError(f"summaries hold no {'operation' if layers else 'layer'}")
    if len(operations) != labelled or len(set(operations)) != labelled:
        raise ValueError(f"operations must be {labelled} distinct names, one for each label, got {list(operations)}")
    if layer is None:
        return int(list(named.values())[-1].usage_divergence().argmax())
    if not -layers <= layer < layers:
        raise ValueError(f"layer is {layer}, but the summaries hold {layers} layers")
    return layer % layers


def _curve(history: Sequence[Mapping[str, float | int]], key: str) -> list[tuple[float, float]]:
    points = [(float(row.get("step", at)), float(row.get(key, math.nan))) for at, row in enumerate(history)]
    return [(step, value) for step, value in points if math.isfinite(step) and math.isfinite(value)]
