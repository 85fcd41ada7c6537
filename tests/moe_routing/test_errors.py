"""Errors name the argument and both shapes. The type checker of the test run would speak first, so it is silenced."""

from dataclasses import replace

import jaxtyping
import pytest
import torch

import moe_routing as mr
from tests.moe_routing import checks
from tests.moe_routing.cases import rich_case


@pytest.fixture(autouse=True)
def _unchecked():
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


ids = torch.zeros(4, dtype=torch.long)
sets = torch.zeros(4, 2, dtype=torch.long)
wide = torch.zeros(4, 5, dtype=torch.long)
z = torch.zeros(4, 3)
yes = torch.ones(4, dtype=torch.bool)
labels = torch.zeros(4, 2, dtype=torch.bool)

CASES = {
    "gap": (lambda: mr.expert_set_gap(sets, ids[:3]), r"field has shape \(3,\).*selected of shape \(4, 2\)"),
    "histogram": (lambda: mr.shift_histogram(sets, ids[:3]), r"field has shape \(3,\).*\(4, 2\)"),
    "cv rows": (lambda: mr.load_cv(sets, ids[:3], 4), r"trajectory has shape \(3,\).*\(4, 2\)"),
    "cv k": (lambda: mr.load_cv(wide, ids, 3), r"selected of shape \(4, 5\) picks k=5.*num_experts=3"),
    "cv expert": (lambda: mr.load_cv(sets + 9, ids, 3), r"selected of shape \(4, 2\) holds id 9.*num_experts=3"),
    "entropy": (lambda: mr.router_entropy(z, yes[:2]), r"mask has shape \(2,\).*probs of shape \(4, 3\)"),
    "consensus size": (lambda: mr.consensus_experts(sets, ids, 3, 4), "size must lie in 1..num_experts=3, got 4"),
    "overlap": (
        lambda: mr.consensus_overlap(sets, ids + 3, sets[:2]),
        r"field of shape \(4,\) holds id 3, but consensus of shape \(2, 2\)",
    ),
    "usage rows": (lambda: mr.turn_usage(z, ids[:2], 1), r"field has shape \(2,\).*probs of shape \(4, 3\)"),
    "usage ids": (lambda: mr.turn_usage(z, ids + 7, 7), r"field of shape \(4,\) holds id 7.*num_fields=7"),
    "labels": (
        lambda: mr.TurnStatistics.from_usage(z, labels[:3], yes),
        r"labels has shape \(3, 2\).*usage of shape \(4, 3\)",
    ),
    "eligible": (lambda: mr.TurnStatistics.from_usage(z, labels, yes[:3]), r"eligible has shape \(3,\).*\(4, 3\)"),
    "sum": (
        lambda: mr.TurnStatistics.from_usage(z, labels, yes) + mr.TurnStatistics.from_usage(z, labels[:, :1], yes),
        r"shape \(1, 3\).*do not add to \(2, 3\)",
    ),
    "control operations": (
        lambda: mr.turn_control(torch.zeros(3, 2, 3), labels, ids, 8),
        r"pmi has shape \(3, 2, 3\), but labels of shape \(4, 2\) ask for 2",
    ),
    "control tokens": (
        lambda: mr.turn_control(torch.zeros(2, 2, 3), labels, ids[:1], 8),
        r"tokens has shape \(1,\).*labels of shape \(4, 2\)",
    ),
    "reduction": (
        lambda: mr.turn_control(torch.zeros(2, 2, 3), labels, ids, 8, reduction="max"),
        "reduction must be 'sum' or 'mean', got 'max'",
    ),
    "loss rows": (lambda: mr.token_consistency_loss(z, sets[:3], ids), r"selected has shape \(3, 2\).*\(4, 3\)"),
    "loss k": (lambda: mr.token_consistency_loss(z, wide, ids), r"selected of shape \(4, 5\) picks k=5.*\(4, 3\)"),
    "loss target": (lambda: mr.token_consistency_loss(z, sets, ids, target="x"), "target must be .* got 'x'"),
    "activation": (lambda: mr.router_probs(z, "relu"), "activation must be 'softmax' or 'sigmoid', got 'relu'"),
    "variant": (lambda: mr.routing_reg(z, sets, ids[:1]), r"field has shape \(1,\).*logits of shape \(4, 3\)"),
    "balance": (
        lambda: mr.load_balancing_loss(z, sets[:2], yes),
        r"selected has shape \(2, 2\).*probs of shape \(4, 3\).*\(4, 2\)",
    ),
    "balance sum": (
        lambda: mr.LoadBalance.from_probs(z, sets, yes) + mr.LoadBalance.from_probs(z, sets[:, :1], yes),
        "k=1 do not add to .* k=2",
    ),
    "z loss": (lambda: mr.router_z_loss(z, yes[:1]), r"mask has shape \(1,\).*logits of shape \(4, 3\)"),
    "drift": (lambda: mr.routing_drift(sets[:1], sets, z, yes), r"recorded has shape \(1, 2\).*\(4, 2\)"),
    "specialization": (
        lambda: mr.specialization_gap(z, labels[:1]),
        r"labels has shape \(1, 2\).*counts of shape \(4, 3\)",
    ),
    "column of fields": (lambda: mr.expert_set_gap(sets, ids[:, None]), r"field has shape \(4, 1\).*asks for \(4,\)"),
    "one expert a token": (lambda: mr.load_cv(ids, ids, 4), r"selected has shape \(4,\), but \[tokens, k\] is wanted"),
    "one expert a pair": (lambda: mr.jaccard_similarity(ids, ids), r"selected has shape \(4,\)"),
    "one expert a count": (lambda: mr.expert_counts(ids, ids, 1, 4), r"selected has shape \(4,\)"),
    "one expert a loss": (lambda: mr.switch_reg(z, ids, ids), r"selected has shape \(4,\)"),
    "one expert a recording": (lambda: mr.routing_drift(ids, ids, z, yes), r"selected has shape \(4,\)"),
    "column of groups": (lambda: mr.expert_counts(sets, ids[:, None], 1, 4), r"group has shape \(4, 1\)"),
    "column of a mask": (lambda: mr.router_entropy(z, yes[:, None]), r"mask has shape \(4, 1\).*asks for \(4,\)"),
    "column of owners": (lambda: mr.consensus_overlap(sets, ids[:, None], sets), r"field has shape \(4, 1\)"),
    "column of voters": (lambda: mr.consensus_experts(sets, ids[:, None], 4, 1), r"field has shape \(4, 1\)"),
    "column of users": (lambda: mr.turn_usage(z, ids[:, None], 1), r"field has shape \(4, 1\)"),
    "column of losses": (lambda: mr.token_consistency_loss(z, sets, ids[:, None]), r"field has shape \(4, 1\)"),
    "column of variants": (lambda: mr.switch_reg(z, sets, ids[:, None]), r"field has shape \(4, 1\)"),
    "labels of one operation": (
        lambda: mr.TurnStatistics.from_usage(z, labels[:, 0], yes),
        r"labels has shape \(4,\) and dtype torch.bool, but a boolean \[fields, operations\] is wanted",
    ),
    "counts for labels": (lambda: mr.turn_objective(z, labels.long(), yes), r"labels has .* dtype torch.int64"),
    "counts for control": (lambda: mr.turn_control(torch.zeros(2, 2, 3), labels.int(), ids, 8), "dtype torch.int32"),
    "counts for pairs": (lambda: mr.specialization_gap(z, labels.float()), "dtype torch.float32"),
    "counts for usage": (lambda: mr.RoutingSummary.of(sets[None], z[None], ids, labels.long(), ids), "torch.int64"),
    "fields": (lambda: mr.field_ids(ids, ids[:1], ids), r"turn has shape \(1,\), but trajectory asks for \(4,\)"),
    "kappa": (
        lambda: mr.kappa_advantage_objective(z, z, z[:1], z),
        r"kappa has shape \(1, 3\).*log_ratio of shape \(4, 3\)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_message_names_the_argument_and_both_shapes(name):
    call, message = CASES[name]
    with pytest.raises(ValueError, match=message):
        call()


GRADIENT = {
    "grad_in": ({"grad_in": torch.zeros(2, 3)}, r"grad_in has shape \(2, 3\), but logits of shape \(4, 3\)"),
    "field": ({"field": ids[:3]}, r"field has shape \(3,\), but logits of shape \(4, 3\)"),
    "selected": ({"selected": sets[:3]}, r"selected has shape \(3, 2\), but logits of shape \(4, 3\)"),
    "k": ({"selected": wide}, r"selected of shape \(4, 5\) picks k=5 experts, but logits of shape \(4, 3\)"),
    "expert": ({"selected": sets + 3}, r"selected of shape \(4, 2\) holds id 3, but logits of shape \(4, 3\)"),
    "experts of the table": (
        {"control": torch.zeros(1, 4)},
        r"control has shape \(1, 4\), but logits of shape \(4, 3\)",
    ),
    "layers of the table": ({"control": torch.zeros(2, 1, 3)}, r"control has shape \(2, 1, 3\), but logits of shape"),
    "rows of the table": ({"field": ids + 1}, r"field of shape \(4,\) holds id 1, but control of shape \(1, 3\)"),
    "device of the field": (
        {"field": ids.to("meta")},
        r"field of shape \(4,\) is on meta, logits of shape \(4, 3\) on cpu",
    ),
    "weight of the turns": ({"lambda_turn": ids * 1.0}, r"lambda_turn has shape \(4,\), but a number asks for \(\)"),
    "weight of the tokens": ({"lambda_token": ids * 1.0}, r"lambda_token has shape \(4,\)"),
    "pairs": ({"num_pairs": ids[:1]}, r"num_pairs has shape \(1,\)"),
    "activation": ({"activation": "tanh"}, "activation must be 'softmax' or 'sigmoid', got 'tanh'"),
    "target": ({"target": "tanh"}, "target must be 'previous_topk', 'uniform_topk', 'overlap' or 'mass', got 'tanh'"),
}


@pytest.mark.parametrize("name", GRADIENT)
@pytest.mark.parametrize("gate", [0.0, 1.0])
def test_router_gradient_checks_its_arguments_even_when_the_gate_is_closed(name, gate):
    change, message = GRADIENT[name]
    good = {"logits": z, "grad_in": z + 1, "field": ids, "control": torch.zeros(1, 3), "selected": sets, "num_pairs": 1}
    assert mr.router_gradient(**good, gate=gate).shape == z.shape
    with pytest.raises(ValueError, match=message):
        mr.router_gradient(**good | change, gate=gate)


@pytest.mark.parametrize("name", ["gate", "scale", "lambda_turn", "lambda_token"])
def test_a_number_for_each_token_is_refused_by_the_hook(name):
    injection = mr.RouterInjection(ids, torch.zeros(1, 3), sets, 1)
    with pytest.raises(ValueError, match=rf"{name} has shape \(4,\), but a number asks for \(\)"):
        replace(injection, **{name: torch.ones(4)})(z, z)


def test_a_table_of_another_batch_is_refused_by_the_hook():
    case = rich_case(1)
    injection = mr.RouterInjection(case.field[:-1], checks.control_of(case, "softmax"), case.selected, 1)
    with pytest.raises(ValueError, match="field has shape"):
        injection(case.logits, case.grad_in)
