"""Routing control on models that PEFT has wrapped: LoRA on attention and on routers, and routers saved whole."""

import pytest
import torch

from moe_routing.adapters.replay import RoutingReplay, record_selection
from moe_routing.adapters.transformers import RoutingControl
from tests.moe_routing.adapters import steering
from tests.moe_routing.adapters.tiny_families import tiny_model

peft = pytest.importorskip("peft", reason="peft is not installed")

WAYS = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "router": {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]},
    "router saved whole": {"target_modules": ["q_proj"], "modules_to_save": ["gate"]},
}


def adapted(family, way):
    """Random adapters in place of PEFT's zeros, under which nothing would reach the other factor."""
    model = peft.get_peft_model(tiny_model(family), peft.LoraConfig(r=2, lora_dropout=0.0, **WAYS[way])).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    return model.eval()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_adapters_get_the_gradient_of_the_objective(family, way):
    model = adapted(family, way)
    with RoutingControl(model, **steering.STRONG) as control:
        assert len(control.routers) == 2
        tables = steering.record(control, model)
        got = steering.steered(model, control, tables)
    base = steering.plain(model)
    total, seen = steering.capture(model, control)
    for layer, (site, (_, output)) in enumerate(zip(control.routers, seen, strict=True)):
        total = total - steering.objective(
            output[0], output[2], tables.control[layer], site.activation == "sigmoid", int(tables.num_pairs)
        )
    total.backward()
    want = steering.gradients(model)
    trained = {name for name in got if "gate" in name}
    assert bool(trained) == (way != "attention")
    assert steering.relative_error(base, want) > 1e-3, "the control must be visible"
    assert steering.relative_error(got, want) < (2e-5 if family == "glm4_moe" else 1e-9)


@pytest.mark.parametrize("way", ["router", "router saved whole"])
def test_reach_router_moves_the_adapters_of_the_router_only(way):
    model = adapted("qwen3_moe", way)
    base = steering.plain(model)
    with RoutingControl(model, reach="router", **steering.STRONG) as control:
        got = steering.steered(model, control, steering.record(control, model))
    for name, found in got.items():
        assert torch.equal(found, base[name]) == ("gate" not in name), name


@pytest.mark.parametrize("way", WAYS)
def test_replay_goes_through_an_adapter(way):
    model = adapted("qwen3_moe", way)
    base = steering.plain(model)
    with torch.no_grad(), record_selection(model) as trace:
        steering.forward(model, steering.tokens())
    with RoutingReplay(model, trace.selected):
        assert steering.equal(steering.plain(model), base)
    other = (trace.selected + 1) % 8
    with RoutingReplay(model, other), RoutingControl(model, **steering.STRONG) as control:
        replayed = steering.plain(model)
        tables = steering.record(control, model)
        _, seen = steering.capture(model, control)
        assert all(torch.equal(output[2], other[:, layer]) for layer, (_, output) in enumerate(seen))
        got = steering.steered(model, control, tables)
    for found, before in ((replayed, base), (got, replayed)):
        trained = {name for name in found if "gate" in name} or set(found)
        assert steering.relative_error({n: found[n] for n in trained}, {n: before[n] for n in trained}) > 1e-3


def test_checkpointing_changes_nothing_under_an_adapter():
    found = []
    for reentrant in (None, False, True):
        model = adapted("qwen3_moe", "router")
        if reentrant is not None:
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        with RoutingControl(model, **steering.STRONG) as control:
            found.append(steering.steered(model, control, steering.record(control, model)))
    assert steering.equal(found[0], found[1])
    assert steering.equal(found[0], found[2])
