"""Credit over time inside a segment."""

import pytest
import torch

from credit import assign_credit, run_ids, step_advantage, turn_returns
from tests.credit.checks_credit import (
    check_step_advantage,
    check_turn_returns,
)


@pytest.mark.parametrize(
    ("check", "function"),
    [
        (check_turn_returns, turn_returns),
        (check_step_advantage, step_advantage),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_checks(check, function):
    check(function)


def test_turns_are_not_normalised_one_by_one_unless_asked():
    """Normalising each turn index alone is biased when the policy chooses when to stop."""
    assert "biased" in step_advantage.__doc__
    returns, group = torch.tensor([[3.0, 1.0], [2.0, 0.0]]), torch.tensor([0, 0])
    every = torch.ones(2, 2)
    turn = torch.arange(2).expand(2, 2)
    pooled, per_turn = step_advantage(returns, group, every), step_advantage(returns, group, every, anchor=turn)
    assert pooled[0, 1] < 0 < per_turn[0, 1]


def test_per_run_credit_reaches_every_token_of_its_run():
    mask = torch.tensor([[1, 1, 0, 0, 1, 1]])
    returns = turn_returns(torch.tensor([[0.0, 1.0]]), torch.tensor([[True, True]]))
    credit = assign_credit(returns[..., None], torch.where(run_ids(mask) >= 0, 0, -1), torch.ones(1, 1))
    assert credit.tolist() == [[1.0, 1.0, 0.0, 0.0, 1.0, 1.0]]
    assert turn_returns(torch.tensor([[1.0]]), torch.tensor([[1]]), discount=0.0).tolist() == [[1.0]]


@pytest.mark.parametrize("discount", [-0.1, 1.1, float("nan")])
def test_discount_lies_in_the_unit_interval(discount):
    with pytest.raises(ValueError, match="discount"):
        turn_returns(torch.ones(1, 1), torch.ones(1, 1), discount=discount)
