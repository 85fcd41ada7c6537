"""Routing control under every implementation of the experts, under autocast, and on two ranks."""

import pytest
import torch

from moe_routing.adapters.transformers import RoutingControl
from tests.moe_routing import processes
from tests.moe_routing.adapters import steering
from tests.moe_routing.adapters.steering_rank import WAYS
from tests.moe_routing.adapters.tiny_families import tiny_model


@pytest.mark.parametrize("experts", ["batched_mm", "grouped_mm"])
def test_experts_implementation_changes_nothing(experts):
    model = tiny_model("qwen3_moe").float()
    with RoutingControl(model, **steering.STRONG) as control:
        tables = steering.record(control, model)
        want = steering.steered(model, control, tables)
        model.set_experts_implementation(experts)
        got = steering.steered(model, control, tables)
    assert steering.relative_error(got, want) < 1e-5


def test_autocast_routes_in_half_precision_and_says_what_survives():
    model = tiny_model("qwen3_moe").float()
    with RoutingControl(model, **steering.STRONG) as control:
        with torch.autocast("cpu", torch.bfloat16):
            tables = steering.record(control, model)
        with torch.autocast("cpu", torch.bfloat16), control.bind(steering.fields(), tables):
            steering.forward(model, steering.tokens()).backward()
        share = control.metrics()["routing/survived"]
    assert all(torch.isfinite(g).all() for g in steering.gradients(model).values())
    assert 0.9 < share < 1.0  # the control is strong here, and still some entries are too small for bfloat16


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [processes.start("adapters.steering_rank", str(rank), str(folder)) for rank in range(2)]
    for process in ranks:
        processes.finish(process)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(("kind", "reach"), WAYS)
def test_two_ranks_give_the_gradients_of_one(kind, reach, of_two_ranks):
    model = tiny_model("qwen3_moe")
    with RoutingControl(model, reach=reach, **steering.STRONG) as control:
        want = steering.steered(model, control, steering.record(control, model))
    for part in of_two_ranks:
        # Both average over ranks, loss and injection alike.
        got = {name: 2 * g for name, g in part[kind, reach].items()}
        assert steering.relative_error(got, want) < 1e-9
