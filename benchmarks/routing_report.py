"""What the main job says about routing: coefficients, rows of the closing table, the paper's claims, pictures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.race import ROUTED
from benchmarks.report import mean_sd, of_run
from benchmarks.rollouts import Batch
from benchmarks.routing_arm import HEADROOM, PAPER_HIGH, RATIO, RULE, Steering, no_routers, operations, settle
from benchmarks.routing_measure import from_plain

Results = Mapping[str, Sequence[Mapping[str, Any]]]
SIGNIFICANT = 0.05


def settle_routing(model: Any, tokenizer: Any, batch: Batch, console: Any, **settings: Any) -> Steering | None:
    """`routing_arm.settle`, printed; None, with the reason, for a model whose routing cannot be controlled."""
    if reason := no_routers(model):
        console.print(f"no arm {ROUTED!r} and no routing metrics: {reason}")
        return None
    steering = settle(model, tokenizer, batch, **settings)
    console.print(steering_table(steering))
    console.print(rule(steering))
    return steering


def report_routing(
    steering: Steering | None, warm: Mapping[str, Any], results: Results, folder: Path, console: Any
) -> dict[str, Any]:
    """Print what becomes of the paper's claims and draw the pictures; returns what belongs into the JSON."""
    if steering is None:
        return {}
    found = findings(warm, results)
    for finding in found:
        console.print(str(finding))
    names = operations(steering.own_tools).operations
    return {
        "steering": steering,
        "steering_rule": rule(steering),
        "operations": names,
        "claims": found,
        "routing_report": save_pictures(folder, warm, results, names),
    }


@dataclass(frozen=True)
class Claim:
    """One claim of the paper, and the difference of arms that it speaks of here.

    Attributes:
        text: the claim.
        metric: of `benchmarks.report.of_run`.
        arm: the arm that should differ.
        base: the arm it is compared with, seed by seed, or "warm".
        sign: +1 if the arm should be higher.
    """

    text: str
    metric: str
    arm: str
    base: str
    sign: int = 1


CLAIMS = (
    Claim("RL scrambles expert selection between neighbouring tokens", "routing/jaccard", "GRPO", "warm", -1),
    Claim("routing control raises Jaccard similarity, by 7.7 %", "routing/jaccard", ROUTED, "SLCA"),
    Claim("routing control raises the turn-level information, by 23.5 %", "routing/information", ROUTED, "SLCA"),
    Claim("routing control widens the specialization gap", "routing/specialization_gap", ROUTED, "SLCA"),
    Claim("routing control improves the task score", "process", ROUTED, "SLCA"),
)


@dataclass(frozen=True)
class Finding:
    """What the race says about a claim.

    Attributes:
        claim: the claim.
        mean: mean difference over the seeds.
        deviation: its standard deviation over the seeds.
        relative: the mean difference, relative to the size of what it is compared with.
        p: one-sided p-value of a t-test over the seeds (paired where both sides have seeds); NaN for one seed.
        verdict: in words.
    """

    claim: Claim
    mean: float
    deviation: float
    relative: float
    p: float
    verdict: str

    def __str__(self) -> str:
        chance = "" if math.isnan(self.p) else f", p = {self.p:.3f}"
        return (
            f"Paper: {self.claim.text}. Here, {self.claim.arm} − {self.claim.base}: {self.mean:+.4f} ± "
            f"{self.deviation:.4f} ({self.relative:+.1%}{chance}): {self.verdict}."
        )


def findings(warm: Mapping[str, Any], results: Results) -> list[Finding]:
    """Each of the paper's claims beside the numbers of this race; those whose arm did not run are left out."""
    values = {arm: [of_run(run) for run in runs] for arm, runs in results.items()}
    before = {f"routing/{name}": value for name, value in warm["routing"].items()} | {"process": warm["process"]}
    found = []
    for claim in CLAIMS:
        after = values.get(claim.arm, [])
        if not after or claim.metric not in after[0]:
            continue
        base = [before] * len(after) if claim.base == "warm" else values[claim.base]
        gaps = [a[claim.metric] - b[claim.metric] for a, b in zip(after, base, strict=True)]
        size = abs(mean_sd([b[claim.metric] for b in base])[0])
        mean, deviation = mean_sd(gaps)
        p = chance_of([claim.sign * gap for gap in gaps])
        found.append(Finding(claim, mean, deviation, mean / size if size else math.nan, p, verdict(p)))
    return found


