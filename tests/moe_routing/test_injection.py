import math

import pytest
import torch
from hypothesis import given, settings
from torch.testing import assert_close

from moe_routing import (
    TurnStatistics,
    add_injection,
    count_pairs,
    injection_survival,
    router_gradient,
    router_injection,
    router_probs,
    token_objective,
    turn_control,
    turn_objective,
    turn_usage,
)
from moe_routing.rho import gradient_share
from tests.moe_routing import checks
from tests.moe_routing import reference as ref
from tests.moe_routing.cases import ACTIVATIONS, TARGETS, make_case, rich_case, seeds

light = settings(max_examples=20, deadline=None)


@light
@given(seeds)
def test_equals_autograd_of_the_explicit_objective(seed):
    checks.check_router_gradient(router_gradient, seed)


@light
@given(seeds)
def test_closed_gates_half_precision_and_rows_that_are_not_finite(seed):
    checks.check_gradient_edges(router_gradient, seed)


@light
@given(seeds)
def test_blocks_of_rows_change_no_bit(seed):
    checks.check_blocks(router_gradient, seed)


@light
@given(seeds)
def test_probabilities_that_underflow(seed):
    checks.check_faint_rows(router_gradient, seed)


@light
@given(seeds)
def test_rho_matches_the_loops(seed):
    checks.check_share(gradient_share, seed)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@settings(max_examples=8, deadline=None)
@given(seeds)
def test_equals_autograd_of_the_packages_own_objectives(activation, target, seed):
    case = make_case(seed)
    z = case.logits.clone().requires_grad_()
    usage, tokens = turn_usage(router_probs(z, activation), case.field, case.num_fields)
    token = token_objective(z, case.selected, case.field, target=target, activation=activation)
    objective = 0.7 * turn_objective(usage, case.labels, tokens > 0) + 0.3 * token
    (expected,) = torch.autograd.grad(-objective, z)
    stats = TurnStatistics.from_usage(usage.detach(), case.labels, tokens > 0)
    got = router_gradient(
        case.logits,
        case.grad_in,
        **checks.plain(
            case,
            control=turn_control(stats.pmi(), case.labels, tokens, stats.num_turns),
            num_pairs=count_pairs(case.field),
            rho=False,
        ),
        activation=activation,
        target=target,
    )
    assert_close(got, case.grad_in + expected, rtol=1e-9, atol=1e-11)


