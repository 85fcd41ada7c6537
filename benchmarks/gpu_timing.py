"""Time on a GPU: events around each call with the cache emptied before it, kernel launches, and hidden waits.

As in :mod:`benchmarks.timing` the candidates take turns within a round and a ratio is taken inside its round. A
device of type ``cpu`` is timed by the clock on the wall, so that the same code runs without a GPU.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.timing import Rounds

Candidates = Mapping[str, Callable[[], object]]
FLUSH_BYTES = 512 << 20  # several times any L2; the time it takes also lets the launches that follow queue up

ROUNDS = (11, 101)


@dataclass
class Budget:
    """Seconds that a run may take, and what had to be left out for it."""

    seconds: float
    began: float = field(default_factory=time.monotonic)
    left_out: list[str] = field(default_factory=list)

    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    def allows(self, what: str, seconds: float) -> bool:
        """Whether ``what``, expected to take so long, may begin; if not, it is noted as left out."""
        if self.seconds - self.spent() >= seconds:
            return True
        self.left_out.append(what)
        return False


def told(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].removesuffix(": ")


class Clock:
    """Seconds that the work of a call takes on the device."""

    def __init__(self, device: str) -> None:
        self.on_gpu = torch.device(device).type == "cuda"
        self.flush = torch.empty(FLUSH_BYTES if self.on_gpu else 0, dtype=torch.uint8, device=device)

    def rounds(self, candidates: Candidates, seconds: float) -> Rounds:
        """Time the candidates in turn, A B C, then C B A, for about so many seconds after one round that warms up."""
        least, most = ROUNDS if self.on_gpu else (2, 2)
        self._round(candidates)
        began = time.monotonic()
        taken = {name: [value] for name, value in self._round(candidates).items()}
        count = min(max(int(seconds / max(time.monotonic() - began, 1e-6)), least), most)
        for turn in range(1, count):
            order = dict(reversed(candidates.items())) if turn % 2 else candidates
            for name, value in self._round(order).items():
                taken[name].append(value)
        return Rounds({name: tuple(values) for name, values in taken.items()})

    def _round(self, candidates: Candidates) -> dict[str, float]:
        return self._round_by_events(candidates) if self.on_gpu else _round_by_wall(candidates)

    def _round_by_events(self, candidates: Candidates) -> dict[str, float]:
        marks = {}
        for name, call in candidates.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.flush.zero_()
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            marks[name] = start.elapsed_time(end) / 1e3
        return marks

    def host_seconds(self, call: Callable[[], object]) -> float:
        """Seconds of the processor's time until a call returns, its work still queued; the median of three tries.

        Few calls, so that the queue of the GPU, about a thousand launches, never fills up.
        """
        tries, calls = [], 20 if self.on_gpu else 1
        for _ in range(3 if self.on_gpu else 1):
            self.wait()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            tries.append((time.perf_counter() - began) / calls)
            self.wait()
        return statistics.median(tries)

    def wait(self) -> None:
        """Let the device finish."""
        if self.on_gpu:
            torch.cuda.synchronize()


def _round_by_wall(candidates: Candidates) -> dict[str, float]:
    marks = {}
    for name, call in candidates.items():
        began = time.perf_counter()
        call()
        marks[name] = time.perf_counter() - began
    return marks


def launches(call: Callable[[], object]) -> list[str] | None:
    """Names of the kernels, copies and fills that a call puts on the GPU, in order; the call must be warmed up.

    Those of the call of middle length among three: the first use of the profiler may lose events while it starts, and
    one call in hundreds clears memory for the others. None where the profiler is not allowed to see the GPU: it then
    reports no event, and raises nothing.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    tries: list[list[str]] = []
    for _ in range(3):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
        tries.append(
            [
                event.name
                for event in profiler.events() or ()
                if event.device_type == DeviceType.CUDA
                and event.name != "Context Sync"
                and not getattr(event, "is_user_annotation", False)
            ]
        )
    return sorted(tries, key=len)[1] or None


def hidden_wait(call: Callable[[], object]) -> str:
    """The first operation of a call that makes the processor wait for the GPU, or nothing."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""
