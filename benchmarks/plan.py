"""Noise and length of the race, from the variance theorem, before anything is raced."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import exact
from benchmarks.exact import Problem


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
        separation: after `steps` steps, how far SLCA's mean gradient has carried the policy beyond GRPO's along the
            noise-free direction, in standard deviations of the noise that GRPO has gathered there by then:
            `√steps (⟨Eg_SLCA, d⟩ − ⟨Eg_GRPO, d⟩) / √(dᵀ V d)`. Below about 3 the race would be a coin toss.
    """

    tool_variance: float
    unified_variance: float
    share: float
    sigma: float
    efficiency: float
    flips: float
    cosine: float
    separation: float


def noise_plan(problem: Problem, steps: int, *, share: float = 0.9, sigma: float | None = None) -> NoisePlan:
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
    scale = exact.expected_scale(problem, sigma).clamp(min=1e-12)
    centred = exact.centring(problem) @ (problem.tool + problem.summary)
    mean = torch.where(problem.has_tool, centred / scale, 0.0)
    variance = exact.centred_variance(problem, sigma, scale)
    flips = exact.flip_probability(problem, sigma)[reference < 0]
    ahead = problem.weight * float((reference - mean) @ problem.gram @ reference)
    gathered = exact.directional_deviation(problem, sigma, scale, reference)
    return NoisePlan(
        tool_variance=tool,
        unified_variance=unified,
        share=sigma**2 / (sigma**2 + unified),
        sigma=sigma,
        efficiency=math.sqrt(tool / (unified + sigma**2)),
        flips=float(flips.mean()) if len(flips) else 0.0,
        cosine=exact.expected_cosine(mean, reference, variance, problem),
        separation=math.sqrt(steps) * ahead / gathered if gathered > 0 else math.inf,
    )


def _within(problem: Problem, rewards: Tensor) -> float:
    """Mean unbiased within-group variance over the rows that have a tool segment."""
    groups = [rewards[problem.has_tool & (problem.group == group)] for group in problem.group.unique()]
    variances = [values.var() for values in groups if len(values) > 1]
    return float(torch.stack(variances).mean()) if variances else 0.0