@light
@given(seeds)
def test_gradients_of_micro_batches_are_the_rows_of_the_whole(seed):
    case = make_case(seed)
    options = checks.plain(case, control=checks.control_of(case, "softmax"))
    whole = router_gradient(case.logits, case.grad_in, **options)
    cut = next((t for t in range(len(case.field) // 2, len(case.field)) if t not in ref.pairs(case.field)), 0)
    for h in (slice(0, cut), slice(cut, None)):
        part = router_gradient(
            case.logits[h],
            case.grad_in[h],
            **options | {"field": case.field[h], "selected": case.selected[h]},
        )
        assert_close(part, whole[h], rtol=1e-12, atol=1e-14)


@light
@given(seeds)
def test_a_scaled_loss_scales_the_injection(seed):
    """rho does not see a GradScaler's factor, so the gate carries it to the rest."""
    case = make_case(seed)
    options = checks.plain(case, control=checks.control_of(case, "softmax"))
    plain = router_gradient(case.logits, case.grad_in, **options)
    scaled = router_gradient(case.logits, case.grad_in * 1024, **options, gate=1024.0)
    assert_close(scaled, plain * 1024, rtol=1e-10, atol=1e-10)


@light
@given(seeds)
def test_the_numbers_of_fields_and_experts_are_names_only(seed):
    case = make_case(seed)
    control = checks.control_of(case, "softmax")
    got = router_gradient(case.logits, case.grad_in, **checks.plain(case, control=control))
    order = torch.randperm(case.experts, generator=torch.Generator().manual_seed(seed))
    inverse = order.argsort()
    spread = torch.zeros(3 * case.num_fields + 1, case.experts, dtype=torch.float64)
    spread[1::3] = control[:, order]
    renamed = router_gradient(
        case.logits[:, order],
        case.grad_in[:, order],
        **checks.plain(
            case,
            control=spread,
            selected=inverse[case.selected],
            field=torch.where(case.field >= 0, 3 * case.field + 1, -1),
        ),
    )
    assert_close(renamed, got[:, order], rtol=1e-10, atol=1e-12)


def test_a_batch_of_prompts_and_an_empty_one_pass_unchanged():
    for tokens, fields in ((3, 2), (3, 0), (0, 0), (0, 2)):
        grad_in = torch.randn(tokens, 4)
        got = router_gradient(
            torch.randn(tokens, 4),
            grad_in,
            field=torch.full((tokens,), -1),
            control=torch.ones(fields, 4),
            selected=torch.zeros(tokens, 2, dtype=torch.long),
            num_pairs=0,
        )
        assert torch.equal(got, grad_in)


def test_ties_zero_gradients_and_tokens_outside_fields_are_bitwise_the_baseline():
    case = rich_case(11)
    grad_in = case.grad_in.clone()
    grad_in[case.field == case.field[case.field >= 0][0]] = -0.0
    control = checks.control_of(case, "softmax")
    got = router_gradient(torch.zeros_like(case.logits), grad_in, **checks.plain(case, control=control))
    assert got.isfinite().all()
    still = (grad_in == 0).all(-1) | (case.field < 0)
    assert torch.equal(torch.signbit(got[still]), torch.signbit(grad_in[still]))
    assert torch.equal(got[still], grad_in[still])


def test_the_closed_gate_returns_the_very_tensor():
    case = rich_case(12)
    options = checks.plain(case, control=checks.control_of(case, "softmax"))
    assert router_gradient(case.logits, case.grad_in, **options, gate=0.0) is case.grad_in
    weightless = options | {"lambda_turn": 0.0, "lambda_token": 0.0}
    assert router_gradient(case.logits, case.grad_in, **weightless) is case.grad_in


def test_no_pairs_in_the_batch_switches_the_token_term_off():
    case = rich_case(13)
    options = checks.plain(case, control=torch.zeros(case.num_fields, case.experts, dtype=torch.float64))
    got = router_gradient(case.logits, case.grad_in, **options | {"num_pairs": torch.tensor(0)})
    assert torch.equal(got, case.grad_in)


@pytest.mark.parametrize("scale", [1e-30, 1e-42, 1e37])
def test_rho_survives_the_ends_of_the_floating_range(scale):
    """Squares of such gradients leave float32."""
    grad_in = torch.tensor([[3.0, -4.0], [0.0, 2.5]]) * scale
    got = router_injection(
        torch.zeros(2, 2),
        grad_in,
        field=torch.zeros(2, dtype=torch.long),
        control=torch.tensor([[1.0, 0.0]]),
        selected=torch.tensor([[0], [1]]),
        num_pairs=0,
        lambda_turn=1.0,
    )
    assert_close(got, torch.tensor([[-0.25, 0.25], [-0.125, 0.125]]), rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_finite_gradient_never_overflows(dtype):
    top = torch.finfo(dtype).max
    grad_in = torch.tensor([[top, -top], [top, 1.0]], dtype=dtype)
    got = router_gradient(
        torch.zeros(2, 2, dtype=dtype),
        grad_in,
        field=torch.zeros(2, dtype=torch.long),
        control=torch.tensor([[1e30, -1e30]]),
        selected=torch.tensor([[0], [0]]),
        num_pairs=1,
        lambda_turn=1e30,
        lambda_token=1e30,
    )
    assert got.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_table_that_is_not_finite_injects_nothing(bad):
    case = rich_case(14)
    control = torch.full((case.num_fields, case.experts), bad, dtype=torch.float64)
    got = router_gradient(case.logits, case.grad_in, **checks.plain(case, control=control))
    assert torch.equal(got, case.grad_in)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_pruned_expert_gets_no_injection_and_the_rest_their_own(target, activation):
    case = rich_case(15)
    keep = case.experts
    pruned = torch.cat([case.logits, torch.full_like(case.logits[:, :1], -math.inf)], 1)
    grad_in = torch.cat([case.grad_in, torch.zeros_like(case.grad_in[:, :1])], 1)
    control = checks.control_of(case, activation)
    wide = torch.cat([control, torch.ones_like(control[:, :1])], 1)
    options = {"activation": activation, "target": target}
    got = router_gradient(pruned, grad_in, **checks.plain(case, control=wide), **options)
    expected = router_gradient(case.logits, case.grad_in, **checks.plain(case, control=control), **options)
    assert_close(got[:, :keep], expected, rtol=1e-10, atol=1e-12)
    assert got[:, keep].eq(0).all()


def test_a_gradient_wider_than_the_injection_keeps_its_bits():
    grad_in = torch.full((1, 2), 1 + 2.0**-40, dtype=torch.float64)
    assert (add_injection(grad_in, torch.full((1, 2), 0.5)) - 1.5 == 2.0**-40).all()


def test_survival_counts_the_mass_that_rounding_kept():
    grad_in = torch.ones(1, 4, dtype=torch.bfloat16)
    injection = torch.tensor([[2.0**-10, -(2.0**-12), 0.5, 0.0]])
    out = add_injection(grad_in, injection)
    survival = injection_survival(grad_in, out, injection)
    assert_close(survival.compute().item(), 0.5 / (0.5 + 2.0**-10 + 2.0**-12))
    wide = add_injection(grad_in.float(), injection)
    assert injection_survival(grad_in.float(), wide, injection).compute().item() == 1
    assert injection_survival(grad_in, grad_in, 0 * injection).compute().item() == 0


def test_stale_routes_form_no_pair():
    case = rich_case(16)
    selected = case.selected.clone()
    selected[::2] = -1
    options = checks.plain(case, control=torch.zeros(case.num_fields, case.experts, dtype=torch.float64))
    got = router_gradient(case.logits, case.grad_in, **options | {"selected": selected})
    assert torch.equal(got, case.grad_in)
