"""What each differentiable primitive keeps for backward, counted exactly: unique storages, the caller's own left out.

The shape is fixed, so the count is a fact about the code and not a measurement. ``TOKEN`` figures are bytes for each
token of a float32 batch; they are upper bounds, so keeping less is no failure but a figure to lower here.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import credit
from benchmarks.timing import bytes_for_backward

ROWS, TOKENS = 16, 128
ENTRIES = ROWS * TOKENS
PER_ROW = 16  # weights of rows, scalars


def batch() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    mask = torch.rand(ROWS, TOKENS, generator=random) < 0.7
    old = torch.randn(ROWS, TOKENS, generator=random) - 2
    return {
        "logp": (old + 0.3 * torch.randn(ROWS, TOKENS, generator=random)).requires_grad_(),
        "old": old,
        "advantages": torch.randn(ROWS, TOKENS, generator=random),
        "parts": torch.randn(ROWS, 2, generator=random).requires_grad_(),
        "mask": mask,
        "protocol": mask & (old > -2),
        "segments": torch.where(mask, (torch.arange(TOKENS) > 64).long(), -1),
        "group": torch.arange(ROWS) // 4,
        "matrix": torch.eye(2),
        "rewards": torch.randn(ROWS, generator=random).requires_grad_(),
    }


Loss = Callable[[dict[str, Tensor]], Tensor]
# Bytes for each token: 4 is one float32 tensor of the batch's size, 8 an int64 one.
BOUNDS: dict[str, tuple[float, Loss]] = {
    "policy_loss": (
        4, lambda b: credit.policy_loss(b["logp"], b["old"], b["advantages"], b["mask"]).loss,
    ),
    "policy_loss, one advantage a row": (
        4, lambda b: credit.policy_loss(b["logp"], b["old"], b["advantages"][:, 0], b["mask"]).loss,
    ),
    "policy_loss, weighted ratio": (
        4,
        lambda b: credit.policy_loss(
            b["logp"], b["old"], b["advantages"], b["mask"], ratio_weight=b["advantages"].abs()
        ).loss,
    ),
    "kl_k3": (4, lambda b: credit.kl_k3(b["logp"], b["old"])),
    "kl_k3, aggregated": (4, lambda b: credit.aggregate_loss(credit.kl_k3(b["logp"], b["old"]), b["mask"])),
    "aggregate_loss": (0, lambda b: credit.aggregate_loss(b["logp"], b["mask"])),
    "format_weighted_ce": (4, lambda b: credit.format_weighted_ce(b["logp"], b["mask"], b["protocol"])),
    "assign_credit": (8, lambda b: credit.assign_credit(b["parts"], b["segments"], b["matrix"])),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDS)
def test_no_more_is_kept_than_stated(name):
    bound, call = BOUNDS[name]
    given = batch()
    kept = bytes_for_backward(lambda: call(given), given.values())
    assert kept <= bound * ENTRIES + PER_ROW * ROWS
    assert kept >= bound * ENTRIES, f"less is kept than stated, {kept / ENTRIES} a token: lower the figure"


def test_group_advantage_keeps_nothing_that_grows_with_the_tokens():
    given = batch()
    kept = bytes_for_backward(lambda: credit.group_advantage(given["rewards"], given["group"]), given.values())
    assert kept <= 256 * ROWS


def test_half_precision_halves_what_is_kept():
    given = {k: v.detach().bfloat16().requires_grad_(v.requires_grad) if v.is_floating_point() else v
             for k, v in batch().items()}  # fmt: skip
    for name in ("policy_loss", "kl_k3"):
        bound, call = BOUNDS[name]
        kept = bytes_for_backward(lambda call=call: call(given), given.values())
        assert bound / 2 * ENTRIES <= kept <= bound / 2 * ENTRIES + PER_ROW * ROWS


def test_the_count_sees_what_autograd_keeps():
    given = batch()
    kept = bytes_for_backward(lambda: (given["logp"].exp() * given["old"]).sum(), given.values())
    assert kept == 4 * ENTRIES
