"""Correctness of the kernels on the device at hand, against the PyTorch reference in float64."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.gpu_cases import ROUTERS, Call, Router, make_call, whole_fields

Gradient = Callable[[Call], Tensor]
IntoMemory = Callable[[Call, Tensor], Tensor]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
CHUNK = 65536  # tokens whose float64 reference is held at one time


@dataclass(frozen=True)
class Check:
    """A call to make, built only when its turn comes: the large ones take gigabytes."""

    name: str
    build: Callable[[], Call]
    runs: bool = True  # every field is one run of tokens, so that the reference can go field by field
    still: bool = False  # no token may change
    in_place: bool = False
    number: int | None = None  # of the autotuner's configuration; None, for calls that are timed later, lets it choose


@dataclass(frozen=True)
class Outcome:
    """What came of a check: the largest error over its bound, and the share of tokens that were changed."""

    name: str
    size: str
    worst: float
    changed: float
    problem: str

    def row(self) -> str:
        """One row of the table."""
        verdict = f"**{self.problem}**" if self.problem else "ok"
        return f"| {self.name} | {self.size} | {self.worst:.3f} | {self.changed:.2f} | {verdict} |"


def run_check(check: Check, kernel: IntoMemory, reference: Gradient) -> Outcome:
    """Run the kernel into memory that holds NaN, or in place, and compare; what goes wrong is told, not raised."""
    call = check.build()
    tokens, experts, k = call.size
    size = f"{tokens}×{experts}, k={k}, {str(call.logits.dtype).removeprefix('torch.')}, {call.activation}"
    if check.in_place:
        own = call.grad_in.clone()
        found = kernel(replace(call, grad_in=own), own)
    else:
        found = kernel(call, torch.full_like(call.grad_in, float("nan")))
    worst, changed, problem = compare(call, found, reference, CHUNK if check.runs else max(tokens, 1))
    if not problem and worst > 1:
        problem = "error above its bound"
    if not problem and check.still != (changed == 0) and tokens:
        problem = "changed" if check.still else "nothing changed: the check is empty"
    return Outcome(check.name, size, worst, changed, problem)


def compare(call: Call, found: Tensor, reference: Gradient, rows: int) -> tuple[float, float, str]:
    """Largest error over its bound, share of changed tokens, and the first problem.

    A token that the reference leaves alone must come back bit for bit. Elsewhere the bound is the rounding of the
    result to its dtype plus 1e-4 of the largest injected value of that token: exp in float32, of arguments up to
    about 20, and the sums over the experts stay well below that.
    """
    if found.shape != call.grad_in.shape or found.dtype != call.grad_in.dtype:
        return float("inf"), 0.0, f"result is {found.dtype} {tuple(found.shape)}"
    worst, changed, problem = 0.0, 0, ""
    for start, stop in whole_fields(call.field, rows):
        part = call.rows(start, stop)
        expected = reference(part.wide())
        given, result = part.grad_in, found[start:stop]
        before = given.double()
        alone = ((expected == before) | (expected.isnan() & before.isnan())).all(-1)
        if not bool(same_bits(result[alone], given[alone]).all()):
            problem = problem or "a token without injection was changed"
        moved = ~alone
        changed += int(moved.sum())
        if bool(moved.any()):
            worst = max(worst, _error(result[moved].double(), expected[moved], before[moved], given.dtype))
    return worst, changed / max(call.size[0], 1), problem


def _error(result: Tensor, expected: Tensor, before: Tensor, dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    injected = (expected - before).abs().amax(-1, keepdim=True)
    # The interpreter cuts float32 off where a GPU rounds it to the nearest bfloat16.
    rounding = 1.0 if dtype == torch.bfloat16 and result.device.type == "cpu" else 0.5
    bound = (rounding * info.eps + 2.0**-22) * expected.abs() + 1e-4 * injected + info.tiny * info.eps
    return float(((result - expected).abs() / bound).nan_to_num(nan=float("inf")).max())


def same_bits(one: Tensor, other: Tensor) -> Tensor:
    """Where the bit patterns agree, so that -0.0 is not 0.0; any NaN agrees with any other.

    Converting a NaN from bfloat16 to float32 and back changes its payload, in PyTorch as well.
    """
    dtype = BITS[one.dtype]
    return (one.contiguous().view(dtype) == other.contiguous().view(dtype)) | (one.isnan() & other.isnan())


def checks(device: str, sizes: Iterable[int], full: bool) -> Iterator[Check]:
    """All checks, those of the routers that are timed first; ``full`` adds the ones that only a GPU has room for."""
    for tokens in sizes:
        for router in ROUTERS:
            for dtype in (torch.bfloat16, torch.float32):
                yield Check(
                    router.name,
                    lambda r=router, n=tokens, d=dtype: make_call(r, n, d, device, seed=n, holes=True),
                )
    others = [*_twists(device, 5000 if full else 45), *_other_shapes(device, 3001 if full else 21)]
    if full:
        others.append(Check("one field over all tokens", lambda: _one_field(device, 300_001)))
    # One configuration each, in turn: one compilation does where it would take several, and all get their checks.
    yield from (replace(check, number=number) for number, check in enumerate(others))


def _other_shapes(device: str, tokens: int) -> Iterator[Check]:
    for experts, k, dtype, activation in (
        (160, 6, torch.bfloat16, "softmax"),
        (384, 8, torch.float16, "sigmoid"),
        (60, 4, torch.float32, "softmax"),
        (7, 3, torch.bfloat16, "sigmoid"),
        (1024, 32, torch.float16, "softmax"),
    ):
        router = Router(f"{experts} experts", experts, k, activation)
        yield Check(router.name, lambda r=router, d=dtype: make_call(r, tokens, d, device, holes=True))
    for activation in ("softmax", "sigmoid"):
        router = Router("", 128, 8, activation)
        for target in ("uniform_topk", "overlap", "mass"):
            yield Check(
                f"target {target}",
                lambda r=router, t=target: make_call(r, tokens, torch.float32, device, target=t, holes=True),
            )


def _twists(device: str, tokens: int) -> Iterator[Check]:
    """One property at a time of the first router's calls."""

    def plain(dtype: torch.dtype = torch.float32, count: int = tokens, mean: int = 16, rho: bool = True) -> Call:
        return make_call(ROUTERS[0], count, dtype, device, seed=1, mean_field=mean, holes=True, rho=rho)

    def outside() -> Call:
        call = plain()
        return replace(call, field=torch.full_like(call.field, -1))

    def gated(dtype: torch.dtype) -> Call:
        call = ugly_rows(plain(dtype))
        return replace(call, gate=torch.zeros((), device=device))

    yield Check("no token", lambda: plain(count=0), still=True)
    yield Check("one token", lambda: replace(plain(count=1), field=torch.zeros(1, dtype=torch.long, device=device)))
    yield Check("fields of one token", lambda: plain(mean=1))
    yield Check("all tokens outside fields", outside, still=True)
    yield Check("field ids that come back", lambda: _recurring(plain()), runs=False)
    yield Check("in place", plain, in_place=True)
    yield Check("in place, bfloat16", lambda: plain(torch.bfloat16), in_place=True)
    yield Check("rho off", lambda: plain(rho=False))
    yield Check("NaN, infinite and zero rows, pruned experts", lambda: ugly_rows(plain()))
    yield Check("the same in bfloat16", lambda: ugly_rows(plain(torch.bfloat16)))
    yield Check("closed gate on the device", lambda: gated(torch.float32), still=True)
    yield Check("closed gate on the device", lambda: gated(torch.bfloat16), still=True)
    yield Check("closed gate", lambda: replace(ugly_rows(plain()), gate=0.0), still=True)
    yield Check("half open gate on the device", lambda: replace(plain(), gate=torch.full((), 0.5, device=device)))
    yield Check("all numbers on the device", lambda: on_device(plain()))
    yield Check("columns apart and rows padded", lambda: apart(plain()))
    yield Check("storage off by one element", lambda: _unaligned(plain(torch.bfloat16)))
    yield Check("32-bit ids", lambda: _short_ids(plain()))


