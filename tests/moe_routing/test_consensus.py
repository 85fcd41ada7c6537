import math

import pytest
import torch
from hypothesis import given, settings
from torch.testing import assert_close

from moe_routing import consensus_agreement, consensus_experts, consensus_overlap
from tests.moe_routing import checks
from tests.moe_routing import reference as ref
from tests.moe_routing.cases import make_case, seeds

light = settings(max_examples=30, deadline=None)


@light
@given(seeds)
def test_consensus_matches_the_loops(seed):
    checks.check_consensus(consensus_experts, seed)


@light
@given(seeds)
def test_overlap_matches_the_loops(seed):
    case = make_case(seed)
    consensus = consensus_experts(case.selected, case.field, case.experts, case.k, case.num_fields)
    kappa = consensus_overlap(case.selected, case.field, consensus)
    for t, owner in enumerate(case.field.tolist()):
        shared = set(case.selected[t].tolist()) & set(
            ref.consensus(case.selected, case.field, owner, case.experts, case.k)
        )
        assert math.isclose(float(kappa[t]), len(shared) / case.k if owner >= 0 else 1.0, rel_tol=1e-6)


@light
@given(seeds)
def test_agreement_is_one_minus_total_variation(seed):
    case = make_case(seed)
    probs = ref.probs(case.logits, "softmax")
    consensus = consensus_experts(case.selected, case.field, case.experts, case.k, case.num_fields)
    agreement, valid = consensus_agreement(probs, case.field, consensus)
    assert torch.equal(valid, case.field >= 0)
    for t in valid.nonzero().flatten().tolist():
        uniform = torch.zeros(case.experts, dtype=torch.float64)
        uniform[consensus[case.field[t]]] = 1 / case.k
        assert math.isclose(float(agreement[t]), 1 - float((probs[t] - uniform).abs().sum()) / 2, abs_tol=1e-12)


def test_ties_go_to_the_lower_index_and_missing_ids_have_no_consensus():
    selected = torch.tensor([[5, 2], [2, 7], [7, 5]])
    got = consensus_experts(selected, torch.tensor([3, 3, 3]), num_experts=300, size=2)
    assert got.tolist() == [[-1, -1], [-1, -1], [-1, -1], [2, 5]]


def test_outside_fields_and_without_a_recording_kappa_is_one():
    selected = torch.tensor([[0, 1], [-1, -1], [2, 3]])
    kappa = consensus_overlap(selected, torch.tensor([0, 0, -1]), torch.tensor([[0, 9]]))
    assert_close(kappa, torch.tensor([0.5, 1.0, 1.0]))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_ids_of_any_width_find_their_field(dtype):
    selected, field = torch.tensor([[0, 1], [1, 2], [2, 3]]), torch.tensor([0, 126, 126])
    consensus = consensus_experts(selected, field, 4, 2, num_fields=300)
    overlap, agreement = consensus_overlap(selected, field, consensus), torch.rand(3, 4)
    assert torch.equal(consensus_overlap(selected.to(dtype), field.to(dtype), consensus), overlap)
    want, got = (consensus_agreement(agreement, ids, consensus)[0] for ids in (field, field.to(dtype)))
    assert torch.equal(got, want)


def test_a_batch_of_prompts_has_no_consensus():
    field = torch.full((3,), -1)
    selected = torch.zeros(3, 1, dtype=torch.long)
    empty = consensus_experts(selected, field, 4, 1)
    assert empty.shape == (0, 1)
    assert consensus_overlap(selected, field, empty).tolist() == [1, 1, 1]
    agreement, valid = consensus_agreement(torch.rand(3, 4), field, empty)
    assert not valid.any()
    assert agreement.eq(0).all()
