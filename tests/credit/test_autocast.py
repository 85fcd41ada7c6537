"""Autocast around a call, as a trainer has it around forward and loss, changes no result."""

import pytest
import torch

import credit

DTYPES = [torch.bfloat16, torch.float16]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_credit_keeps_its_precision(dtype):
    advantages, segments = noise(5, 3), torch.arange(-1, 4).repeat(5, 3)
    weights = noise(4, 3)
    want = credit.assign_credit(advantages, segments, weights)
    with torch.autocast("cpu", dtype):
        found = credit.assign_credit(advantages, segments, weights)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_advantages_and_returns_keep_theirs(dtype):
    rewards, group = noise(8), torch.arange(8) // 4
    runs, present = noise(4, 3), torch.ones(4, 3, dtype=torch.bool)

    def found():
        return credit.group_advantage(rewards, group), credit.turn_returns(runs, present, discount=0.9)

    want = found()
    with torch.autocast("cpu", dtype):
        torch.testing.assert_close(found(), want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_keeps_its(dtype):
    old, advantages, mask = noise(4, 9), noise(4, 9).flip(0), noise(4, 9) > -1

    def found():
        logp = (old + 0.3 * noise(9, 4).T).requires_grad_()
        loss = credit.policy_loss(logp, old, advantages, mask).loss
        loss.backward()
        return loss.detach(), logp.grad

    want = found()
    with torch.autocast("cpu", dtype):
        torch.testing.assert_close(found(), want, rtol=0, atol=0)
