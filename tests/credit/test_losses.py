"""The policy loss."""

import pytest
import torch

from credit import policy_loss
from tests.credit.checks_losses import (
    MODES,
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
    loss_case,
    run,
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


@pytest.mark.parametrize("mode", MODES)
def test_padding_and_the_order_of_rows_change_nothing(mode):
    case = loss_case(8)
    loss, grad = run(policy_loss, case, mode=mode, horizon=6)
    order = torch.tensor([2, 0, 3, 1])
    moved = run(policy_loss, {name: value[order] for name, value in case.items()}, mode=mode, horizon=6)
    torch.testing.assert_close(moved[0], loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(moved[1], grad[order], rtol=1e-12, atol=0)
    padded = {
        name: torch.nn.functional.pad(value, (0, 5), value=False if name == "mask" else float("nan"))
        for name, value in case.items()
    }
    wider = run(policy_loss, padded, mode=mode, horizon=6)
    torch.testing.assert_close(wider[0], loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(wider[1], torch.nn.functional.pad(grad, (0, 5)), rtol=1e-12, atol=0)
