"""Tests of the kernel under Triton's interpreter; ``test_kernels`` runs them in a process of their own.

The interpreter must be chosen before Triton is first imported, so these are no part of the ordinary collection.
"""

import importlib
import inspect
import itertools
import math
import resource
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.testing import assert_close

from moe_routing import (
    RouterInjection,
    add_injection,
    fused,
    injection_survival,
    kernels,
    router_gradient,
    router_injection,
)
from moe_routing.backend import kernel_choice
from tests.moe_routing.cases import ACTIVATIONS, TARGETS, seeds
from tests.moe_routing.kernel_cases import (
    DTYPES,
    KernelCase,
    assert_same,
    check_equal,
    kernel_case,
    run,
    stack_of_pages,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where the kernel masks what it warns of


@pytest.fixture(autouse=True, scope="module")
def _rounding():
    """The interpreter cuts bfloat16 off; devices round to the nearest, ties to even."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    plain = interpreter._convert_float

    def convert(values, source, target, mode):
        if (source.name, target.name) != ("fp32", "bf16"):
            return plain(values, source, target, mode)
        halves = torch.tensor(values.tolist(), dtype=torch.float32).bfloat16()
        return halves.view(torch.int16).numpy().view("uint16").reshape(values.shape)

    interpreter._convert_float = convert
    yield
    interpreter._convert_float = plain


def light(examples):
    return settings(max_examples=examples, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


@light(25)
@given(seeds)
def test_equals_pytorch_in_float64(seed):
    check_equal(seed)


def sized(tokens, experts, k, seed=0, field=None, **options):
    rng = torch.Generator().manual_seed(seed)
    selected = torch.rand(max(tokens, 1), experts, generator=rng).argsort(-1)[:tokens, :k]
    selected[1::3] = selected[::3][: len(selected[1::3])]
    return KernelCase(
        2 * torch.randn(tokens, experts, generator=rng),
        torch.randn(tokens, experts, generator=rng),
        {
            "field": torch.zeros(tokens, dtype=torch.long) if field is None else field,
            "control": torch.randn(3, experts, generator=rng),
            "selected": selected,
            "num_pairs": 5,
            "lambda_turn": 0.7,
            "lambda_token": 0.3,
        }
        | options,
    )


@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [(5, 1, 1), (5, 3, 3), (5, 100, 7), (3, 160, 8), (3, 384, 10), (2, 512, 32), (2, 1024, 8), (17, 8, 2)],
)
def test_sizes_that_are_no_powers_of_two(tokens, experts, k):
    case = sized(tokens, experts, k, activation=ACTIVATIONS[experts % 2])
    assert_same(run(case, block=4 if experts > 16 else 16)[0], case)


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 8])
def test_blocks_that_are_not_full(tokens):
    """One field spans everything, so the last row of a block is the predecessor of the first of the next."""
    case = sized(tokens, 6, 2, seed=tokens, gap_threshold=1.0)
    assert_same(run(case, block=4)[0], case)


@pytest.mark.parametrize("target", TARGETS)
def test_a_gap_at_the_threshold_and_logits_far_from_zero(target):
    check_gap_at_the_threshold(target)


def check_gap_at_the_threshold(target):
    case = sized(6, 8, 2, target=target, selected=torch.arange(6)[:, None] + torch.arange(2), gap_threshold=0.5)
    case = replace(case, logits=3 * case.logits + torch.tensor([[300.0], [-300.0]]).repeat(3, 1))
    assert_same(run(case, block=4)[0], case)


@pytest.mark.parametrize("field", [[-1] * 6, [0, 1, 2, 0, 1, 2], [0, 0, 0, -1, 0, 0], [2, 2, 1, 1, 2, 2]])
def test_fields_of_one_token_and_none(field):
    case = sized(6, 5, 2, field=torch.tensor(field), gap_threshold=1.0)
    assert_same(run(case, block=4)[0], case)


@pytest.mark.parametrize(("target", "activation"), itertools.product(TARGETS, ACTIVATIONS))
def test_pruned_experts_and_rows_that_are_not_usable(target, activation):
    """-inf prunes an expert; NaN and +inf end a row and its pairs, at the edge of a block and inside one."""
    case = sized(14, 6, 2, seed=3, gap_threshold=1.0, target=target, activation=activation)
    logits = case.logits.clone()
    logits[:, 5] = -math.inf
    logits[3, 5], logits[6, 0], logits[9] = math.nan, math.inf, -math.inf
    logits[11, case.options["selected"][10]] = -math.inf  # the target of row 11 is out of reach
    logits[12, case.options["selected"][12]] = -math.inf  # row 12 offers row 13 nothing
    case = replace(case, logits=logits)
    got = run(case, block=4)[0]
    assert_same(got, case)
    for row in (3, 6, 9):
        assert torch.equal(got[row], case.grad_in[row])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rho", [True, False])
def test_a_gradient_that_is_not_finite_stays_in_its_row(bad, rho):
    field = torch.tensor([0, 0, 0, 0, 1, 1, -1])
    case = sized(7, 5, 2, field=field, rho=rho)
    grad_in = case.grad_in.clone()
    grad_in[1, 2], grad_in[6, 0] = bad, bad
    quiet = grad_in.clone()
    quiet[1] = 0
    got, expected = run(replace(case, grad_in=grad_in), block=4)[0], run(replace(case, grad_in=quiet), block=4)[0]
    others = torch.arange(7) != 1
    assert torch.equal(got[others].nan_to_num(7, 8, 9), expected[others].nan_to_num(7, 8, 9))
    assert torch.equal(got[1].view(torch.int32), grad_in[1].view(torch.int32))


@pytest.mark.parametrize("scale", [1e-30, 1e-42, 1e37])
def test_rho_at_the_ends_of_the_floating_range(scale):
    case = KernelCase(
        torch.zeros(2, 2),
        torch.tensor([[3.0, -4.0], [0.0, 2.5]]) * scale,
        {"field": torch.zeros(2, dtype=torch.long), "selected": torch.tensor([[0], [1]]), "num_pairs": 0}
        | {"control": torch.tensor([[1.0, 0.0]]), "lambda_turn": scale * 1e3 if scale > 1 else 1.0},
    )
    if scale > 1:
        case = replace(case, options=case.options | {"lambda_turn": 1e37})
    got = run(case)[0] - case.grad_in
    expected = torch.tensor([[-0.25, 0.25], [-0.125, 0.125]]) * case.options["lambda_turn"]
    assert_close(got, expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_finite_gradient_never_overflows(dtype):
    top = torch.finfo(dtype).max
    case = KernelCase(
        torch.zeros(3, 2, dtype=dtype),
        torch.tensor([[top, -top], [top, 1.0], [1.0, 1.0]], dtype=dtype),
        {"field": torch.tensor([0, 0, 1]), "selected": torch.tensor([[0], [0], [0]]), "num_pairs": 1}
        | {"control": torch.tensor([[1e30, -1e30], [math.nan, 1.0]]), "lambda_turn": 1e30, "lambda_token": 1e30},
    )
    assert torch.equal(run(case)[0], case.grad_in)


@pytest.mark.parametrize("target", TARGETS)
def test_a_row_of_half_precision_that_is_longer_than_its_range(target):
    case = sized(5, 100, 7, gap_threshold=1.0, target=target, lambda_turn=3e3, lambda_token=1e4)
    case = replace(case, grad_in=(1e4 * case.grad_in.clamp(-3, 3)).half())
    assert case.grad_in.float().norm(dim=-1).min() > torch.finfo(torch.half).max
    got = run(case)[0]
    assert_same(got, case)
    assert (got != case.grad_in).any(-1).all()


@light(8)
@given(seeds)
def test_survival_is_that_of_pytorch(seed):
    case = kernel_case(seed)
    out, survival = run(case, survival=True)
    options = case.options
    injection = router_injection(case.logits.float(), case.grad_in, **options)
    expected = injection_survival(case.grad_in, add_injection(case.grad_in, injection), injection)
    assert_close(survival.count, expected.count, rtol=1e-5, atol=1e-9)
    # Which additions round away hangs on the last bit of a few of them.
    assert_close(survival.total, expected.total, rtol=2e-2, atol=1e-9)
    assert torch.equal(out.view(torch.uint8), run(case)[0].view(torch.uint8))


def test_what_rounding_eats_is_not_counted():
    grad_in = torch.ones(1, 4, dtype=torch.bfloat16)
    case = KernelCase(
        torch.zeros(1, 4),
        grad_in,
        {"field": torch.tensor([0]), "selected": torch.tensor([[0]]), "num_pairs": 0, "lambda_turn": 1.0}
        | {"control": torch.tensor([[2.0, -2.0, 2.0**-10, -(2.0**-10)]])},
    )
    _, survival = run(case, survival=True)
    assert_close(survival.compute().item(), 1 / (1 + 2.0**-11), rtol=1e-3, atol=0)


@pytest.mark.parametrize("strides", [((1 << 30) - 3, 1), (1, (1 << 29) - 3)])
def test_offsets_beyond_two_to_the_31(strides):
    """By strides: the tables span gigabytes of addresses, of which a few pages are memory."""
    case = sized(4, 6, 2, seed=5, gap_threshold=1.0)
    tables = [stack_of_pages(values.bfloat16(), strides) for values in (case.logits, case.grad_in)]
    far = replace(case, logits=tables[0], grad_in=tables[1])
    near = replace(case, logits=tables[0].clone(), grad_in=tables[1].clone())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.MonkeyPatch.context() as patch:
        # Tensors of the processor are worked on in place; copied "back", all of the space would become memory.
        patch.setattr("triton.runtime.interpreter.GridExecutor._restore_args_dev", lambda *args: None)
        got = fused.fused_router_gradient(far.logits, far.grad_in, **far.options, out=far.grad_in)[0].clone()
    assert torch.equal(got, run(near)[0])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_experts_further_apart_than_32_bits_can_count():
    case = sized(4, 6, 3, seed=5, gap_threshold=0.0)
    selected = stack_of_pages(case.options["selected"].short(), (1, (1 << 30) + 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("triton.runtime.interpreter.GridExecutor._restore_args_dev", lambda *args: None)
        got, _ = fused.fused_router_gradient(case.logits, case.grad_in, **case.options | {"selected": selected})
    assert torch.equal(got, run(case)[0])


def test_a_gradient_that_sum_expanded():
    case = sized(5, 6, 2)
    case = replace(case, grad_in=torch.ones(()).expand(5, 6))
    got, _ = fused.fused_router_gradient(case.logits, case.grad_in, **case.options)
    assert_same(got, case)


def test_ids_out_of_range_take_no_part():
    case = sized(6, 5, 2, field=torch.tensor([0, 0, 7, 7, 1, 1]), gap_threshold=1.0)
    selected = case.options["selected"].clone()
    selected[0, 0], selected[4] = 5, -1
    wild = replace(case, options=case.options | {"selected": selected})
    tame = torch.tensor([0, 0, -1, -1, 1, 1])
    known = replace(case, options=case.options | {"selected": selected.clamp(max=4), "field": tame})
    known.options["selected"][0] = -1
    assert torch.equal(run(wild)[0], run(known)[0])


def test_numbers_on_the_device_are_those_of_python():
    check_numbers_on_the_device_are_read()


def check_numbers_on_the_device_are_read():
    """Bit for bit, in any dtype that holds them; ``scale`` multiplies a gate of either kind."""
    case = sized(9, 6, 2, seed=2, gap_threshold=1.0, lambda_turn=0.75, lambda_token=0.375, gate=0.5, num_pairs=3)
    expected = run(case, scale=4.0)[0]
    assert_same(run(case)[0], case)
    for dtype, names in itertools.product(DTYPES, ({"lambda_turn"}, {"lambda_token"}, set(NUMBERS))):
        on_device = {name: torch.tensor(case.options[name], dtype=dtype) for name in names}
        there = replace(case, options=case.options | on_device)
        for scale in (4.0, torch.tensor(4.0, dtype=torch.float64)):
            assert torch.equal(run(there, scale=scale)[0], expected)
    nothing = {"lambda_turn": torch.zeros(()), "lambda_token": torch.zeros((), dtype=torch.float64)}
    case = replace(case, grad_in=torch.where(case.grad_in > 1, -0.0, case.grad_in))
    still = run(replace(case, options=case.options | nothing))[0]
    assert torch.equal(still.view(torch.int32), case.grad_in.view(torch.int32))


NUMBERS = ("lambda_turn", "lambda_token", "gate")


def test_tuning_leaves_no_trace(monkeypatch):
    """Each configuration runs several times, here on the gradient itself; only the last run may count."""
    built = kernels.kernels()
    runs = []

    def bench(call, quantiles):
        call()
        call()
        runs.append(len(runs))
        return [-float(len(runs))] * 3

    for tuner in (built.tuned_norms, built.tuned_inject):
        monkeypatch.setitem(vars(tuner), "do_bench", bench)
    case = sized(5, 100, 3)
    expected, sums = run(case, survival=True)
    monkeypatch.setattr(fused, "kernels", lambda: SimpleNamespace(**vars(built) | {"interpreted": False}))
    for _ in range(2):
        got, again = run(case, in_place=True, survival=True)
        assert_close(got, expected, rtol=1e-6, atol=1e-8)
        assert_close(again.count, sums.count)
    assert len(runs) == 16  # eight configurations of each kernel suit 100 experts, and the choice is kept


def test_the_same_router_gradient_runs_it(monkeypatch):
    calls = []
    launch = fused.fused_router_gradient
    for module in ("injection", "hooks"):
        monkeypatch.setattr(
            f"moe_routing.{module}.fused_router_gradient", lambda *a, **k: calls.append(1) or launch(*a, **k)
        )
    assert kernel_choice("cpu") == "triton"
    case = sized(5, 6, 2)
    assert_same(router_gradient(case.logits, case.grad_in, **case.options), case)
    assert len(calls) == 1
    assert router_gradient(case.logits, case.grad_in, **case.options, gate=0.0) is case.grad_in
    router_gradient(case.logits.double(), case.grad_in, **case.options)  # float64 stays in PyTorch
    assert len(calls) == 1
    reports = []
    steer = RouterInjection(**case.options, scale=torch.tensor(2.0), gate=0.5)
    assert_same(steer(case.logits, case.grad_in, reports.append), case)
    assert len(calls) == 2
    assert reports[0].compute() > 0.99
    with pytest.raises(ValueError, match="control"):
        router_gradient(case.logits, case.grad_in, **case.options | {"control": torch.zeros(3, 5)})
    with pytest.raises(ValueError, match="picks k=7 experts"):
        router_gradient(case.logits, case.grad_in, **case.options | {"selected": torch.zeros(5, 7, dtype=torch.long)})


def mutant(folder, name, old, new):
    """``kernels`` of a copy of the kernel in which ``old``, which must occur exactly once, reads ``new``."""
    sources = {module: inspect.getsource(importlib.import_module(f"moe_routing.{module}")) for module in PARTS}
    assert sum(source.count(old) for source in sources.values()) == 1, f"{old!r} does not occur once"
    for module, source in sources.items():
        source = source.replace(old, new).replace("from moe_routing import device", f"import device_{name} as device")
        (folder / f"{module}_{name}.py").write_text(source.replace("from moe_routing.device", f"from device_{name}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        return importlib.import_module(f"kernels_{name}").kernels


PARTS = ("device", "kernels")
MUTANTS = {
    "the sign of the turn term": ("scale = -gate * share", "scale = gate * share"),
    "only one field has a highest norm": ("mask=first, sem", "mask=first & (field == 0), sem"),
    "the maximum of one block": ("tl.atomic_max(highest_ptr + field", "tl.atomic_xchg(highest_ptr + field"),
    "pairs across fields": ("inside & (before == field)", "inside & (before >= 0)"),
    "the first row of a block has no predecessor": ("tl.where(index == 0, edge, above)", "(index > 0) & above"),
    "own experts as the target": ("tl.load(where - selected_row, mask=at", "tl.load(where, mask=at"),
    "q of the current token": ('z_at if TARGET == "mass" else z_before', "z_at"),
    "the gate of the gap is strict": ("(gap <= gap_threshold)", "(gap < gap_threshold)"),
    "offsets in 32 bits": ("rows * z_row, g_ptr", "(rows * z_row).to(tl.int32), g_ptr"),
    "padding is an expert": (
        'mask=tile, other=float("-inf")).to(tl.float32)\n    raw',
        "mask=tile, other=0.0).to(tl.float32)\n    raw",
    ),
    "the softmax is not shifted": ("mass = tl.exp(z - top)", "mass = tl.exp(z)"),
    "the weight of the turn term on the device is not read": ("number(turn_ptr, lambda_turn)", "lambda_turn"),
    "the weight of the token term on the device is not read": ("number(token_ptr, lambda_token)", "lambda_token"),
    "a gate on the device takes the place of its factor": ("gate * number(gate_ptr, 1.0)", "number(gate_ptr, gate)"),
    "-0.0 becomes 0.0": ("tl.where(added[:, None], (raw", "tl.where(here[:, None], (raw"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(monkeypatch, tmp_path, name):
    monkeypatch.setattr(fused, "kernels", mutant(tmp_path, f"mutant{list(MUTANTS).index(name)}", *MUTANTS[name]))
    with pytest.raises(AssertionError):
        check_everything()


def check_everything():
    for seed in range(8):
        check_equal(seed)
    check_numbers_on_the_device_are_read()
    for target in TARGETS:
        check_gap_at_the_threshold(target)
    test_offsets_beyond_two_to_the_31(((1 << 30) - 3, 1))


def test_the_copies_work(monkeypatch, tmp_path):
    """Else every mutant would be killed, and by nothing."""
    monkeypatch.setattr(fused, "kernels", mutant(tmp_path, "unbroken", "_DEVICE = (block_sum", "_DEVICE = ( block_sum"))
    check_everything()
