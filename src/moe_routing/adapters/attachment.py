"""Hooks on the routers of a model, and the phase that they serve."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moe_routing.adapters.calls import Reach, router_calls
from moe_routing.adapters.phases import Binding, Recording
from moe_routing.adapters.routers import RouterSite, find_routers
from moe_routing.adapters.wiring import Attached, Observe, acts_here, wire


class Attachment:
    """Tells the current phase of every router that runs; without a phase nothing happens.

    A phase concerns the forwards of the thread that entered it, not those that another runs meanwhile.

    Args:
        model, reach, router_dtype: as in :class:`moe_routing.adapters.transformers.RoutingControl`.

    Raises:
        ValueError, NotImplementedError: as there.
    """

    def __init__(self, model: nn.Module, reach: Reach, router_dtype: torch.dtype | None) -> None:
        self.routers: list[RouterSite] = find_routers(model)
        self.model_name = type(model).__name__
        self._phase: Recording | Binding | None = None
        self._source_output: dict[int, Tensor] = {}
        self._thread = threading.get_ident()
        calls = router_calls(self.routers, self._current, self._source_output, reach, router_dtype)
        self._attached: list[Attached] = []
        for layer, site in enumerate(self.routers):
            if site.source is not None:
                self._attached.append(wire(site.source).observe(self._source_hook(layer)))
            wiring = wire(site.module)
            self._attached += [wiring.surround(calls[layer]), wiring.observe(self._router_hook(layer, site))]

    @contextmanager
    def during(self, phase: Recording | Binding) -> Iterator[None]:
        """Serve ``phase``; its routers are seen until the end of the context, whatever happens in it.

        Raises:
            RuntimeError: inside another phase, or after :meth:`detach`.
        """
        if not self._attached:
            raise RuntimeError("this RoutingControl is detached")
        if self._phase is not None:
            raise RuntimeError("record() and bind() do not nest")
        self._phase, self._thread = phase, threading.get_ident()
        try:
            yield
        finally:
            self._leave()

    def detach(self) -> None:
        """Remove every hook; the model is as it was."""
        for attached in self._attached:
            attached.remove()
        self._attached.clear()
        self._leave()

    def __str__(self) -> str:
        count = Counter((site.family_name, site.activation) for site in self.routers)
        families = (f"{family} ({activation}): {n} routers" for (family, activation), n in count.items())
        return f"{self.model_name}, {', '.join(families)}"

    def _current(self) -> Recording | Binding | None:
        return self._phase if self._phase is not None and acts_here(self._thread) else None

    def _leave(self) -> None:
        self._phase = None
        self._source_output.clear()

    def _source_hook(self, layer: int) -> Observe:
        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            if self._current() is not None:
                self._source_output[layer] = output

        return keep

    def _router_hook(self, layer: int, site: RouterSite) -> Observe:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            phase = self._current()
            if phase is not None:
                logits = site.logits(output) if site.source is None else self._source_output.pop(layer)
                phase.visit(layer, site, logits, output)

        return after
