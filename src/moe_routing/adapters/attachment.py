"""Hooks on the routers of a model, and the phase that they serve."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moe_routing.adapters.calls import Reach, RouterCall, router_calls
from moe_routing.adapters.phases import Binding, Recording
from moe_routing.adapters.routers import RouterSite, find_routers


class Attachment:
    """Tells the current phase of every router that runs; without a phase nothing happens.

    The hooks run outside compiled graphs, since they look at data and hang further hooks on tensors.

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
        calls = router_calls(self.routers, lambda: self._phase, self._source_output, reach, router_dtype)
        self._handles: list[RemovableHandle | RouterCall] = [*calls]
        for layer, site in enumerate(self.routers):
            if site.source is not None:
                self._handles.append(site.source.register_forward_hook(self._source_hook(layer)))
            self._handles.append(site.module.register_forward_hook(self._router_hook(layer, site)))

    @contextmanager
    def during(self, phase: Recording | Binding) -> Iterator[None]:
        """Serve ``phase``; its routers are seen until the end of the context, whatever happens in it.

        Raises:
            RuntimeError: inside another phase, or after :meth:`detach`.
        """
        if not self._handles:
            raise RuntimeError("this RoutingControl is detached")
        if self._phase is not None:
            raise RuntimeError("record() and bind() do not nest")
        self._phase = phase
        try:
            yield
        finally:
            self._leave()

    def detach(self) -> None:
        """Remove every hook; the model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._leave()

    def __str__(self) -> str:
        count = Counter((site.family_name, site.activation) for site in self.routers)
        families = (f"{family} ({activation}): {n} routers" for (family, activation), n in count.items())
        return f"{self.model_name}, {', '.join(families)}"

    def _leave(self) -> None:
        self._phase = None
        self._source_output.clear()

    def _source_hook(self, layer: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            if self._phase is not None and module is self.routers[layer].source:
                self._source_output[layer] = output

        return torch.compiler.disable(keep)  # type: ignore[no-untyped-call]

    def _router_hook(self, layer: int, site: RouterSite) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self._phase is None or module is not site.module:  # a copy of the model copies its hooks
                return
            logits = site.logits(output) if site.source is None else self._source_output.pop(layer)
            self._phase.visit(layer, site, logits, output)

        return torch.compiler.disable(after)  # type: ignore[no-untyped-call]
