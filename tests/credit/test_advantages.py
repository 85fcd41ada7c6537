"""Group-relative advantages."""

import pytest
import torch

from credit import group_advantage
from credit.advantages import compact_ids, dense_ids
from tests.credit.checks_credit import (
    check_absent_rows,
    check_advantage,
    check_advantage_gradient,
    check_advantage_precision,
    check_equal_rewards,
    check_group_ids,
    check_lone_rows,
    check_present_must_be_finite,
)


@pytest.mark.parametrize(
    ("check", "function"),
    [
        (check_advantage, group_advantage),
        (check_equal_rewards, group_advantage),
        (check_absent_rows, group_advantage),
        (check_lone_rows, group_advantage),
        (check_group_ids, group_advantage),
        (check_advantage_gradient, group_advantage),
        (check_advantage_precision, group_advantage),
        (check_present_must_be_finite, group_advantage),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_checks(check, function):
    check(function)


def test_a_partial_group_is_found_by_id_not_by_stride():
    got = group_advantage(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 1]))
    torch.testing.assert_close(got, torch.tensor([-0.70711, 0.70711, 0.0]), rtol=1e-4, atol=1e-5)


def test_an_empty_response_does_not_shift_its_peers():
    rewards, group = torch.tensor([1.0, 2.0, 4.0, 100.0]), torch.zeros(4, dtype=torch.int64)
    got = group_advantage(rewards, group, torch.tensor([1, 1, 1, 0]))
    assert torch.equal(got[:3], group_advantage(rewards[:3], group[:3]))
    assert got[3] == 0


def test_dense_ids_cost_nothing_for_large_ids():
    ids = torch.tensor([2**62, -(2**62), 0, 2**62])
    assert dense_ids(ids).tolist() == [2, 0, 1, 2]
    assert dense_ids(ids[:0]).tolist() == []
    assert dense_ids(torch.tensor([127, -128, 127], dtype=torch.int8)).tolist() == [1, 0, 1]


def test_scale_must_be_known():
    with pytest.raises(Exception, match="scale"):
        group_advantage(torch.ones(2), torch.tensor([0, 0]), scale="sdt")


@pytest.mark.parametrize("ids", [[2, 0, 1, 2], [-5, -4, -5, -2], [9, 200, 9, 2**62], [-(2**63), 2**63 - 1, 0, 0]])
def test_compact_ids_stay_below_their_number_and_keep_apart(ids):
    given = torch.tensor(ids)
    compact = compact_ids(given)
    assert compact.dtype is torch.int64
    assert set(compact.tolist()) <= set(range(len(ids)))
    assert torch.equal(compact[:, None] == compact, given[:, None] == given)
    assert torch.equal(compact_ids(given.view(2, 2)), compact.view(2, 2))


def test_compact_ids_of_bytes_do_not_wrap():
    assert compact_ids(torch.arange(-128, 128, dtype=torch.int8)).tolist() == list(range(256))
    assert compact_ids(torch.zeros(0, dtype=torch.int64)).tolist() == []