def chance_of(gaps: Sequence[float]) -> float:
    """One-sided p-value of Student's t-test that the mean is above 0; NaN for fewer than two values.

    >>> round(chance_of([1.0, 2.0, 3.0]), 4), chance_of([1.0])
    (0.0371, nan)
    """
    from scipy.stats import t

    mean, deviation = mean_sd(gaps)
    if len(gaps) < 2:
        return math.nan
    if deviation == 0:
        return 0.5 if mean == 0 else float(mean < 0)
    return float(t.sf(mean / (deviation / math.sqrt(len(gaps))), len(gaps) - 1))


def verdict(p: float) -> str:
    """A p-value in words."""
    if math.isnan(p):
        return "one seed cannot tell"
    if p < SIGNIFICANT:
        return "it shows at this scale"
    return "the opposite shows at this scale" if p > 1 - SIGNIFICANT else "it does not show at this scale"


def rule(steering: Steering) -> str:
    """How the coefficients were found, in words."""
    return RULE.format(share=steering.share, ratio=RATIO, paper=PAPER_HIGH, headroom=HEADROOM)


def steering_table(steering: Steering) -> Any:
    """The coefficients of routing control and what they follow from, as a rich table."""
    from rich.table import Table

    table = Table(title="Routing control, from one batch of the warm checkpoint, before any race", title_justify="left")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    for name, value in (
        ("‖G‖, gradient that arrives at the router weights", f"{steering.incoming:.3e}"),
        ("‖D_turn‖, turn term there at λ_turn = 1", f"{steering.turn:.3e}"),
        ("‖D_token‖, token term there at λ_token = 1", f"{steering.token:.3e}"),
        ("wanted norm of the injection, relative to ‖G‖", f"{steering.share:g}"),
        ("hence λ_turn", f"{steering.lambda_turn:.3e}"),
        ("hence λ_token", f"{steering.lambda_token:.3e}"),
        ("policy entropy, nats", f"{steering.entropy:.3f}"),
        ("hence the gate is open for entropies in", f"[0, {steering.high:.3f}]"),
    ):
        table.add_row(name, value)
    return table


def save_pictures(folder: Path, warm: Mapping[str, Any], results: Results, operations: Sequence[str]) -> dict[str, Any]:
    """`routing.png` and `routing.html`: expert usage by operation and shifts, before and after, and the training.

    Seeds of an arm are added up: they share the warm checkpoint, and with it the identity of every expert.

    Returns:
        The numbers behind the pictures.
    """
    from moe_routing import routing_report

    summaries = {"warm": from_plain(warm["routing"]["summary"])}
    for arm, runs in results.items():
        first, *others = (from_plain(run["final"]["routing"]["summary"]) for run in runs)
        summaries[arm] = sum(others, first)
    return routing_report(
        summaries,
        operations,
        mean_history([run["curve"] for run in results[ROUTED]]),
        png=folder / "routing.png",
        html=folder / "routing.html",
        title="Expert routing on the held-out tasks before and after the race; below, the training of the routed arm",
    )


def mean_history(curves: Sequence[Sequence[Mapping[str, float]]]) -> list[dict[str, float]]:
    """What the routed arm logged at each step, mean over the seeds."""
    steps = []
    for at, rows in enumerate(zip(*curves, strict=True)):
        names = [name for name in rows[0] if name.startswith("routing/") and all(name in row for row in rows)]
        means = {name: sum(row[name] for row in rows) / len(rows) for name in names}
        steps.append({"step": float(at + 1), **means})
    return steps
