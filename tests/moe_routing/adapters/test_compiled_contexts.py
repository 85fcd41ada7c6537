"""Whatever is attached to a compiled model acts as on a plain one, whether it was compiled before or later."""

import inspect

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from moe_routing.adapters.replay import record_selection
from moe_routing.adapters.wiring import Wiring
from tests.moe_routing.adapters import contexts, steering
from tests.moe_routing.adapters.tiny_families import tiny_model

NAMES = ("control", "replay", "consensus", "record", "summary", "low rank")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """One sparse block of a model, which the compiler is done with sooner than with the whole."""

    def __init__(self):
        super().__init__()
        self.block = shallow().layers[0].mlp
        # What makes its class known as one that records router logits.
        self.model = type("Sparse", (nn.Module,), {"_can_record_outputs": type(shallow())._can_record_outputs})()
        self.model.mlp = self.block

    def forward(self, x):
        return self.block(x)


def shallow():
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("batched_mm")
    model.layers, model.config.num_hidden_layers = model.layers[:1], 1
    return model


def block_step(block, call):
    """Gradients of a step of one block."""
    x = torch.randn(steering.ROWS, steering.LENGTH, 32, generator=torch.Generator().manual_seed(4)).double()
    call(x).tanh().sum().backward()
    return steering.gradients(block)


def inside(name, model, step, call=None):
    """What a step gives inside a context: gradients, the experts that were selected, and what was recorded."""
    call = model if call is None else call
    with context(name, call) as active, record_selection(call) as trace:
        found = step(model, call) | {"selected": trace.selected}
    if name == "record":
        found["recorded"] = active.selected
    if name == "summary":
        found["recorded"] = active.summary.usage
    return found


def context(name, model):
    if name == "replay":
        return contexts.RoutingReplay(model, contexts.foreign(layers=1))
    if name == "consensus":
        return contexts.fixed_consensus(model, contexts.foreign(layers=1), steering.fields())
    return contexts.CONTEXTS[name](model)


def assert_close(found, want):
    assert found.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_compiled_model_is_no_different(compiled_first):
    block = Block()
    plain = block_step(block, block)
    want = {name: inside(name, block, block_step) for name in NAMES}
    block.compile(backend="aot_eager")
    if compiled_first:
        assert_close(block_step(block, block), plain)
    for name in NAMES:
        assert_close(inside(name, block, block_step), want[name])
        assert_close(block_step(block, block), plain)


def test_a_wrapper_around_the_model_is_no_different():
    block = Block()
    plain, want = block_step(block, block), inside("replay", block, block_step)
    whole = torch.compile(block, backend="eager")
    assert_close(block_step(block, whole), plain)
    assert_close(inside("replay", block, block_step, whole), want)
    assert_close(block_step(block, whole), plain)


def test_entering_again_compiles_nothing_anew():
    """A replay for every micro-batch must not use up the compiler's limit, which would run the model uncompiled."""
    block, counter, frames = Block(), CompileCounterWithBackend("eager"), []
    block.compile(backend=counter)
    for _ in range(3):
        for name in NAMES:
            inside(name, block, block_step)
            block_step(block, block)
        frames.append(counter.frame_count)
    assert frames == frames[:1] * 3
    assert frames[0] > 0


@pytest.mark.parametrize("name", ["replay", "record"])
def test_a_full_graph_fails_with_the_way_out(name, monkeypatch):
    monkeypatch.setattr(Wiring, "__call__", inspect.unwrap(Wiring.__call__))  # without the tests' type checker
    block = Block()
    plain = block_step(block, block)
    block.compile(backend="eager", fullgraph=True)
    assert_close(block_step(block, block), plain)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile the model without"), context(name, block):
        block_step(block, block)
    assert_close(block_step(block, block), plain)


def test_a_wrapper_that_keeps_what_has_left_compiles_whole(monkeypatch):
    monkeypatch.setattr(Wiring, "__call__", inspect.unwrap(Wiring.__call__))
    block = Block()
    plain = block_step(block, block)
    with record_selection(block):
        inner = block.block.gate.forward
        block.block.gate.forward = lambda *args: inner(*args)
    block.compile(backend="eager", fullgraph=True)
    assert_close(block_step(block, block), plain)


def test_hooks_alone_are_not_seen_by_a_graph(monkeypatch):
    monkeypatch.setattr(Wiring, "__init__", hooks_alone)
    with pytest.raises(RuntimeError, match=r"did not run|have not run"):
        test_a_compiled_model_is_no_different(True)


def hooks_alone(self, module):
    vars(self).update(module=module, surrounding=[], replacing={}, observing=[])
