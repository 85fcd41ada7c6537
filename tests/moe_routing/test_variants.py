import math

import pytest
import torch
from hypothesis import given, settings
from torch.testing import assert_close

from moe_routing import (
    SumCount,
    kappa_advantage_objective,
    kappa_ratio_objective,
    outlier_reg,
    routing_reg,
    switch_reg,
    turn_switch_reg,
)
from tests.moe_routing import reference as ref
from tests.moe_routing.cases import ACTIVATIONS, make_case, seeds

light = settings(max_examples=20, deadline=None)


@light
@given(seeds)
def test_routing_reg_matches_the_loops(seed):
    case = make_case(seed)
    for activation in ACTIVATIONS:
        z, w = (case.logits.clone().requires_grad_() for _ in range(2))
        loss, valid = routing_reg(z, case.selected, case.field, activation=activation)
        p = ref.probs(w, activation)
        expected = torch.zeros(len(case.field), dtype=torch.float64)
        for t, owner in enumerate(case.field.tolist()):
            if owner >= 0:
                chosen = ref.consensus(case.selected, case.field, owner, case.experts, case.k)
                expected[t] = -sum(torch.log(p[t, e]) for e in chosen) / case.k
        assert torch.equal(valid, case.field >= 0)
        assert_close(loss, expected, rtol=1e-9, atol=1e-12)
        if expected.requires_grad:
            grads = torch.autograd.grad(loss.sum(), z) + torch.autograd.grad(expected.sum(), w)
            assert_close(*grads, rtol=1e-9, atol=1e-12)


@light
@given(seeds)
def test_switch_reg_matches_the_loops_at_both_ends(seed):
    case = make_case(seed)
    for activation in ACTIVATIONS:
        z, w = (case.logits.clone().requires_grad_() for _ in range(2))
        loss, valid = switch_reg(z, case.selected, case.field, activation=activation)
        p = ref.probs(w, activation)
        pairs = ref.pairs(case.field)
        assert valid.nonzero().flatten().tolist() == pairs
        if pairs:
            expected = sum(1 - (p[t - 1] * p[t]).sum() for t in pairs)
            assert_close(loss.sum(), expected, rtol=1e-9, atol=1e-12)
            grads = torch.autograd.grad(loss.sum(), z) + torch.autograd.grad(expected, w)
            assert_close(*grads, rtol=1e-9, atol=1e-12)


def test_identical_distributions_still_pay_for_being_spread_out():
    z = torch.tensor([[1.0, 0.0, -1.0]]).repeat(2, 1)
    loss, _ = switch_reg(z, torch.tensor([[0], [0]]), torch.tensor([0, 0]))
    p = z[0].softmax(-1)
    assert_close(loss[1], 1 - p.square().sum())


