"""The choices that the objectives leave open: what is averaged, when there are turns enough, and the gate."""

import jaxtyping
import pytest
import torch

from moe_routing.adapters.transformers import RoutingControl
from tests.moe_routing.adapters import steering
from tests.moe_routing.adapters.tiny_families import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3_moe")


def tables_and_change(model, **options):
    """The tables, and what the control adds to the gradient of the last router, where it adds once."""
    with RoutingControl(model, **steering.STRONG | options) as control:
        tables = steering.record(control, model)
        got = steering.steered(model, control, tables)
        (weight,) = (name for name, p in model.named_parameters() if p is control.routers[-1].module.weight)
    return tables, got[weight] - steering.plain(model)[weight]


def test_token_losses_are_averaged_over_pairs_or_over_fields(model):
    pairs, by_pairs = tables_and_change(model, lambda_turn=0.0)
    turns, by_turns = tables_and_change(model, lambda_turn=0.0, normalizer="turns")
    assert (int(pairs.divisor), int(turns.divisor)) == (8, 15)
    assert int(turns.num_pairs) == 8
    assert by_pairs.abs().max() > 1e-3
    torch.testing.assert_close(15 * by_turns, 8 * by_pairs)


def test_micro_batches_count_each_field_once(model):
    field = steering.fields()
    with RoutingControl(model, normalizer="turns") as control, torch.no_grad():
        for rows in (slice(0, 1), slice(1, 4)):
            with control.record(field[rows], steering.labels(), steering.kinds()):
                model(input_ids=steering.tokens()[rows])
        assert int(control.tables(0.1).divisor) == 15


def test_min_turns_says_which_kind_of_field_has_a_signal(model):
    kind = steering.kinds()
    for min_turns, think, tool in ((7, True, True), (8, True, False), (9, False, False)):
        tables, _ = tables_and_change(model, min_turns=min_turns)
        assert tables.num_turns == {"think": 8, "tool": 7}
        assert bool((tables.control[:, kind == 0] != 0).any()) == think
        assert bool((tables.control[:, kind == 1] != 0).any()) == tool
    # The token term needs no turns.
    _, change = tables_and_change(model, min_turns=9)
    torch.testing.assert_close(change, tables_and_change(model, lambda_turn=0.0)[1])
    assert change.abs().max() > 1e-3


def test_reduction_is_over_operations(model):
    whole, by_sum = tables_and_change(model, lambda_token=0.0)
    mean, by_mean = tables_and_change(model, lambda_token=0.0, reduction="mean")
    torch.testing.assert_close(2 * mean.control, whole.control)
    torch.testing.assert_close(2 * by_mean, by_sum)


def test_the_gate_is_that_of_the_paper_unless_said_otherwise(model):
    base = steering.plain(model)
    with RoutingControl(model, **steering.STRONG) as control:
        assert (control.gate.low, control.gate.high) == (0.0, 0.2)
        assert steering.equal(steering.steered(model, control, steering.record(control, model, 0.21)), base)
        assert not steering.equal(steering.steered(model, control, steering.record(control, model, 0.2)), base)
    with RoutingControl(model, gate=None, **steering.STRONG) as control:
        assert not steering.equal(steering.steered(model, control, steering.record(control, model, None)), base)
    assert RoutingControl(model).gate is not RoutingControl(model).gate


@pytest.mark.parametrize("option", ["normalizer", "reduction", "target", "gate"])
def test_unknown_choices_are_errors(option, model, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # else the type checker speaks first
    before = [len(module._forward_hooks) for module in model.modules()]
    with pytest.raises(ValueError, match=f"{option} must be .* got 'median'"):
        RoutingControl(model, **{option: "median"})
    assert [len(module._forward_hooks) for module in model.modules()] == before
