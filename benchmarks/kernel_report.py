"""The router gradient's kernels without a GPU: registers, spills, width of the accesses, and bytes moved.

``python -m benchmarks.kernel_report`` compiles every configuration that the autotuner may choose for sm_80, sm_90 and
sm_100, reads the machine code, counts the traffic under Triton's interpreter, and writes a section of the report.
"""

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_cases import ROUTERS, Call, Router, make_call
from benchmarks.gpu_checks import apart, on_device
from benchmarks.kernel_code import CAPABILITIES, Code, compile_call
from benchmarks.sections import write_section
from benchmarks.timing import versions

TITLE = "Router-gradient kernel: compiled code"
TOKENS = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, count, print and write the section."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel_report", description=__doc__)
    parser.add_argument("--capabilities", type=int, nargs="+", default=CAPABILITIES)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="of the routers' calls")
    parser.add_argument("--number", type=int, help="one configuration of each, by its number; all by default")
    parser.add_argument("--json", action="store_true", help="print the figures of the routers and write nothing")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS.md"))
    chosen = parser.parse_args(arguments)
    if find_spec("triton") is None:
        print(f"triton is not installed: the section '{TITLE}' stays as it is")
        return 0
    calls = dict(_router_calls(chosen.dtypes))
    if chosen.json:
        found = [
            {"call": name, **vars(code), "wide": code.wide}
            for name, call in calls.items()
            for capability in chosen.capabilities
            for code in _codes(call, capability, chosen.number)
        ]
        print(json.dumps(found))
        return 0
    rows = [
        row
        for capability in chosen.capabilities
        for name, call in (calls | (dict(_other_calls()) if capability == 90 else {})).items()
        for row in _rows(name, _codes(call, capability, chosen.number, survival=name.startswith("survival")))
    ]
    section = _section(rows, _traffic())
    write_section(chosen.output, TITLE, section)
    print(f"# {TITLE}\n\n{section}")
    return 0


def _router_calls(dtypes: Sequence[str]) -> Iterator[tuple[str, Call]]:
    for router in ROUTERS:
        for dtype in dtypes:
            yield f"{router.name}, {dtype}", make_call(router, TOKENS, getattr(torch, dtype), "cpu")


def _other_calls() -> Iterator[tuple[str, Call]]:
    """What the tables of the routers do not show."""
    first = make_call(ROUTERS[0], TOKENS, torch.bfloat16, "cpu")
    yield "survival counted, 128 experts, bfloat16", first
    yield "target overlap, 128 experts, bfloat16", replace(first, target="overlap")
    yield "numbers on the device, 128 experts, bfloat16", on_device(first)
    yield "rho off, 128 experts, bfloat16", replace(first, rho=False)
    for experts, k, dtype in ((160, 6, "bfloat16"), (384, 8, "float16"), (1024, 32, "float32")):
        router = Router("", experts, k, "softmax")
        yield f"{experts} experts, k={k}, {dtype}", make_call(router, TOKENS, getattr(torch, dtype), "cpu")
    yield "columns apart, 128 experts, bfloat16: nothing to align", apart(first)


def _codes(call: Call, capability: int, number: int | None, survival: bool = False) -> list[Code]:
    return [compiled.read() for compiled in compile_call(call, capability, number, survival)]


def _rows(name: str, codes: Iterable[Code]) -> Iterator[str]:
    """A row for each kernel, over its configurations."""
    by_kernel: dict[str, list[Code]] = {}
    for code in codes:
        by_kernel.setdefault(code.kernel, []).append(code)
    for kernel, found in by_kernel.items():
        registers = [code.registers for code in found]
        cells = [
            f"sm_{found[0].capability}",
            name,
            kernel,
            str(len(found)),
            f"{min(registers)} to {max(registers)}",
            f"{max(code.spills for code in found)}",
            f"{max(code.stack for code in found)}",
            f"{max(code.shared for code in found)}",
            f"{sum(code.wide for code in found)} of {len(found)}",
            f"{found[0].rows} rows, {found[0].warps} warps: {_accesses(found[0])}",
        ]
        yield f"| {' | '.join(cells)} |"


def _accesses(code: Code) -> str:
    loads, stores = (
        ", ".join(f"{count}×{bits}" for bits, count in found.items()) for found in (code.loads, code.stores)
    )
    return f"{loads} in; {stores} out"


def _traffic() -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-m", "benchmarks.kernel_traffic"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"benchmarks.kernel_traffic failed:\n{done.stderr}")
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _traffic_rows(found: Iterable[dict[str, Any]]) -> str:
    lines = []
    for call in found:
        parts = [part for kernel in call["kernels"].values() for part in kernel.values()]
        moved, asked = (sum(part[what] for part in parts) for what in ("moved", "asked"))
        per_token = [f"{amount / call['tokens']:.0f}" for amount in (asked, moved, call["floor"], call["once"])]
        shares = f"{moved / call['floor']:.4f} | {moved / call['once']:.2f}"
        lines.append(f"| {call['router']}, {call['dtype']} | {' | '.join(per_token)} | {shares} |")
    return "\n".join(lines)


def _section(rows: Sequence[str], traffic: Sequence[dict[str, Any]]) -> str:
    today = datetime.date.today().isoformat()
    return f"""Written by `python -m benchmarks.kernel_report` on {today}, without a GPU.
{versions(("triton", "torch"))}.

Compiled from the arguments of a real launch, in every configuration that the autotuner may choose there; registers and
spills are those of a thread, from the machine code. *Spills* counts instructions on local memory, *stack* its bytes,
*shared* the bytes of a block. *128 bits* counts the configurations that read and write all rows (logits, gradient,
control row, result) with accesses of 128 bits; the last column lists all accesses of one of them, bits by kind: what
is narrower are field ids and experts (64-bit integers), norms, and single entries at the previous token's experts.

| GPU | call | kernel | configurations | registers | spills | stack | shared | 128 bits | accesses of a thread |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}

## Bytes moved

Counted access by access under Triton's interpreter, {traffic[0]["tokens"]} tokens, bytes per token. *Asked for* is what
the instructions name; caches serve what a kernel reads again. *Moved* counts each 32-byte sector once for each kernel
that touches it. The *floor* reads every input once, writes the result once and, since rho needs the maximum of its
field first, reads the gradient and the field ids twice, with a norm written and read in between; *once* is without
rho's second reading.

| call | asked for | moved | floor | once | moved / floor | moved / once |
| --- | --- | --- | --- | --- | --- | --- |
{_traffic_rows(traffic)}
"""


if __name__ == "__main__":
    raise SystemExit(main())
