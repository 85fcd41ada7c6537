import inspect

import pytest
import torch
from jaxtyping import TypeCheckError

import moe_routing

SIGNATURES = {
    "expert_set_gap": ["selected", "field"],
    "jaccard_similarity": ["selected", "field"],
    "shift_histogram": ["selected", "field"],
    "load_cv": ["selected", "trajectory", "num_experts"],
    "router_entropy": ["probs", "mask"],
    "consensus_experts": ["selected", "field", "num_experts", "size"],
    "consensus_overlap": ["selected", "field", "consensus"],
    "turn_usage": ["probs", "field", "num_fields"],
    "turn_control": ["pmi", "labels", "tokens", "num_turns", "min_turns=8", "reduction='sum'"],
    "token_consistency_loss": [
        "logits", "selected", "field", "gap_threshold=0.5", "target='previous_topk'", "activation='softmax'",
    ],
    "router_gradient": [
        "logits", "grad_in", "field", "control", "selected", "num_pairs", "lambda_turn=2e-06", "lambda_token=2e-07",
        "gap_threshold=0.5", "gate=1.0", "activation='softmax'", "target='previous_topk'", "rho=True",
    ],
    "load_balancing_loss": ["probs", "selected", "mask"],
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_the_specification(name):
    parameters = inspect.signature(getattr(moe_routing, name)).parameters.values()
    got = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert got[: len(SIGNATURES[name])] == SIGNATURES[name]
    # What the specification does not name must be optional.
    assert all("=" in extra for extra in got[len(SIGNATURES[name]) :])


def test_exports_are_listed_sorted_and_documented():
    assert moe_routing.__all__ == sorted(moe_routing.__all__)
    for name in moe_routing.__all__:
        exported = getattr(moe_routing, name)
        assert exported.__doc__, name
        assert exported.__module__.startswith("moe_routing."), name


def test_gate_and_statistics_have_the_promised_members():
    gate = moe_routing.EntropyGate(low=0.0, high=0.2)
    assert (gate(0.1), gate(0.3)) == (1.0, 0.0)
    stats = moe_routing.TurnStatistics.from_usage(
        torch.rand(3, 9, 4), torch.ones(9, 2, dtype=torch.bool), torch.ones(9, dtype=torch.bool)
    )
    assert stats.pmi(eps=1e-12, clamp=20.0).shape == (3, 2, 2, 4)
    assert stats.information().shape == (3, 2)
    assert (stats + stats).num_turns == 18


def test_shapes_are_really_checked_in_the_test_run():
    with pytest.raises(TypeCheckError):
        moe_routing.expert_set_gap(torch.zeros(4, 2, dtype=torch.long), torch.zeros(3, dtype=torch.long))
