"""Divergence from a reference policy."""

import pytest
import torch

from credit import aggregate_loss, kl_k3
from tests.credit.checks_losses import (
    check_kl,
)


@pytest.mark.parametrize(
    ("check", "function"),
    [
        (check_kl, kl_k3),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_checks(check, function):
    check(function)


@pytest.mark.parametrize("ugly", [float("nan"), float("inf"), -float("inf")])
def test_a_masked_nan_reaches_neither_the_aggregate_nor_its_gradient(ugly):
    logp = torch.tensor([[0.3, ugly], [ugly, 0.1]], requires_grad=True)
    ref = torch.tensor([[0.0, 0.2], [ugly, 0.4]])
    loss = aggregate_loss(kl_k3(logp, ref), torch.tensor([[1, 0], [0, 1]]))
    loss.backward()
    assert loss.isfinite()
    assert logp.grad.isfinite().all()
    assert logp.grad[0, 1] == logp.grad[1, 0] == 0


def test_the_reference_gets_no_gradient_and_a_second_derivative_is_refused():
    logp, ref = torch.zeros(1, 1, requires_grad=True), torch.ones(1, 1, requires_grad=True)
    (slope, nothing) = torch.autograd.grad(
        kl_k3(logp, ref).sum() ** 2, (logp, ref), create_graph=True, allow_unused=True
    )
    assert nothing is None
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()
    assert kl_k3(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0, 3)
