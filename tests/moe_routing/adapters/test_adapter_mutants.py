"""Named mistakes of an adapter, each of which must fail the suite's own check."""

from dataclasses import replace

import pytest
import torch

from moe_routing.adapters import calls, phases, transformers
from moe_routing.adapters.families import FAMILIES, highest_logits
from moe_routing.adapters.phases import Binding, Recording
from tests.moe_routing.adapters import test_checkpointing as checkpointing
from tests.moe_routing.adapters import test_families as families
from tests.moe_routing.adapters import test_reach as reach
from tests.moe_routing.adapters.tiny_families import tiny_model

WRONG = {
    "sigmoid router taken for softmax": ("deepseek_v3", {"activation": "softmax"}),
    "softmax router taken for sigmoid": ("qwen3_moe", {"activation": "sigmoid"}),
    "probabilities taken for logits": ("gemma4", {"source": ""}),
    "hook on a view that nothing else reads": ("zaya", {"source": ""}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_family_entries_fail_the_gradient_check(name, monkeypatch):
    family, change = WRONG[name]
    monkeypatch.setitem(FAMILIES, family, replace(FAMILIES[family], **change))
    with pytest.raises(AssertionError):
        families.test_controlled_gradient_is_that_of_the_objective(family)


def test_selection_by_logits_alone_differs_where_a_bias_selects():
    """The entry's selection must be the router's own: a bias moves it away from the largest logits."""
    model = tiny_model("deepseek_v3")
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-3, 3, len(buffer)))
    with transformers.RoutingControl(model) as control, torch.no_grad():
        _, seen = families.steering.capture(model, control)
    site, output = control.routers[0], seen[0][1]
    own = site.selected(output, output[0])
    assert torch.equal(own.sort(-1).values, output[2].sort(-1).values)
    assert not torch.equal(
        own.sort(-1).values, highest_logits(site.module, site.parent, output, output[0]).sort(-1).values
    )


def test_a_counter_that_adds_fails_under_checkpointing(monkeypatch):
    class Adding(Recording):
        def visit(self, layer, site, logits, output):
            before = self.usage.get(layer, 0)
            super().visit(layer, site, logits, output)
            self.usage[layer] = self.usage[layer] + before

    monkeypatch.setattr(transformers, "Recording", Adding)
    with pytest.raises(AssertionError):
        checkpointing.test_recording_a_checkpointed_forward_counts_once(tiny_model("qwen3_moe"))


def test_an_unguarded_hook_fails_under_reentrant_checkpointing(monkeypatch):
    class Unguarded(Binding):
        def visit(self, layer, site, logits, output):
            self.seen = True
            stash = phases.Stash(logits, site.selected(output, logits))
            logits.register_hook(lambda grad: self._steer(layer, site, stash, grad))

    monkeypatch.setattr(transformers, "Binding", Unguarded)
    with pytest.raises(RuntimeError, match=r"requires_grad|require grad"):
        checkpointing.test_checkpointing_changes_nothing("qwen3_moe", True)


def test_an_injection_that_passes_on_through_the_input_fails(monkeypatch):
    class Twice(Binding):
        def _steer(self, layer, site, stash, grad, side=None):
            passed = super()._steer(layer, site, stash, grad, side)
            return passed if side is None else passed + side[-1]

    monkeypatch.setattr(transformers, "Binding", Twice)
    with pytest.raises(AssertionError):
        reach.test_only_the_routers_feel_the_control("qwen3_moe", None)


def test_a_second_run_on_the_live_input_fails(monkeypatch):
    monkeypatch.setattr(calls, "_detached", lambda value: value)
    with pytest.raises(AssertionError):
        reach.test_only_the_routers_feel_the_control("qwen3_moe", None)


def test_products_left_to_autocast_fail(monkeypatch):
    def widened(self, func, types, args=(), kwargs=None):
        return func(*map(self._widened, args), **(kwargs or {}))

    monkeypatch.setattr(calls.WideProducts, "__torch_function__", widened)
    with pytest.raises(AssertionError):
        reach.test_a_router_in_float32_keeps_the_whole_injection("qwen3_moe", True)
