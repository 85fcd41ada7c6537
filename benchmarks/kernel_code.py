"""Machine code of the router gradient's kernels, compiled for GPUs that are not there, and what it says of itself.

The launch is the real one, down to the alignment that Triton sees in the arguments: a driver that names the wanted GPU
stands in for the one of the machine, and the kernels' launchers compile and stop there.
"""

import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import moe_routing.fused
from benchmarks.gpu_cases import Call
from moe_routing.kernels import kernels

CAPABILITIES = (80, 90, 100)
ACCESS = re.compile(r"\b(LDG|STG|ATOMG|RED)\.E?([\w.]*)")
BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}


@dataclass(frozen=True)
class Code:
    """One kernel for one GPU in one configuration, by its disassembly.

    Attributes:
        spills: instructions that store to or load from the local memory of a thread.
        loads: loads from global memory by width in bits; likewise ``stores``.
        row_loads: 128-bit loads that it takes to read the rows of the block once; likewise ``row_stores``.
    """

    kernel: str
    capability: int
    rows: int
    warps: int
    registers: int
    stack: int
    spills: int
    shared: int
    loads: dict[int, int]
    stores: dict[int, int]
    row_loads: int
    row_stores: int

    @property
    def wide(self) -> bool:
        """Whether rows are read and written 128 bits at a time, or more."""
        loads = sum(count * (bits // 128) for bits, count in self.loads.items())
        stores = sum(count * (bits // 128) for bits, count in self.stores.items())
        return loads >= self.row_loads and stores >= self.row_stores


def compile_call(
    call: Call, capability: int, number: int | None = None, survival: bool = False, **numbers: Any
) -> list["Compiled"]:
    """Every kernel that a call launches, in all configurations that the autotuner would try, or in one of them.

    ``number`` counts these configurations in a circle; ``numbers`` replace those of the call, the gate for instance.
    """
    built = kernels()
    with _driver(capability):
        launchers = {name: _Launcher(getattr(built, f"tuned_{name}"), number) for name in ("norms", "inject")}
        own = SimpleNamespace(**{f"tuned_{name}": launcher for name, launcher in launchers.items()}, interpreted=False)
        real, moe_routing.fused.kernels = moe_routing.fused.kernels, lambda: own
        try:
            given = call.keywords() | numbers
            moe_routing.fused.fused_router_gradient(call.logits, call.grad_in, **given, survival=survival)
        finally:
            moe_routing.fused.kernels = real
    return [
        Compiled(name, call, capability, config, code)
        for name, launcher in launchers.items()
        for config, code in launcher.compiled
    ]


class _Launcher:
    """Compiles what it is asked to launch."""

    def __init__(self, tuner: Any, number: int | None) -> None:
        self.tuner, self.number = tuner, number
        self.compiled: list[tuple[Any, Any]] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.tuner.nargs = dict(zip(self.tuner.arg_names, arguments))
            for config in self._configurations(constants):
                code = self.tuner.fn.warmup(*arguments, grid=grid, **constants, **config.all_kwargs())
                self.compiled.append((config, code))

        return launch

    def _configurations(self, constants: dict[str, Any]) -> list[Any]:
        tried = self.tuner.prune_configs(constants)
        return tried if self.number is None else [tried[self.number % len(tried)]]


@contextmanager
def _driver(capability: int) -> Iterator[None]:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    # The number of the device also keeps the caches of the targets apart.
    stand_in = SimpleNamespace(
        get_current_device=lambda: capability,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )
    name = "_active" if hasattr(driver, "_active") else "active"
    before = getattr(driver, name)
    driver.set_active(stand_in)
    try:
        yield
    finally:
        setattr(driver, name, before)


@dataclass(frozen=True)
class Compiled:
    """A kernel as Triton hands it over."""

    kernel: str
    call: Call
    capability: int
    config: Any
    code: Any

    def read(self) -> Code:
        """Take the machine code apart."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.code.asm["cubin"])
            file.flush()
            usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
            text = _tool("nvdisasm", "--print-code", file.name)
        numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
        rows, warps = self.config.kwargs["BLOCK_N"], self.config.num_warps
        own = self.call.grad_in.element_size()
        read = own if self.kernel == "norms" else own + self.call.logits.element_size() + 4
        padded = 1 << (self.call.size[1] - 1).bit_length()
        per_thread = rows * padded / (32 * warps * 16)
        return Code(
            kernel=self.kernel,
            capability=self.capability,
            rows=rows,
            warps=warps,
            registers=numbers["REG"],
            stack=numbers["STACK"] + numbers["LOCAL"],
            spills=len(re.findall(r"\b(?:LDL|STL)\b", text)),
            shared=self.code.metadata.shared,
            loads=_widths(text, "LDG"),
            stores=_widths(text, "STG"),
            row_loads=math.ceil(per_thread * read),
            row_stores=0 if self.kernel == "norms" else math.ceil(per_thread * own),
        )


def _widths(text: str, kind: str) -> dict[int, int]:
    found: Counter[int] = Counter()
    for name, suffixes in ACCESS.findall(text):
        if name == kind:
            found[next((BITS[part] for part in suffixes.split(".") if part in BITS), 32)] += 1
    return dict(sorted(found.items(), reverse=True))


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout
