"""The theorems behind the routing, as properties: each numbered as in the specification of the package."""

import math

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from credit import (
    GRPO,
    RLTR,
    SLCA,
    SupportControl,
    ToolPO,
    aggregate_loss,
    assign_credit,
    format_weighted_ce,
    group_advantage,
    policy_loss,
)
from tests import reference
from tests.credit.checks_credit import NAN, same
from tests.credit.checks_losses import MODES

# A busy machine is slow, which is no failure of a theorem.
calm = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much]}
few = settings(max_examples=10, **calm)
many = settings(max_examples=30, **calm)
reals = st.floats(-100, 100, width=32).map(lambda x: round(x, 3))
WIDTH, VOCABULARY = 6, 7


def column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def columns(rows: int, element: st.SearchStrategy[float] = reals) -> st.SearchStrategy[Tensor]:
    return st.lists(element, min_size=rows, max_size=rows).map(column)


def integer_rows(rows: int, low: int, high: int, width: int = WIDTH) -> st.SearchStrategy[Tensor]:
    row = st.lists(st.integers(low, high), min_size=width, max_size=width)
    return st.lists(row, min_size=rows, max_size=rows).map(torch.tensor)


class TinyModel(torch.nn.Module):
    """A causal language model small enough for hundreds of gradients."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(VOCABULARY, 8)
        self.mix = torch.nn.GRU(8, 8, batch_first=True)
        self.head = torch.nn.Linear(8, VOCABULARY)
        self.double()

    def logp(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.mix(self.embed(torch.nn.functional.pad(tokens, (1, 0))[:, :-1]))
        return self.head(hidden).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)

    def gradient(self, loss: Tensor) -> Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(self.parameters()))])


def ascent(model: TinyModel, tokens: Tensor, credit: Tensor, mask: Tensor, weight: float) -> Tensor:
    """The policy gradient of the tokens in ``mask``, at ratio 1, each weighing ``weight``: w * sum of A * score."""
    logp = model.logp(tokens)
    return -model.gradient(policy_loss(logp, logp.detach(), credit, mask, denominator=1 / weight).loss)


# 1. Isolation


@many
@given(columns(6), columns(6), columns(6, st.one_of(reals, st.just(NAN))), integer_rows(6, -1, 1), columns(6))
def test_1_tool_credit_is_bitwise_independent_of_summary_rewards(tool, first, second, segments, ids):
    group = (ids > 0).long()
    for rule in (SLCA(), SLCA(tool=0.3, summary=2.0), SupportControl(tool_to_summary=True)):
        one = rule({"tool": tool, "summary": first}, group, segments)
        two = rule({"tool": tool, "summary": second}, group, segments)
        assert torch.equal(one[segments == 0], two[segments == 0])
    one = SLCA()({"tool": first, "summary": tool}, group, segments)
    two = SLCA()({"tool": second.nan_to_num(), "summary": tool}, group, segments)
    assert torch.equal(one[segments == 1], two[segments == 1])


def both_segments(rows: int) -> Tensor:
    return torch.tensor([[0, 0, -1, 0, -1, 1]]).expand(rows, WIDTH)


@few
@given(st.integers(0, 10**6))
def test_1_jacobian_of_tool_credit_in_summary_rewards(seed):
    g = torch.Generator().manual_seed(seed)
    tool, summary = torch.randn(2, 5, generator=g, dtype=torch.float64)
    segments, group = both_segments(5), torch.zeros(5, dtype=torch.int64)

    def tool_credit(rule, name, other):
        return torch.autograd.functional.jacobian(
            lambda leaf: rule({name: leaf, other: tool}, group, segments)[segments == 0], summary
        )

    assert (tool_credit(SLCA(), "summary", "tool") == 0).all()
    assert (tool_credit(SupportControl(), "summary", "tool") == 0).all()
    assert (tool_credit(SupportControl(tool_to_summary=True), "summary", "tool") == 0).all()
    for rule, name, other in (
        (GRPO(), "summary", "tool"),
        (ToolPO(), "global", "local"),
        (SupportControl(summary_to_tool=True), "summary", "tool"),
    ):
        assert tool_credit(rule, name, other).abs().max() > 1e-2


@few
@given(st.integers(0, 10**6), columns(4), columns(4))
def test_1_tool_part_of_the_parameter_gradient(seed, first, second):
    assume(first.std() > 0.1 and second.std() > 0.1)
    model, g = TinyModel(), torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (4, WIDTH), generator=g)
    tool = torch.randn(4, generator=g, dtype=torch.float64)
    segments, group = both_segments(4), torch.zeros(4, dtype=torch.int64)

    def gradient(rule, summary, part):
        credit = rule({"tool": tool, "summary": summary}, group, segments)
        return ascent(model, tokens, credit, part, 1 / int((segments >= 0).sum()))

    assert torch.equal(gradient(SLCA(), first, segments == 0), gradient(SLCA(), second, segments == 0))
    # What the summary reward moves in the whole gradient it moves through summary tokens.
    moved = [gradient(SLCA(), summary, segments >= 0) for summary in (first, second)]
    through = [gradient(SLCA(), summary, segments == 1) for summary in (first, second)]
    same(moved[0] - moved[1], through[0] - through[1], 1e-12)
    total = [GRPO()({"tool": tool, "summary": summary}, group, segments)[:, 0] for summary in (first, second)]
    assume((total[0] - total[1]).abs().max() > 1e-2)
    assert not torch.equal(gradient(GRPO(), first, segments == 0), gradient(GRPO(), second, segments == 0))


# 2. Nuisance variance, by enumeration: three tool trajectories, four noise values


NOISE = column([-2.0, -0.5, 0.5, 2.0])
NOISE_P = column([0.1, 0.4, 0.4, 0.1])
TOOL_TRAJECTORIES = torch.tensor([[1, 2, 3, 0, 5, 0], [2, 4, 0, 0, 5, 0], [6, 0, 0, 0, 5, 0]])
TOOL_SEGMENTS = torch.tensor([[0, 0, 0, -1, 1, -1], [0, 0, -1, -1, 1, -1], [0, -1, -1, -1, 1, -1]])


def enumerate_estimators(tool: Tensor, summary: Tensor, sigma: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Tool-token gradients ``[trajectory, noise, parameter]`` of both estimators, and w^2 |U|^2 of each trajectory."""
    model = TinyModel()
    unified, routed = torch.ones(2, 1, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    rows: dict[str, list[Tensor]] = {"std": [], "slca": []}
    power = []
    for k in range(3):
        tokens, segments = TOOL_TRAJECTORIES[k : k + 1], TOOL_SEGMENTS[k : k + 1]
        weight = 1 / int((segments >= 0).sum())
        score = model.gradient(model.logp(tokens)[segments == 0].sum())
        power.append(weight**2 * score.square().sum())
        for noise in NOISE * sigma[k]:
            pair = torch.stack([tool[k], summary[k] + noise])[None]
            for name, components, weights in (("std", pair.sum(1, keepdim=True), unified), ("slca", pair, routed)):
                credit = assign_credit(components, segments, weights)
                rows[name].append(ascent(model, tokens, credit, segments == 0, weight))
    return {name: torch.stack(value).view(3, len(NOISE), -1) for name, value in rows.items()}, torch.stack(power)


def trace_variance(values: Tensor, chance: Tensor) -> Tensor:
    """E|g - E g|^2 over the leading axis."""
    mean = torch.tensordot(chance, values, 1)
    return torch.tensordot(chance, (values - mean).square().sum(-1), 1)


@few
@given(columns(3), columns(3), columns(3, st.floats(0.1, 3.0)), columns(3, st.floats(0.05, 1.0)))
def test_2_conditional_variance_removed_is_exactly_the_nuisance_term(tool, summary, sigma, chance):
    chance = chance / chance.sum()
    gradients, power = enumerate_estimators(tool, summary, sigma)
    conditional = {
        name: sum(chance[k] * trace_variance(value[k], NOISE_P) for k in range(3)) for name, value in gradients.items()
    }
    noise_variance = (NOISE_P * NOISE.square()).sum() * sigma.square()
    removed = conditional["std"] - conditional["slca"]
    torch.testing.assert_close(removed, (chance * power * noise_variance).sum(), rtol=1e-9, atol=0)
    assert removed > 0
    assert torch.equal(gradients["slca"], gradients["slca"][:, :1].expand_as(gradients["slca"]))  # no variance at all


def test_2_unconditional_variances_may_order_either_way():
    chance = column([0.5, 0.3, 0.2])
    joint = (chance[:, None] * NOISE_P[None]).flatten()

    def unconditional(tool, summary, sigma):
        gradients, _ = enumerate_estimators(column(tool), column(summary), column(sigma))
        return {name: trace_variance(value.flatten(0, 1), joint) for name, value in gradients.items()}

    noisy = unconditional([0.2, 0.5, 0.9], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0])
    assert noisy["std"] > noisy["slca"]
    opposed = unconditional([0.2, 0.5, 0.9], [-0.2, -0.5, -0.9], [0.01, 0.01, 0.01])
    assert opposed["std"] < opposed["slca"]


