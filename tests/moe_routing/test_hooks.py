import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from moe_routing import RouterInjection, SumCount, register_injection, router_gradient, steer_router
from tests.moe_routing import checks
from tests.moe_routing.cases import rich_case


def setting(seed=21, **options):
    case = rich_case(seed)
    injection = RouterInjection(
        case.field,
        checks.control_of(case, "softmax"),
        case.selected,
        max(len(case.field), 1),
        lambda_turn=0.5,
        lambda_token=0.25,
        **options,
    )
    return case, injection


def run(case, place):
    """A router in a small block: logits from W h, a loss that reads the logits twice."""
    torch.manual_seed(0)
    h = torch.randn(len(case.field), 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(case.experts, 3, dtype=torch.float64, requires_grad=True)
    logits = h @ weight.T
    seen = place(logits)
    loss = (seen.softmax(-1) * case.grad_in).sum() + seen.square().mean()
    loss.backward()
    return loss.detach(), weight.grad, h.grad, weight.detach(), h.detach()


def hooked(injection, report=None):
    def place(logits):
        register_injection(logits, injection, report)
        return logits

    return place


def test_hook_and_operation_agree_and_leave_the_forward_alone():
    case, injection = setting()
    plain = run(case, lambda z: z)
    by_hook = run(case, hooked(injection))
    by_operation = run(case, lambda z: steer_router(z, injection))
    assert torch.equal(plain[0], by_hook[0])
    assert torch.equal(plain[0], by_operation[0])
    for a, b in zip(by_hook[1:3], by_operation[1:3]):
        assert torch.equal(a, b)
    assert not torch.allclose(by_hook[1], plain[1])


def test_weight_and_input_get_the_injection_by_the_chain_rule():
    case, injection = setting()
    _, plain_w, plain_h, weight, h = run(case, lambda z: z)
    _, got_w, got_h, _, _ = run(case, hooked(injection))
    logits = (h @ weight.T).requires_grad_()
    (grad_in,) = torch.autograd.grad((logits.softmax(-1) * case.grad_in).sum() + logits.square().mean(), logits)
    delta = injection(logits, grad_in) - grad_in
    assert_close(got_w - plain_w, delta.T @ h)
    assert_close(got_h - plain_h, delta @ weight)


nothing = {"lambda_turn": torch.tensor(0.0), "lambda_token": torch.tensor(0.0)}


@pytest.mark.parametrize(
    ("options", "told"), [({"gate": 0.0}, True), ({"gate": torch.tensor(0.0)}, False), (nothing, False)]
)
def test_a_closed_gate_is_bitwise_the_baseline(options, told):
    case, injection = setting()
    injection = replace(injection, **options)
    assert injection.closed == told, "a tensor was read"
    for place in (hooked(injection), lambda z: steer_router(z, injection)):
        for a, b in zip(run(case, place), run(case, lambda z: z)):
            assert torch.equal(a, b)


def test_a_removed_hook_is_gone_and_evaluation_needs_none():
    case, injection = setting()
    baseline = run(case, lambda z: z)

    def place(logits):
        register_injection(logits, injection).remove()
        return logits

    assert torch.equal(run(case, place)[1], baseline[1])
    with torch.no_grad():
        assert register_injection(torch.zeros(2, 2), injection) is None


def test_survival_is_reported_and_adds_up():
    case, injection = setting()
    reports: list[SumCount] = []
    run(case, hooked(injection, reports.append))
    run(case, hooked(injection, reports.append))
    assert (reports[0] + reports[1]).compute().item() == 1


def test_logits_with_a_batch_axis_are_flattened_in_order():
    case, injection = setting()
    even = len(case.field) // 2 * 2
    injection = RouterInjection(case.field[:even], injection.control, case.selected[:even], 5, 0.5, 0.25)
    logits, grad = case.logits[:even], case.grad_in[:even]
    cube = (2, even // 2, case.experts)
    got = injection(logits.reshape(cube), grad.reshape(cube))
    assert torch.equal(got.reshape(even, -1), injection(logits, grad))


def test_scale_is_the_factor_on_the_loss():
    case, injection = setting()
    _, scaled = setting(scale=torch.tensor(64.0, dtype=torch.float64))
    got = scaled(case.logits, case.grad_in * 64)
    assert_close(got, 64 * injection(case.logits, case.grad_in))


def test_the_call_is_router_gradient():
    case, injection = setting()
    expected = router_gradient(
        case.logits,
        case.grad_in,
        field=injection.field,
        control=injection.control,
        selected=injection.selected,
        num_pairs=injection.num_pairs,
        lambda_turn=0.5,
        lambda_token=0.25,
    )
    assert torch.equal(injection(case.logits, case.grad_in), expected)


def test_half_precision_gradients_keep_their_dtype():
    case, injection = setting()
    z = case.logits.bfloat16().requires_grad_()
    logits = z * 1
    register_injection(logits, injection)
    logits.square().sum().backward()
    assert z.grad.dtype == torch.bfloat16
    assert z.grad.isfinite().all()


def test_the_hook_keeps_no_tensor_alive():
    case, injection = setting()
    gc.collect()
    z = case.logits.clone().requires_grad_()
    logits = z * 1
    register_injection(logits, injection)
    alive = weakref.ref(logits)
    del logits
    assert alive() is None


def test_gradient_checkpointing_injects_once():
    case, injection = setting()
    counted: list[SumCount] = []

    def place(logits):
        return torch.utils.checkpoint.checkpoint(
            lambda z: steer_router(z * 1, injection, counted.append), logits, use_reentrant=False
        )

    got = run(case, place)
    assert len(counted) == 1
    assert_close(got[1], run(case, hooked(injection))[1])
