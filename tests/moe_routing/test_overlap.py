"""Agreement of neighbouring rows, block by block."""

import pytest
import torch

from moe_routing import add_injection, blocks
from moe_routing.overlap import neighbour_overlap


@pytest.mark.parametrize("rows", [1, 2, 5, 9])
def test_overlap_has_the_value_and_derivatives_of_its_formula_in_any_blocks(rows, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 2 * 4)
    probs = torch.rand(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)).requires_grad_()
    want = (probs[1:] * probs[:-1]).sum(-1)
    torch.testing.assert_close(neighbour_overlap(probs)[1:], want)
    slope = torch.arange(rows, dtype=torch.float64) - 1
    (got,) = torch.autograd.grad((neighbour_overlap(probs) * slope)[1:].sum(), probs)
    (wanted,) = torch.autograd.grad((want * slope[1:]).sum(), probs)
    torch.testing.assert_close(got, wanted)
    if rows > 1:
        assert torch.autograd.gradcheck(neighbour_overlap, probs)
        assert torch.autograd.gradgradcheck(neighbour_overlap, probs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_whose_first_number_is_zero_may_still_be_injected(dtype):
    g = torch.tensor([[-0.0, 1.0], [-0.0, 1.0], [1.0, -0.0], [1.0, 3e38], [torch.nan, 1.0]], dtype=dtype)
    injection = torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, 1.0], [0.0, 3e38], [1.0, 1.0]])
    got = add_injection(g, injection)
    assert got[:3].tolist() == [[0.0, 2.0], [-0.0, 1.0], [2.0, 1.0]]
    assert torch.signbit(got[1, 0])
    assert torch.equal(got[3:].view(torch.uint8), g[3:].view(torch.uint8))