# 3. Direction


@many
@given(columns(5), columns(5), st.sampled_from([0.01, 0.3, 1.0, 3.0, 100.0]), st.integers(0, 100))
def test_3_direction_and_its_sign_flip(tool, summary, size, seed):
    assume(tool.std() > 0.1)
    row = int(tool.argmin())
    summary = size * summary.clone()
    summary[row] = summary.max() + size
    segments, group = both_segments(5), torch.zeros(5, dtype=torch.int64)
    a_tool, a_summary = (group_advantage(r, group, eps=0.0)[row] for r in (tool, summary))
    alpha, beta = -a_tool, a_summary
    assert alpha > 0
    assert beta > 0

    model = TinyModel(seed)
    tokens = torch.randint(0, VOCABULARY, (5, WIDTH), generator=torch.Generator().manual_seed(seed))[row : row + 1]
    here = segments[row : row + 1] == 0
    ideal = -model.gradient(model.logp(tokens)[here].sum())
    strength = ideal.square().sum()

    def aligned(rule):
        credit = rule({"tool": tool, "summary": summary}, group, segments)[row : row + 1]
        return ascent(model, tokens, credit, here, 1.0) @ ideal

    torch.testing.assert_close(aligned(SLCA(eps=0.0)), alpha * strength, rtol=1e-9, atol=0)
    gap = alpha * tool.std() - beta * summary.std()
    same(aligned(GRPO(scale="none")) / strength, gap, 1e-9 * (1 + float(summary.abs().max())))
    assume(gap.abs() > 1e-6)
    assert torch.sign(aligned(GRPO())) == torch.sign(gap)
    assert aligned(SLCA()) > 0


