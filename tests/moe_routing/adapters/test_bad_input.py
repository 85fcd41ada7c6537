"""Ugly input at a live model: each case is defined, and no finite gradient becomes one that is not."""

from dataclasses import replace

import jaxtyping
import pytest
import torch

from moe_routing import turn_objective
from moe_routing.adapters.families import FAMILIES
from moe_routing.adapters.tables import RoutingRecord
from moe_routing.adapters.transformers import RoutingControl
from tests.moe_routing.adapters import steering
from tests.moe_routing.adapters.tiny_families import tiny_model

KINDS = ["qwen3_moe", "deepseek_v3", "gpt_oss"]


@pytest.fixture
def model():
    return tiny_model("qwen3_moe")


def steered(model, field, labels, kind, **options):
    """Tables and gradients with other metadata than usual."""
    with RoutingControl(model, **steering.STRONG | options) as control:
        with torch.no_grad(), control.record(field, labels, kind):
            steering.forward(model, steering.tokens())
        tables = control.tables(0.1)
        with control.bind(field, tables):
            steering.forward(model, steering.tokens()).backward()
    return tables, steering.gradients(model)


def usual(model, **options):
    return steered(model, steering.fields(), steering.labels(), steering.kinds(), **options)


def spread(values, step=3, fill=0):
    """Row ``f`` at ``step * f + 1``, among rows that belong to no field."""
    rows = torch.full((step * len(values) + 2, *values.shape[1:]), fill, dtype=values.dtype)
    rows[1 : step * len(values) + 1 : step] = values
    return rows


def test_field_ids_need_not_be_contiguous(model):
    field = steering.fields()
    far = torch.where(field >= 0, 3 * field + 1, -1)
    want_tables, want = usual(model)
    tables, got = steered(model, far, spread(steering.labels()), spread(steering.kinds()))
    assert tables.num_turns == want_tables.num_turns
    assert int(tables.divisor) == int(want_tables.divisor)
    assert steering.relative_error(got, want) < 1e-12


def test_labels_of_turns_without_a_field_do_not_matter(model):
    field, labels, kind = steering.fields(), steering.labels(), steering.kinds()
    _, want = usual(model)
    more = torch.ones(5, 2, dtype=torch.bool)
    tables, got = steered(model, field, torch.cat([labels, more]), torch.cat([kind, torch.ones(5, dtype=kind.dtype)]))
    assert tables.num_turns == {"think": 8, "tool": 7}
    assert (tables.control[:, 16:] == 0).all()
    assert steering.equal(got, want)


def test_fewer_than_eight_turns_leave_the_token_term_alone(model):
    few = torch.where(steering.fields() < 4, steering.fields(), -1)
    tables, got = steered(model, few, steering.labels(), steering.kinds())
    assert tables.num_turns == {"think": 2, "tool": 2}
    assert (tables.control == 0).all()
    _, want = steered(model, few, steering.labels(), steering.kinds(), lambda_turn=0.0)
    assert steering.equal(got, want)
    assert not steering.equal(got, steering.plain(model))


@pytest.mark.parametrize("fields", [0, 16])
def test_a_batch_of_prompts_is_the_baseline(fields, model):
    nothing = torch.full_like(steering.fields(), -1)
    tables, got = steered(model, nothing, steering.labels()[:fields], steering.kinds()[:fields])
    assert tables.num_turns == {"think": 0, "tool": 0}
    assert int(tables.num_pairs) == 0
    assert tables.control.isfinite().all()
    assert steering.equal(got, steering.plain(model))


@pytest.mark.parametrize("family", KINDS)
def test_equal_logits_are_ties(family):
    model = tiny_model(family)
    for site in RoutingControl(model).routers:
        for parameter in site.module.parameters():
            torch.nn.init.zeros_(parameter)
    base = steering.plain(model)
    tables, got = usual(model)
    assert tables.control.isfinite().all()
    assert all(g.isfinite().all() for g in got.values())
    # Every turn uses every expert alike, so no operation tells anything: what is left is the token term.
    assert all(float(information.abs().max()) < 1e-9 for information in tables.information.values())
    assert steering.relative_error(got, base) > 1e-3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("family", KINDS)
