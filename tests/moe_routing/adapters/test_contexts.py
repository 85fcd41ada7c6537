"""What is attached to a model goes away without a trace, and concerns nothing outside it."""

import gc
import itertools
import random
import threading
import warnings
import weakref
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from moe_routing.adapters import summary as summaries
from moe_routing.adapters import weights
from moe_routing.adapters.replay import RoutingReplay, record_selection
from moe_routing.adapters.routers import find_routers
from moe_routing.adapters.transformers import RoutingControl
from moe_routing.adapters.wiring import Wiring
from tests.moe_routing.adapters import steering
from tests.moe_routing.adapters.contexts import CONTEXTS, INTERVENTIONS, foreign, wiring
from tests.moe_routing.adapters.tiny_families import tiny_config, tiny_model

TOGETHER = ("control", "replay", "record", "summary", "low rank")
RECORDERS = ("record", "summary")


@pytest.fixture
def model():
    return tiny_model("qwen3_moe")


def run(model, ids=None):
    with torch.no_grad():
        return steering.forward(model, steering.tokens() if ids is None else ids)


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_untouched(model, before):
    assert wiring(model) == before[0]
    assert steering.equal(model.state_dict(), before[1])


def experts(model):
    """What the experts of every layer receive in one forward."""
    seen, handles = [], []
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            handles.append(module.register_forward_pre_hook(lambda module, args: seen.append(args[1])))
    run(model)
    for handle in handles:
        handle.remove()
    return torch.stack(seen, dim=1)


@pytest.mark.parametrize("seed", range(6))
def test_contexts_of_all_kinds_are_left_in_any_order(model, seed):
    before, plain = (wiring(model), state(model)), run(model)
    order = random.Random(seed)
    names = order.sample(TOGETHER, len(TOGETHER))
    active = {name: CONTEXTS[name](model) for name in names}
    for context in active.values():
        context.__enter__()
    assert not torch.equal(run(model), plain)
    for name in order.sample(names, len(names)):
        active[name].__exit__(None, None, None)
    assert_untouched(model, before)
    assert torch.equal(run(model), plain)


@pytest.mark.parametrize("names", itertools.permutations(["replay", "low rank"]))
def test_a_replay_and_a_low_rank_router_act_together_in_either_order(model, names):
    with CONTEXTS[names[0]](model), CONTEXTS[names[1]](model), record_selection(model) as trace:
        assert torch.equal(experts(model), foreign())
        _, seen = steering.capture(model, SimpleNamespace(routers=find_routers(model)))
    assert torch.equal(trace.selected, foreign())
    assert all(output[0].unique(dim=1).shape[1] == 3 for _, output in seen)


@pytest.mark.parametrize(("name", "other"), [("replay", "replay"), ("replay", "consensus"), ("low rank", "low rank")])
def test_two_interventions_of_one_kind_are_an_error(model, name, other):
    before = wiring(model), state(model)
    with CONTEXTS[name](model):
        want, attached = run(model), wiring(model)
        with pytest.raises(RuntimeError, match="replaced by another context already"), CONTEXTS[other](model):
            pass
        assert wiring(model) == attached
        assert torch.equal(run(model), want)
    assert_untouched(model, before)


@pytest.mark.parametrize("name", ["replay", "summary"])
def test_a_context_is_not_entered_twice_at_once_but_can_be_entered_again(model, name):
    before, plain = (wiring(model), state(model)), run(model)
    context = CONTEXTS[name](model)
    for _ in range(2):
        with context:
            with pytest.raises(RuntimeError, match="already active"):
                context.__enter__()
            assert torch.equal(run(model), plain) == (name not in INTERVENTIONS)
        assert_untouched(model, before)


class InterruptError(Exception):
    pass


def interrupt(*_):
    raise InterruptError


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("where", ["attention of layer 1", "gate of layer 0", "gate of layer 1, before"])
def test_an_exception_inside_a_forward_leaves_nothing(model, name, where):
    before, plain = (wiring(model), state(model)), run(model)
    layer = model.layers[int(where.split("layer ")[1][0])]
    module = layer.self_attn if where.startswith("attention") else layer.mlp.gate
    register = module.register_forward_pre_hook if where.endswith("before") else module.register_forward_hook
    handle = register(interrupt)
    with pytest.raises(InterruptError), CONTEXTS[name](model):
        run(model)
    handle.remove()
    assert_untouched(model, before)
    with CONTEXTS[name](model):
        run(model)
    assert torch.equal(run(model), plain)


