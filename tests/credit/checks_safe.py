"""What where-safe arithmetic must do, as functions of the function under test."""

import torch

from tests.credit.checks_credit import INF, NAN, Fn, same

UGLY = torch.tensor([NAN, INF, -INF, 0.0, -1.0, 2.0], dtype=torch.float64)


def check_select(fn: Fn) -> None:
    mask = torch.tensor([False, False, False, True, True, True])
    leaf = UGLY.clone().requires_grad_()
    out = fn(mask, leaf)
    same(out, [0, 0, 0, 0, -1, 2], 0)
    (out * torch.tensor([NAN, INF, 1, 1, 1, 3], dtype=torch.float64)).nansum().backward()
    assert (leaf.grad[:3] == 0).all()
    assert leaf.grad[5] == 3
    assert fn(mask, torch.arange(6)).tolist() == [0, 0, 0, 3, 4, 5]
    assert fn(mask, leaf.detach().bfloat16()).dtype == torch.bfloat16


def check_divide(fn: Fn) -> None:
    top = torch.tensor([1.0, 0.0, NAN, INF, 3.0], requires_grad=True)
    bottom = torch.tensor([2.0, 0.0, 0.0, 0.0, -4.0], requires_grad=True)
    for fill in (0.0, 7.0):
        top.grad = bottom.grad = None
        out = fn(top, bottom, fill)
        same(out.detach(), [0.5, fill, fill, fill, -0.75], 0)
        out.sum().backward()
        same(top.grad, [0.5, 0, 0, 0, -0.25], 0)
        same(bottom.grad, [-0.25, 0, 0, 0, -3 / 16], 0)


def check_log(fn: Fn) -> None:
    leaf = torch.tensor([1.0, 0.0, -2.0, -INF, 4.0], dtype=torch.float64, requires_grad=True)
    out = fn(leaf, -9.0)
    same(out.detach(), [0.0, -9.0, -9.0, -9.0, torch.tensor(4.0).double().log()], 1e-12)
    out.sum().backward()
    same(leaf.grad, [1, 0, 0, 0, 0.25], 0)
    same(fn(leaf.detach())[1], 0.0, 0)
    assert fn(torch.tensor([NAN])).isnan().all()


def check_sqrt(fn: Fn) -> None:
    leaf = torch.tensor([4.0, 0.0, -2.0, -INF], requires_grad=True)
    out = fn(leaf)
    same(out.detach(), [2, 0, 0, 0], 0)
    out.sum().backward()
    same(leaf.grad, [0.25, 0, 0, 0], 0)
    assert fn(torch.tensor([NAN])).isnan().all()


def check_masked_mean(fn: Fn) -> None:
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]]).bool()
    leaf = torch.tensor([[1.0, NAN, 4.0], [INF, NAN, -INF]], requires_grad=True)
    out = fn(leaf, mask)
    same(out.detach(), [2.5, 0.0], 0)
    out.sum().backward()
    same(leaf.grad, [[0.5, 0, 0.5], [0, 0, 0]], 0)
    for dtype in (torch.float16, torch.bfloat16):  # a sum of 1e5 and a count of 1e5 leave float16
        got = fn(torch.ones(100_000, dtype=dtype), torch.ones(100_000, dtype=torch.bool))
        assert got.dtype == dtype
        same(got, 1.0, 0)
