"""RoutingControl on a live model: the order of a step, rounding, detaching, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import moe_routing as mr
from moe_routing.adapters.families import FAMILIES
from moe_routing.adapters.routers import find_routers
from moe_routing.adapters.transformers import RoutingControl
from tests.moe_routing.adapters import steering
from tests.moe_routing.adapters.tiny_families import tiny_model

KINDS = ["qwen3_moe", "deepseek_v3", "gpt_oss"]


@pytest.fixture
def model():
    return tiny_model("qwen3_moe")


def test_tables_are_those_of_the_recorded_probabilities(model):
    with RoutingControl(model) as control, torch.no_grad():
        tables = steering.record(control, model)
        _, seen = steering.capture(model, control)
    flat, kind = steering.fields().reshape(-1), steering.kinds()
    for layer, (_, output) in enumerate(seen):
        p = torch.softmax(output[0], -1)
        for k, name in enumerate(("think", "tool")):
            owned = [f for f in range(steering.FIELDS) if kind[f] == k and (flat == f).any()]
            q = torch.stack([p[flat == f].mean(0) for f in owned])
            y = steering.labels()[owned]
            assert tables.num_turns[name] == len(owned)
            for o in range(2):
                information = 0.0
                for present in (False, True):
                    joint = q[y[:, o] == present].sum(0) / len(owned)
                    share = (y[:, o] == present).double().mean()
                    information += (joint * (joint / (q.mean(0) * share)).log()).sum()
                torch.testing.assert_close(tables.information[name][layer, o], information, rtol=1e-6, atol=1e-9)
    # Seven TOOL turns are too few for a signal, eight THINK turns are enough.
    assert (tables.control[:, kind == 1] == 0).all()
    assert (tables.control[:, kind == 0] != 0).any()
    assert int(tables.num_pairs) == 8


def test_micro_batches_add_up_to_the_whole(model):
    field, ids = steering.fields(), steering.tokens()
    with RoutingControl(model) as control:
        whole = steering.record(control, model)
        for rows in (slice(0, 1), slice(1, 4)):
            with torch.no_grad(), control.record(field[rows], steering.labels(), steering.kinds()):
                model(input_ids=ids[rows])
        parts = control.tables(0.1)
    torch.testing.assert_close(parts.control, whole.control)
    assert torch.equal(parts.num_pairs, whole.num_pairs)


def test_forwards_outside_are_untouched(model):
    base, values = steering.plain(model), steering.forward(model, steering.tokens())
    with RoutingControl(model, **steering.STRONG) as control:
        tables = steering.record(control, model)
        assert steering.equal(steering.plain(model), base)
        with control.bind(steering.fields(), tables):
            assert torch.equal(steering.forward(model, steering.tokens()), values)
            with torch.no_grad():
                model(input_ids=steering.tokens()[:1])


def test_closed_gate_and_zero_weights_are_the_baseline(model):
    base = steering.plain(model)
    with RoutingControl(model, gate=mr.EntropyGate(), **steering.STRONG) as control:
        closed = steering.record(control, model, entropy=0.5)
        assert steering.equal(steering.steered(model, control, closed), base)
        assert control.metrics()["routing/gate"] == 0.0
        with pytest.raises(ValueError, match="entropy is required"):
            steering.record(control, model, entropy=None)
    with RoutingControl(model, lambda_turn=0.0, lambda_token=0.0) as control:
        assert steering.equal(steering.steered(model, control, steering.record(control, model)), base)


def test_rho_is_that_of_the_arriving_gradient(model):
    options = steering.STRONG | {"rho": True}
    arrived, passed = {}, {}
    with RoutingControl(model, **options) as control:
        tables = steering.record(control, model)
        site = control.routers[-1]
        handle = site.module.register_forward_hook(
            lambda module, args, output: output[0].register_hook(lambda grad: passed.update(grad=grad)) and None
        )
        steering.steered(model, control, tables)
        handle.remove()
        _, seen = steering.capture(model, control)
    logits, _, selected = seen[-1][1]
    handle = site.module.register_forward_hook(
        lambda module, args, output: output[0].register_hook(lambda grad: arrived.update(grad=grad)) and None
    )
    steering.plain(model)
    handle.remove()
    want = mr.router_gradient(
        logits.detach(), arrived["grad"], field=steering.fields().reshape(-1), control=tables.control[-1],
        selected=selected, num_pairs=tables.num_pairs, **options,
    )  # fmt: skip
    torch.testing.assert_close(passed["grad"], want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("family", KINDS)
def test_half_precision_keeps_its_dtype_and_reports_what_survives(family):
    model = tiny_model(family).bfloat16()
    with RoutingControl(model, lambda_turn=1e-4, lambda_token=1e-4) as control:
        tables = steering.record(control, model)
        found = steering.steered(model, control, tables)
        share = control.metrics()["routing/survived"]
        assert "routing/survived" not in control.metrics()
        dtype = steering.capture(model, control)[1][0][1][0].dtype
    assert all(torch.isfinite(g).all() for g in found.values())
    # DeepSeek-V3 routes in float32, where everything survives; the others in bfloat16, where part is rounded away.
    assert (share > 0.999) if dtype == torch.float32 else (0.0 <= share < 0.99), share


def test_detach_leaves_the_model_as_it_was(model):
    def hooks():
        return [(name, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()]

    before = hooks()
    control = RoutingControl(model)
    assert hooks() != before
    with pytest.raises(KeyError), control:
        raise KeyError
    assert hooks() == before
    control.detach()
    with pytest.raises(RuntimeError, match="detached"):
        steering.record(control, model)


def test_wrappers_are_searched_through(model):
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.module = inner

    assert [site.module for site in find_routers(Wrapper(model))] == [site.module for site in find_routers(model)]


def test_repr_names_family_activation_and_routers(model):
    assert repr(RoutingControl(model)) == (
        "RoutingControl(Qwen3MoeModel, qwen3_moe (softmax): 2 routers, router_gradient in PyTorch)"
    )


def test_refusals_name_the_class(model, monkeypatch):
    with pytest.raises(ValueError, match="Linear has no router"):
        RoutingControl(nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match="cannot steer DogeModel: its scores are sums of two keys"):
        RoutingControl(tiny_model("doge"))
    monkeypatch.delitem(FAMILIES, "qwen3_moe")
    with pytest.raises(NotImplementedError, match="Qwen3MoeModel records router logits of Qwen3MoeTopKRouter"):
        RoutingControl(model)


def test_score_functions_without_a_formula_are_refused():
    model = tiny_model("deepseek_v4")
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.scoring_func = "sqrtsoftplus"
    with pytest.raises(NotImplementedError, match="sqrtsoftplus"):
        RoutingControl(model)


def test_misuse_is_an_error(model):
    field, ids = steering.fields(), steering.tokens()
    with RoutingControl(model) as control:
        with pytest.raises(RuntimeError, match="nothing recorded"):
            control.tables()
        tables = steering.record(control, model)
        with pytest.raises(ValueError, match="field"), control.bind(field[:1], tables):
            model(input_ids=ids)
        with pytest.raises(RuntimeError, match="no router of Qwen3MoeModel ran"), control.bind(field, tables):
            pass
        with (
            pytest.raises(RuntimeError, match="did not run"),
            control.record(field, steering.labels(), steering.kinds()),
        ):
            pass
        with control.bind(field, tables):
            model(input_ids=ids)
            with pytest.raises(RuntimeError, match="do not nest"), control.bind(field, tables):
                pass
        one_layer = replace(tables, control=tables.control[:1], information={})
        with pytest.raises(ValueError, match="holds 1 layers, but Qwen3MoeModel has 2"), control.bind(field, one_layer):
            pass
        # An error inside leaves nothing bound.
        steering.record(control, model)
