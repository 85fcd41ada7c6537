"""Routing control under gradient checkpointing: the same gradients, nothing counted twice, no memory held."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from moe_routing.adapters.stash import Stash
from moe_routing.adapters.transformers import RoutingControl
from tests.moe_routing.adapters import steering
from tests.moe_routing.adapters.tiny_families import tiny_model

KINDS = ["qwen3_moe", "deepseek_v3", "gpt_oss"]


@pytest.fixture
def model():
    return tiny_model("qwen3_moe")


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(family, reentrant):
    model = tiny_model(family)
    with RoutingControl(model, **steering.STRONG) as control:
        tables = steering.record(control, model)
        want = steering.steered(model, control, tables)
        plain_mass = control._survival.collect()
        control.metrics()
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        assert model.is_gradient_checkpointing
        got = steering.steered(model, control, tables)
        # Every router injects once, although it runs twice.
        mass = control._survival.collect()
        assert torch.equal(mass.count, plain_mass.count)
    assert steering.equal(got, want)


def test_recording_a_checkpointed_forward_counts_once(model):
    with RoutingControl(model) as control:
        want = steering.record(control, model)
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        with control.record(steering.fields(), steering.labels(), steering.kinds()):
            steering.forward(model, steering.tokens()).backward()
        got = control.tables(0.1)
    torch.testing.assert_close(got.control, want.control, rtol=0, atol=0)
    assert got.num_turns == want.num_turns
    # A usage counted twice would cancel in the table, but not here.
    torch.testing.assert_close(got.information, want.information, rtol=0, atol=0)


def in_a_closure(z):
    values = z.detach()
    return SimpleNamespace(tensors=lambda: (values,))


@pytest.mark.parametrize("keep", [Stash, in_a_closure])
def test_stash_leaves_the_memory_to_the_checkpoint(keep):
    """A closure over the tensor gives the same gradient and holds the memory: the test can tell the two apart."""
    storages = []

    def block(x):
        z = x * 2
        storages.append(weakref.ref(z.untyped_storage()))
        kept = keep(z)
        z.register_hook(lambda grad: grad + kept.tensors()[0])
        return z.sin()

    x = torch.ones(3, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    gc.collect()
    assert (storages[0]() is None) == (keep is Stash)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * (torch.full((3,), 2.0).cos() + 2))


def test_nothing_outlives_the_graph(model):
    storages = []
    with RoutingControl(model, **steering.STRONG) as control:
        tables = steering.record(control, model)
        handle = control.routers[0].module.register_forward_hook(
            lambda module, args, output: storages.append(weakref.ref(output[0].untyped_storage()))
        )
        gc.collect()
        gc.disable()
        try:
            with control.bind(steering.fields(), tables):
                loss = steering.forward(model, steering.tokens())
                assert storages[0]() is not None
                loss.backward()
            del loss
            assert storages[0]() is None
        finally:
            gc.enable()
            handle.remove()
