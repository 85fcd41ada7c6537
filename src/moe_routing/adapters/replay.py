"""Replay of a recorded expert selection on Hugging Face models (R3), and the recording of one."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any

from jaxtyping import Int, Shaped
from torch import Tensor, nn

from credit._safe import require_shape
from moe_routing.adapters.weights import ReplaceableRouter, remove, replaceable_routers, replaced, stacked
from moe_routing.adapters.wiring import Attached, Observe, Replace, acts_here, in_backward, wire
from moe_routing.fields import check_tokens
from moe_routing.interventions import recorded_selection, replayed_selection


class RoutingReplay:
    """Replays a recorded expert selection in the forwards and backwards that run inside it.

    ``S`` is the recorded selection and ``w`` the router's own weights of it under the current logits, so that the
    gradient flows into the router. Whatever else hooks the router (its recorder, a ``RoutingControl``) sees them too.

    Args:
        model: a transformers model with routers, or any wrapper around one.
        selected: recorded experts ``[tokens, layers, k]``, one row per token of the forward (prompt included, rows of
            the batch flattened), one layer per router in the order of the modules. A row of -1 keeps the live choice.
        mask: True at real tokens, in the shape of the batch or flat; ids at padding are ignored.

    Raises:
        ValueError: if shapes disagree, an id is not an expert, or a row holds an expert twice.
        NotImplementedError: if the selection of a router of the model cannot be replaced.
        RuntimeError: on entering, if another replay is active on the model; at the end of the context, if a router
            did not run in it.

    Under gradient checkpointing the backward belongs inside, since it runs the routers again. A compiled model runs
    its routers outside its graphs meanwhile. Forwards in other threads, and copies of the model, are untouched.

    Reference: paper appendix D (R3).

    >>> import torch
    >>> from transformers import Qwen3MoeConfig, Qwen3MoeModel
    >>> model = Qwen3MoeModel(Qwen3MoeConfig(
    ...     vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=4,
    ...     num_experts=4, num_experts_per_tok=2, moe_intermediate_size=4))
    >>> ids = torch.arange(6).reshape(1, 6)
    >>> with RoutingReplay(model, torch.tensor([[[3, 1]]]).repeat(6, 1, 1)), record_selection(model) as trace:
    ...     _ = model(ids)
    >>> trace.selected[0].tolist()
    [[3, 1]]
    """

    def __init__(
        self, model: nn.Module, selected: Int[Tensor, "tokens layers k"], *, mask: Shaped[Tensor, "..."] | None = None
    ) -> None:
        self.routers: list[ReplaceableRouter] = replaceable_routers(model)
        tokens, k = selected.shape[0], self.routers[0].top_k
        require_shape(
            "selected", selected, (tokens, len(self.routers), k), f"{type(model).__name__}, [tokens, layers, k],"
        )
        flat = None if mask is None else mask.reshape(-1)
        self._selected = [
            recorded_selection(selected[:, layer], router.num_experts, flat)
            for layer, router in enumerate(self.routers)
        ]
        self._ran: set[int] = set()
        self._active: AbstractContextManager[None] | None = None

    def __enter__(self) -> "RoutingReplay":
        if self._active is not None:
            raise RuntimeError("this RoutingReplay is already active")
        context = replaced(self.routers, "selection", self._change)
        context.__enter__()
        self._active = context
        self._ran.clear()
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: Any) -> None:
        if self._active is not None:
            context, self._active = self._active, None
            context.__exit__(error, *rest)
        missing = [router.site.name for layer, router in enumerate(self.routers) if layer not in self._ran]
        if missing and error is None:
            raise RuntimeError(f"routers that did not run inside RoutingReplay, so nothing was replayed: {missing}")

    def _change(self, layer: int, router: ReplaceableRouter) -> Replace:
        def replay(output: Any) -> Any:
            logits, _, live = output
            recorded = self._selected[layer].to(live.device)
            check_tokens("selected", recorded, logits.shape[0], f"the forward (logits of {router.site.name})")
            self._ran.add(layer)
            return router.replace(output, logits, replayed_selection(recorded, live))

        return replay


@dataclass
class SelectionTrace:
    """Experts that the routers selected in the last forward, by layer."""

    count: int
    layers: dict[int, Tensor] = dataclass_field(default_factory=dict)

    @property
    def selected(self) -> Int[Tensor, "tokens layers k"]:
        """The recording, in the form that :class:`RoutingReplay` takes.

        Raises:
            RuntimeError: if a router has not run yet.
        """
        if len(self.layers) < self.count:
            raise RuntimeError(f"{self.count - len(self.layers)} of {self.count} routers have not run while recorded")
        return stacked(self.layers, self.count)


@contextmanager
def record_selection(model: nn.Module) -> Iterator[SelectionTrace]:
    """Record the experts that a forward selects, those of a surrounding intervention included.

    Forwards in other threads, and copies of the model, are not recorded; of several forwards the last one is.

    Raises:
        ValueError: if the model has no router.
        NotImplementedError: if the selection of a router of the model cannot be replaced.

    Reference: ours; the form is that of rollout engines.

    >>> import torch
    >>> from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    >>> model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
    ...     vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=4,
    ...     num_experts=4, num_experts_per_tok=2, moe_intermediate_size=4)).eval()
    >>> ids = torch.arange(6).reshape(1, 6)
    >>> with record_selection(model) as trace, torch.no_grad():
    ...     _ = model(ids)
    >>> trace.selected.shape
    torch.Size([6, 1, 2])
    """
    routers = replaceable_routers(model)
    trace, thread = SelectionTrace(len(routers)), threading.get_ident()

    def keeper(layer: int) -> Observe:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if in_backward() or not acts_here(thread):
                return
            if layer in trace.layers:  # the next forward, which must not mix with one that was broken off
                trace.layers.clear()
            trace.layers[layer] = output[2].detach().long()

        return keep

    attached: list[Attached] = []
    try:
        for layer, router in enumerate(routers):
            attached.append(wire(router.site.module).observe(keeper(layer)))
        yield trace
    finally:
        remove(attached)
