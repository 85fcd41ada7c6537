"""Timing helpers of `make bench`: interleaved rounds, ratios pair by pair, bytes kept for backward, the machine.

A shared machine drifts, so nothing here trusts one absolute time. The candidates run in turn within each round, the
order turning from round to round, and a ratio is taken inside its round before the median is taken over the rounds.
With one thread the clock is the processor time of the process, which the machine's other work cannot lengthen much;
with more it is the wall clock, since threads that wait for each other burn processor time too.
"""

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spread:
    """Smallest, median and largest of some figures."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Spread of at least one figure."""
        ordered = sorted(values)
        return cls(ordered[0], statistics.median(ordered), ordered[-1])

    def scaled(self, factor: float) -> "Spread":
        """In another unit."""
        return Spread(self.low * factor, self.median * factor, self.high * factor)


@dataclass(frozen=True)
class Rounds:
    """Seconds of each candidate in each round."""

    seconds: Mapping[str, tuple[float, ...]]

    def time(self, name: str) -> Spread:
        """Spread of a candidate's seconds."""
        return Spread.of(self.seconds[name])

    def ratio(self, name: str, base: str) -> Spread:
        """Spread of seconds of ``name`` over seconds of ``base``, each pair from one round."""
        return Spread.of(a / b for a, b in zip(self.seconds[name], self.seconds[base], strict=True))


def interleave(candidates: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 3) -> Rounds:
    """Time the candidates in turn, A B C, then C B A, after rounds that are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(-warmup, rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                start = clock()
                candidates[name]()
                elapsed = clock() - start
                if turn >= 0:
                    seconds[name].append(elapsed)
    finally:
        if collecting:
            gc.enable()
    return Rounds({name: tuple(values) for name, values in seconds.items()})


def bytes_for_backward(forward: Callable[[], Tensor], arguments: Iterable[Tensor]) -> int:
    """Bytes of the storages that autograd keeps until backward; the caller's own arguments cost nothing extra."""
    given = {argument.untyped_storage().data_ptr() for argument in arguments}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()  # alive while counting, so that no address is used twice
    del result
    return sum(kept.values())


def bandwidth(megabytes: int = 128, rounds: int = 7) -> Spread:
    """Bytes read plus bytes written in a second by a plain copy between two buffers too large for a cache."""
    source = torch.ones(megabytes << 18)
    target = torch.empty_like(source)
    taken = interleave({"copy": lambda: target.copy_(source)}, rounds).seconds["copy"]
    return Spread.of(2 * source.nbytes / seconds for seconds in taken)


def machine() -> str:
    """The kind of processor, the cores this process may use, the threads torch uses and the clock."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = torch.get_num_threads()
    used = "1 torch thread, processor time" if threads == 1 else f"{threads} torch threads, wall clock"
    return f"{_processor()}, {cores} cores, {platform.system()}; {used}"


def versions(packages: Iterable[str]) -> str:
    """Python and the packages that are installed, with their versions."""
    found = [f"Python {platform.python_version()}"]
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} absent")
    return ", ".join(found)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