@pytest.mark.parametrize("name", RECORDERS)
def test_a_forward_that_broke_off_is_not_mixed_with_another(model, name):
    with CONTEXTS[name](model) as found:
        run(model)
        handle = model.layers[1].self_attn.register_forward_hook(interrupt)
        with pytest.raises(InterruptError):
            run(model, steering.tokens().flip(0))
        handle.remove()
        with pytest.raises(RuntimeError, match="run"):
            _ = found.selected if name == "record" else found.summary
        run(model)
        got = found.selected if name == "record" else found.summary.usage
    with CONTEXTS[name](model) as found:
        run(model)
    assert torch.equal(got, found.selected if name == "record" else found.summary.usage)


@pytest.mark.parametrize("name", ["replay", "low rank", "record"])
def test_a_model_moved_to_another_dtype_inside_keeps_it(name):
    model, want = tiny_model("deepseek_v3"), tiny_model("deepseek_v3").to(torch.bfloat16)
    for module in model.modules():
        if hasattr(module, "topk_group"):
            module.topk_group = module.num_group
            module.e_score_correction_bias.copy_(torch.linspace(-1, 1, 8))
    want.load_state_dict(model.state_dict())
    before = wiring(model)
    with CONTEXTS[name](model):
        model.to(torch.bfloat16)
        run(model)
    assert steering.equal(model.state_dict(), want.state_dict())
    assert wiring(model) == before


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_step_of_an_optimiser_inside_is_kept(model, name):
    before = wiring(model), state(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    with CONTEXTS[name](model):
        steering.forward(model, steering.tokens()).backward()
        optimiser.step()
        inside = state(model)
    assert steering.equal(model.state_dict(), inside)
    assert not torch.equal(inside["layers.0.mlp.gate.weight"], before[1]["layers.0.mlp.gate.weight"])
    assert wiring(model) == before[0]


@pytest.mark.parametrize("name", ["replay", "low rank", "record"])
def test_an_adapter_that_is_added_or_merged_inside_stays(model, name):
    peft = pytest.importorskip("peft")
    config = {"r": 2, "init_lora_weights": False, "target_parameters": ["gate.weight"]}
    before, plain = wiring(model), run(model)
    torch.manual_seed(0)
    with CONTEXTS[name](model):
        adapted = peft.get_peft_model(model, peft.LoraConfig(**config))
        run(adapted.base_model.model)
    merged = run(adapted.base_model.model)
    assert not torch.equal(merged, plain)
    with CONTEXTS[name](adapted):
        run(adapted.base_model.model)
        whole = adapted.merge_and_unload()
    assert torch.allclose(run(whole), merged)
    assert wiring(whole) == before


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_forward_in_another_thread_is_untouched(model, name):
    plain, found, seen = run(model), [], {}
    with CONTEXTS[name](model) as active, ExitStack() as stack:
        if isinstance(active, RoutingControl):
            stack.enter_context(active.record(steering.fields(), steering.labels(), steering.kinds()))
        run(model)
        if name == "record":
            seen = dict(active.layers)
        thread = threading.Thread(target=lambda: found.append(run(model, steering.tokens()[:2])))
        thread.start()
        thread.join()
        assert len(found) == 1, "a batch of another size is no error there"
        if name == "record":
            assert all(active.layers[layer] is seen[layer] for layer in seen)
    assert torch.equal(found[0], run(model, steering.tokens()[:2]))
    assert torch.equal(run(model), plain)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", INTERVENTIONS)
def test_a_recompute_outside_is_not_silent(model, name, reentrant):
    model.train()
    with CONTEXTS[name](model):
        want = steering.plain(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with CONTEXTS[name](model):
            assert steering.equal(steering.plain(model), want)
        with CONTEXTS[name](model), torch.no_grad():
            steering.forward(model, steering.tokens())
    if reentrant:
        with pytest.warns(RuntimeWarning, match="runs the routers again"), CONTEXTS[name](model):
            steering.forward(model, steering.tokens())
        return
    with CONTEXTS[name](model):
        loss = steering.forward(model, steering.tokens())
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["replay", "low rank", "control"])
def test_a_recompute_in_a_thread_of_autograd_counts_as_inside(model, name, reentrant):
    """On a GPU the backward pass, and with it the recompute, runs in a thread of its own."""
    model.train()
    with CONTEXTS[name](model) as active:
        want = step(model, active, lambda loss: loss.backward())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()

    def elsewhere(loss):
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    with CONTEXTS[name](model) as active:
        assert steering.equal(step(model, active, elsewhere), want)


def step(model, active, backward):
    """Gradients of a step whose backward is run by ``backward``; bound, if a control is active."""
    with ExitStack() as stack:
        if isinstance(active, RoutingControl):
            stack.enter_context(active.bind(steering.fields(), steering.record(active, model)))
        backward(steering.forward(model, steering.tokens()))
    return steering.gradients(model)


@pytest.mark.parametrize("name", ["replay", "low rank"])
def test_a_control_steers_what_an_intervention_made_in_either_order(model, name):
    """The router's own weights get the same either way; ``reach="router"`` gives nothing else to the rest."""
    with CONTEXTS[name](model):
        base = steering.plain(model)
    found = {}
    for reach in ("backbone", "router"):
        options = {"reach": reach} | steering.STRONG
        with CONTEXTS[name](model), RoutingControl(model, **options) as control:
            found[reach] = steering.steered(model, control, steering.record(control, model))
        with RoutingControl(model, **options) as control, CONTEXTS[name](model):
            assert steering.equal(found[reach], steering.steered(model, control, steering.record(control, model)))
    last = "layers.1.mlp.gate.weight"
    torch.testing.assert_close(found["router"][last], found["backbone"][last], rtol=1e-12, atol=1e-12)
    assert float((found["router"][last] - base[last]).abs().max()) > 1e-2
    rest = [key for key in base if not key.endswith("gate.weight")]
    assert all(torch.equal(found["router"][key], base[key]) for key in rest)
    assert not all(torch.equal(found["backbone"][key], base[key]) for key in rest)


@pytest.mark.parametrize("name", INTERVENTIONS)
def test_a_plain_backward_may_come_after_the_context(model, name):
    with CONTEXTS[name](model):
        want = steering.plain(model)
        loss = steering.forward(model, steering.tokens())
    loss.backward()
    assert steering.equal(steering.gradients(model), want)


def test_generation_inside_a_replay_is_an_error_and_leaves_nothing():
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(tiny_config("qwen3_moe", Qwen3MoeForCausalLM)).eval()
    before = wiring(model), state(model)
    options = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None, "use_cache": True}
    want = model.generate(steering.tokens(), **options)
    with (
        pytest.raises(ValueError, match=r"selected has shape \(28, 2\), but the forward"),
        RoutingReplay(model, foreign()),
    ):
        model.generate(steering.tokens(), **options)
    assert_untouched(model, before)
    assert torch.equal(model.generate(steering.tokens(), **options), want)


