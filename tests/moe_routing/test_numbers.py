"""The gate and both weights as tensors: the same bits as Python numbers, and new values at any step."""

from dataclasses import replace

import pytest
import torch

from moe_routing import RouterInjection, router_gradient, router_injection
from tests.moe_routing import checks
from tests.moe_routing.cases import TARGETS, rich_case


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("target", TARGETS)
def test_weights_that_are_tensors_are_those_of_python(dtype, target):
    case = rich_case(12)
    options = checks.plain(case, control=checks.control_of(case, "softmax"), target=target)
    numbers = {"lambda_turn": 0.75, "lambda_token": 0.375, "gate": 0.5}
    tensors = {name: torch.tensor(value, dtype=dtype) for name, value in numbers.items()}
    for z, g in ((case.logits, case.grad_in), (case.logits.float(), case.grad_in.bfloat16())):
        expected = router_gradient(z, g, **options | numbers)
        assert torch.equal(router_gradient(z, g, **options | tensors), expected)
        assert torch.equal(router_injection(z, g, **options | tensors), router_injection(z, g, **options | numbers))
        nothing = {"lambda_turn": torch.zeros((), dtype=dtype), "lambda_token": torch.zeros((), dtype=dtype)}
        got = router_gradient(z, torch.where(g > 0, g, -0.0), **options | nothing)
        assert torch.equal(got, torch.where(g > 0, g, -0.0))
        assert torch.equal(torch.signbit(got), torch.signbit(torch.where(g > 0, g, -0.0)))


def test_new_values_of_tensors_need_no_new_injection():
    case = rich_case(21)
    injection = RouterInjection(case.field, checks.control_of(case, "softmax"), case.selected, 9)
    gate, turn, token = (torch.tensor(0.0, dtype=torch.float64) for _ in range(3))
    changing = replace(injection, gate=gate, lambda_turn=turn, lambda_token=token)
    for values in ((1.0, 0.5, 0.25), (0.5, 2.0, 0.0)):
        gate.fill_(values[0]), turn.fill_(values[1]), token.fill_(values[2])
        given = replace(injection, gate=values[0], lambda_turn=values[1], lambda_token=values[2])
        assert torch.equal(changing(case.logits, case.grad_in), given(case.logits, case.grad_in))