def on_device(call: Call) -> Call:
    """The same weights and gate as tensors beside the logits, next to each other in memory."""
    names = ("gate", "lambda_turn", "lambda_token")
    values = torch.tensor([float(getattr(call, name)) for name in names], device=call.logits.device)
    return replace(call, **dict(zip(names, values, strict=True)))


def _one_field(device: str, tokens: int) -> Call:
    call = make_call(ROUTERS[0], tokens, torch.bfloat16, device, mean_field=128)
    return replace(call, field=torch.zeros_like(call.field))


def _recurring(call: Call) -> Call:
    return replace(call, field=torch.where(call.field >= 0, call.field % 3, -1))


def ugly_rows(call: Call) -> Call:
    """Rows of NaN, infinity, zero and minus zero, and experts pruned by -inf, each in a few tokens."""
    z, g = call.logits.clone(), call.grad_in.clone()
    g[:, 0] = -0.0
    g[3::17, 1] = float("nan")
    g[4::17, 2] = float("inf")
    g[5::17] = 0.0
    z[6::17, 3] = float("nan")
    z[7::17, 4] = float("inf")
    z[8::17, 5:9] = float("-inf")
    z[9::17] = float("-inf")
    return replace(call, logits=z, grad_in=g)


def apart(call: Call) -> Call:
    """The same numbers with gaps between columns and between rows."""

    def spread_out(values: Tensor) -> Tensor:
        room = values.new_full((values.shape[0], 2 * values.shape[1] + 3), -1)
        room[:, : 2 * values.shape[1] : 2] = values
        return room[:, : 2 * values.shape[1] : 2]

    names = ("logits", "grad_in", "control", "selected")
    return replace(call, **{name: spread_out(getattr(call, name)) for name in names})


def _unaligned(call: Call) -> Call:
    def moved(values: Tensor) -> Tensor:
        room = values.new_empty(values.numel() + 1)
        room[1:] = values.flatten()
        return room[1:].view(values.shape)

    return replace(call, logits=moved(call.logits), grad_in=moved(call.grad_in), control=moved(call.control))


def _short_ids(call: Call) -> Call:
    return replace(call, field=call.field.int(), selected=call.selected.int(), num_pairs=call.num_pairs.int())
