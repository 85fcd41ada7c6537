import math

import pytest
import torch
from hypothesis import given, settings
from torch.testing import assert_close

from moe_routing import TurnStatistics, router_probs, turn_control, turn_objective, turn_usage
from tests.moe_routing import checks
from tests.moe_routing import reference as ref
from tests.moe_routing.cases import ACTIVATIONS, make_case, rich_case, seeds

light = settings(max_examples=30, deadline=None)


@light
@given(seeds)
def test_facts_of_mutual_information(seed):
    checks.check_information(TurnStatistics, seed)


@light
@given(seeds)
def test_control_matches_the_loops(seed):
    checks.check_turn_control(turn_control, seed)


@light
@given(seeds)
def test_usage_is_the_mean_of_each_field(seed):
    case = make_case(seed)
    for activation in ACTIVATIONS:
        probs = router_probs(case.logits, activation)
        usage, tokens = turn_usage(probs, case.field, case.num_fields)
        for f, row in enumerate(ref.usage(ref.probs(case.logits, activation), case.field, case.num_fields)):
            expected = torch.zeros(case.experts, dtype=torch.float64) if row is None else row
            assert_close(usage[f], expected, rtol=1e-12, atol=1e-14)
        assert torch.equal(tokens, case.tokens_of_field())


@light
@given(seeds)
def test_the_exact_gradient_of_the_information_is_the_pmi(seed):
    """Holding pmi constant loses nothing: d I_o / d q_i(e) = pmi_o(e, y_io) / N where nothing is clamped."""
    case = make_case(seed)
    usage, tokens = turn_usage(router_probs(case.logits), case.field, case.num_fields)
    usage = usage.detach().requires_grad_()
    stats = TurnStatistics.from_usage(usage, case.labels, tokens > 0)
    (got,) = torch.autograd.grad(stats.information().sum(), usage)
    expected = torch.zeros_like(usage)
    turns = int(stats.num_turns)
    for i in (tokens > 0).nonzero().flatten().tolist():
        for o, y in enumerate(case.labels[i].tolist()):
            expected[i] += stats.pmi()[o, int(y)].detach() / turns
    assert_close(got, expected, rtol=1e-6, atol=1e-8)


@light
@given(seeds)
def test_objective_has_the_control_as_its_gradient_and_the_information_as_its_value(seed):
    case = make_case(seed)
    usage, tokens = turn_usage(router_probs(case.logits), case.field, case.num_fields)
    usage = usage.detach().requires_grad_()
    stats = TurnStatistics.from_usage(usage.detach(), case.labels, tokens > 0)
    for reduction in ("sum", "mean"):
        value = turn_objective(usage, case.labels, tokens > 0, reduction=reduction, min_turns=1)
        information = getattr(stats.information(), reduction)()
        assert_close(value.detach(), information, rtol=1e-9, atol=1e-12)
        (got,) = torch.autograd.grad(value, usage)
        control = turn_control(stats.pmi(), case.labels, tokens, stats.num_turns, min_turns=1, reduction=reduction)
        assert_close(got, control * tokens[:, None], rtol=1e-9, atol=1e-12)


@light
@given(seeds)
def test_statistics_of_shards_add_up_in_any_order(seed):
    case = make_case(seed)
    _, whole = checks.statistics(TurnStatistics, case)
    usage, tokens = turn_usage(router_probs(case.logits), case.field, case.num_fields)
    cut = case.num_fields // 2
    parts = [
        TurnStatistics.from_usage(usage[h], case.labels[h], tokens[h] > 0) for h in (slice(0, cut), slice(cut, None))
    ]
    for total in (parts[0] + parts[1], parts[1] + parts[0]):
        assert_close(total.pmi(), whole.pmi(), rtol=1e-9, atol=1e-9)
    shards = [turn_objective(usage[h], case.labels[h], tokens[h] > 0, whole) for h in (slice(0, cut), slice(cut, None))]
    assert_close(sum(shards), turn_objective(usage, case.labels, tokens > 0), rtol=1e-9, atol=1e-12)
    order = torch.randperm(case.num_fields, generator=torch.Generator().manual_seed(seed))
    shuffled = TurnStatistics.from_usage(usage[order], case.labels[order], tokens[order] > 0)
    assert_close(shuffled.information(), whole.information(), rtol=1e-9, atol=1e-12)


def test_layers_share_the_labels_but_not_the_table():
    case = rich_case(0)
    layers = torch.stack([case.logits, case.logits.flip(1)])
    usage, tokens = turn_usage(router_probs(layers), case.field, case.num_fields)
    stats = TurnStatistics.from_usage(usage, case.labels, tokens > 0)
    control = turn_control(stats.pmi(), case.labels, tokens, stats.num_turns)
    for layer in range(2):
        alone, _ = turn_usage(router_probs(layers[layer]), case.field, case.num_fields)
        one = TurnStatistics.from_usage(alone, case.labels, tokens > 0)
        assert_close(stats.information()[layer], one.information())
        assert_close(control[layer], turn_control(one.pmi(), case.labels, tokens, one.num_turns))
    assert turn_objective(usage, case.labels, tokens > 0).shape == (2,)


