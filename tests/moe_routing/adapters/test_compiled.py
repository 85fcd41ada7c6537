"""Routing control with compiled experts, whole in one graph, and on a model that is compiled whole."""

import pytest
import torch

from moe_routing.adapters.transformers import RoutingControl
from tests.moe_routing.adapters import steering
from tests.moe_routing.adapters.tiny_families import tiny_model


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def steered(model):
    with RoutingControl(model, **steering.STRONG) as control:
        return steering.steered(model, control, steering.record(control, model))


@pytest.mark.parametrize("experts", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_experts_change_nothing(backend, experts):
    model = tiny_model("qwen3_moe").float()
    model.set_experts_implementation(experts)
    want = steered(model)
    for layer in model.layers:
        layer.mlp.experts.compile(backend=backend, fullgraph=True)
    assert steering.relative_error(steered(model), want) < 1e-6


def test_a_model_compiled_whole_is_steered_outside_its_graphs():
    """It has run before the control comes; a router in a graph would get its gradient past the logits."""
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("batched_mm")
    model.layers, model.config.num_hidden_layers = model.layers[:1], 1
    want, plain = steered(model), steering.plain(model)
    model.compile(backend="aot_eager")
    assert steering.relative_error(steering.plain(model), plain) < 1e-12
    assert steering.relative_error(steered(model), want) < 1e-12
    assert steering.relative_error(plain, want) > 1e-2, "the control must be visible"
    assert steering.relative_error(steering.plain(model), plain) < 1e-12