def test_a_model_that_is_dropped_with_a_control_on_it_is_freed():
    model = tiny_model("qwen3_moe")
    control = RoutingControl(model)
    gone = weakref.ref(model.layers[0].mlp.gate)
    del model, control
    gc.collect()
    assert gone() is None


def hooks_of_a_thread(monkeypatch):
    monkeypatch.setattr(weights, "acts_here", lambda thread: True)
    test_a_forward_in_another_thread_is_untouched(tiny_model("qwen3_moe"), "replay")


def threads_of_autograd_left_out(monkeypatch):
    monkeypatch.setattr("moe_routing.adapters.wiring.in_backward", lambda: False)
    test_a_recompute_in_a_thread_of_autograd_counts_as_inside(tiny_model("qwen3_moe"), "low rank", True)


def no_notice_of_a_recompute(monkeypatch):
    monkeypatch.setattr(weights, "in_reentrant_checkpoint", lambda: False)
    test_a_recompute_outside_is_not_silent(tiny_model("qwen3_moe"), "low rank", True)


def one_forward_over_another(monkeypatch):
    monkeypatch.setattr(summaries, "in_backward", lambda: True)
    test_a_forward_that_broke_off_is_not_mixed_with_another(tiny_model("qwen3_moe"), "summary")


def a_wiring_that_stays(monkeypatch):
    monkeypatch.setattr(Wiring, "leave_if_empty", lambda self: None)
    test_contexts_of_all_kinds_are_left_in_any_order(tiny_model("qwen3_moe"), 0)


def the_later_one_first(monkeypatch):
    monkeypatch.setattr("moe_routing.adapters.wiring.ROLES", ("selection", "scores"))
    test_a_replay_and_a_low_rank_router_act_together_in_either_order(tiny_model("qwen3_moe"), ("replay", "low rank"))


MUTANTS = [
    hooks_of_a_thread,
    threads_of_autograd_left_out,
    no_notice_of_a_recompute,
    one_forward_over_another,
    a_wiring_that_stays,
    the_later_one_first,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_killed(mutant, monkeypatch):
    with pytest.raises((AssertionError, RuntimeError, ValueError, pytest.fail.Exception)):
        mutant(monkeypatch)


def test_a_context_that_is_interrupted_on_entering_leaves_nothing(model, monkeypatch):
    before, wired = (wiring(model), state(model)), []

    def second_fails(module, plain=weights.wire):
        if wired:
            raise InterruptError
        wired.append(module)
        return plain(module)

    monkeypatch.setattr(weights, "wire", second_fails)
    with pytest.raises(InterruptError):
        CONTEXTS["replay"](model).__enter__()
    assert_untouched(model, before)
