"""The policy loss."""

import pytest
import torch

from credit import policy_loss
from tests.credit.checks_losses import (
    check_dual_clip,
    check_kinks,
    check_policy_gradient,
    check_policy_loud,
    check_policy_masked,
    check_policy_memory,
    check_policy_precision,
    check_policy_rows,
    check_policy_stats,
    check_policy_upstream,
    check_policy_value,
)


@pytest.mark.parametrize(
    ("check", "function"),
    [
        (check_policy_value, policy_loss),
        (check_policy_gradient, policy_loss),
        (check_policy_upstream, policy_loss),
        (check_policy_masked, policy_loss),
        (check_policy_loud, policy_loss),
        (check_dual_clip, policy_loss),
        (check_kinks, policy_loss),
        (check_policy_rows, policy_loss),
        (check_policy_precision, policy_loss),
        (check_policy_stats, policy_loss),
        (check_policy_memory, policy_loss),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_checks(check, function):
    check(function)


def test_a_second_derivative_is_refused_rather_than_wrong():
    leaf = torch.zeros(1, 1, requires_grad=True)
    loss = policy_loss(leaf, torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1)).loss
    (slope,) = torch.autograd.grad(loss**2, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


@pytest.mark.parametrize("options", [{"dual_clip": 1.0}, {"dual_clip": 0.5}, {"clip_low": -0.1}, {"clip_high": -0.1}])
def test_bounds_must_make_sense(options):
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=next(iter(options))):
        policy_loss(x, x, x, x, **options)


def test_an_unknown_mode_is_named():
    x = torch.zeros(1, 1)
    with pytest.raises(Exception, match="mode"):
        policy_loss(x, x, x, x, mode="mean")
