"""Routing control in float16 with a GradScaler, as trainers run it: float32 weights under autocast."""

import pytest
import torch

import moe_routing as mr
from moe_routing.adapters.transformers import RoutingControl
from tests.moe_routing.adapters import steering
from tests.moe_routing.adapters.tiny_families import tiny_model

FAMILIES = ["qwen3_moe", "deepseek_v3", "gpt_oss"]
SCALE = 2.0**6


def half():
    return torch.autocast("cpu", torch.float16)


def scaler_at(scale):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)


def scaled_step(model, scaler, control=None, tables=None, told=None):
    """Unscaled gradients of one step; without a control those of the plain loss."""
    with half():
        if control is None:
            scaler.scale(steering.forward(model, steering.tokens())).backward()
        else:
            scaler.scale(torch.zeros(()))  # it makes its scale when it is first used
            with control.bind(steering.fields(), tables, scale=told or scaler.get_scale()):
                scaler.scale(steering.forward(model, steering.tokens())).backward()
    scaler.unscale_(torch.optim.SGD(model.parameters()))
    return steering.gradients(model)


def change(a, b):
    return {name: a[name].double() - b[name].double() for name in a}


def distance(a, b):
    """Of two gradients, relative to the second."""
    total = sum(float((a[name] - b[name]).square().sum()) for name in b)
    return (total / sum(float(x.square().sum()) for x in b.values())) ** 0.5


@pytest.mark.parametrize("rho", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_scaled_injection_is_that_of_the_unscaled_gradient(family, rho):
    model, options = tiny_model(family).float(), steering.STRONG | {"rho": rho}
    control, seen = steering.watched(model, **options)
    with control:
        with half():
            tables = steering.record(control, model)
        scaled_step(model, scaler_at(SCALE), control, tables)
    seen.remove()
    for layer, site in enumerate(control.routers):
        logits, grad = seen.outputs[layer][0], seen.arrived[layer]
        want = mr.router_gradient(
            logits.detach().float(), grad.float() / SCALE, field=steering.fields().reshape(-1),
            control=tables.control[layer], selected=site.selected(seen.outputs[layer], logits),
            num_pairs=tables.num_pairs, activation=site.activation, **options,
        )  # fmt: skip
        assert not torch.equal(seen.passed[layer], grad)
        assert seen.passed[layer].dtype == logits.dtype
        torch.testing.assert_close(seen.passed[layer], (want * SCALE).to(logits.dtype), rtol=2e-3, atol=1e-6 * SCALE)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_scale_drops_out_of_the_gradients(family):
    model = tiny_model(family).float()
    with RoutingControl(model, **steering.STRONG) as control:
        with half():
            tables = steering.record(control, model)
        plain = scaled_step(model, scaler_at(SCALE))
        want = change(scaled_step(model, scaler_at(1.0), control, tables), plain)
        got = change(scaled_step(model, scaler_at(SCALE), control, tables), plain)
        forgotten = change(scaled_step(model, scaler_at(SCALE), control, tables, told=1.0), plain)
    assert distance(got, want) < 1e-3
    assert distance(forgotten, want) > 0.5


def test_an_overflow_reaches_the_scaler_and_its_step_is_skipped():
    model = tiny_model("qwen3_moe").float()
    control, seen = steering.watched(model, **steering.STRONG)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), scaler_at(SCALE)
    before = {name: p.clone() for name, p in model.named_parameters()}
    broken = torch.tensor([1, 9])  # tokens of the flattened batch
    with control:
        with half():
            tables = steering.record(control, model)
        with half(), control.bind(steering.fields(), tables, scale=SCALE):
            hidden = model(input_ids=steering.tokens(), use_cache=False)[0]
            factor = torch.ones(steering.ROWS * steering.LENGTH, 1)
            factor[broken] = float("inf")
            hidden.register_hook(lambda grad: grad * factor.reshape(steering.ROWS, steering.LENGTH, 1))
            scaler.scale(hidden.square().mean()).backward()
        share = control.metrics()["routing/survived"]
    seen.remove()
    last = len(control.routers) - 1
    arrived, passed = seen.arrived[last], seen.passed[last]
    rows = ~arrived.isfinite().all(-1)
    assert rows.nonzero().flatten().tolist() == broken.tolist()
    torch.testing.assert_close(passed[rows], arrived[rows], rtol=0, atol=0, equal_nan=True)
    assert passed[~rows].isfinite().all()
    assert not torch.equal(passed[~rows], arrived[~rows])
    assert 0 < share <= 1
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    optimizer.zero_grad()
    # The next step is a healthy one.
    scaled_step(model, scaler, control := RoutingControl(model, **steering.STRONG), tables)
    control.detach()


def test_router_dtype_keeps_the_whole_injection_in_float16():
    shares = {}
    for dtype in (None, torch.float32):
        model = tiny_model("qwen3_moe").float()
        with RoutingControl(model, lambda_turn=1e-4, lambda_token=1e-4, router_dtype=dtype) as control:
            with half():
                tables = steering.record(control, model)
            gradients = scaled_step(model, scaler_at(SCALE), control, tables)
            shares[dtype] = control.metrics()["routing/survived"]
        assert all(g.isfinite().all() for g in gradients.values())
    assert shares[None] < 0.999 < 0.9999 < shares[torch.float32] <= 1.0
