import math

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
    probs = torch.tensor([[0.9, 0.1], [0.1, 0.9], [math.nan, 0.5], [0.5, 0.5]])
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
