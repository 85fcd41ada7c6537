"""``reach="router"``: the router's weights move as under control, and nothing below them feels it.
``router_dtype``: logits in float32 keep the whole injection."""

import jaxtyping
import pytest
import torch

from moe_routing.adapters.families import FAMILIES
from moe_routing.adapters.transformers import RoutingControl
from tests.moe_routing.adapters import steering
from tests.moe_routing.adapters.tiny_families import tiny_model

# Softmax, sigmoid with groups and bias, logits of a submodule, a router with two inputs that carry gradients.
KINDS = ["qwen3_moe", "glm4_moe", "gemma4", "zaya"]
TOLERANCE = {"glm4_moe": 1e-6}  # routes in float32
CHECKPOINTING = [None, False, True]


def checkpointed(model, reentrant):
    if reentrant is not None:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    return model


def detached(value):
    return value.detach() if isinstance(value, torch.Tensor) else value


def of_routers(model, control):
    parameters = {id(p) for site in control.routers for p in site.module.parameters()}
    return {name for name, p in model.named_parameters() if id(p) in parameters}


@pytest.mark.parametrize("reentrant", CHECKPOINTING)
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_only_the_routers_feel_the_control(family, reentrant):
    model = checkpointed(tiny_model(family), reentrant)
    base = steering.plain(model)
    with RoutingControl(model, **steering.STRONG) as control:
        tables = steering.record(control, model)
        through = steering.steered(model, control, tables)
    with RoutingControl(model, reach="router", **steering.STRONG) as control:
        own = of_routers(model, control)
        again = steering.record(control, model)
        values = steering.forward(model, steering.tokens())
        with control.bind(steering.fields(), again):
            assert torch.equal(steering.forward(model, steering.tokens()), values)
        got = steering.steered(model, control, again)
        mass = control._survival.collect()
    assert torch.equal(again.control, tables.control)
    assert len(own) == 2
    assert got.keys() == base.keys()
    assert all(torch.equal(got[name], base[name]) for name in got if name not in own)
    assert not all(torch.equal(through[name], base[name]) for name in got if name not in own)
    # The gradient that arrives at the last router is the same either way, so its weight moves the same way.
    last = max(own)
    assert steering.relative_error({last: base[last]}, {last: through[last]}) > 1e-2
    assert steering.relative_error({last: got[last]}, {last: through[last]}) < TOLERANCE.get(family, 1e-12)
    assert float(mass.count) > 0


@pytest.mark.parametrize("family", KINDS)
def test_router_gradients_are_those_of_the_objective_on_a_held_input(family):
    model = tiny_model(family)
    base = steering.plain(model)
    with RoutingControl(model, reach="router", **steering.STRONG) as control:
        tables = steering.record(control, model)
        got = steering.steered(model, control, tables)
    seen = {}
    handles = [
        site.module.register_forward_hook(
            lambda module, args, kwargs, output: seen.update({id(module): (args, kwargs, output)}), with_kwargs=True
        )
        for site in control.routers
    ]
    steering.forward(model, steering.tokens())
    for handle in handles:
        handle.remove()
    total = torch.zeros((), dtype=torch.float64)
    for layer, site in enumerate(control.routers):
        args, kwargs, output = seen[id(site.module)]
        held = site.module(*map(detached, args), **{name: detached(value) for name, value in kwargs.items()})
        z = steering.recorded_logits(held, site.index, family == "gemma4")
        total = total - steering.objective(
            z, site.selected(output, z.detach()), tables.control[layer], site.activation == "sigmoid",
            int(tables.num_pairs),
        )  # fmt: skip
    total.backward()
    change = steering.gradients(model)
    assert steering.relative_error(base, got) > 1e-3, "the control must be visible"
    want = {name: base[name] + change.get(name, 0) for name in base}
    assert steering.relative_error(got, want) < TOLERANCE.get(family, 1e-9)


def test_a_frozen_router_or_a_closed_gate_leaves_everything():
    model = tiny_model("qwen3_moe")
    base = steering.plain(model)
    with RoutingControl(model, reach="router", lambda_turn=0.0, lambda_token=0.0) as control:
        assert steering.equal(steering.steered(model, control, steering.record(control, model)), base)
    with RoutingControl(model, reach="router", **steering.STRONG) as control:
        for site in control.routers:
            site.module.requires_grad_(False)
        tables = steering.record(control, model)
        got = steering.steered(model, control, tables)
    assert steering.equal(got, {name: base[name] for name in got})


