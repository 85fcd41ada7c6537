"""Routing control under the expert and tensor parallelism of transformers: two ranks give the gradients of one."""

import pytest
import torch

from moe_routing.adapters.ranks import batch_groups
from tests.moe_routing import processes
from tests.moe_routing.adapters import steering
from tests.moe_routing.adapters.parallel_rank import FAMILIES, LAYOUTS, step
from tests.moe_routing.adapters.tiny_families import tiny_model

TOLERANCE = {"deepseek_v3": 1e-6}  # routes in float32
STEPS = ("plain", "backbone", "router", "replay")


@pytest.fixture(scope="module")
def alone_and_ranks(tmp_path_factory):
    """The steps of one rank, and those of each of two, by family and layout."""
    folder = tmp_path_factory.mktemp("ranks")
    models = {family: tiny_model(family) for family in FAMILIES}
    for family, model in models.items():
        model.save_pretrained(folder / family)
    environment = {"WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    started = [
        processes.start("adapters.parallel_rank", str(r), str(folder), RANK=str(r), LOCAL_RANK=str(r), **environment)
        for r in range(2)
    ]
    alone = {family: step(model) for family, model in models.items()}
    for process in started:
        processes.finish(process)
    return alone, [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def averaged(got, want):
    """By how much each gradient is smaller than the sum over ranks.

    FSDP averages, and the number of times it divides what only one rank holds differs between backends.
    """
    norms = {name: (float(want[name].norm()), float(got[name].norm())) for name in want}
    return {name: round(a / b) if b else 1 for name, (a, b) in norms.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_the_gradients_of_one(family, layout, alone_and_ranks):
    alone, parts = alone_and_ranks
    want = alone[family]
    for kind in ("backbone", "router", "replay"):
        assert steering.relative_error(want["plain"], want[kind]) > 1e-3, "the intervention must be visible"
    for part in parts:
        got = part[family, layout]
        torch.testing.assert_close(got["tables"], want["tables"], rtol=1e-6, atol=1e-9)
        factor = averaged(got["plain"], want["plain"])
        assert {factor[n] for n in factor if ".experts." not in n} == {2 if "fsdp_size" in LAYOUTS[layout] else 1}
        for kind in STEPS:
            whole = {name: factor[name] * g for name, g in got[kind].items()}
            assert steering.relative_error(whole, want[kind]) < TOLERANCE.get(family, 1e-9), kind


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sum_over_all_ranks_counts_a_shared_batch_twice(layout, alone_and_ranks):
    alone, parts = alone_and_ranks
    copies = 1 if "fsdp_size" in LAYOUTS[layout] else 2
    for part in parts:
        got = part["qwen3_moe", layout]["over all ranks"]
        assert got["num_pairs"] == copies * alone["qwen3_moe"]["tables"]["num_pairs"]


def test_other_models_add_up_over_all_ranks():
    assert batch_groups(tiny_model("qwen3_moe")) == [None]
