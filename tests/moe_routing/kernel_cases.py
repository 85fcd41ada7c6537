"""Cases for the fused kernel and the comparison with the PyTorch form in float64."""

import mmap
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_routing import fused, router_gradient
from tests.moe_routing import checks
from tests.moe_routing.cases import ACTIVATIONS, TARGETS, make_case

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@dataclass(frozen=True)
class KernelCase:
    logits: Tensor
    grad_in: Tensor
    options: dict[str, Any]


def draw(seed: int, options):
    return options[torch.randint(len(options), (), generator=torch.Generator().manual_seed(seed)).item()]


def kernel_case(seed: int, **options: Any) -> KernelCase:
    """A random case of every option and dtype; consecutive seeds share nothing."""
    case = make_case(seed)
    control = torch.randn(case.num_fields, case.experts, generator=torch.Generator().manual_seed(seed))
    # Some fields have no control: a token with neither term must keep its bits.
    control[:: draw(seed, (2, 3, 100))] = 0
    ids = draw(seed + 1, (torch.int32, torch.int64))
    chosen = {
        "control": control,
        "field": case.field.to(ids),
        "selected": case.selected.to(draw(seed + 2, (torch.int32, torch.int64))),
        "activation": draw(seed + 3, ACTIVATIONS),
        "target": draw(seed + 4, TARGETS),
        "rho": draw(seed + 5, (True, True, False)),
        "gap_threshold": draw(seed + 6, (0.5, 0.5, 0.0, 1.0, -1.0, 0.3)),
        "gate": draw(seed + 7, (1.0, torch.tensor(0.5), torch.tensor(3.0, dtype=torch.float64))),
        "num_pairs": draw(seed + 8, (7, torch.tensor(7), 0, torch.tensor(0))),
        "lambda_turn": draw(seed + 13, (0.7, torch.tensor(0.7), torch.tensor(0.7, dtype=torch.float64), 0.0)),
        "lambda_token": draw(seed + 14, (0.3, torch.tensor(0.3), torch.tensor(0.0))),
    }
    grad_in = case.grad_in.clone()
    grad_in[:: draw(seed + 9, (4, 100))] = -0.0
    logits = case.logits.to(draw(seed + 10, DTYPES))
    if draw(seed + 11, (True, False, False)):
        logits = logits.round()  # ties
    return KernelCase(logits, grad_in.to(draw(seed + 12, DTYPES)), checks.plain(case, **chosen | options))


def spread(table: Tensor, seed: int) -> Tensor:
    """The same numbers in memory that is contiguous, transposed, strided in both axes, or not aligned."""
    rows, columns = table.shape[0], table.shape[-1]
    kind = draw(seed, ("plain", "transposed", "strided", "unaligned"))
    if kind == "plain" or table.dim() == 1:
        return table
    if kind == "transposed":
        return table.t().contiguous().t()
    if kind == "strided":
        wide = torch.zeros(2 * rows + 1, 3 * columns + 2, dtype=table.dtype)
        wide[: 2 * rows : 2, 1 : 1 + 3 * columns : 3] = table
        return wide[: 2 * rows : 2, 1 : 1 + 3 * columns : 3]
    flat = torch.zeros(rows * columns + 1, dtype=table.dtype)
    flat[1:] = table.reshape(-1)
    return flat[1:].view(rows, columns)


def run(case: KernelCase, *, in_place: bool = False, block: int = 16, **options: Any):
    """The kernel's result, in memory that held NaN, and the survival sums if asked for."""
    out = case.grad_in.clone() if in_place else torch.full_like(case.grad_in, float("nan"))
    grad_in = out if in_place else case.grad_in
    return fused.fused_router_gradient(case.logits, grad_in, **case.options, out=out, block=block, **options)


def exact(case: KernelCase) -> Tensor:
    """The PyTorch form on the same numbers in float64, which the kernel never takes."""
    options = case.options | {"control": case.options["control"].double()}
    return router_gradient(case.logits.double(), case.grad_in.double(), **options)


def assert_same(got: Tensor, case: KernelCase, expected: Tensor | None = None) -> None:
    """Within one rounding of the gradient's dtype and a few of float32; bit for bit where nothing is injected.

    Those of float32 are of the terms' size: ``s - <p, s>`` may be far smaller than ``s``.
    """
    expected = exact(case) if expected is None else expected
    wide = case.grad_in.double()
    moved = torch.where(wide.isfinite(), expected - wide, torch.zeros_like(wide)).abs()
    still = ~(expected != wide).any(-1) | ~wide.isfinite().all(-1)
    bits = BITS[case.grad_in.dtype]
    assert torch.equal(got.view(bits)[still], case.grad_in.contiguous().view(bits)[still]), "a row changed"
    rounding = torch.finfo(case.grad_in.dtype).eps / 2 * expected.abs()
    options = case.options
    table = options["control"].double().abs().nan_to_num()
    rows = torch.cat([table.amax(-1), torch.zeros(1, dtype=torch.float64)])  # the last for tokens outside fields
    terms = options["lambda_turn"] * rows[options["field"].long()] + options["lambda_token"]
    terms = terms * float(options.get("gate", 1.0))
    room = (
        rounding + 1e-5 * moved.amax(-1, keepdim=True) + 2**-22 * terms[:, None] + torch.finfo(case.grad_in.dtype).tiny
    )
    error = (got.double() - expected).abs()[~still]
    assert (error <= room[~still]).all(), f"off by {(error / room[~still]).max().item()} of what rounding explains"


def check_equal(seed: int) -> None:
    case = kernel_case(seed)
    case = replace(
        case,
        logits=spread(case.logits, seed),
        grad_in=spread(case.grad_in, seed + 1),
        options=case.options
        | {
            "selected": spread(case.options["selected"], seed + 2),
            "control": spread(case.options["control"], seed + 3),
        },
    )
    got, _ = run(case, in_place=draw(seed + 4, (False, False, True)), block=draw(seed + 5, (4, 16, 32)))
    assert_same(got, case)


def stack_of_pages(values: Tensor, strides: tuple[int, int]) -> Tensor:
    """``values`` at strides of gigabytes, in address space of which only the pages in use are memory.

    2**31 numbers lie in front: an offset that wraps round reads zeros there and does not end the process.
    """
    front = 1 << 31
    count = front + sum((n - 1) * stride for n, stride in zip(values.shape, strides)) + 1
    size = count * values.element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    space = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=values.dtype)
    return space.as_strided(values.shape, strides, front).copy_(values)
