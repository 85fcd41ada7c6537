"""Format-weighted cross-entropy."""

import pytest
import torch

from credit import format_weighted_ce
from tests.credit.checks_losses import (
    check_ce,
    check_ce_split,
)


@pytest.mark.parametrize(
    ("check", "function"),
    [
        (check_ce, format_weighted_ce),
        (check_ce_split, format_weighted_ce),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_checks(check, function):
    check(function)


def test_position_t_scores_the_token_at_t_and_the_end_of_turn_is_trained():
    """Nothing is shifted here: the last position of the mask, the end of the turn, has its own gradient."""
    logp = torch.zeros(1, 4, requires_grad=True)
    format_weighted_ce(logp, torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 0, 0, 1]]), 1.0).backward()
    assert logp.grad.tolist() == [[0.0, 0.0, -0.5, -1.5]]


def test_half_precision_is_summed_wide():
    for dtype in (torch.float16, torch.bfloat16):
        loss = format_weighted_ce(torch.full((3, 3000), -20.0, dtype=dtype), torch.ones(3, 3000), torch.zeros(3, 3000))
        assert loss.dtype == dtype
        assert float(loss) == pytest.approx(20.0, rel=1e-2)
