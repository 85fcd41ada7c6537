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


@pytest.mark.parametrize("family", CONTROLLED)
def test_controlled_gradient_is_that_of_the_objective(family):
    model = tiny_model(family)
    with RoutingControl(model, **steering.STRONG) as control:
        tables = steering.record(control, model)
        got = steering.steered(model, control, tables)
        activations = [site.activation for site in control.routers]
    base = steering.plain(model)

    loss, seen = steering.capture(model, control)
    total = loss
    for layer, (site, (_, output)) in enumerate(zip(control.routers, seen, strict=True)):
        z = steering.recorded_logits(output, site.index, bool(FAMILIES[family].source) and family != "zaya")
        selected = FAMILIES[family].selected(site.module, site.parent, output, z.detach())
        sigmoid = activations[layer] == "sigmoid"
        total = total - steering.objective(z, selected, tables.control[layer], sigmoid, int(tables.num_pairs))
    total.backward()
    want = steering.gradients(model)
    assert steering.relative_error(base, want) > 1e-3, (
        "the control must be visible for the comparison to mean something"
    )
    assert steering.relative_error(got, want) < (1e-9 if all_float64(seen, control) else 2e-5)


def all_float64(seen, control):
    logits = [site.logits(output) for site, (_, output) in zip(control.routers, seen)]
    return all(z.dtype == torch.float64 for z in logits)


# Weights that are no function of each score alone.
OWN_WEIGHTS = {
    "phimoe",
    "switch_transformers",
    "nllb_moe",
    "dbrx",
    "jetmoe",
    "llama4",
    "zaya",
    "gemma4",
    "diffusion_gemma",
}


@pytest.mark.parametrize("family", [name for name in CONTROLLED if name not in OWN_WEIGHTS])
def test_activation_is_the_one_that_makes_the_weights(family):
    """``weight_e / activation(z_e)`` is the same for every selected expert, whatever the scale and normalisation."""
    model = tiny_model(family)
    with RoutingControl(model) as control, torch.no_grad():
        _, seen = steering.capture(model, control)
    for site, (_, output) in zip(control.routers, seen, strict=True):
        z = output[site.index].double()
        score = (z.exp() if site.activation == "softmax" else z.sigmoid()).gather(-1, output[2].long())
        ratio = output[1].double() / score
        torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-5, atol=0)
