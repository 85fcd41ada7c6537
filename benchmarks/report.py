"""What the main job leaves behind: tables, a picture of the curves, every number as JSON, one conflict as HTML."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.experiment import Comparison
from benchmarks.plan import NoisePlan
from benchmarks.rollouts import Batch
from benchmarks.routing_measure import ROUTING_METRICS, routing_of, steered_of

NOTE = (
    "Conditional on the tool trajectories, SLCA's tool gradient has no summary noise (theorem A.3); the unconditional "
    "variance may order either way. Rows without a tool segment are absent from SLCA's tool group, so a needless call "
    "on a task that needs none is only visible to the unified reward."
)
METRICS = {
    "process": ("process score", "{:.3f}"),
    "success": ("Success@0.9", "{:.3f}"),
    "tool_turns": ("tool turns", "{:.2f}"),
    "redundant": ("redundant calls", "{:.2f}"),
    "summary": ("summary score, no noise", "{:.3f}"),
    "gradient_variance": ("tool-gradient variance", "{:.2e}"),
    "noise_variance": ("  of it, summary noise", "{:.2e}"),
    "norm_deviation": ("gradient norm, sd over steps", "{:.3f}"),
    "cpu_seconds": ("training, CPU seconds", "{:.0f}"),
}
# These two depend on the rule; for the warm checkpoint the exact experiment shows them for both.
OF_A_RULE = ("gradient_variance", "noise_variance")


def mean_sd(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for one value)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def of_run(run: Mapping[str, Any]) -> dict[str, float]:
    """Every metric of one seed of one arm."""
    kinds = {f"process/{kind}": scores["process"] for kind, scores in run["final"]["kinds"].items()}
    scalars = {name: value for name, value in run["final"].items() if name not in ("kinds", "routing")}
    times = {name: run[name] for name in ("wall_seconds", "cpu_seconds")}
    deviation = mean_sd([step["grad_norm"] for step in run["curve"]])[1]
    return {**scalars, **kinds, **routing_of(run["final"]), **steered_of(run), "norm_deviation": deviation, **times}


def summarise(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, tuple[float, float]]]:
    """For each arm and metric, mean and standard deviation over the seeds."""
    summary = {}
    for arm, runs in results.items():
        values = [of_run(run) for run in runs]
        summary[arm] = {metric: mean_sd([value[metric] for value in values]) for metric in values[0]}
    return summary


def seeds_ahead(results: Mapping[str, Sequence[Mapping[str, Any]]], metric: str = "process") -> str:
    """In how many seeds SLCA ends above GRPO, and the mean difference: seeds are paired, prompts and noise shared."""
    gaps = [of_run(b)[metric] - of_run(a)[metric] for a, b in zip(results["GRPO"], results["SLCA"], strict=True)]
    mean, deviation = mean_sd(gaps)
    ahead = sum(gap > 0 for gap in gaps)
    return (
        f"{metric} score, SLCA − GRPO by seed: {mean:+.3f} ± {deviation:.3f}; SLCA is ahead in {ahead} of {len(gaps)}."
    )


def plan_table(plan: NoisePlan, steps: int, rollouts: int) -> Any:
    """The noise plan as a rich table."""
    from rich.table import Table

    table = Table(title="Noise plan, from theorem A.3 on the warm checkpoint, before any race", title_justify="left")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    for name, value in (
        ("within-group variance of R_tool", f"{plan.tool_variance:.4f}"),
        ("within-group variance of R_tool + R_sum, no noise", f"{plan.unified_variance:.4f}"),
        ("noise's share of the unified reward's variance", f"{plan.share:.2f}"),
        ("hence σ of the summary noise", f"{plan.sigma:.3f}"),
        ("expected sign flips of below-mean trajectories", f"{plan.flips:.3f}"),
        ("expected cosine of GRPO's tool gradient with the noise-free one", f"{plan.cosine:.3f}"),
        ("expected drift of GRPO relative to SLCA", f"{plan.efficiency:.3f}"),
        ("expected lead of SLCA over GRPO, in sd of GRPO's noise", f"{plan.separation:.1f}"),
        ("rollouts a step × steps", f"{rollouts} × {steps}"),
    ):
        table.add_row(name, value)
    return table


def exact_table(comparisons: Sequence[Comparison], redraws: int) -> Any:
    """Measured beside predicted."""
    from rich.table import Table

    table = Table(title=f"Exact experiment: one batch, {redraws} redraws of the summary noise", title_justify="left")
    for name in ("quantity", "estimator", "measured", "± error", "predicted", "theory"):
        table.add_column(name, justify="left" if name in ("quantity", "estimator", "theory") else "right")
    shown = ""
    for line in comparisons:
        verdict = {True: "exact, holds", False: "exact, DOES NOT HOLD", None: line.theory}[line.holds]
        values = (line.measured, line.error, line.predicted)
        numbers = ["" if value is None or math.isnan(value) else f"{value:.4g}" for value in values]
        table.add_row("" if line.quantity == shown else line.quantity, line.estimator, *numbers, verdict)
        shown = line.quantity
    return table


def race_table(warm: Mapping[str, Any], results: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    """The closing table: warm checkpoint, then each arm, mean ± sd over its seeds."""
    from rich.table import Table

    seeds = max((len(runs) for runs in results.values()), default=0)
    table = Table(title=f"Held-out tasks after the race, mean ± sd of {seeds} seed(s)", title_justify="left")
    table.add_column("metric")
    table.add_column("warm", justify="right")
    summary = summarise(results)
    for arm in summary:
        table.add_column(arm, justify="right")
    before = {name: value for name, value in warm.items() if name not in (*OF_A_RULE, "routing")}
    before |= {f"process/{kind}": scores["process"] for kind, scores in warm["kinds"].items()} | routing_of(warm)
    process, *others = METRICS.items()
    kinds = {f"process/{kind}": (f"  {kind}", "{:.3f}") for kind in warm["kinds"]}
    for rows in ((process, *kinds.items(), *others), ROUTING_METRICS.items() if warm["routing"] else ()):
        for metric, (title, form) in rows:
            measured = [summary[arm].get(metric) for arm in summary]
            cells = ["" if pair is None else " ± ".join(form.format(v) for v in pair) for pair in measured]
            table.add_row(title, form.format(before[metric]) if metric in before else "", *cells)
        table.add_section()
    return table


def save_curves(path: Path, warm: Mapping[str, Any], results: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Process score, redundant calls, summary score and gradient norm over the steps; seeds thin, their mean thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {
        "process": "process score",
        "redundant": "redundant calls",
        "summary": "summary score, no noise",
        "grad_norm": "gradient norm",
    }
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 3.2), layout="constrained")
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        for arm, colour in zip(results, ("tab:orange", "tab:blue", "tab:green"), strict=False):
            curves = torch.tensor([[step[key] for step in run["curve"]] for run in results[arm]])
            steps = range(1, curves.shape[1] + 1)
            for curve in curves:
                axis.plot(steps, curve, color=colour, alpha=0.25, linewidth=0.8)
            axis.plot(steps, _smooth(curves.mean(dim=0)), color=colour, linewidth=2.0, label=arm)
        if key in warm:
            axis.axhline(warm[key], color="grey", linestyle=":", linewidth=1.0, label="warm, held out")
        axis.set_title(title)
        axis.set_xlabel("step")
    axes[0].legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _smooth(curve: torch.Tensor, width: int = 5) -> torch.Tensor:
    """Trailing mean over up to `width` steps."""
    return torch.stack([curve[max(0, at + 1 - width) : at + 1].mean() for at in range(len(curve))])


def save_json(path: Path, **parts: Any) -> None:
    """Every number of the run."""
    path.write_text(json.dumps(parts, indent=1, default=_plain), encoding="utf-8")


def _plain(value: Any) -> Any:
    if hasattr(value, "as_dict"):
        return value.as_dict()
    if hasattr(value, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    return str(value)


def save_conflict(path: Path, batch: Batch, tokenizer: Any, sigma: float) -> bool:
    """The token-credit page of the sharpest conflict: a below-mean tool trajectory that unified credit reinforces.

    Of one draw of the noise, the rollout for which `A_GRPO − A_SLCA` on tool tokens is largest among those with
    `A_SLCA < 0 < A_GRPO`, with both rules' advantages, token by token.

    Returns:
        False if the batch holds no conflict; then nothing is written.
    """
    from credit import GRPO, SLCA, Segment
    from credit.view import batch_token_credit, byte_level_bytes, write_html

    generator = torch.Generator().manual_seed(0)
    noise = sigma * torch.randn(len(batch.group), generator=generator, dtype=torch.float64)
    rewards = {"tool": batch.tool_reward, "summary": batch.summary_reward + noise}
    routed = {type(rule).__name__: rule(rewards, batch.group, batch.segments) for rule in (SLCA(), GRPO())}
    on_tool = batch.segments == Segment.TOOL
    count = on_tool.sum(dim=1).clamp(min=1)
    tool = {name: torch.where(on_tool, credit, 0.0).sum(dim=1) / count for name, credit in routed.items()}
    gap = torch.where((tool["SLCA"] < 0) & (tool["GRPO"] > 0), tool["GRPO"] - tool["SLCA"], 0.0)
    row = int(gap.argmax())
    if gap[row] <= 0:
        return False
    question = batch.rows[row]["prompt"][-1]["content"]
    note = (
        f"Process score {float(batch.tool_reward[row]):.2f}, below its group's mean; summary reward "
        f"{float(rewards['summary'][row]):.2f} of which {float(noise[row]):+.2f} is noise. Unified credit lifts the "
        "tool calls, segment-locked credit lowers them."
    )
    prompts = [ids[mask] for ids, mask in zip(batch.prompt_ids, batch.prompt_mask, strict=True)]
    views = batch_token_credit(
        batch.completion_ids,
        segments=batch.segments,
        advantages=routed,
        rewards=rewards,
        group=batch.group,
        per_row={"mask": batch.learnable, "completion_mask": batch.completion_mask, "prompt": prompts},
        rows=[row],
        decode=lambda token: byte_level_bytes([tokenizer.convert_ids_to_tokens(token)])[0],
        title=question,
        note=note,
    )
    write_html(views, path)
    return True
