import math

import pytest
import torch
from hypothesis import given, settings
from torch.testing import assert_close

from moe_routing import count_fields, count_pairs, field_ids, router_probs, token_consistency_loss, token_objective
from tests.moe_routing import checks
from tests.moe_routing import reference as ref
from tests.moe_routing.cases import ACTIVATIONS, TARGETS, make_case, rich_case, seeds


@settings(max_examples=15, deadline=None)
@given(seeds)
def test_every_target_matches_the_loops_in_value_and_gradient(seed):
    checks.check_token_loss(token_consistency_loss, seed)


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_objective_is_minus_the_mean_over_all_pairs_and_shards_add_up(seed):
    case = make_case(seed)
    loss, valid = token_consistency_loss(case.logits, case.selected, case.field)
    pairs = int(count_pairs(case.field))
    assert pairs == int(valid.sum()) == len(ref.pairs(case.field))
    assert int(count_fields(case.field)) == len({f for f in case.field.tolist() if f >= 0})
    whole = token_objective(case.logits, case.selected, case.field)
    assert_close(whole, -loss.sum() / max(pairs, 1))
    cut = next((t for t in range(len(case.field) // 2, len(case.field)) if t not in ref.pairs(case.field)), 0)
    halves = [
        token_objective(case.logits[h], case.selected[h], case.field[h], pairs)
        for h in (slice(0, cut), slice(cut, None))
    ]
    assert_close(halves[0] + halves[1], whole)


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_router_probabilities_match_their_definition(seed):
    case = make_case(seed)
    for activation in ACTIVATIONS:
        got = router_probs(case.logits, activation)
        assert_close(got, ref.probs(case.logits, activation), rtol=1e-12, atol=1e-14)


def test_only_the_current_token_gets_a_gradient():
    z = torch.randn(2, 4, requires_grad=True)
    for target in TARGETS:
        for activation in ACTIVATIONS:
            loss, _ = token_consistency_loss(
                z, torch.tensor([[0, 1], [0, 1]]), torch.tensor([5, 5]), target=target, activation=activation
            )
            (grad,) = torch.autograd.grad(loss.sum(), z)
            assert grad[0].eq(0).all()
            assert grad[1].abs().max() > 0


def test_threshold_zero_acts_on_equal_sets_and_a_negative_one_on_none():
    selected, field = torch.tensor([[0, 1], [1, 0], [1, 2]]), torch.zeros(3, dtype=torch.long)
    z = torch.randn(3, 4)
    acted = [
        token_consistency_loss(z, selected, field, gap_threshold=h)[0].ne(0).tolist() for h in (0.0, -0.1, 0.5, 1.0)
    ]
    assert acted == [[False, True, False], [False] * 3, [False, True, True], [False, True, True]]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite(target, activation, bad):
    """A NaN or +inf row forms no pair; a pruned expert (-inf) that nobody selects changes nothing else."""
    z = torch.randn(4, 5)
    z[1, 4] = bad
    z.requires_grad_()
    selected, field = torch.tensor([[0, 1]] * 4), torch.zeros(4, dtype=torch.long)
    loss, valid = token_consistency_loss(z, selected, field, target=target, activation=activation)
    assert loss.isfinite().all()
    assert valid.tolist() == [False, bad == -math.inf, bad == -math.inf, True]
    loss.sum().backward()
    assert z.grad.isfinite().all()


@pytest.mark.parametrize("target", ["previous_topk", "uniform_topk", "mass"])
def test_a_target_that_was_pruned_away_is_no_pair(target):
    z = torch.zeros(2, 3)
    z[1, :2] = -math.inf
    z.requires_grad_()
    loss, valid = token_consistency_loss(z, torch.tensor([[0, 1], [0, 1]]), torch.tensor([0, 0]), target=target)
    assert not valid.any()
    assert loss.eq(0).all()
    loss.sum().backward()
    assert z.grad.isfinite().all()


def test_extreme_logits_keep_their_target():
    """The selected probabilities of a biased router may all underflow; their ratios still count."""
    z = torch.tensor([[0.0, -200.0, -200.0], [0.0, 0.0, 0.0]], requires_grad=True)
    loss, _ = token_consistency_loss(z, torch.tensor([[1, 2], [1, 2]]), torch.tensor([0, 0]))
    assert_close(loss[1].item(), math.log(3))
    loss.sum().backward()
    assert_close(z.grad[1], torch.tensor([1 / 3, 1 / 3 - 0.5, 1 / 3 - 0.5]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_wide(dtype):
    case = rich_case(7)
    z = case.logits.to(dtype)
    loss, _ = token_consistency_loss(z, case.selected, case.field)
    wide, _ = token_consistency_loss(z.float(), case.selected, case.field)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, wide)


def test_nothing_to_compare():
    for field in (torch.zeros(0, dtype=torch.long), torch.full((3,), -1)):
        z = torch.zeros(len(field), 4, requires_grad=True)
        loss, valid = token_consistency_loss(z, torch.zeros(len(field), 2, dtype=torch.long), field)
        assert not valid.any()
        value = token_objective(z, torch.zeros(len(field), 2, dtype=torch.long), field)
        assert value.item() == 0
        (value + loss.sum()).backward()
        assert z.grad.eq(0).all()


def test_field_ids_of_any_size_are_told_apart():
    """One number for each triple would wrap around, and triples of different trajectories would share it."""
    trajectory = torch.tensor([2**62, 0, 2**62, 0, 2**61])
    turn = torch.tensor([0, 2**40, 2**40, 0, 1])
    ids, triples = field_ids(trajectory, turn, torch.tensor([1, 0, 0, 1, 0]))
    assert triples.tolist() == [[0, 0, 1], [0, 2**40, 0], [2**61, 1, 0], [2**62, 0, 1], [2**62, 2**40, 0]]
    assert ids.tolist() == [3, 1, 4, 0, 2]


def test_field_ids_number_the_triples_that_occur():
    trajectory = torch.tensor([7, 7, 7, 7, 0, 0, -1])
    turn = torch.tensor([0, 0, 0, 1, 3, -1, 0])
    kind = torch.tensor([0, 1, 0, 0, 1, 0, 0])
    ids, table = field_ids(trajectory, turn, kind)
    assert ids.tolist() == [1, 2, 1, 3, 0, -1, -1]
    assert table.tolist() == [[0, 3, 1], [7, 0, 0], [7, 0, 1], [7, 1, 0]]
