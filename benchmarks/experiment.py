"""Measured against predicted: the three quantities of the exact experiment, for SLCA and for GRPO."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import exact
from benchmarks.exact import Problem


@dataclass(frozen=True)
class Comparison:
    """One line of the table.

    Attributes:
        quantity: what was measured.
        estimator: on which gradient estimator.
        measured: mean over the redraws.
        error: Monte-Carlo standard error of `measured`.
        predicted: what theory gives.
        theory: "exact" where equality must hold up to Monte-Carlo error, "approximate" where no closed form exists.
    """

    quantity: str
    estimator: str
    measured: float
    error: float
    predicted: float
    theory: str

    @property
    def holds(self) -> bool | None:
        """Whether an exact prediction lies within four standard errors; None for an approximate one."""
        if self.theory != "exact":
            return None
        return abs(self.measured - self.predicted) <= 4 * self.error + 1e-9 * abs(self.predicted)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


def compare(problem: Problem, sigma: float, *, redraws: int = 4000, seed: int = 0) -> list[Comparison]:
    """Redraw the summary noise and set every measured quantity beside its prediction.

    Estimators: *local*, the paper's (raw rewards, scale fixed, no baseline), for which theorem A.3 is stated; *fixed
    scale*, with the group mean taken off; and *GRPO* and *SLCA* as trained, fully normalised. For normalised GRPO the
    theorem is not exact, since its mean and scale depend on the whole group; the line says "approximate".

    Args:
        problem: rewards and Gram matrix of one batch.
        sigma: standard deviation of the noise.
        redraws: how many.
        seed: of the noise.
    """
    from credit import GRPO, SLCA

    noise = exact.redraw(problem, sigma, redraws, seed)
    silent = torch.zeros(1, len(problem.tool), dtype=torch.float64)
    on_tool = problem.has_tool & (problem.segments[:, 1] >= 0)
    local = torch.where(on_tool, problem.tool + problem.summary + noise, 0.0)
    fixed = exact.tool_advantages(problem, GRPO(scale="none"), noise)
    grpo = exact.tool_advantages(problem, GRPO(), noise)
    slca = exact.tool_advantages(problem, SLCA(), noise)
    reference = exact.tool_advantages(problem, SLCA(), silent)[0]
    scale = exact.expected_scale(problem, sigma)
    near = exact.centred_variance(problem, sigma, scale)
    centred = exact.centring(problem) @ (problem.tool + problem.summary)
    mean = torch.where(problem.has_tool, centred / scale, 0.0)
    return [
        _variance("local", local, problem, exact.local_variance(problem, sigma), "exact"),
        _variance("fixed scale", fixed, problem, exact.centred_variance(problem, sigma), "exact"),
        _variance("GRPO", grpo, problem, near, "approximate"),
        _variance("SLCA", slca, problem, 0.0, "exact"),
        _cosine("GRPO", grpo, reference, problem, exact.expected_cosine(mean, reference, near, problem)),
        _cosine("SLCA", slca, reference, problem, 1.0),
        _flips("GRPO", grpo, reference, exact.flip_probability(problem, sigma)),
        _flips("SLCA", slca, reference, torch.zeros_like(reference)),
    ]


def _variance(name: str, advantages: Tensor, problem: Problem, predicted: float, theory: str) -> Comparison:
    measured, error = exact.trace_variance(advantages, problem)
    return Comparison("trace variance", name, measured, error, predicted, theory)


def _cosine(
    name: str, advantages: Tensor, reference: Tensor, problem: Problem, predicted: float
) -> Comparison:
    values = exact.cosines(advantages, reference, problem)
    theory = "exact" if name == "SLCA" else "approximate"
    error = float(values.std()) / math.sqrt(len(values))
    return Comparison("cosine with the noise-free gradient", name, float(values.mean()), error, predicted, theory)


def _flips(name: str, advantages: Tensor, reference: Tensor, probability: Tensor) -> Comparison:
    below = reference < 0
    if not below.any():
        return Comparison("below-mean trajectory reinforced", name, 0.0, 0.0, 0.0, "exact")
    shares = (advantages[:, below] > 0).double().mean(dim=1)
    error = float(shares.std()) / math.sqrt(len(shares))
    predicted = float(probability[below].mean())
    return Comparison("below-mean trajectory reinforced", name, float(shares.mean()), error, predicted, "exact")


@dataclass(frozen=True)
class NoisePlan:
    """The race's noise and length, settled from the variance theorem before any race is run.

    Both the tool reward's own deviation and the noise reach a tool token multiplied by the same `w U_i`, so theorem
    A.3 makes the noise's share of the tool-token variance a ratio of reward variances:

        share = σ² / (σ² + v),     v = mean within-group variance of R_tool + R_sum without noise.

    Attributes:
        tool_variance: mean within-group variance of the tool reward.
        unified_variance: the same of the unified reward without noise (`v`).
        share: share of the unified reward's variance that is noise.
        sigma: the σ that gives this share.
        efficiency: `√(v_tool / (v + σ²))`, how much of SLCA's drift along the tool signal GRPO keeps.
        flips: expected share of below-mean tool trajectories that GRPO reinforces.
        cosine: expected cosine of GRPO's tool gradient with the noise-free one.
    """

    tool_variance: float
    unified_variance: float
    share: float
    sigma: float
    efficiency: float
    flips: float
    cosine: float


def noise_plan(problem: Problem, *, share: float = 0.9, sigma: float | None = None) -> NoisePlan:
    """Choose σ for a wanted share of noise, or describe a given σ; see `NoisePlan`.

    Raises:
        ValueError: a share outside (0, 1), or a batch whose groups all agree: then no σ has a share.
    """
    from credit import SLCA

    if not 0.0 < share < 1.0:
        raise ValueError(f"share must be between 0 and 1, got {share}")
    tool = _within(problem, problem.tool)
    unified = _within(problem, problem.tool + problem.summary)
    if tool <= 0 or unified <= 0:
        raise ValueError("no group of the batch has rollouts of different tool reward: nothing could be learned")
    sigma = math.sqrt(unified * share / (1.0 - share)) if sigma is None else sigma
    silent = torch.zeros(1, len(problem.tool), dtype=torch.float64)
    reference = exact.tool_advantages(problem, SLCA(), silent)[0]
    scale = exact.expected_scale(problem, sigma)
    centred = exact.centring(problem) @ (problem.tool + problem.summary)
    mean = torch.where(problem.has_tool, centred / scale.clamp(min=1e-12), 0.0)
    variance = exact.centred_variance(problem, sigma, scale.clamp(min=1e-12))
    flips = exact.flip_probability(problem, sigma)[reference < 0]
    return NoisePlan(
        tool_variance=tool,
        unified_variance=unified,
        share=sigma**2 / (sigma**2 + unified),
        sigma=sigma,
        efficiency=math.sqrt(tool / (unified + sigma**2)),
        flips=float(flips.mean()) if len(flips) else 0.0,
        cosine=exact.expected_cosine(mean, reference, variance, problem),
    )


def _within(problem: Problem, rewards: Tensor) -> float:
    """Mean unbiased within-group variance over the rows that have a tool segment."""
    groups = [rewards[problem.has_tool & (problem.group == group)] for group in problem.group.unique()]
    variances = [values.var() for values in groups if len(values) > 1]
    return float(torch.stack(variances).mean()) if variances else 0.0
