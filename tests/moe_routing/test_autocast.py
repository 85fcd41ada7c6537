"""Autocast around a call, as a trainer has it around forward and backward, changes no result."""

import pytest
import torch

import moe_routing as mr
from tests.moe_routing import checks
from tests.moe_routing.cases import ACTIVATIONS, TARGETS, rich_case


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gradient_is_computed_in_its_own_precision(activation, target, dtype):
    case = rich_case(21)
    options = checks.plain(case, control=checks.control_of(case, activation).float())
    options |= {"activation": activation, "target": target}
    logits, grad_in = case.logits.float(), case.grad_in.float()
    want = mr.router_gradient(logits, grad_in, **options)
    with torch.autocast("cpu", dtype):
        assert torch.equal(mr.router_gradient(logits, grad_in, **options), want)


def test_the_tables_are_too():
    case = rich_case(22)

    def control():
        usage, tokens = mr.turn_usage(mr.router_probs(case.logits.float()), case.field, case.num_fields)
        statistics = mr.TurnStatistics.from_usage(usage, case.labels, tokens > 0)
        return mr.turn_control(statistics.pmi(), case.labels, tokens, statistics.num_turns)

    want = control()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(control(), want)