# 4. Scale, shift, permutation, relabelling


@many
@given(columns(8), columns(8), st.floats(1e-3, 1e3), st.sampled_from([1e-6, 1e-2, 1.0]))
def test_4_scale_up_to_the_floor_with_its_exact_bound(rewards, ids, factor, eps):
    group = (ids > 0).long()
    plain = group_advantage(rewards, group, eps=eps)
    scaled = group_advantage(factor * rewards, group, eps=eps)
    for i in range(8):
        peers = rewards[group == group[i]]
        if len(peers) < 2 or (peers == peers[0]).all():
            assert plain[i] == scaled[i] == 0
            continue
        sigma, distance = peers.std(), (rewards[i] - peers.mean()).abs()
        gap = distance * eps * abs(factor - 1) / ((factor * sigma + eps) * (sigma + eps))
        same((scaled[i] - plain[i]).abs(), gap, 1e-8)
        assert (scaled[i] - plain[i]).abs() <= plain[i].abs() * eps * abs(factor - 1) / (factor * sigma + eps) + 1e-8


@many
@given(columns(8), st.lists(st.integers(-2, 2), min_size=8, max_size=8), st.floats(-50, 50), st.permutations(range(8)))
def test_4_shift_permutation_and_relabelling(rewards, ids, shift, order):
    group, order = torch.tensor(ids), torch.tensor(order)
    plain = group_advantage(rewards, group, eps=0.1)
    same(group_advantage(rewards + shift, group, eps=0.1), plain, 1e-9)
    same(group_advantage(rewards[order], group[order], eps=0.1), plain[order], 1e-9)
    names = torch.tensor([10**18, -(10**18), 7, 2 * 10**8, 0])
    same(group_advantage(rewards, names[group + 2], eps=0.1), plain, 1e-9)
    for g in group.unique():
        assert plain[group == g].sum().abs() < 1e-9


