"""Copies of a model under control, several controls on one model, and batches that were given up."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch

from moe_routing.adapters.transformers import RoutingControl
from tests.moe_routing.adapters import steering
from tests.moe_routing.adapters.tiny_families import tiny_model


@pytest.mark.parametrize("family", ["qwen3_moe", "zaya"])
@pytest.mark.parametrize("options", [{}, {"reach": "router", "router_dtype": torch.float64}])
def test_a_copy_is_a_model_of_its_own(family, options):
    model = tiny_model(family)
    with RoutingControl(model, **options) as control:
        twin = copy.deepcopy(model)
        base = steering.plain(twin)
        tables = steering.record(control, model)
        with torch.no_grad(), control.record(steering.fields(), steering.labels(), steering.kinds()):
            steering.forward(model, steering.tokens())
            for parameter in model.parameters():
                parameter.normal_()
            steering.forward(twin, steering.tokens())
        assert torch.equal(control.tables(0.1).control, tables.control)
        with control.bind(steering.fields(), tables):
            steering.forward(model, steering.tokens())
            assert steering.equal(steering.plain(twin), base)
        with RoutingControl(twin, **options) as other:
            assert torch.equal(steering.record(other, twin).control, tables.control)


@pytest.mark.parametrize("first", [0, 1])
def test_two_controls_detach_in_any_order(first):
    model = tiny_model("qwen3_moe")
    base = steering.plain(model)
    controls = [RoutingControl(model, reach="router", **steering.STRONG) for _ in range(2)]
    tables = steering.record(controls[0], model)
    want = steering.steered(model, controls[0], tables)
    controls[first].detach()
    assert steering.equal(steering.steered(model, controls[1 - first], tables), want)
    controls[1 - first].detach()
    assert steering.equal(steering.plain(model), base)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_wrapper_put_on_later_is_kept():
    model = tiny_model("qwen3_moe")
    base = steering.plain(model)
    control = RoutingControl(model, **steering.STRONG)
    router, calls = control.routers[0].module, []
    inner = router.forward
    router.forward = lambda *args: (calls.append(args), inner(*args))[1]
    control.detach()
    assert steering.equal(steering.plain(model), base)
    assert len(calls) == 1


def test_a_field_counts_once():
    model = tiny_model("qwen3_moe")
    with RoutingControl(model) as control:
        want = steering.record(control, model)
        with torch.no_grad(), control.record(steering.fields(), steering.labels(), steering.kinds()):
            steering.forward(model, steering.tokens())
        with pytest.raises(ValueError, match=r"field 0 \(and 14 more\) has tokens in two recorded forwards"):
            steering.record(control, model)
        control.discard()
        assert torch.equal(steering.record(control, model).control, want.control)


def frozen_router(model, options):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("gate.weight"))
    return RoutingControl(model, reach="router", **options)


def frozen_but_the_norm(model, options):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "norm.weight")
    return RoutingControl(model, **options)


@pytest.mark.parametrize("frozen", [frozen_router, frozen_but_the_norm])
def test_frozen_weights_are_said_to_be_out_of_reach(frozen):
    model = tiny_model("qwen3_moe")
    with frozen(model, steering.STRONG) as control:
        tables, base = steering.record(control, model), steering.plain(model)
        with pytest.warns(RuntimeWarning, match="steers nothing"):
            assert steering.equal(steering.steered(model, control, tables), base)
        assert "routing/survived" not in control.metrics()
        closed = replace(tables, gate=0.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            steering.steered(model, control, closed)


def test_a_frozen_router_beside_others_is_left_alone():
    model = tiny_model("qwen3_moe")
    with RoutingControl(model, reach="router", **steering.STRONG) as control:
        tables = steering.record(control, model)
        want = steering.steered(model, control, tables)
        control.routers[0].module.weight.requires_grad_(False)
        found = steering.steered(model, control, tables)
    frozen = want.keys() - found.keys()
    assert frozen == {f"{control.routers[0].name}.weight"}
    assert all(torch.equal(found[name], want[name]) for name in found)


def test_a_backward_that_recomputes_outside_is_said_to_be_lost():
    model = tiny_model("qwen3_moe").train()
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with RoutingControl(model, **steering.STRONG) as control:
        tables = steering.record(control, model)
        with pytest.warns(RuntimeWarning, match="backward outside"), control.bind(steering.fields(), tables):
            loss = steering.forward(model, steering.tokens())
        loss.backward()
