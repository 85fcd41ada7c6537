"""Replay weights, recorded selections, consensus selections and low-rank routers, as tensors."""

import re

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_routing import interventions as own
from tests.moe_routing.test_mutants import killed, mutate


@pytest.fixture(autouse=True)
def _unchecked():
    """Wrong shapes must meet the package's own messages, and mutants its assertions, not the type checker."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


SCORINGS = ("softmax", "topk_softmax", "sigmoid")


def draw(seed: int, tokens: int = 6, experts: int = 8, k: int = 3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator).mul(3).to(dtype)
    selected = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :k]
    return logits, selected


def loop_weights(z, selected, scoring, renormalise, scale):
    """Token by token, from the definition."""
    rows = []
    for row, ids in zip(z.double(), selected.tolist(), strict=True):
        if scoring == "sigmoid":
            scores = [1 / (1 + torch.exp(-value)) for value in row]
        else:
            scores = [torch.exp(value) / torch.exp(row).sum() for value in row]
        chosen = torch.stack([scores[e] for e in ids])
        rows.append(scale * (chosen / chosen.sum() if renormalise or scoring == "topk_softmax" else chosen))
    return torch.stack(rows)


def check_weights(weights, seed):
    z, selected = draw(seed)
    probe = torch.rand(selected.shape, generator=torch.Generator().manual_seed(seed + 99))
    for scoring in SCORINGS:
        for renormalise in (True, False):
            a, b = z.clone().requires_grad_(), z.clone().requires_grad_()
            got = weights(a, selected, scoring=scoring, renormalise=renormalise, scale=2.5)
            want = loop_weights(b, selected, scoring, renormalise, 2.5)
            assert torch.allclose(got.double(), want, atol=1e-5)
            (got * probe).sum().backward()
            (want * probe).sum().backward()
            assert a.grad is not None
            assert torch.allclose(a.grad, b.grad, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_weights_and_gradients_are_those_of_the_definition(seed):
    check_weights(own.selected_weights, seed)


def check_vanished(weights, seed):
    z = torch.tensor([[0.0, 1.0, 500.0], [-torch.inf, -torch.inf, 0.0]]).requires_grad_()
    got = weights(z, torch.tensor([[0, 1], [0, 1]]))
    assert torch.allclose(got[0], torch.tensor([0.0, 1.0]).softmax(-1))
    assert bool(torch.isfinite(got).all())
    got.square().sum().backward()
    assert bool(torch.isfinite(z.grad).all())
    assert float(z.grad[0, 1]) > 0.1


def test_a_selection_without_probability_has_finite_weights_and_gradients():
    check_vanished(own.selected_weights, 0)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_half_and_double_precision(scoring, dtype):
    z, selected = draw(0, dtype=dtype)
    got = own.selected_weights(z, selected, scoring=scoring)
    assert got.dtype == (torch.float32 if scoring == "softmax" else dtype)
    assert torch.allclose(got.double(), loop_weights(z, selected, scoring, True, 1.0), atol=1e-2)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_recorded_ids_of_any_width(scoring, dtype):
    z, selected = draw(0)
    wide = own.selected_weights(z, selected, scoring=scoring)
    assert torch.equal(own.selected_weights(z, selected.to(dtype), scoring=scoring), wide)


def test_no_token_and_bad_arguments():
    assert own.selected_weights(torch.zeros(0, 4), torch.zeros(0, 2, dtype=torch.long)).shape == (0, 2)
    assert own.recorded_selection(torch.zeros(0, 2, dtype=torch.long), 4).shape == (0, 2)
    with pytest.raises(ValueError, match=r"scoring must be"):
        own.selected_weights(torch.zeros(1, 4), torch.zeros(1, 2, dtype=torch.long), scoring="tanh")


def check_recorded(recorded, seed):
    good = torch.tensor([[2, 0], [-1, -1], [1, 3]], dtype=torch.int16)
    assert recorded(good, 4).tolist() == good.tolist()
    stale = torch.tensor([[2, 0], [9, 9], [-7, 1]])
    assert recorded(stale, 4, torch.tensor([1, 0, 0])).tolist() == [[2, 0], [-1, -1], [-1, -1]]
    for row, message in {
        (0, 4): r"selected of shape \(2, 2\) holds ids outside 0\.\.3, first at token 1: \[0, 4\]",
        (0, -2): "outside 0..3",
        (3, 3): "an expert twice",
        (-1, 2): "only in part",
    }.items():
        error = ""
        try:
            recorded(torch.tensor([[0, 1], row]), 4)
        except ValueError as caught:
            error = str(caught)
        assert re.search(message, error), row


def test_recorded_selections_are_checked():
    check_recorded(own.recorded_selection, 0)
    with pytest.raises(ValueError, match=r"k=3 experts of num_experts=2"):
        own.recorded_selection(torch.tensor([[0, 1, 2]]), 2)
    with pytest.raises(ValueError, match=r"mask has shape \(3,\), but selected of shape \(1, 2\)"):
        own.recorded_selection(torch.tensor([[0, 1]]), 4, torch.ones(3))


def test_replay_falls_back_row_by_row_and_refuses_another_shape():
    live = torch.tensor([[0, 1], [2, 0]])
    assert own.replayed_selection(torch.tensor([[-1, -1], [1, 3]]), live).tolist() == [[0, 1], [1, 3]]
    with pytest.raises(ValueError, match=r"recorded has shape \(1, 2\), but the live selection asks for \(2, 2\)"):
        own.replayed_selection(torch.tensor([[1, 3]]), live)


def check_consensus_selection(consensus, seed):
    _, selected = draw(seed, tokens=12)
    field = torch.tensor([-1, 5, 5, 5, 2, 2, -1, 0, 0, 0, 0, -1])
    got = consensus(selected, field, 8).tolist()
    for t, f in enumerate(field.tolist()):
        counts = [0] * 8
        for u, g in enumerate(field.tolist()):
            for e in selected[u].tolist():
                counts[e] += g == f
        best = sorted(range(8), key=lambda e: (-counts[e], e))[:3]
        assert got[t] == (best if f >= 0 else [-1] * 3)


@pytest.mark.parametrize("seed", range(3))
def test_consensus_selection_matches_a_loop(seed):
    check_consensus_selection(own.consensus_selection, seed)


def test_consensus_selection_of_prompts_only_is_all_live():
    _, selected = draw(0)
    assert own.consensus_selection(selected, torch.full((6,), -1), 8).unique().tolist() == [-1]


sizes = st.integers(1, 6).flatmap(lambda ranks: st.tuples(st.just(ranks), st.integers(1, 5).map(lambda n: n * ranks)))


@settings(max_examples=50, deadline=None)
@given(sizes, st.data())
def test_tiers_number_the_experts_of_each_bucket(size, data):
    ranks, experts = size
    groups = data.draw(st.integers(1, experts))
    group = own.expert_groups(experts, groups).tolist()
    assert sorted(set(group)) == list(range(groups))
    assert group == sorted(group)
    seen: dict[tuple[int, int], int] = {}
    for e, tier in enumerate(own.expert_tiers(experts, groups, ranks).tolist()):
        bucket = (group[e], e * ranks // experts)
        assert tier == seen.get(bucket, 0)
        seen[bucket] = tier + 1


@settings(max_examples=50, deadline=None)
@given(sizes, st.data())
def test_one_group_uses_every_rank_tier_by_tier(size, data):
    ranks, experts = size
    k = data.draw(st.integers(1, experts))
    tiers = own.expert_tiers(experts, 1, ranks)
    chosen = own.tiered_topk(torch.zeros(2, experts), tiers, k)[0]
    assert len({int(e) * ranks // experts for e in chosen}) == min(k, ranks)
    assert tiers[chosen].tolist() == sorted(tiers.tolist())[:k]


def check_tiered(topk, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 3, (5, 8), generator=generator).float() * (1e30, 1e-9)[seed % 2]
    tiers = torch.randint(0, 3, (8,), generator=generator)
    for row, got in zip(scores.tolist(), topk(scores, tiers, 5).tolist(), strict=True):
        assert got == sorted(range(8), key=lambda e: (-row[e], int(tiers[e]), e))[:5]


@pytest.mark.parametrize("seed", range(5))
def test_selection_is_lexicographic_at_any_magnitude(seed):
    check_tiered(own.tiered_topk, seed)


def check_mix(mix, seed):
    weight = torch.randn(7, 9, generator=torch.Generator().manual_seed(seed))
    for groups in (1, 3, 7):
        got, group = mix(weight, groups), own.expert_groups(7, groups)
        assert int(torch.linalg.matrix_rank(got.double(), rtol=1e-9)) == groups
        for e in range(7):
            assert torch.allclose(got[e], weight[group == group[e]].mean(0), atol=1e-6)
            assert torch.equal(got[e], got[int((group == group[e]).nonzero()[0])])


@pytest.mark.parametrize("seed", range(3))
def test_mixed_rows_are_group_means_of_rank_at_most_the_groups(seed):
    check_mix(own.low_rank_mix, seed)


def test_mixing_as_many_groups_as_experts_changes_nothing_in_half_precision():
    weight = torch.randn(6, 4).bfloat16()
    assert torch.equal(own.low_rank_mix(weight, 6), weight)
    assert own.low_rank_mix(torch.full((4,), 3e4).half(), 1).tolist() == [3e4] * 4  # the sum would overflow


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: own.expert_groups(4, 5), r"num_groups must lie in 1\.\.num_experts=4, got 5"),
        (lambda: own.low_rank_mix(torch.zeros(4, 2), 0), "num_groups must lie"),
        (lambda: own.expert_tiers(6, 1, 4), "num_ranks must divide num_experts=6, got 4"),
        (lambda: own.expert_tiers(6, 1, 0), "num_ranks must divide"),
        (lambda: own.tiered_topk(torch.zeros(2, 4), torch.zeros(3, dtype=torch.long), 1), r"tiers has shape \(3,\)"),
        (lambda: own.tiered_topk(torch.zeros(2, 4), torch.zeros(4, dtype=torch.long), 5), r"k must lie in 1\.\.4"),
    ],
)
def test_bad_sizes_are_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


MUTANTS = {
    "gathered from the selected scores only": (
        "selected_weights", check_weights,
        "chosen = chosen_probs(logits, selected)",
        "chosen = torch.softmax(logits.float().gather(1, selected), dim=-1)",
    ),
    "detached weights": (
        "selected_weights", check_weights, "logits.sigmoid().gather", "logits.detach().sigmoid().gather",
    ),
    "zero over zero": ("selected_weights", check_vanished, "lost = total < _LOST_MASS", "lost = total < -1"),
    "mask ignored": (
        "recorded_selection", check_recorded, "ids = torch.where(as_mask(mask)[:, None], ids, -1)", "pass",
    ),
    "duplicates pass": ("recorded_selection", check_recorded, "(ordered[:, 1:] ==", "(9 + ordered[:, 1:] =="),
    "partly recorded rows pass": ("recorded_selection", check_recorded, "~absent.all(-1)", "absent.all(-1)"),
    "ids below -1 pass": ("recorded_selection", check_recorded, "outside = (ids < -1) | (", "outside = ("),
    "unlabelled tokens join the last field": ("consensus_selection", check_consensus_selection, "+ 2)", "+ 1)"),
    "tiers by a small number": (
        "tiered_topk", check_tiered, "scores[:, order].sort(", "(scores[:, order] - 1e-6 * tiers[order]).sort(",
    ),
    "higher tier first": ("tiered_topk", check_tiered, "tiers.to(scores.device).argsort(", "(-tiers).argsort("),
    "sum instead of mean": ("low_rank_mix", check_mix, ".sum(1) / size", ".sum(1) + 0 * size"),
    "interleaved groups": (
        "low_rank_mix", check_mix, "group = expert_groups(weight.shape[0], num_groups).to(weight.device)",
        "group = torch.arange(weight.shape[0]) % num_groups",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(name):
    function, check, old, new = MUTANTS[name]
    assert not killed(check, getattr(own, function))
    assert killed_or_broken(check, getattr(mutate("interventions", old, new), function))


def killed_or_broken(check, implementation) -> bool:
    """A mutant may also fail with the wrong error; any failure of the check counts."""
    try:
        return killed(check, implementation)
    except (ValueError, IndexError, RuntimeError):
        return True