@few
@given(columns(6), columns(6), integer_rows(6, -1, 1), st.permutations(range(6)), st.integers(0, 3))
def test_4_rules_are_equivariant_and_ignore_padding(tool, summary, segments, order, extra):
    order, group = torch.tensor(order), torch.tensor([0, 0, 0, 5, 5, 5])
    for rule in (SLCA(), GRPO(), ToolPO(), RLTR(), SupportControl(summary_to_tool=True, tool_to_summary=True)):
        rewards = dict(zip(rule.components, (tool, summary)))
        plain = rule(rewards, group, segments)
        moved = rule({k: v[order] for k, v in rewards.items()}, group[order], segments[order])
        same(moved, plain[order], 1e-9)
        padded = rule(rewards, group, torch.nn.functional.pad(segments, (0, extra), value=-1))
        assert torch.equal(padded, torch.nn.functional.pad(plain, (0, extra)))


# 5. Assignment is linear


@many
@given(st.integers(0, 10**6), st.floats(-3, 3), st.floats(-3, 3))
def test_5_assignment_is_linear_in_both_arguments(seed, x, y):
    g = torch.Generator().manual_seed(seed)
    segments = torch.randint(-1, 3, (4, WIDTH), generator=g)
    a, b = torch.randn(2, 4, 2, generator=g, dtype=torch.float64)
    u, v = torch.randn(2, 3, 2, generator=g, dtype=torch.float64)
    for one, two in ((a, b), (a, torch.zeros_like(a))):
        same(
            assign_credit(x * one + y * two, segments, u),
            x * assign_credit(one, segments, u) + y * assign_credit(two, segments, u),
            1e-12,
        )
    same(
        assign_credit(a, segments, x * u + y * v),
        x * assign_credit(a, segments, u) + y * assign_credit(a, segments, v),
        1e-12,
    )
    segments[0] = -1
    assert (assign_credit(a, segments, u)[segments < 0] == 0).all()


@few
@given(columns(6), columns(6), integer_rows(6, -1, 1))
def test_5_a_weight_of_zero_silences_its_segment_exactly(tool, summary, segments):
    rewards, group = {"tool": tool, "summary": summary}, torch.tensor([0, 0, 0, 5, 5, 5])
    full = SLCA()(rewards, group, segments)
    for rule, silent in ((SLCA(tool=0.0), 0), (SLCA(summary=0.0), 1)):
        got = rule(rewards, group, segments)
        assert (got[segments == silent] == 0).all()
        assert torch.equal(got[segments == 1 - silent], full[segments == 1 - silent])
    same(SLCA(tool=0.25, summary=3.0)(rewards, group, segments), torch.where(segments == 0, 0.25, 3.0) * full, 1e-12)
    assert torch.equal(RLTR()({"tool": tool}, group, segments), SLCA(summary=0.0)(rewards, group, segments))
    assert torch.equal(SupportControl()(rewards, group, segments), full)


# 6. Dual clip

log_ratios = st.floats(-4, 4)
widths = st.floats(0.0, 0.9)


def surrogate(log_ratio: float, advantage: float, **options) -> tuple[float, float]:
    leaf = torch.full((1, 1), log_ratio, dtype=torch.float64, requires_grad=True)
    every = torch.ones(1, 1)
    loss = policy_loss(leaf, torch.zeros(1, 1).double(), column([advantage]), every, **options).loss
    loss.backward()
    return -float(loss.detach()), -float(leaf.grad)


@many
@given(log_ratios, st.floats(-5, 5), widths, widths, st.floats(1.01, 8.0))
def test_6_dual_clip(log_ratio, advantage, low, high, dual):
    options = {"clip_low": low, "clip_high": high}
    ratio = math.exp(log_ratio)
    value, slope = surrogate(log_ratio, advantage, dual_clip=dual, **options)
    plain, plain_slope = surrogate(log_ratio, advantage, dual_clip=None, **options)
    same(
        torch.tensor(value, dtype=torch.float64),
        -reference.token_loss(log_ratio, 0.0, advantage, low, high, dual),
        1e-9,
    )
    if advantage >= 0 or ratio <= dual:
        assert (value, slope) == (plain, plain_slope)
    else:
        assert slope == 0
    if advantage < 0:
        assert value >= dual * advantage - 1e-9
    step = 1e-6
    above, below = (surrogate(log_ratio + s, advantage, dual_clip=dual, **options)[0] for s in (step, -step))
    assert abs(above - below) <= 2.1 * step * abs(advantage) * ratio + 1e-12  # continuous, even Lipschitz
    kinks = [math.log(k) for k in (1 - low, 1 + high, dual)]
    if min(abs(log_ratio - k) for k in kinks) > 2 * step:
        same(
            torch.tensor(slope, dtype=torch.float64), (above - below) / (2 * step), 1e-5 * (1 + abs(advantage) * ratio)
        )


