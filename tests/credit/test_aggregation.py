"""From a loss per token to one number."""

import pytest
import torch

from credit import aggregate_loss
from tests.credit.checks_losses import (
    check_aggregate,
    check_aggregate_masked,
    check_aggregate_precision,
    check_aggregate_split,
)


@pytest.mark.parametrize(
    ("check", "function"),
    [
        (check_aggregate, aggregate_loss),
        (check_aggregate_masked, aggregate_loss),
        (check_aggregate_split, aggregate_loss),
        (check_aggregate_precision, aggregate_loss),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_checks(check, function):
    check(function)


def test_token_mean_over_unequal_micro_batches_is_not_the_mean_of_means():
    loss, mask = torch.ones(2, 90), torch.zeros(2, 90)
    loss[0], mask[0, :10], mask[1] = 5.0, 1, 1
    parts = [aggregate_loss(loss[i : i + 1], mask[i : i + 1], denominator=100.0) for i in range(2)]
    assert float(sum(parts)) == pytest.approx(1.4)
    assert float(aggregate_loss(loss, mask)) == pytest.approx(1.4)


@pytest.mark.parametrize(("accumulation", "generation"), [(4, 2), (2, 4), (3, 1), (1, 3), (4, 4)])
def test_accumulation_and_generation_in_any_pair(accumulation, generation):
    """The count that divides is that of the update's own batches, however many updates one generation feeds."""
    g = torch.Generator().manual_seed(0)
    loss, mask = torch.rand(12, 8, generator=g), torch.rand(12, 8, generator=g) < 0.5
    pool = list(zip(loss.repeat(generation, 1).split(3), mask.repeat(generation, 1).split(3)))
    for start in range(0, len(pool), accumulation):
        update = pool[start : start + accumulation]
        count = float(sum(keep.sum() for _, keep in update))
        got = sum(aggregate_loss(part, keep, denominator=count) for part, keep in update)
        whole = aggregate_loss(torch.cat([p for p, _ in update]), torch.cat([k for _, k in update]))
        torch.testing.assert_close(got, whole)