@pytest.mark.parametrize("turns", [0, 1, 7])
def test_too_few_turns_give_no_signal(turns):
    usage = torch.rand(turns, 4).softmax(-1)
    usage.requires_grad_()
    labels = torch.arange(turns)[:, None] % 2 == 0
    stats = TurnStatistics.from_usage(usage, labels, torch.ones(turns, dtype=torch.bool))
    tokens = torch.ones(turns, dtype=torch.long)
    control = turn_control(stats.pmi(), labels, tokens, stats.num_turns)
    assert control.eq(0).all()
    value = turn_objective(usage, labels, tokens > 0)
    assert value.item() == 0
    value.backward()
    assert usage.grad.eq(0).all()
    eight = torch.rand(8, 4).softmax(-1)
    labels = torch.arange(8)[:, None] % 2 == 0
    stats = TurnStatistics.from_usage(eight, labels, torch.ones(8, dtype=torch.bool))
    assert turn_control(stats.pmi(), labels, torch.ones(8, dtype=torch.long), 8).abs().max() > 0
    assert turn_objective(eight, labels, torch.ones(8, dtype=torch.bool)) > 0


def test_pmi_is_clamped_and_a_lone_expert_is_fully_informative():
    usage = torch.eye(2).repeat(8, 1)
    labels = torch.tensor([[True], [False]]).repeat(8, 1)
    stats = TurnStatistics.from_usage(usage, labels, torch.ones(16, dtype=torch.bool))
    assert_close(stats.information(), torch.tensor([math.log(2)], dtype=torch.float64))
    assert stats.pmi().min().item() == -20
    assert stats.pmi(clamp=0.5).abs().max().item() == 0.5


def test_a_constant_operation_adds_exactly_zero_in_single_precision():
    usage = torch.rand(1000, 16).softmax(-1)
    labels = torch.tensor([[True, False]]).expand(1000, -1)
    stats = TurnStatistics.from_usage(usage, labels, torch.ones(1000, dtype=torch.bool))
    assert stats.information().tolist() == [0, 0]
    assert turn_control(stats.pmi(), labels, torch.ones(1000, dtype=torch.long), 1000).eq(0).all()


def test_an_expert_idle_without_the_operation_is_seen_as_such():
    """P(e, absent) is a difference of sums: noise of single precision there would hide a pmi at its clamp."""
    usage = torch.rand(400, 3).softmax(-1)
    labels = torch.arange(400)[:, None] % 2 == 0
    usage[1::2, 2] = 0
    stats = TurnStatistics.from_usage(usage, labels, torch.ones(400, dtype=torch.bool))
    assert stats.pmi()[0, 0, 2].item() == -20


def test_a_turn_that_is_not_finite_takes_no_part():
    usage = torch.rand(2, 20, 4).softmax(-1)
    labels = torch.arange(20)[:, None] % 2 == 0
    eligible = torch.ones(20, dtype=torch.bool)
    broken = usage.clone()
    broken[1, 3, 0] = math.nan
    without = eligible.clone()
    without[3] = False
    got, expected = (TurnStatistics.from_usage(u, labels, e) for u, e in ((broken, eligible), (usage, without)))
    assert int(got.num_turns) == 19
    assert torch.equal(got.pmi(), expected.pmi())
    leaf = broken.requires_grad_()
    value = turn_objective(leaf, labels, eligible)
    assert_close(value.detach(), turn_objective(usage, labels, without))
    value.sum().backward()
    assert leaf.grad.isfinite().all()


def test_a_nan_row_stays_in_its_own_field():
    probs = torch.tensor([[0.5, 0.5], [math.nan, 0.5], [math.nan, 1.0], [1.0, 0.0]], requires_grad=True)
    usage, tokens = turn_usage(probs, torch.tensor([0, 2, -1, 0]), 4)
    assert usage[[0, 1, 3]].isfinite().all()
    assert tokens.tolist() == [2, 0, 1, 0]
    usage[0].sum().backward()
    assert_close(probs.grad, torch.tensor([[0.5, 0.5], [0.0, 0.0], [0.0, 0.0], [0.5, 0.5]]))


def test_labels_of_a_turn_without_tokens_do_not_matter():
    case = rich_case(3)
    usage, tokens = turn_usage(router_probs(case.logits), case.field, case.num_fields)
    other = case.labels.clone()
    other[tokens == 0] = ~other[tokens == 0]
    assert (tokens == 0).any()
    first, second = (TurnStatistics.from_usage(usage, y, tokens > 0) for y in (case.labels, other))
    assert torch.equal(first.pmi(), second.pmi())
    control = turn_control(first.pmi(), other, tokens, 8)
    assert control[tokens == 0].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_usage_is_accumulated_wide(dtype):
    probs = torch.full((4096, 4), 0.25, dtype=dtype)
    usage, tokens = turn_usage(probs, torch.zeros(4096, dtype=torch.long), 1)
    assert usage.dtype == torch.float32
    assert_close(usage, torch.full((1, 4), 0.25))
    assert TurnStatistics.from_usage(usage, torch.ones(1, 1, dtype=torch.bool), tokens > 0).num_turns == 1


def test_token_counts_of_32_bits_do_not_wrap_around():
    pmi, labels, tokens = torch.rand(1, 2, 2), torch.tensor([[True], [False]]), torch.tensor([70_000, 1])
    for turns in (70_000, torch.tensor(70_000), torch.tensor(70_000, dtype=torch.int32)):
        assert torch.equal(turn_control(pmi, labels, tokens.int(), turns), turn_control(pmi, labels, tokens, 70_000))


def test_reduce_without_distributed_is_the_identity():
    case = rich_case(4)
    _, stats = checks.statistics(TurnStatistics, case)
    assert torch.equal(stats.reduce().pmi(), stats.pmi())
