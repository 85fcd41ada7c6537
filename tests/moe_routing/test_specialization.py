import math

import pytest
import torch
from hypothesis import given, settings
from torch.testing import assert_close

from moe_routing import expert_counts, router_probs, routing_drift, specialization_gap
from tests.moe_routing.cases import make_case, seeds

light = settings(max_examples=30, deadline=None)


def loop_gap(counts, labels, eligible):
    shares = [c / c.sum() if ok and c.sum() > 0 else None for c, ok in zip(counts.double(), eligible)]
    alike, apart = [], []
    for i in range(len(shares)):
        for j in range(i + 1, len(shares)):
            if shares[i] is not None and shares[j] is not None:
                similarity = float(torch.minimum(shares[i], shares[j]).sum())
                (alike if (labels[i] & labels[j]).any() else apart).append(similarity)
    return sum(alike) / len(alike) - sum(apart) / len(apart) if alike and apart else 0.0


@light
@given(seeds)
def test_specialization_gap_matches_the_loops(seed):
    case = make_case(seed)
    counts = expert_counts(case.selected, case.field, case.num_fields, case.experts)
    eligible = torch.arange(case.num_fields) % 4 != 1
    got = specialization_gap(counts.double(), case.labels, eligible)
    assert math.isclose(float(got), loop_gap(counts, case.labels, eligible), abs_tol=1e-9)
    layers = torch.stack([counts, counts.flip(0)]).double()
    each = [specialization_gap(layer, case.labels) for layer in layers]
    assert_close(specialization_gap(layers, case.labels), torch.stack(each))


def test_specialization_gap_without_pairs_or_turns_is_zero():
    assert specialization_gap(torch.ones(3, 4), torch.ones(3, 1, dtype=torch.bool)).item() == 0
    assert specialization_gap(torch.ones(0, 4), torch.ones(0, 1, dtype=torch.bool)).item() == 0
    broken = torch.tensor([[1.0, 0.0], [math.nan, 1.0], [1.0, 0.0], [0.0, 1.0]])
    labels = torch.tensor([[True], [True], [True], [False]])
    assert specialization_gap(broken, labels).item() == 1.0


@light
@given(seeds)
def test_routing_drift_matches_the_loops_and_shards_add_up(seed):
    case = make_case(seed)
    probs = router_probs(case.logits)
    recorded = case.selected.roll(1, 0)
    mask = case.field >= 0
    drift = routing_drift(recorded, case.selected, probs, mask)
    exact, jaccard, mass = [], [], []
    for t in mask.nonzero().flatten().tolist():
        r, s = set(recorded[t].tolist()), set(case.selected[t].tolist())
        exact.append(r == s)
        jaccard.append(len(r & s) / len(r | s))
        mass.append(sum(float(probs[t, e]) for e in r & s) / sum(float(probs[t, e]) for e in s))
    n = max(len(exact), 1)
    assert math.isclose(float(drift.exact_match), sum(exact) / n, abs_tol=1e-12)
    assert math.isclose(float(drift.jaccard), sum(jaccard) / n, abs_tol=1e-12)
    assert math.isclose(float(drift.selected_mass), sum(mass) / n, abs_tol=1e-12)
    cut = len(mask) // 3
    parts = [routing_drift(recorded[h], case.selected[h], probs[h], mask[h]) for h in (slice(0, cut), slice(cut, None))]
    assert_close((parts[0] + parts[1]).jaccard, drift.jaccard)
    assert_close((parts[0] + parts[1]).reduce().selected_mass, drift.selected_mass)


def test_equal_recordings_do_not_drift_whatever_their_order():
    selected = torch.tensor([[0, 3], [2, 1], [-1, -1]])
    drift = routing_drift(selected.flip(1), selected, torch.rand(3, 4), torch.ones(3, dtype=torch.bool))
    assert (drift.exact_match.item(), drift.jaccard.item(), drift.selected_mass.item()) == (1, 1, 1)
    assert drift.tokens.item() == 2


@pytest.mark.parametrize("absent", [0, 1])
def test_a_token_that_one_recording_lacks_is_no_drift(absent):
    whole, partial = torch.tensor([[0, 3], [2, 1]]), torch.tensor([[-1, -1], [2, 1]])
    pair = (partial, whole) if absent == 0 else (whole, partial)
    drift = routing_drift(*pair, torch.rand(2, 4), torch.ones(2, dtype=torch.bool))
    assert (drift.exact_match.item(), drift.tokens.item()) == (1, 1)


def test_a_token_without_probabilities_is_no_drift():
    selected, probs = torch.tensor([[0, 3], [2, 1]]), torch.rand(2, 4)
    probs[1, 2] = math.nan
    drift = routing_drift(selected, selected, probs, torch.ones(2, dtype=torch.bool))
    assert (drift.exact_match.item(), drift.jaccard.item(), drift.selected_mass.item()) == (1, 1, 1)
    assert drift.tokens.item() == 1


def test_a_selection_whose_probability_underflowed_is_compared_by_its_experts():
    """A biased router may select experts of probability 0: equal sets share all of it, whatever it is."""
    selected, recorded = torch.tensor([[0, 1], [0, 1], [0, 1]]), torch.tensor([[1, 0], [1, 2], [2, 3]])
    probs = torch.tensor([[0.0, 0.0, 0.5, 0.5]]).repeat(3, 1)
    drift = routing_drift(recorded, selected, probs, torch.ones(3, dtype=torch.bool))
    assert drift.selected_mass.item() == 0.5
    assert drift.tokens.item() == 3