def test_tokens_whose_logits_are_not_finite_are_left_out(family, bad):
    """Two tokens reach the last router broken, so that the gradients of the others stay finite."""
    model, broken = tiny_model(family), torch.tensor([2, 12])
    control, seen = steering.watched(model, **steering.STRONG)
    router = control.routers[-1].module

    def poison(module, args):
        hidden = args[0].clone()
        hidden.view(-1, hidden.shape[-1])[broken] = bad
        return (hidden, *args[1:])

    handle = router.register_forward_pre_hook(poison)
    with control:
        tables = steering.record(control, model)
        steering.steered(model, control, tables)
        share = control.metrics()["routing/survived"]
    handle.remove()
    seen.remove()
    last = len(control.routers) - 1
    logits, arrived, passed = seen.outputs[last][0], seen.arrived[last], seen.passed[last]
    assert set(range(28)) - set(logits.isfinite().all(-1).nonzero().flatten().tolist()) == set(broken.tolist())
    assert tables.control.isfinite().all()
    # Fields 0 and 6 are of no use to the statistics of that layer.
    assert all(information.isfinite().all() for information in tables.information.values())
    assert (passed.isfinite() | ~arrived.isfinite()).all()
    torch.testing.assert_close(passed[broken], arrived[broken], rtol=0, atol=0, equal_nan=True)
    changed = (passed != arrived).any(-1)
    changed[broken] = False
    assert changed.any()
    assert 0 < share <= 1


def test_a_turn_that_the_statistics_leave_out_is_not_steered():
    """As in the objective, of which it is no part: a NaN in one layer takes the turn out of all."""
    usage = torch.softmax(torch.randn(2, 10, 4, dtype=torch.float64), -1)
    labels, field = torch.arange(20).reshape(10, 2) % 3 == 0, torch.arange(10).repeat_interleave(2)
    usage[1, 3] = torch.nan
    tables = RoutingRecord.of(usage, field, labels, torch.zeros(10, dtype=torch.long)).tables()
    assert tables.num_turns["think"] == 9
    assert ((tables.control != 0).any(-1) == (torch.arange(10) != 3)).all()

    leaf = usage.clone().requires_grad_()
    turn_objective(leaf, labels, torch.ones(10, dtype=torch.bool)).sum().backward()
    torch.testing.assert_close(tables.control, (leaf.grad / 2).float())


def test_an_expert_pruned_by_minus_infinity_gets_nothing():
    model = tiny_model("gpt_oss")
    for site in RoutingControl(model).routers:
        with torch.no_grad():
            site.module.weight[3], site.module.bias[3] = 0, -float("inf")
    tables, got = usual(model)
    base = steering.plain(model)
    assert tables.control.isfinite().all()
    assert all(g.isfinite().all() for g in got.values())
    assert steering.relative_error(got, base) > 1e-3
    for site in RoutingControl(model).routers:
        (name,) = (name for name, p in model.named_parameters() if p is site.module.bias)
        assert got[name][3] == 0


def test_more_experts_selected_than_there_are_is_an_error(model, monkeypatch):
    family = FAMILIES["qwen3_moe"]
    wide = replace(family, selected=lambda router, parent, output, logits: torch.arange(9).expand(len(logits), 9))
    monkeypatch.setitem(FAMILIES, "qwen3_moe", wide)
    with pytest.raises(
        ValueError, match=r"selected of shape \(28, 9\) picks k=9 experts, but logits of shape \(28, 8\)"
    ):
        usual(model)


def test_tables_of_another_model_or_batch_are_errors_in_the_forward(model, monkeypatch):
    field = steering.fields()
    with RoutingControl(model) as control:
        tables = steering.record(control, model)
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        wrong = {
            r"holds 1 layers, but Qwen3MoeModel has 2 routers": tables.control[:1],
            r"field of shape \(4, 7\) holds id 14, but tables.control of shape \(2, 9, 8\)": tables.control[:, :9],
            r"control has shape \(16, 7\), but the logits of .* \(28, 8\) asks for \(16, 8\)": tables.control[..., :7],
        }
        for message, table in wrong.items():
            with pytest.raises(ValueError, match=message), control.bind(field, replace(tables, control=table)):
                steering.forward(model, steering.tokens())
        with (
            pytest.raises(ValueError, match="holds id 14"),
            control.record(field, steering.labels()[:9], steering.kinds()[:9]),
        ):
            steering.forward(model, steering.tokens())
        with (
            pytest.raises(ValueError, match=r"kind of shape \(16,\) holds id 2, but FieldKind has room for 2"),
            control.record(field, steering.labels(), steering.kinds() + 1),
        ):
            steering.forward(model, steering.tokens())
        with (
            pytest.raises(ValueError, match=r"kind has shape \(9,\), but labels of shape \(16, 2\)"),
            control.record(field, steering.labels(), steering.kinds()[:9]),
        ):
            steering.forward(model, steering.tokens())
