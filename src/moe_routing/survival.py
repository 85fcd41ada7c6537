"""What survives rounding of the injections of many routers, added up where it lies."""

import threading
from collections.abc import Hashable

import torch
from jaxtyping import Float
from torch import Tensor

from moe_routing.cleared import place_of
from moe_routing.fused import sum_survival, survival_sums
from moe_routing.sums import SumCount


class SurvivalTotal:
    """A report for ``RouterInjection`` that adds up ``injection_survival`` over routers and micro-batches.

    The kernel adds to its memory, one piece for each device and stream, without an operation more for each router.

    >>> total = SurvivalTotal()
    >>> for _ in range(2):
    ...     total(SumCount(torch.tensor(1.0), torch.tensor(4.0)))
    >>> total.collect(), total.collect()
    (SumCount(total=tensor(2.), count=tensor(8.)), None)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[torch.device, SumCount] = {}
        self._sums: dict[Hashable, Tensor] = {}

    def __call__(self, part: SumCount) -> None:
        """Add the sums of one router, on their own device: to read them would wait for it."""
        device = part.total.device
        with self._lock:
            self._parts[device] = part + self._parts[device] if device in self._parts else part

    def sums(self, device: torch.device) -> Float[Tensor, " sums"] | None:
        """Memory for the kernel to add to; None while a CUDA graph is captured, whose replays would write to it later.

        By then :meth:`collect` may have given it back.
        """
        place = place_of(device)
        if place is None:
            return None
        with self._lock:
            if place not in self._sums:
                self._sums[place] = survival_sums(device)
            return self._sums[place]

    def collect(self) -> SumCount | None:
        """Everything since the last call, on the CPU; None if nothing was reported. Waits for the devices."""
        with self._lock:
            parts, sums = [*self._parts.values()], [*self._sums.values()]
            self._parts, self._sums = {}, {}
        parts += map(sum_survival, sums)
        # The memory is held until its sums have arrived: other streams may be given it afterwards.
        parts = [SumCount(part.total.cpu(), part.count.cpu()) for part in parts]
        return sum(parts[1:], parts[0]) if parts else None
