"""Every family of transformers that records router logits: controlled exactly, or refused with a reason."""

import pytest
import torch

from benchmarks.routing_families import PAGE, page, recorders
from moe_routing.adapters.families import FAMILIES
from moe_routing.adapters.transformers import RoutingControl
from tests.moe_routing.adapters import steering
from tests.moe_routing.adapters.tiny_families import tiny_model

RECORDED = recorders()
CONTROLLED = [name for name in RECORDED if name in FAMILIES and not FAMILIES[name].refused]


def test_every_recording_family_is_accounted_for():
    assert set(RECORDED) == set(FAMILIES)


def test_the_page_is_that_of_the_installed_library():
    assert PAGE.read_text() == page(), "run python -m benchmarks.routing_families"


@pytest.mark.parametrize("family", [name for name in RECORDED if name in FAMILIES and FAMILIES[name].refused])
def test_refused_families_say_why(family):
    with pytest.raises(NotImplementedError, match=f"cannot steer .*: {FAMILIES[family].refused}"):
        RoutingControl(tiny_model(family))


def test_phimoe_is_steered_where_experts_nearly_tie():
    """Where none comes near the best, its mixture is of one expert, whose weight is 1 whatever the logits are."""
    for noise, acts in ((0.0, False), (0.5, True)):
        model = tiny_model("phimoe")
        for module in model.modules():
            if hasattr(module, "router_jitter_noise"):
                module.router_jitter_noise = noise
        base = steering.plain(model)
        with RoutingControl(model, **steering.STRONG | {"rho": True}) as control:
            got = steering.steered(model, control, steering.record(control, model))
            assert ("routing/survived" in control.metrics()) == acts
        assert steering.equal(got, base) != acts


def test_experts_in_mxfp4_are_refused():
    model = tiny_model("gpt_oss")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    for layer in model.layers:
        layer.mlp = mxfp4.Mxfp4GptOssMLP(layer.mlp.router, layer.mlp.experts)
    with pytest.raises(NotImplementedError, match=r"GptOss\w+ with fused mxfp4 experts.*dequantize=True"):
        RoutingControl(model)


def test_a_forward_that_goes_past_its_routers_is_an_error():
    """As fused kernels do that compute the logits from the router's weight."""
    model = tiny_model("qwen3_moe")
    with RoutingControl(model) as control:
        tables = steering.record(control, model)
        for layer in model.layers:
            layer.mlp.forward = lambda hidden, gate=layer.mlp.gate: hidden @ gate.weight.T @ gate.weight
        with pytest.raises(RuntimeError, match="no router of Qwen3MoeModel ran inside bind"):
            steering.steered(model, control, tables)
        with pytest.raises(RuntimeError, match="did not run inside record"):
            steering.record(control, model)


# What the families below record or return, read off their source: an account that does not go through the adapter.
RECORDS_PROBABILITIES = {"gemma4", "diffusion_gemma"}
# Weights that are no function of each score alone, so that the activation cannot be measured.
KNOWN_ACTIVATION = dict.fromkeys(["phimoe", "switch_transformers", "nllb_moe", "dbrx", "jetmoe", "zaya"], "softmax")
KNOWN_ACTIVATION |= {"llama4": "sigmoid"} | dict.fromkeys(RECORDS_PROBABILITIES, "softmax")


def measured_activation(output, index):
    """The score function for which ``weight_e / score(z_e)`` is the same for every selected expert of a token."""
    z, weight, selected = output[index].detach().double(), output[1].detach().double(), output[2].long()
    spread = {}
    for name, scores in {"softmax": z.exp(), "sigmoid": z.sigmoid()}.items():
        ratio = weight / scores.gather(-1, selected)
        spread[name] = float((ratio / ratio[:, :1] - 1).abs().max())
    best = min(spread, key=spread.get)
    assert spread[best] < 1e-5 < 1e-2 < max(spread.values()), spread
    return best


@pytest.mark.parametrize("family", CONTROLLED)
def test_controlled_gradient_is_that_of_the_objective(family):
    model = tiny_model(family)
    with RoutingControl(model, **steering.STRONG) as control:
        tables = steering.record(control, model)
        got = steering.steered(model, control, tables)
    base = steering.plain(model)

    total, seen = steering.capture(model, control)
    for layer, (site, (_, output)) in enumerate(zip(control.routers, seen, strict=True)):
        activation = KNOWN_ACTIVATION.get(family) or measured_activation(output, site.index)
        assert site.activation == activation
        z = steering.recorded_logits(output, site.index, family in RECORDS_PROBABILITIES)
        selected = site.selected(output, z.detach())
        total = total - steering.objective(
            z, selected, tables.control[layer], activation == "sigmoid", int(tables.num_pairs)
        )
    total.backward()
    want = steering.gradients(model)
    assert steering.relative_error(base, want) > 1e-3, "the control must be visible"
    assert steering.relative_error(got, want) < (1e-9 if all_float64(seen, control) else 2e-5)


def all_float64(seen, control):
    logits = [site.logits(output) for site, (_, output) in zip(control.routers, seen)]
    return all(z.dtype == torch.float64 for z in logits)
