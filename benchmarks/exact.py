"""The exact experiment: redraw the summary noise over one fixed batch of rollouts, and look at the tool gradient.

The part of the policy gradient that comes from tool tokens is linear in the rollouts' advantages,

    g = Σ_i w A_i U_i,     U_i = Σ_{t in tool tokens of i} ∇ log π(y_t | h_t),     w = 1 / N,

with `N` the learnable tokens of the batch (the token mean of DAPO, at ratio 1). One backward pass per rollout
gives the Gram matrix `K = U Uᵀ`, and then every norm, cosine and variance of any number of redraws is exact algebra
on `B x B` numbers. The batch, and with it everything the tool trajectories determine (the paper's F_tool), stays
fixed; only the summary noise ξ ~ N(0, σ²) is drawn again.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.rollouts import Batch


@dataclass(frozen=True)
class Problem:
    """What a redraw needs: rewards, groups, who has which segment, and the Gram matrix of tool scores.

    Attributes:
        tool: `[B]` process reward.
        summary: `[B]` summary reward without noise.
        group: `[B]` group ids.
        segments: `[B, 2]`, a tool token and a summary token for each rollout, -1 where it has none.
        gram: `[B, B]` inner products of the rollouts' tool-token gradients; 0 for a row without tool tokens.
        weight: `w`, what the loss multiplies each token by.
    """

    tool: Tensor
    summary: Tensor
    group: Tensor
    segments: Tensor
    gram: Tensor
    weight: float

    @property
    def has_tool(self) -> Tensor:
        return self.segments[:, 0] >= 0

    @property
    def learns(self) -> Tensor:
        return (self.segments >= 0).any(dim=1)


def affordable_prompts(model: Any, wanted: int, copies: int, gigabytes: float) -> int:
    """How many prompts' rollouts fit: each rollout's gradient is kept whole, in float32; at least one prompt's are.

    >>> affordable_prompts(torch.nn.Linear(1000, 1000, bias=False), wanted=16, copies=8, gigabytes=0.1)
    3
    """
    size = 4e-9 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    return max(1, min(wanted, int(gigabytes / (copies * size))))


def tool_gradients(model: Any, batch: Batch) -> Tensor:
    """`U`: the gradient of each rollout's summed tool-token log-probability, `[B, parameters]`, by `B` passes."""
    from credit import Segment

    parameters = [p for p in model.parameters() if p.requires_grad]
    size = sum(p.numel() for p in parameters)
    count = len(batch.segments)
    gradients = torch.zeros(count, size)
    model.eval()
    for row in range(count):
        on = batch.segments[row] == Segment.TOOL
        if not on.any():
            continue
        prompt = batch.prompt_ids[row][batch.prompt_mask[row]].to(model.device)
        length = int(batch.completion_mask[row].sum())
        answer = batch.completion_ids[row][:length].to(model.device)
        logits = model(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        logp = torch.log_softmax(logits.float(), dim=-1).gather(-1, answer[:, None]).squeeze(-1)
        parts = torch.autograd.grad(logp[on[:length].to(logp.device)].sum(), parameters, allow_unused=True)
        filled = (torch.zeros_like(p) if g is None else g for p, g in zip(parameters, parts, strict=True))
        gradients[row] = torch.cat([part.flatten().float() for part in filled]).cpu()
    return gradients


def make_problem(model: Any, batch: Batch) -> Problem:
    """Everything the redraws need, from one batch of real rollouts."""
    from credit import Segment

    gradients = tool_gradients(model, batch)
    names = torch.tensor([int(Segment.TOOL), int(Segment.SUMMARY)])
    has = torch.stack([(batch.segments == name).any(dim=1) for name in names], dim=1)
    return Problem(
        tool=batch.tool_reward,
        summary=batch.summary_reward,
        group=batch.group,
        segments=torch.where(has, names, int(Segment.NONE)),
        gram=(gradients @ gradients.T).double(),
        weight=1.0 / max(int(batch.learnable.sum()), 1),
    )


def redraw(problem: Problem, sigma: float, count: int, seed: int = 0) -> Tensor:
    """`count` draws of the summary noise, `[count, B]`."""
    generator = torch.Generator().manual_seed(seed)
    return sigma * torch.randn(count, len(problem.tool), generator=generator, dtype=torch.float64)


def tool_advantages(problem: Problem, rule: Any, noise: Tensor) -> Tensor:
    """The advantage that `rule` gives to each rollout's tool tokens, for every redraw: `[count, B]`.

    Every redraw is a set of groups of its own, so that one call of the rule answers for all.
    """
    count, size = noise.shape
    stride = int(problem.group.max()) + 1
    group = (problem.group + stride * torch.arange(count)[:, None]).flatten()
    rewards = {"tool": problem.tool.repeat(count), "summary": (problem.summary + noise).flatten()}
    credit = rule(rewards, group, problem.segments.repeat(count, 1))
    return credit[:, 0].reshape(count, size)


def trace_variance(advantages: Tensor, problem: Problem) -> tuple[float, float]:
    """Trace of the covariance of `g` over the redraws, and its Monte-Carlo standard error."""
    count = len(advantages)
    # Taken from the first redraw first: advantages that do not vary then have variance 0, not a rounding residue.
    moved = advantages - advantages[0]
    deviation = moved - moved.mean(dim=0)
    squares = problem.weight**2 * ((deviation @ problem.gram) * deviation).sum(dim=1) * count / (count - 1)
    return float(squares.mean()), float(squares.std() / math.sqrt(count))


def cosines(advantages: Tensor, reference: Tensor, problem: Problem) -> Tensor:
    """Cosine of every redraw's tool gradient with the one that `reference` advantages give; 0 where either is 0."""
    along = advantages @ problem.gram @ reference
    norms = ((advantages @ problem.gram) * advantages).sum(dim=1) * (reference @ problem.gram @ reference)
    return torch.where(norms > 0, along / norms.clamp(min=torch.finfo(norms.dtype).tiny).sqrt(), 0.0)


def centring(problem: Problem) -> Tensor:
    """`C`: subtracts from each present row the mean of its group's present rows, `[B, B]`."""
    present = problem.learns
    same = (problem.group[:, None] == problem.group) & present[:, None] & present
    count = same.sum(dim=1, keepdim=True).clamp(min=1)
    judged = same & (count >= 2)
    return torch.where(judged, torch.eye(len(same), dtype=torch.float64) - 1.0 / count, 0.0)


def local_variance(problem: Problem, sigma: float) -> float:
    """SLCA theorem A.3: `σ² w² Σ_i ‖U_i‖²`, for rewards without a baseline and a fixed scale."""
    noisy = problem.has_tool & (problem.segments[:, 1] >= 0)
    return sigma**2 * problem.weight**2 * float(problem.gram.diagonal()[noisy].sum())


def centred_variance(problem: Problem, sigma: float, scale: Tensor | None = None) -> float:
    """The same with group means taken off: `σ² w² tr(C K C)`; ours. `scale` `[B]` divides each row's advantage."""
    centre = centring(problem) if scale is None else centring(problem) / scale[:, None]
    on_tool = torch.where(problem.has_tool[:, None], centre, 0.0)
    return sigma**2 * problem.weight**2 * float((on_tool.T @ problem.gram @ on_tool).trace())


def directional_deviation(problem: Problem, sigma: float, scale: Tensor, along: Tensor) -> float:
    """Standard deviation, over the noise, of `⟨g, d⟩` with `d = Σ along_i U_i`: `σ w ‖Cᵀ K along‖`, scaled as above."""
    reach = torch.where(problem.has_tool, (problem.gram @ along) / scale, 0.0)
    return sigma * problem.weight * float((centring(problem).T @ reach).norm())


def expected_scale(problem: Problem, sigma: float) -> Tensor:
    """Root of the expected within-group variance of the noisy unified reward, `√(s² + σ²)`, for each row: `[B]`."""
    present = problem.learns
    same = (problem.group[:, None] == problem.group) & present
    count = same.sum(dim=1)
    deviation = centring(problem) @ (problem.tool + problem.summary)
    spread = torch.where(same, deviation**2, 0.0).sum(dim=1) / (count - 1).clamp(min=1)
    return (spread + sigma**2).sqrt()


def flip_probability(problem: Problem, sigma: float) -> Tensor:
    """Probability that unified credit reinforces each rollout's tool tokens, `[B]`; exact for normalised GRPO too.

    Dividing by a positive scale keeps the sign, so only the centred reward counts: it is Gaussian with mean `d_i`
    and variance `σ²(1 − 1/G)`, hence `Φ(d_i / (σ √(1 − 1/G)))`.
    """
    deviation = centring(problem) @ (problem.tool + problem.summary)
    spread = sigma * centring(problem).diagonal().clamp(min=0).sqrt()
    sure = (deviation > 0).double()
    argument = deviation / torch.where(spread > 0, spread, 1.0)
    normal = 0.5 * (1.0 + torch.erf(argument / math.sqrt(2.0)))
    return torch.where(spread > 0, normal, sure)


def expected_cosine(mean: Tensor, reference: Tensor, variance: float, problem: Problem) -> float:
    """`⟨Eg, d⟩ / (‖d‖ √(‖Eg‖² + V))`: the cosine if the noisy gradient's norm equals its root mean square."""
    gram = problem.gram
    power = problem.weight**2 * float(mean @ gram @ mean) + variance
    length = math.sqrt(float(reference @ gram @ reference) * power)
    return problem.weight * float(mean @ gram @ reference) / length if length > 0 else 0.0


def group_variance(advantages: Tensor, problem: Problem) -> float:
    """Variance of `g` over prompts and rollouts as well, from the scatter of the groups' contributions.

    The groups are independent, so `V(g) = n/(n−1) Σ_j ‖h_j − h̄‖²` with `h_j` the part of group `j`; averaged over
    the redraws. This one is not conditional on the trajectories.
    """
    ids = problem.group.unique()
    parts = (problem.group == ids[:, None]).double()
    own = torch.einsum("ja,na,ab,nb,jb->n", parts, advantages, problem.gram, advantages, parts)
    whole = ((advantages @ problem.gram) * advantages).sum(dim=1)
    count = len(ids)
    scatter = (own - whole / count) * count / max(count - 1, 1)
    return float(problem.weight**2 * scatter.mean())
