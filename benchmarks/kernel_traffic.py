"""Bytes that the router gradient's kernels read and write, counted access by access under Triton's interpreter.

Run as a process of its own, since Triton decides on its first import whether to interpret: prints JSON.
"""

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

import moe_routing.fused
from benchmarks.gpu_cases import ROUTERS, Call, make_call
from moe_routing.kernels import kernels

SECTOR = 32  # bytes: the smallest piece that memory hands out


class Traffic:
    """What each kernel asks of each tensor: bytes by access, and the sectors that it touches at least once."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.spans = {name: (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for name, t in tensors.items()}
        self.asked: Counter[tuple[str, str]] = Counter()
        self.sectors: dict[tuple[str, str], set[int]] = defaultdict(set)
        self.kernel = ""

    def count(self, addresses: Any, mask: Any, size: int, kind: str) -> None:
        """Add one access of a block."""
        touched = addresses[mask.astype(bool)].ravel()
        if touched.size:
            first = int(touched[0])
            owner = next((name for name, (low, high) in self.spans.items() if low <= first < high), "norms and maxima")
            key = (self.kernel, f"{kind} {owner}")
            self.asked[key] += touched.size * size
            self.sectors[key].update((touched // SECTOR).tolist())

    def table(self) -> dict[str, dict[str, dict[str, int]]]:
        """For each kernel and tensor the bytes asked for and the bytes of the sectors touched."""
        found: dict[str, dict[str, dict[str, int]]] = defaultdict(dict)
        for kernel, what in self.asked:
            sectors = len(self.sectors[kernel, what])
            found[kernel][what] = {"asked": self.asked[kernel, what], "moved": SECTOR * sectors}
        return dict(found)


def count_call(call: Call, block: int = 16) -> dict[str, dict[str, dict[str, int]]]:
    """The traffic of one call."""
    out = torch.empty_like(call.grad_in)
    names = ("logits", "grad_in", "field", "control", "selected")
    traffic = Traffic({name: getattr(call, name) for name in names} | {"out": out})
    with _watched(traffic):
        moe_routing.fused.fused_router_gradient(call.logits, call.grad_in, **call.keywords(), out=out, block=block)
    return traffic.table()


@contextmanager
def _watched(traffic: Traffic) -> Iterator[None]:
    from triton.runtime import interpreter

    built, real, launched = kernels(), interpreter._interpreter, moe_routing.fused.kernels

    def load(addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        traffic.count(addresses, mask, dtype.itemsize, "read")
        return real.load(addresses, mask, other, dtype)

    def store(addresses: Any, values: Any, mask: Any) -> Any:
        traffic.count(addresses, mask, values.dtype.itemsize, "write")
        return real.store(addresses, values, mask)

    def atomic(operation: Any, addresses: Any, values: Any, mask: Any, order: Any) -> Any:
        traffic.count(addresses, mask, values.dtype.itemsize, "atomic")
        return real.atomic_rmw(operation, addresses, values, mask, order)

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: Any) -> Any:
            traffic.kernel = self.name
            return getattr(built, self.name)[grid]

    watched = {name: getattr(real, name) for name in dir(real) if not name.startswith("__")}
    interpreter._interpreter = SimpleNamespace(**watched | {"load": load, "store": store, "atomic_rmw": atomic})
    own = SimpleNamespace(norms=Named("norms"), inject=Named("inject"), interpreted=True)
    moe_routing.fused.kernels = lambda: own
    try:
        yield
    finally:
        interpreter._interpreter, moe_routing.fused.kernels = real, launched


def main() -> int:
    """Count a call of each router in bfloat16 and float32, of as many tokens as the argument says."""
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    found = []
    for router in ROUTERS:
        for dtype in (torch.bfloat16, torch.float32):
            call = make_call(router, tokens, dtype, "cpu")
            once = call.floor_bytes() - tokens * (router.experts * call.grad_in.element_size() + 8 + 8)
            name = {"router": router.name, "dtype": str(dtype).removeprefix("torch."), "tokens": tokens}
            found.append(name | {"once": once, "floor": call.floor_bytes(), "kernels": count_call(call)})
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
