"""Credit as a matrix."""

import pytest
import torch

from credit import assign_credit
from tests.credit.checks_credit import (
    check_assign,
    check_assign_bounds,
    check_assign_gradient,
    check_assign_runs,
    check_assign_silence,
)


@pytest.mark.parametrize(
    ("check", "function"),
    [
        (check_assign, assign_credit),
        (check_assign_runs, assign_credit),
        (check_assign_gradient, assign_credit),
        (check_assign_silence, assign_credit),
        (check_assign_bounds, assign_credit),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_checks(check, function):
    check(function)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_dtype_of_the_advantages_stays(dtype):
    got = assign_credit(torch.ones(1, 2, dtype=dtype), torch.tensor([[0, -1, 1]]), torch.eye(2))
    assert got.dtype == dtype
    assert got.tolist() == [[1.0, 0.0, 1.0]]