@many
@given(st.integers(0, 10**6), st.floats(0.0, 0.5), st.floats(1.6, 6.0))
def test_6_equals_the_expression_of_trl_when_delta_is_c(seed, width, dual):
    g = torch.Generator().manual_seed(seed)
    logp = torch.randn(3, 5, generator=g, dtype=torch.float64, requires_grad=True)
    old, advantages = torch.randn(2, 3, 5, generator=g, dtype=torch.float64)
    mask = torch.rand(3, 5, generator=g) < 0.8
    ours = policy_loss(logp, old, advantages, mask, clip_low=width, clip_high=width, dual_clip=dual).loss
    (our_gradient,) = torch.autograd.grad(ours, logp)
    # trl.GRPOTrainer._compute_loss, with delta = c and its token-level aggregation
    coef_1 = torch.exp(logp - old)
    coef_2 = torch.clamp(coef_1, 1 - width, 1 + width)
    per_token = -torch.min(torch.clamp(coef_1, max=dual) * advantages, coef_2 * advantages)
    theirs = (per_token * mask).sum() / mask.sum().clamp(min=1.0)
    same(ours, float(theirs.detach()), 1e-10)
    same(our_gradient, torch.autograd.grad(theirs, logp)[0], 1e-10)


# 7. Aggregation over any split


@many
@given(st.integers(0, 10**6), st.sampled_from(MODES), st.lists(st.integers(0, 5), min_size=8, max_size=8))
def test_7_any_split_into_micro_batches_and_ranks_equals_the_whole(seed, mode, places):
    """Each row goes to one of six (rank, micro-batch) places, which is trimmed to its own longest row."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(8, WIDTH, generator=g) < torch.rand(8, 1, generator=g)
    loss = torch.where(mask, torch.randn(8, WIDTH, generator=g, dtype=torch.float64), NAN)
    logp = torch.where(mask, torch.randn(8, WIDTH, generator=g, dtype=torch.float64), NAN).requires_grad_()
    old, advantages = torch.randn(2, 8, WIDTH, generator=g, dtype=torch.float64)
    place = torch.tensor(places)
    count = (mask.sum() if mode == "token_mean" else mask.any(1).sum()).double()
    options = {"mode": mode, "denominator": count, "horizon": WIDTH}
    parts, surrogates = [], []
    for which in range(6):
        rows = place == which
        width = int(mask[rows].any(0).nonzero().max()) + 1 if mask[rows].any() else 0
        parts.append(aggregate_loss(loss[rows, :width], mask[rows, :width], mode, count, horizon=WIDTH))
        cut = [x[rows, :width] for x in (logp, old, advantages, mask)]
        surrogates.append(policy_loss(*cut, **options))
    same(sum(parts), aggregate_loss(loss, mask, mode), 1e-12)
    whole = policy_loss(logp, old, advantages, mask, mode=mode)
    total = sum(part.loss for part in surrogates)
    same(total, float(whole.loss.detach()), 1e-12)
    same(torch.autograd.grad(total, logp)[0], torch.autograd.grad(whole.loss, logp)[0], 1e-12)
    joined = surrogates[0].stats
    for part in surrogates[1:]:
        joined = joined + part.stats
    for name, value in joined.compute().items():
        same(value, whole.stats.compute()[name], 1e-9)


# 8. Format-weighted cross-entropy


@many
@given(st.integers(0, 10**6), st.floats(0.0, 4.0))
def test_8_format_ce_is_one_weighted_ce(seed, weight):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, WIDTH, VOCABULARY, generator=g, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (3, WIDTH), generator=g)
    mask = torch.rand(3, WIDTH, generator=g) < 0.7
    fmt = mask & (torch.rand(3, WIDTH, generator=g) < 0.5)
    logp = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    ours = format_weighted_ce(logp, mask, fmt, weight)
    weights = mask / mask.sum().clamp(min=1) + weight * fmt / fmt.sum().clamp(min=1)
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    theirs = (weights.flatten().double() * each).sum()
    same(ours, float(theirs.detach()), 1e-6)
    same(torch.autograd.grad(ours, logits)[0], torch.autograd.grad(theirs, logits)[0], 1e-6)
    wanted = reference.format_weighted_ce(logp.detach().tolist(), mask.tolist(), fmt.tolist(), weight)
    same(ours, wanted, 1e-12)
