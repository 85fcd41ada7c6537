"""Rows worked through in blocks, in any number of them, give what one block gives."""

import pytest
import torch

from credit import _safe, aggregate_loss, format_weighted_ce, kl_k3, policy_loss, turn_returns

NAN, INF = float("nan"), float("inf")


def case(far=25, rows=7, tokens=5):
    g = torch.Generator().manual_seed(3)
    mask = torch.rand(rows, tokens, generator=g) < 0.7
    old = torch.randn(rows, tokens, generator=g)
    logp = old + torch.randn(rows, tokens, generator=g)
    logp[1, 2], logp[5, 0] = old[1, 2] + far, old[5, 0] - far  # beyond the bound on the exponent, in two blocks only
    hole = torch.where(mask, 0.0, torch.tensor([NAN, INF, -INF, NAN, INF]))
    return logp + hole, old, torch.randn(rows, tokens, generator=g) + hole, mask


CALLS = {
    "policy_loss": lambda x, old, advantages, mask: policy_loss(x, old, advantages, mask).loss,
    "policy_loss, weighted": lambda x, old, advantages, mask: (
        policy_loss(x, old, advantages, mask, ratio_weight=advantages.abs()).loss
    ),
    "kl_k3": lambda x, old, advantages, mask: aggregate_loss(kl_k3(x, old), mask),
    "format_weighted_ce": lambda x, old, advantages, mask: format_weighted_ce(x, mask, mask & (old > 0)),
    "turn_returns": lambda x, old, advantages, mask: (turn_returns(x, mask, discount=0.9) * old).sum(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CALLS)
def test_value_and_gradient_do_not_depend_on_the_blocks(name, dtype, monkeypatch):
    logp, old, advantages, mask = case(8 if dtype is torch.float16 else 25)  # e^20 is no float16
    found = []
    for block in (1 << 16, 10, 1):
        monkeypatch.setattr(_safe, "BLOCK", block)
        leaf = logp.to(dtype).requires_grad_()
        value = CALLS[name](leaf, old.to(dtype), advantages.to(dtype), mask)
        value.backward()
        assert value.isfinite()
        assert (leaf.grad[~mask] == 0).all()
        found.append((value.detach(), leaf.grad))
    for value, slope in found[1:]:
        torch.testing.assert_close(value, found[0][0], rtol=4 * torch.finfo(dtype).eps, atol=0)
        torch.testing.assert_close(slope, found[0][1], rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_statistics_of_the_loss_add_up_over_blocks(monkeypatch):
    given = case()
    whole = vars(policy_loss(*given).stats)
    monkeypatch.setattr(_safe, "BLOCK", 10)
    for name, value in vars(policy_loss(*given).stats).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-6, atol=0)


def test_what_is_kept_by_bits_can_be_differentiated_twice_and_mapped():
    values = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, False, True, True]).expand(3, 4)
    assert torch.autograd.gradcheck(lambda x: _safe.keep(mask, x * x), values)
    assert torch.autograd.gradgradcheck(lambda x: _safe.keep(mask, x * x), values)
    assert torch.equal(torch.vmap(_safe.keep)(mask, values), _safe.select(mask, values))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_flags_that_are_numbers_become_bits(dtype):
    bits = _safe.flag_bits_(torch.tensor([0.0, 1.0, 2.0], dtype=dtype))
    assert bits.tolist() == [0, -1, -1]
