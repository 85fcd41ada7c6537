import math

import pytest
import torch
from hypothesis import given, settings
from torch.testing import assert_close

from moe_routing import (
    SumCount,
    coefficient_of_variation,
    entropy,
    expert_counts,
    expert_set_gap,
    jaccard_similarity,
    load_cv,
    load_entropy,
    router_entropy,
    shift_histogram,
)
from tests.moe_routing import checks
from tests.moe_routing import reference as ref
from tests.moe_routing.cases import make_case, rich_case, seeds

light = settings(max_examples=30, deadline=None)


@light
@given(seeds)
def test_pairs_match_the_loops(seed):
    checks.check_gap(expert_set_gap, seed)
    checks.check_jaccard(jaccard_similarity, seed)
    checks.check_shift_histogram(shift_histogram, seed)


@light
@given(seeds)
def test_load_matches_the_loops_and_its_bounds(seed):
    checks.check_load_cv(load_cv, seed)
    case = make_case(seed)
    ids = sorted({f for f in case.field.tolist() if f >= 0})
    loads = [ref.counts(case.selected, case.field, f, case.experts) for f in ids]
    expected = [ref.entropy([c / sum(load) for c in load]) for load in loads]
    assert_close(load_entropy(case.selected, case.field, case.experts), torch.tensor(expected), rtol=1e-5, atol=1e-6)


@light
@given(seeds)
def test_jaccard_is_a_function_of_the_gap(seed):
    case = make_case(seed)
    gap, valid = expert_set_gap(case.selected, case.field)
    similarity, _ = jaccard_similarity(case.selected, case.field)
    assert_close(similarity[valid], ((1 - gap) / (1 + gap))[valid])


@light
@given(seeds)
def test_shards_cut_between_fields_add_up(seed):
    case = make_case(seed)
    cut = next((t for t in range(len(case.field) // 2, len(case.field)) if t not in ref.pairs(case.field)), 0)
    halves = [slice(0, cut), slice(cut, None)]
    whole = SumCount.of(*expert_set_gap(case.selected, case.field))
    parts = [SumCount.of(*expert_set_gap(case.selected[h], case.field[h])) for h in halves]
    assert_close((parts[0] + parts[1]).compute(), whole.compute(), rtol=1e-12, atol=0)
    histograms = [shift_histogram(case.selected[h], case.field[h]) for h in halves]
    assert torch.equal(histograms[0] + histograms[1], shift_histogram(case.selected, case.field))
    counts = [expert_counts(case.selected[h], case.field[h], case.num_fields, case.experts) for h in halves]
    whole_counts = expert_counts(case.selected, case.field, case.num_fields, case.experts)
    assert torch.equal(counts[0] + counts[1], whole_counts)


@light
@given(seeds)
def test_padding_and_expert_order_do_not_matter(seed):
    case = make_case(seed)
    gap, valid = expert_set_gap(case.selected, case.field)
    padded_field = torch.cat([torch.tensor([-1, -1]), case.field, torch.tensor([-1])])
    stale = torch.zeros(1, case.k, dtype=torch.long)
    padded = torch.cat([stale, stale - 1, case.selected.flip(1), stale])
    padded_gap, padded_valid = expert_set_gap(padded, padded_field)
    assert torch.equal(padded_gap[2:-1], gap)
    assert torch.equal(padded_valid[2:-1], valid)


def test_no_pair_crosses_a_field_a_turn_or_a_row():
    selected = torch.tensor([[0, 1]] * 6)
    field = torch.tensor([4, 4, 7, -1, 7, 7])
    assert expert_set_gap(selected, field)[1].tolist() == [False, True, False, False, False, True]


def test_unrecorded_rows_take_no_part():
    selected = torch.tensor([[0, 1], [-1, -1], [0, 1], [0, 2]])
    field = torch.zeros(4, dtype=torch.long)
    assert expert_set_gap(selected, field)[1].tolist() == [False, False, False, True]
    assert expert_counts(selected, field, 1, 3).tolist() == [[3, 2, 1]]
    assert_close(load_cv(selected, field, 3), torch.tensor([ref.load_cv([3, 2, 1])], dtype=torch.float32))


@pytest.mark.parametrize("seed", range(32))
def test_gap_is_exact_at_every_threshold(seed):
    checks.check_gap_at_threshold(expert_set_gap, seed)


def test_cv_is_zero_only_at_uniform_load_and_ignores_missing_ids():
    assert coefficient_of_variation(torch.full((7,), 3)).item() == 0
    values = load_cv(torch.tensor([[0], [1], [0]]), torch.tensor([2, 2, 900]), 2)
    assert_close(values, torch.tensor([0.0, 1.0]))
    assert load_cv(torch.zeros(2, 1, dtype=torch.long), torch.tensor([-1, -1]), 2).shape == (0,)


def test_router_entropy_ignores_what_lies_under_the_mask():
    probs = torch.tensor([[0.5, 0.5, 0.0], [math.nan, 1.0, math.inf], [1.0, 0.0, 0.0]], requires_grad=True)
    value = router_entropy(probs, torch.tensor([True, False, True]))
    assert_close(value, torch.tensor(math.log(2) / 2))
    value.backward()
    assert probs.grad.isfinite().all()
    assert probs.grad[1].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_router_entropy_is_computed_wide(dtype):
    probs = torch.full((3, 4), 0.25, dtype=dtype)
    value = router_entropy(probs, torch.ones(3, dtype=torch.int64))
    assert value.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    assert_close(value.item(), math.log(4))


def test_nothing_counted_is_zero():
    assert router_entropy(torch.rand(2, 3), torch.zeros(2, dtype=torch.bool)).item() == 0
    assert router_entropy(torch.rand(0, 3), torch.zeros(0, dtype=torch.bool)).item() == 0
    assert shift_histogram(torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, dtype=torch.long)).tolist() == [0, 0, 0]
    assert SumCount.of(torch.rand(0), torch.zeros(0, dtype=torch.bool)).compute().item() == 0


def test_entropy_is_log_of_the_size_at_uniform():
    assert_close(entropy(torch.full((5,), 0.2)).item(), math.log(5), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_cv_of_narrow_counts_does_not_wrap_around(dtype):
    counts = torch.zeros(64, dtype=dtype)
    counts[0] = torch.iinfo(dtype).max
    assert_close(coefficient_of_variation(counts).item(), math.sqrt(63), rtol=1e-6, atol=0)


def test_int32_selections_work():
    case = rich_case(5)
    for fn in (expert_set_gap, jaccard_similarity):
        assert torch.equal(fn(case.selected.int(), case.field.int())[0], fn(case.selected, case.field)[0])
    assert torch.equal(
        load_cv(case.selected.int(), case.field.int(), case.experts), load_cv(case.selected, case.field, case.experts)
    )
