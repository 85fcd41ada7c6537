"""Routing control on Hugging Face mixture-of-experts models, without a change to their code.

The order of a training step: record the old-policy forwards, build the tables once, then bind each micro-batch while
its forward and backward run. A forward outside ``record`` and ``bind`` (generation, evaluation) is untouched.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moe_routing.adapters.calls import Reach, RouterCall, router_calls
from moe_routing.adapters.phases import Binding, Recording
from moe_routing.adapters.ranks import batch_groups
from moe_routing.adapters.routers import RouterSite, find_routers
from moe_routing.adapters.tables import RoutingRecord, RoutingTables
from moe_routing.gate import EntropyGate
from moe_routing.hooks import RouterInjection
from moe_routing.objectives import Target
from moe_routing.sums import SumCount


class RoutingControl:
    """Steers the routers of ``model`` through the gradient at their logits; forward values stay as they are.

    Args:
        model: a transformers model with routers, or any wrapper around one (PEFT, DDP, FSDP).
        lambda_turn, lambda_token: weights of the turn-level and the token-level term.
        gap_threshold, target, rho: as in :func:`moe_routing.router_gradient`.
        gate: the entropy gate, or None to act at any entropy.
        reach: ``"backbone"`` (the paper) lets the change flow on through the router's input; ``"router"`` changes
            the gradient of the router's own weights only. The router then runs twice.
        router_dtype: computes the logits in at least this dtype inside ``record`` and ``bind``; float32 keeps an
            injection whole that bfloat16 rounds away, and moves the forward values by the rounding it spares.

    Raises:
        ValueError: if the model has no router.
        NotImplementedError: if one of its routers cannot be steered, or not with these options.

    Reference: paper sections 3.1 to 3.3 and algorithm 1.

    >>> from transformers import Qwen3MoeConfig, Qwen3MoeModel
    >>> model = Qwen3MoeModel(Qwen3MoeConfig(
    ...     vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=4,
    ...     num_experts=4, num_experts_per_tok=2, moe_intermediate_size=4))
    >>> ids, field = torch.arange(16).reshape(8, 2), torch.arange(8)[:, None].expand(8, 2)
    >>> labels, kind = torch.tensor([[True], [False]]).repeat(4, 1), torch.zeros(8, dtype=torch.long)
    >>> with RoutingControl(model) as control:
    ...     with torch.no_grad(), control.record(field, labels, kind):
    ...         _ = model(ids)
    ...     tables = control.tables()
    ...     with control.bind(field, tables):
    ...         model(ids).last_hidden_state.sum().backward()
    >>> tables.control.shape, int(tables.num_pairs)
    (torch.Size([1, 8, 4]), 8)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lambda_turn: float = 2e-6,
        lambda_token: float = 2e-7,
        gap_threshold: float = 0.5,
        target: Target = "previous_topk",
        rho: bool = True,
        gate: EntropyGate | None = None,
        reach: Reach = "backbone",
        router_dtype: torch.dtype | None = None,
    ) -> None:
        self.routers: list[RouterSite] = find_routers(model)
        self.lambda_turn = lambda_turn
        self.lambda_token = lambda_token
        self.gap_threshold = gap_threshold
        self.target: Target = target
        self.rho = rho
        self.gate = gate
        self._model_name = type(model).__name__
        self.batch_groups = batch_groups(model)
        self._phase: Recording | Binding | None = None
        self._record: RoutingRecord | None = None
        self._survived: dict[torch.device, SumCount] = {}
        self._source_output: dict[int, Tensor] = {}
        calls = router_calls(self.routers, lambda: self._phase, self._source_output, reach, router_dtype)
        self._handles: list[RemovableHandle | RouterCall] = [*calls]
        for layer, site in enumerate(self.routers):
            if site.source is not None:
                self._handles.append(site.source.register_forward_hook(self._source_hook(layer)))
            self._handles.append(site.module.register_forward_hook(self._router_hook(layer, site)))

    @contextmanager
    def record(
        self,
        field: Int[Tensor, "..."],
        labels: Bool[Tensor, "fields operations"],
        kind: Int[Tensor, " fields"],
    ) -> Iterator[Recording]:
        """Gather the statistics of one forward under the old policy; yields them as they grow.

        Args:
            field: field id of each token of the forward, in its own shape or flat; -1 outside fields. Ids number
                the fields of this rank's whole batch, and a field lies in one micro-batch.
            labels: operations of each of these fields.
            kind: :class:`moe_routing.FieldKind` of each of them.

        Raises:
            RuntimeError: inside another ``record`` or ``bind``, or if a router did not run.
            ValueError: if shapes disagree or change between micro-batches.
        """
        phase = Recording(field.detach().reshape(-1), labels.shape[0])
        self._enter(phase)
        try:
            yield phase
        finally:
            self._leave()
        missing = [site.name for layer, site in enumerate(self.routers) if layer not in phase.usage]
        if missing:
            raise RuntimeError(f"routers of {self._model_name} that did not run inside record(): {missing}")
        usage = [phase.usage[layer] for layer in range(len(self.routers))]
        if len({layer.shape[-1] for layer in usage}) > 1:
            raise ValueError(
                f"the routers of {self._model_name} differ in their number of experts "
                f"{sorted({layer.shape[-1] for layer in usage})}; attach to one of its submodels"
            )
        part = RoutingRecord.of(torch.stack(usage), phase.field, labels, kind)
        self._record = part if self._record is None else self._record + part

    def tables(self, entropy: float | Tensor | None = None, process_group: Any = None) -> RoutingTables:
        """Close the recorded batch: add up over ranks and build the control table of every layer.

        Args:
            entropy: mean policy entropy over the generated tokens of all ranks; required with a gate.
            process_group: ranks to add up over; by default all that hold batches of their own, which leaves out
                the ranks that share one under tensor or expert parallelism. Every rank must call this.

        Raises:
            RuntimeError: if nothing was recorded.
            ValueError: if a gate is set and the entropy is missing.
        """
        if self._record is None:
            raise RuntimeError("nothing recorded: run the old-policy forward inside record() before tables()")
        if self.gate is not None and entropy is None:
            raise ValueError("entropy is required, because this RoutingControl has an entropy gate")
        record, self._record = self._record, None
        opening = 1.0 if self.gate is None or entropy is None else self.gate(entropy)
        for group in self.batch_groups if process_group is None else [process_group]:
            record = record.reduce(group)
        return record.tables(opening)

    @contextmanager
    def bind(
        self, field: Int[Tensor, "..."], tables: RoutingTables, *, scale: float | Float[Tensor, ""] = 1.0
    ) -> Iterator[None]:
        """Steer the forward and backward of one micro-batch, both of which belong inside.

        Under gradient checkpointing the backward runs the forward again, so the binding must last that long.

        Args:
            field: as in :meth:`record`; ids are rows of the tables.
            tables: from :meth:`tables`.
            scale: factor between the gradient at hand and that of the plain loss: a GradScaler's scale, times the
                number of ranks where gradients are averaged rather than added.

        Raises:
            RuntimeError: inside another ``record`` or ``bind``, or if no router ran.
            ValueError: if the tables were made for another number of layers, or the forward has another number of
                tokens than ``field``.
        """
        if tables.control.shape[0] != len(self.routers):
            raise ValueError(
                f"tables.control of shape {tuple(tables.control.shape)} holds {tables.control.shape[0]} layers, but "
                f"{self._model_name} has {len(self.routers)} routers"
            )
        settings = partial(
            RouterInjection,
            lambda_turn=self.lambda_turn,
            lambda_token=self.lambda_token,
            gap_threshold=self.gap_threshold,
            target=self.target,
            rho=self.rho,
            scale=scale,
        )
        phase = Binding(field.detach().reshape(-1), tables, settings, self._count_survival)
        self._enter(phase)
        try:
            yield
        finally:
            self._leave()
        if not phase.seen:
            raise RuntimeError(
                f"no router of {self._model_name} ran inside bind(): the forward bypasses its router modules "
                "(as fused mxfp4 experts do) or lies outside"
            )

    def metrics(self) -> dict[str, float]:
        """Share of the injected mass that survived rounding since the last call, and the gate's state."""
        gate = {} if self.gate is None else self.gate.metrics()
        parts = [SumCount(part.total.cpu(), part.count.cpu()) for part in self._survived.values()]
        survived = {"survived": float(sum(parts[1:], parts[0]).compute())} if parts else {}
        self._survived.clear()
        return {f"routing/{key}": value for key, value in (gate | survived).items()}

    def detach(self) -> None:
        """Remove every hook; the model is as it was. Calling it twice does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._leave()

    def __enter__(self) -> "RoutingControl":
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        count = Counter((site.family_name, site.activation) for site in self.routers)
        families = ", ".join(f"{family} ({activation}): {n} routers" for (family, activation), n in count.items())
        return f"RoutingControl({self._model_name}, {families}, router_gradient in PyTorch)"

    def _enter(self, phase: Recording | Binding) -> None:
        if not self._handles:
            raise RuntimeError("this RoutingControl is detached")
        if self._phase is not None:
            raise RuntimeError("record() and bind() do not nest")
        self._phase = phase

    def _leave(self) -> None:
        self._phase = None
        self._source_output.clear()

    def _source_hook(self, layer: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            if self._phase is not None:
                self._source_output[layer] = output

        return keep

    def _router_hook(self, layer: int, site: RouterSite) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self._phase is None:
                return
            logits = site.logits(output) if site.source is None else self._source_output.pop(layer)
            self._phase.visit(layer, site, logits, output)

        return after

    def _count_survival(self, part: SumCount) -> None:
        # Added up where they are: to read them would make every router of every backward wait for its device.
        device = part.total.device
        self._survived[device] = part + self._survived[device] if device in self._survived else part
