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