@light
@given(seeds)
def test_outlier_reg_pays_for_selected_outsiders_and_moves_only_them(seed):
    case = make_case(seed)
    size = 1 + seed % case.experts
    for activation in ACTIVATIONS:
        z = case.logits.clone().requires_grad_()
        loss, valid = outlier_reg(z, case.selected, case.field, size=size, activation=activation)
        p = ref.probs(case.logits, activation)
        expected, slope = torch.zeros(len(case.field), dtype=torch.float64), torch.zeros_like(p)
        for t, owner in enumerate(case.field.tolist()):
            if owner >= 0:
                inside = ref.consensus(case.selected, case.field, owner, case.experts, size)
                for e in set(case.selected[t].tolist()) - set(inside):
                    expected[t] += p[t, e]
                    slope[t, e] = p[t, e] * (1 if activation == "softmax" else 1 / (1 + case.logits[t, e].exp()))
        assert torch.equal(valid, case.field >= 0)
        assert_close(loss, expected, rtol=1e-9, atol=1e-12)
        assert_close(torch.autograd.grad(loss.sum(), z)[0], slope, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_variants_survive_logits_that_are_not_finite(bad, activation):
    z = torch.randn(4, 5)
    z[1] = bad
    z.requires_grad_()
    selected, field = torch.tensor([[0, 1], [2, 3], [0, 1], [0, 4]]), torch.zeros(4, dtype=torch.long)
    for fn, options in ((routing_reg, {}), (switch_reg, {}), (outlier_reg, {"size": 2})):
        loss, valid = fn(z, selected, field, activation=activation, **options)
        assert loss.isfinite().all()
        assert not valid[1]
        assert torch.autograd.grad(loss.sum(), z)[0].isfinite().all()


def test_a_consensus_that_a_token_has_pruned_is_out_of_its_reach():
    z = torch.zeros(3, 4)
    z[1, 0] = -math.inf
    z.requires_grad_()
    loss, valid = routing_reg(z, torch.tensor([[0, 1]] * 3), torch.zeros(3, dtype=torch.long))
    assert valid.tolist() == [True, False, True]
    assert_close(loss.detach(), torch.tensor([math.log(4), 0.0, math.log(4)]))
    loss.sum().backward()
    assert z.grad.isfinite().all()
    assert z.grad[1].eq(0).all()


def test_a_token_that_was_not_recorded_has_no_outliers():
    selected = torch.tensor([[1], [1], [-1]])
    loss, valid = outlier_reg(torch.zeros(3, 4), selected, torch.zeros(3, dtype=torch.long), size=1)
    assert valid.tolist() == [True, True, False]
    assert loss.tolist() == [0, 0, 0]


def test_variants_of_a_batch_of_prompts_are_zero():
    z = torch.randn(3, 4, requires_grad=True)
    selected, field = torch.zeros(3, 2, dtype=torch.long), torch.full((3,), -1)
    for fn, options in ((routing_reg, {}), (switch_reg, {}), (outlier_reg, {"size": 2})):
        loss, valid = fn(z, selected, field, **options)
        assert SumCount.of(loss, valid).compute().item() == 0
        assert torch.autograd.grad(loss.sum(), z)[0].eq(0).all()


def test_turn_switch_reg_compares_consecutive_turns_of_one_trajectory():
    usage = torch.rand(2, 5, 3, dtype=torch.float64).softmax(-1)
    usage.requires_grad_()
    got = turn_switch_reg(usage, torch.tensor([0, 0, 0, 1, 1]), torch.tensor([2, 0, 1, 4, 4]))
    expected = [(1 - (q[0] * q[2]).sum() + 1 - (q[3] * q[4]).sum()) / 2 for q in usage]
    assert_close(got.compute(), torch.stack(expected))
    assert torch.autograd.grad(got.total.sum(), usage)[0][:, 0].abs().max() > 0
    assert turn_switch_reg(usage[:, :1], torch.tensor([0]), torch.tensor([2])).compute().tolist() == [0, 0]


def test_kappa_one_is_the_plain_clipped_objective():
    log_ratio = torch.tensor([0.0, 0.5, -0.5, 0.5, -0.5])
    advantages = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0])
    one, mask = torch.ones(5), torch.ones(5, dtype=torch.bool)
    ratio = log_ratio.exp()
    plain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    assert torch.equal(kappa_advantage_objective(log_ratio, advantages, one, mask), plain)
    assert torch.equal(kappa_ratio_objective(log_ratio, advantages, one, mask), plain)
    half = one / 2
    assert_close(kappa_advantage_objective(log_ratio, advantages, half, mask), plain / 2)
    halved = ratio / 2
    assert_close(
        kappa_ratio_objective(log_ratio, advantages, half, mask),
        torch.minimum(halved * advantages, halved.clamp(0.8, 1.2) * advantages),
    )


@pytest.mark.parametrize("objective", [kappa_advantage_objective, kappa_ratio_objective])
def test_kappa_objectives_let_nothing_through_the_mask(objective):
    log_ratio = torch.tensor([0.1, math.nan, math.inf, 200.0], requires_grad=True)
    advantages = torch.tensor([1.0, math.nan, 1.0, -1.0])
    mask = torch.tensor([1, 0, 0, 1])
    value = objective(log_ratio, advantages, torch.tensor([0.5, math.nan, 1.0, 1.0]), mask)
    assert value.isfinite().all()
    value.sum().backward()
    assert log_ratio.grad.isfinite().all()
    assert log_ratio.grad[1:3].eq(0).all()


@pytest.mark.parametrize("objective", [kappa_advantage_objective, kappa_ratio_objective])
def test_kappa_objectives_have_the_derivatives_of_their_formula(objective):
    log_ratio = torch.tensor([0.1, 0.9, -0.9, 0.9, -0.9, 0.3], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0, 3.0], dtype=torch.float64)
    kappa, mask = torch.full_like(advantages, 0.9), torch.tensor([True] * 5 + [False])
    assert torch.autograd.gradcheck(lambda x: objective(x, advantages, kappa, mask), log_ratio)
    assert torch.autograd.gradgradcheck(lambda x: objective(x, advantages, kappa, mask), log_ratio)
    assert objective(log_ratio * math.nan, advantages, kappa, mask)[:5].isnan().all()
    slope = torch.func.grad(lambda x: objective(x, advantages, kappa, mask).sum())(log_ratio.detach())
    assert_close(slope, torch.autograd.grad(objective(log_ratio, advantages, kappa, mask).sum(), log_ratio)[0])
