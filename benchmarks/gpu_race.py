"""The kernel, eager PyTorch, torch.compile and a copy of the bytes that have to move, at the sizes of real routers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.gpu_cases import ROUTERS, Call, Router, make_call
from benchmarks.gpu_checks import on_device
from benchmarks.gpu_figure import Timing
from benchmarks.gpu_paths import Compiled, eager, kernel, kernel_counting
from benchmarks.gpu_timing import Budget, Clock, hidden_wait, launches, told

DTYPES = (torch.bfloat16, torch.float32)
COUNTING = "kernel, with survival and all numbers on the device"
LAMBDA_TOKEN = 1e4  # one value for all sizes: a new one would make torch.compile compile again
SECONDS = 0.6  # of rounds at each size
BYTES_AT_PEAK = 14 * 4  # of eager PyTorch for each logit, roughly


@dataclass(frozen=True)
class Launches:
    """What one call asks of the processor: launches (None: not counted), seconds until it returns, the first wait."""

    candidate: str
    shape: str
    names: Sequence[str] | None
    host: float
    wait: str


class Race:
    """Times all candidates at all sizes that time and memory allow; what is left out is noted in the budget."""

    def __init__(self, device: str, budget: Budget, with_compile: bool) -> None:
        self.device, self.budget = device, budget
        self.clock = Clock(device)
        self.compiled = Compiled(with_compile, budget)
        self.timings: list[Timing] = []
        self.launches: list[Launches] = []
        self.problems: list[str] = []

    def run(self, sizes: Sequence[int]) -> None:
        """All routers and dtypes at the first size, then at the next; launches are counted at the second one."""
        longest = 0.0
        for tokens in sizes:
            for dtype in DTYPES:
                for router in ROUTERS:
                    name = f"{router.name}, {_short(dtype)}, {tokens} tokens"
                    if self._has_memory(name, tokens * router.experts) and self.budget.allows(name, longest):
                        began, compiling = time.monotonic(), sum(self.compiled.seconds)
                        counting = tokens == sizes[1] and dtype == torch.bfloat16  # launches are the same in float32
                        try:
                            self._at(router, tokens, dtype, counting)
                        except Exception as error:  # the other sizes are still worth timing
                            self.problems.append(f"{name}: {told(error)}")
                        spent = time.monotonic() - began - (sum(self.compiled.seconds) - compiling)
                        longest = max(longest, spent)

    def _at(self, router: Router, tokens: int, dtype: torch.dtype, counting: bool) -> None:
        call = replace(make_call(router, tokens, dtype, self.device), lambda_token=LAMBDA_TOKEN)
        candidates = self._candidates(call)
        seen = {name: candidate() for name, candidate in candidates.items() if name != "copy"}
        for name, result in seen.items():
            # Both may round to either neighbour in bfloat16; the checks against float64 came before.
            tolerance = 2.0**-7 if dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(
                seen["kernel"], result, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
            )
        del seen
        timed = self.clock.rounds(candidates, SECONDS)
        shape = (router.name, router.experts, router.k, router.activation, _short(dtype), tokens)
        for name in candidates:
            figures = (timed.time(name), call.floor_bytes(), timed.ratio(name, "kernel"))
            self.timings.append(Timing(*shape, name, *figures))
        if counting:
            self._count(f"{router.name}, {_short(dtype)}, {tokens} tokens", call, candidates)

    def _candidates(self, call: Call) -> dict[str, Callable[[], Tensor]]:
        source = torch.empty(call.floor_bytes() // 2, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        candidates = {
            "kernel": lambda: kernel(call),
            "copy": lambda: target.copy_(source),
            "eager": lambda: eager(call),
        }
        compiled = self.compiled(call)
        return candidates | ({"torch.compile": lambda: compiled(call)} if compiled else {})

    def _count(self, shape: str, call: Call, candidates: dict[str, Callable[[], Tensor]]) -> None:
        counting = {COUNTING: kernel_counting(on_device(call))}
        for name, candidate in (counting | candidates).items():
            if name != "copy":
                host = self.clock.host_seconds(candidate)
                names = launches(candidate) if self.clock.on_gpu else None
                wait = hidden_wait(candidate) if self.clock.on_gpu else "not looked for"
                self.launches.append(Launches(name, shape, names, host, wait))

    def _has_memory(self, name: str, logits: int) -> bool:
        if not self.clock.on_gpu:
            return True
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if logits * BYTES_AT_PEAK <= free:
            return True
        self.budget.left_out.append(f"{name}: needs {logits * BYTES_AT_PEAK / 2**30:.0f} GiB of memory")
        return False


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