def test_a_frozen_backbone_still_trains_its_routers():
    model = tiny_model("qwen3_moe").requires_grad_(False)
    with RoutingControl(model, reach="router", **steering.STRONG) as control:
        for site in control.routers:
            site.module.requires_grad_(True)
        base, tables = steering.plain(model), steering.record(control, model)
        got = steering.steered(model, control, tables)
    assert got.keys() == base.keys()
    assert len(got) == 2
    assert all(steering.relative_error({name: got[name]}, {name: base[name]}) > 1e-3 for name in got)


def test_nothing_is_left_over_from_a_backward_pass_that_failed():
    model = tiny_model("qwen3_moe")
    with RoutingControl(model, reach="router", **steering.STRONG) as control:
        tables = steering.record(control, model)
        want = steering.steered(model, control, tables)
        with control.bind(steering.fields(), tables):
            hidden = model(input_ids=steering.tokens(), use_cache=False)[0]
            hidden.register_hook(lambda grad: grad * float("inf"))
            hidden.sum().backward()
        model.zero_grad()
        assert steering.equal(steering.steered(model, control, tables), want)


@pytest.mark.parametrize("family", ["switch_transformers", "nllb_moe", "dbrx", "phimoe"])
def test_routers_that_draw_random_numbers_are_refused_by_name(family):
    model = tiny_model(family)
    assert FAMILIES[family].random
    with pytest.raises(NotImplementedError, match=rf"reach='router' .*\({family}\): it draws random"):
        RoutingControl(model, reach="router")
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("family", ["llama4", "dbrx"])
def test_experts_that_take_no_wider_weights_are_refused_by_name(family):
    with pytest.raises(NotImplementedError, match=rf"router_dtype .*\({family}\): its experts fail"):
        RoutingControl(tiny_model(family), router_dtype=torch.float32)


def test_unknown_choices_are_errors_and_detaching_puts_forward_back(monkeypatch):
    model = tiny_model("qwen3_moe")
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # else the type checker speaks first
    with pytest.raises(ValueError, match="reach must be"):
        RoutingControl(model, reach="everything")
    with pytest.raises(ValueError, match="floating-point"):
        RoutingControl(model, router_dtype=torch.int32)
    router = model.layers[0].mlp.gate
    router.forward = own = router.forward
    with RoutingControl(model, router_dtype=torch.float32):
        assert router.forward is not own
    assert router.__dict__["forward"] is own
    assert "forward" not in model.layers[1].mlp.gate.__dict__


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_router_in_float32_keeps_the_whole_injection(family, autocast):
    share, grads = {}, {}
    for dtype in (None, torch.float32):
        model = tiny_model(family)
        model = model.float() if autocast else model.bfloat16()
        weak = {"lambda_turn": 1e-4, "lambda_token": 1e-4}
        with (
            RoutingControl(model, router_dtype=dtype, **weak) as control,
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            tables = steering.record(control, model)
            grads[dtype] = steering.steered(model, control, tables)
            share[dtype] = control.metrics()["routing/survived"]
            with control.bind(steering.fields(), tables):
                logits = steering.capture(model, control)[1][0][1][0]
        assert logits.dtype == (dtype or torch.bfloat16)
        assert all(g.isfinite().all() for g in grads[dtype].values())
        assert {p.dtype for p in model.parameters()} == {torch.float32 if autocast else torch.bfloat16}
    assert share[None] < 0.99 < 0.999 < share[torch.float32] <= 1.0
    assert grads[None].keys() == grads[torch.float32].keys()


def test_a_router_in_float32_is_one_only_while_bound():
    model = tiny_model("qwen3_moe").bfloat16()
    base = steering.plain(model)
    with RoutingControl(model, router_dtype=torch.float32) as control:
        assert steering.equal(steering.plain(model), base)
        with pytest.raises(KeyError), control.bind(steering.fields(), steering.record(control, model)):
            raise KeyError
        assert steering.equal(steering.plain(model), base)
        assert len(torch.overrides._get_current_function_mode_stack()) == 0


@pytest.mark.parametrize("reentrant", CHECKPOINTING)
def test_both_together_under_checkpointing(reentrant):
    options = {"reach": "router", "router_dtype": torch.float32, **steering.STRONG}
    found = []
    for kind in (None, reentrant):
        model = checkpointed(tiny_model("qwen3_moe").bfloat16(), kind)
        with RoutingControl(model, **options) as control:
            found.append(steering.steered(model, control, steering.record(control, model)))
    assert steering.equal(*found)
