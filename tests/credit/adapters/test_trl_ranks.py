"""Two gloo ranks train like one process on the same rollouts, although a group lies across both."""

import pytest
import torch

from tests.credit.adapters.two_ranks import TRAINERS, run


@pytest.fixture(scope="module")
def one(model_path, tmp_path_factory):
    return run(TRAINERS["genuine"], model_path, tmp_path_factory.mktemp("single"), 1)


def check(one, ranks):
    for number, whole in enumerate(one["batches"]):
        for rank, result in enumerate(ranks):
            mine = result["batches"][number]
            rows = slice(4 * rank, 4 * rank + 4)
            width = mine["segments"].shape[1]
            assert torch.equal(mine["segments"], whole["segments"][rows, :width])
            torch.testing.assert_close(mine["advantages"], whole["advantages"][rows, :width])
    for result in ranks:
        for name, weight in result["weights"].items():
            torch.testing.assert_close(weight, one["weights"][name], atol=1e-6, rtol=1e-5)
        for entry, expected in zip(result["log"], one["log"], strict=True):
            assert entry == pytest.approx(expected, rel=1e-5, abs=1e-7, nan_ok=True)


def test_two_ranks_equal_one(one, two):
    widths = {result["genuine"]["batches"][0]["segments"].shape[1] for result in two}
    assert len(widths) == 2  # the ranks hold different numbers of tokens
    assert all((batch["advantages"] != 0).any() for batch in one["batches"])
    check(one, [result["genuine"] for result in two])


def test_a_rank_that_is_done_still_takes_part_in_generation(two):
    """Sharded models and vLLM's server generate on all ranks at once, and would wait for it for ever."""
    busy, idle = (result["own tools"] for result in two)
    assert busy["turns"] == [0, 1, 2, 3, 0] * 2
    assert idle["turns"] == [0, 1, 2, 3, 0] * 2
    assert idle["batches"][0]["segments"].shape[1] < busy["batches"][0]["segments"].shape[1]


@pytest.mark.parametrize("mutant", [name for name in TRAINERS if name != "genuine"])
def test_broken_sharding_is_noticed(one, two, mutant):
    with pytest.raises(AssertionError):
        check(one, [result[mutant] for result in two])
