"""Two gloo ranks train like one process on the same rollouts, although a group lies across both."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.credit.adapters.two_ranks import TRAINERS, run

ROOT = Path(__file__).parents[3]
# verl installs a package `tests`, which would win over this folder; under pytest the folder wins.
START = """
import runpy, sys, types
sys.modules["tests"] = types.ModuleType("tests")
sys.modules["tests"].__path__ = ["tests"]
runpy.run_module("tests.credit.adapters.two_ranks", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def two(model_path, tmp_path_factory):
    """What each of two ranks saw."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", START, str(model_path), str(folder)],
            cwd=ROOT,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(error[-2000:] for error in errors)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


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
