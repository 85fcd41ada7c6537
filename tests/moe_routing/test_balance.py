import math

import pytest
import torch
from hypothesis import given, settings
from torch.testing import assert_close

from moe_routing import LoadBalance, load_balancing_loss, router_z_loss
from tests.moe_routing import checks
from tests.moe_routing import reference as ref
from tests.moe_routing.cases import make_case, seeds

light = settings(max_examples=30, deadline=None)


@light
@given(seeds)
def test_load_balancing_matches_the_loops(seed):
    checks.check_load_balancing(load_balancing_loss, seed)


@light
@given(seeds)
def test_micro_batches_add_up_exactly(seed):
    case = make_case(seed)
    probs, mask = ref.probs(case.logits, "sigmoid"), case.field >= 0
    cut = len(mask) // 3
    parts = [LoadBalance.from_probs(probs[h], case.selected[h], mask[h]) for h in (slice(0, cut), slice(cut, None))]
    whole = load_balancing_loss(probs, case.selected, mask)
    assert_close((parts[0] + parts[1]).loss(), whole, rtol=1e-9, atol=1e-12)


def test_layers_are_not_pooled():
    """Four layers, each collapsed on another expert: pooling would call that the optimum."""
    probs = torch.eye(4)[:, None, :].expand(4, 6, 4)
    selected = torch.arange(4)[:, None, None].expand(4, 6, 1)
    assert load_balancing_loss(probs, selected, torch.ones(6, dtype=torch.bool)).tolist() == [4, 4, 4, 4]


def test_padding_and_unrecorded_rows_do_not_count():
    probs = torch.tensor([[0.9, 0.1], [0.1, 0.9], [math.nan, 0.5], [0.8, 0.2]])
    selected = torch.tensor([[0], [1], [0], [-1]])
    loss = load_balancing_loss(probs, selected, torch.tensor([1, 1, 0, 1]))
    assert_close(loss, torch.tensor(1.0))


def test_frequencies_are_detached_and_an_empty_batch_is_zero():
    z = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    probs = z.softmax(-1)
    selected = probs.topk(2).indices
    mask = torch.ones(6, dtype=torch.bool)
    (grad,) = torch.autograd.grad(load_balancing_loss(probs, selected, mask), probs, retain_graph=True)
    frequency = torch.nn.functional.one_hot(selected, 4).double().sum((0, 1)) / 6
    assert_close(grad, (frequency * 4 / 2 / 6).expand(6, 4))
    empty = load_balancing_loss(probs, selected, ~mask)
    assert empty.item() == 0
    assert torch.autograd.grad(empty, probs)[0].eq(0).all()


def test_z_loss_has_the_derivatives_of_its_formula_and_none_in_rows_left_out():
    z = torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z[:, 1, 2] = -torch.inf  # a pruned expert
    mask = torch.tensor([True, True, True, False, True])
    finite = torch.isfinite(z)

    def loss(values):
        return router_z_loss(torch.zeros_like(z).masked_scatter(finite, values).masked_fill(~finite, -torch.inf), mask)

    values = z[finite].requires_grad_()
    assert torch.autograd.gradcheck(loss, values)
    assert torch.autograd.gradgradcheck(loss, values)
    ugly = z.clone()
    ugly[0, 0, 0], ugly[0, 2, 1], ugly[1, 3], ugly[1, 4] = torch.nan, torch.inf, torch.nan, -torch.inf
    ugly.requires_grad_()
    got = router_z_loss(ugly, mask)
    want = [ugly.detach()[layer, rows].logsumexp(-1).square().mean() for layer, rows in ((0, [1, 4]), (1, [0, 1, 2]))]
    torch.testing.assert_close(got, torch.stack(want))
    for twice in (False, True):
        (slope,) = torch.autograd.grad(got.sum(), ugly, retain_graph=True, create_graph=twice)
        assert bool(torch.isfinite(slope).all())
        assert torch.equal(
            slope.abs().sum(-1) == 0, torch.tensor([[True, False, True, True, False], [False] * 3 + [True] * 2])
        )


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).max, torch.finfo(torch.float32).min])
def test_z_loss_ignores_padding_as_large_as_a_number_can_be(fill):
    z = torch.randn(3, 4)
    z[1] = fill
    z.requires_grad_()
    router_z_loss(z, torch.tensor([True, False, True])).backward()
    assert z.grad.isfinite().all()
    assert (z.grad[1] == 0).all()


def test_z_loss_is_the_mean_square_of_the_log_partition():
    z = torch.randn(2, 5, 4)
    z[0, 3] = math.nan
    mask = torch.tensor([True, True, False, True, True])
    z.requires_grad_()
    got = router_z_loss(z, mask)
    square = torch.logsumexp(z.detach(), -1).square()
    assert_close(got, torch.stack([square[0, [0, 1, 4]].mean(), square[1, mask].mean()]))
    got.sum().backward()
    assert z.grad.isfinite().all()
    assert z.grad[:, 2].eq(0).all()
    assert router_z_loss(torch.randn(3, 4), torch.zeros(3, dtype=torch.bool)).item() == 0
    assert router_z_loss(torch.randn(3, 4).bfloat16(), torch.ones(3)).dtype == torch.float32
