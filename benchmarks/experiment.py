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
        predicted: what theory gives, if it gives anything.
        theory: "exact" where equality must hold up to Monte-Carlo error, "approximate" where no closed form exists,
            "none" where nothing is claimed.
    """

    quantity: str
    estimator: str
    measured: float
    error: float
    predicted: float | None
    theory: str

    @property
    def holds(self) -> bool | None:
        """Whether an exact prediction lies within four standard errors; None for any other."""
        if self.theory != "exact" or self.predicted is None:
            return None
        return abs(self.measured - self.predicted) <= 4 * self.error + 1e-9 * abs(self.predicted)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


def compare(problem: Problem, sigma: float, *, redraws: int = 4000, seed: int = 0) -> list[Comparison]:
    """Redraw the summary noise and set every measured quantity beside its prediction.

    Estimators: *local*, the paper's (raw rewards, scale fixed, no baseline), for which theorem A.3 is stated; *fixed
    scale*, with the group mean taken off; and *GRPO* and *SLCA* as trained, fully normalised. For normalised GRPO the
    theorem is not exact, since its mean and scale depend on the whole group; the line says "approximate". The
    last lines vary prompts and rollouts too: there the paper claims no order, and either may be larger.

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
        _unconditional("GRPO", grpo, problem),
        _unconditional("SLCA", slca, problem),
    ]


def _variance(name: str, advantages: Tensor, problem: Problem, predicted: float, theory: str) -> Comparison:
    measured, error = exact.trace_variance(advantages, problem)
    return Comparison("trace variance", name, measured, error, predicted, theory)


def _cosine(name: str, advantages: Tensor, reference: Tensor, problem: Problem, predicted: float) -> Comparison:
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


def _unconditional(name: str, advantages: Tensor, problem: Problem) -> Comparison:
    variance = exact.group_variance(advantages, problem)
    return Comparison("variance over prompts and rollouts too", name, variance, math.nan, None, "none")
