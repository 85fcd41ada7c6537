"""A copy or a file of a model is the bare model, whatever is attached to it meanwhile."""

import copy
import io
import pickle

import pytest
import torch

from moe_routing.adapters.routers import find_routers
from moe_routing.adapters.transformers import RoutingControl
from moe_routing.adapters.wiring import Wiring
from tests.moe_routing.adapters import steering
from tests.moe_routing.adapters.contexts import CONTEXTS, INTERVENTIONS, wiring
from tests.moe_routing.adapters.tiny_families import model_class, tiny_model


def through_a_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    assert b"cmoe_routing" not in file.getvalue(), "the file must load without this package"
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_a_file,
}


def hook_of_the_user(module, args, output):
    RUNS.append(module)


RUNS = []


def run(model):
    with torch.no_grad():
        return steering.forward(model, steering.tokens())


def assert_bare(twin, bare):
    assert wiring(twin) == wiring(bare)
    state = bare.state_dict()
    assert twin.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in twin.state_dict().items())


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", CONTEXTS)
def test_a_copy_is_the_bare_model(name, way):
    model = tiny_model("qwen3_moe")
    for site in find_routers(model):
        site.module.register_forward_hook(hook_of_the_user)
    bare, plain = COPIES[way](model), run(model)
    with CONTEXTS[name](model) as active:
        attached = run(model)
        assert torch.equal(attached, plain) == (name not in INTERVENTIONS)
        twin = COPIES[way](model)
        assert_bare(twin, bare)
        seen = dict(active.layers) if name == "record" else None
        RUNS.clear()
        assert torch.equal(run(twin), plain)
        assert [id(module) for module in RUNS] == [id(site.module) for site in find_routers(twin)]
        assert seen is None or all(active.layers[layer] is seen[layer] for layer in seen)
        assert torch.equal(run(model), attached), "the original stays attached"
        assert_bare(COPIES[way](twin), bare)
    assert_bare(twin, bare)
    assert_bare(model, bare)
    assert torch.equal(run(model), plain)


@pytest.mark.parametrize("family", ["gemma4", "zaya"])
@pytest.mark.parametrize("name", ["control", "summary"])
def test_a_copy_is_bare_where_the_scores_come_from_a_submodule(family, name):
    model = tiny_model(family)
    bare, plain = copy.deepcopy(model), run(model)
    with CONTEXTS[name](model):
        for way in COPIES.values():
            assert_bare(way(model), bare)
            assert torch.equal(run(way(model)), plain)
    assert_bare(model, bare)


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_checkpoint_is_that_of_the_bare_model(name, tmp_path):
    model = tiny_model("qwen3_moe")
    state, plain = copy.deepcopy(model.state_dict()), run(model)
    with CONTEXTS[name](model):
        found = model.state_dict()
        assert found.keys() == state.keys()
        assert all(torch.equal(found[key], state[key]) for key in state)
        model.save_pretrained(tmp_path)
        loaded = model_class("qwen3_moe").from_pretrained(
            tmp_path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        assert torch.equal(run(loaded.eval()), plain)
        run(model)
        model.load_state_dict({key: value + 1 for key, value in state.items()})
    assert all(torch.equal(value, state[key] + 1) for key, value in model.state_dict().items()), "loading is kept"


class Outer:
    """Another library's wrapper, which keeps the forward that it found."""

    def __init__(self, module):
        self.inner = module.forward
        module.forward = self

    def __call__(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_bare_inside_the_wrapper_of_another_library(way):
    model = tiny_model("qwen3_moe")
    plain = run(model)
    before = wiring(model)
    with CONTEXTS["replay"](model):
        outer = [Outer(site.module) for site in find_routers(model)]
        twin = pickle.loads(pickle.dumps(model)) if way != "deepcopy" else copy.deepcopy(model)
        assert not torch.equal(run(model), plain)
        assert torch.equal(run(twin), plain)
    assert torch.equal(run(model), plain)
    assert all(vars(site.module)["forward"] is one for site, one in zip(find_routers(model), outer))
    with CONTEXTS["replay"](model):
        assert not torch.equal(run(model), plain)
        assert torch.equal(run(twin), plain)
    for site in find_routers(model):
        del site.module.forward
    assert wiring(model) == before


def test_a_forward_put_on_before_is_given_back_and_copied():
    model = tiny_model("qwen3_moe")
    outer = [Outer(site.module) for site in find_routers(model)]
    plain = run(model)
    with CONTEXTS["replay"](model):
        twin = copy.deepcopy(model)
        assert torch.equal(run(twin), plain)
        assert not torch.equal(run(model), plain)
    assert all(vars(site.module)["forward"] is one for site, one in zip(find_routers(model), outer))
    assert all(type(vars(site.module)["forward"]) is Outer for site in find_routers(twin))


def test_a_state_with_hooks_in_it_fails_the_check(monkeypatch):
    monkeypatch.setattr(Wiring, "_state", lambda self: vars(self.module))
    with pytest.raises((AssertionError, AttributeError, pickle.PicklingError)):
        test_a_copy_is_the_bare_model("replay", "deepcopy")


def test_a_control_that_was_copied_can_be_attached_to_the_copy():
    model = tiny_model("qwen3_moe")
    with RoutingControl(model, **steering.STRONG) as control:
        tables = steering.record(control, model)
        want = steering.steered(model, control, tables)
        twin = through_a_file(model)
        with RoutingControl(twin, **steering.STRONG) as other:
            assert steering.equal(steering.steered(twin, other, tables), want)
