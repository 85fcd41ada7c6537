"""Routing control on Hugging Face mixture-of-experts models, without a change to their code.

The order of a training step: record the old-policy forwards, build the tables once, then bind each micro-batch while
its forward and backward run. A forward outside ``record`` and ``bind`` (generation, evaluation) is untouched.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moe_routing.adapters.attachment import Attachment
from moe_routing.adapters.calls import Reach
from moe_routing.adapters.phases import Binding, Recording
from moe_routing.adapters.ranks import batch_groups
from moe_routing.adapters.routers import RouterSite
from moe_routing.adapters.tables import Normalizer, RoutingRecord, RoutingTables
from moe_routing.backend import kernel_choice
from moe_routing.fields import check_ids
from moe_routing.gate import EntropyGate
from moe_routing.hooks import RouterInjection
from moe_routing.objectives import Target, check_target
from moe_routing.survival import SurvivalTotal
from moe_routing.turns import MIN_TURNS, Reduction, check_reduction

IMPLEMENTATIONS = {"torch": "PyTorch", "triton": "Triton"}
UNREACHED = (
    "bind() steers nothing: no gradient will reach the logits of any router. What lies before them is frozen (with "
    "reach='router' their weights), or the forward ran without gradient, as under reentrant checkpointing with the "
    "backward outside bind()"
)


class RoutingControl:
    """Steers the routers of ``model`` through the gradient at their logits; forward values stay as they are.

    Args:
        model: a transformers model with routers, or any wrapper around one (PEFT, DDP, FSDP).
        lambda_turn, lambda_token: weights of the turn-level and the token-level term; tensors may change between steps.
        gap_threshold, target, rho: as in :func:`moe_routing.router_gradient`.
        normalizer: what the token losses are averaged over: within-field ``"pairs"``, or ``"turns"``, that is fields.
        min_turns, reduction: as in :func:`moe_routing.turn_control`.
        gate: the entropy gate; ``"paper"`` is ``EntropyGate(0.0, 0.2)``, and so :meth:`tables` asks for the entropy
            of the batch. None acts at any entropy, where the paper saw training collapse.
        reach: ``"backbone"`` (the paper) lets the change flow on through the router's input; ``"router"`` changes
            the gradient of the router's own weights only. The router then runs twice.
        router_dtype: computes the logits in at least this dtype inside ``record`` and ``bind``; float32 keeps an
            injection whole that bfloat16 rounds away, and moves the forward values by the rounding it spares.

    A compiled model (``torch.compile``) breaks its graph at each router while this is attached. Ranks that work on one
    batch together, as under tensor and expert parallelism, count it once.

    Raises:
        ValueError: if the model has no router, or an option is unknown.
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
    ...     tables = control.tables(entropy=0.1)
    ...     with control.bind(field, tables):
    ...         model(ids).last_hidden_state.sum().backward()
    >>> tables.control.shape, int(tables.num_pairs)
    (torch.Size([1, 8, 4]), 8)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lambda_turn: float | Float[Tensor, ""] = 2e-6,
        lambda_token: float | Float[Tensor, ""] = 2e-7,
        gap_threshold: float = 0.5,
        target: Target = "previous_topk",
        rho: bool = True,
        normalizer: Normalizer = "pairs",
        min_turns: int = MIN_TURNS,
        reduction: Reduction = "sum",
        gate: EntropyGate | Literal["paper"] | None = "paper",
        reach: Reach = "backbone",
        router_dtype: torch.dtype | None = None,
    ) -> None:
        check_target(target)
        check_reduction(reduction)
        if normalizer not in ("pairs", "turns"):
            raise ValueError(f"normalizer must be 'pairs' or 'turns', got {normalizer!r}")
        if isinstance(gate, str) and gate != "paper":
            raise ValueError(f"gate must be an EntropyGate, 'paper' or None, got {gate!r}")
        self._attachment = Attachment(model, reach, router_dtype)
        self.routers: list[RouterSite] = self._attachment.routers
        self.lambda_turn = lambda_turn
        self.lambda_token = lambda_token
        self.gap_threshold = gap_threshold
        self.target: Target = target
        self.rho = rho
        self.normalizer: Normalizer = normalizer
        self.min_turns = min_turns
        self.reduction: Reduction = reduction
        self.gate = EntropyGate() if gate == "paper" else gate
        self.batch_groups = batch_groups(model)
        self._record: RoutingRecord | None = None
        self._survival = SurvivalTotal()

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
            ValueError: if shapes disagree or labels change between micro-batches, or a field is recorded twice.
        """
        phase = Recording(field.detach().reshape(-1), labels.shape[0])
        with self._attachment.during(phase):
            yield phase
        part = phase.record(self.routers, labels, kind, self._attachment.model_name)
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
            raise ValueError(
                "entropy is required, because this RoutingControl has an entropy gate; gate=None acts at any entropy"
            )
        record, self._record = self._record, None
        opening = 1.0 if self.gate is None or entropy is None else self.gate(entropy)
        for group in self.batch_groups if process_group is None else [process_group]:
            record = record.reduce(group)
        return record.tables(opening, normalizer=self.normalizer, min_turns=self.min_turns, reduction=self.reduction)

    def discard(self) -> None:
        """Drop what was recorded since the last tables: the batch was given up, after an error for instance."""
        self._record = None

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

        Warns:
            RuntimeWarning: if no gradient will reach the logits of any router, so that nothing is steered.

        Raises:
            RuntimeError: inside another ``record`` or ``bind``, or if no router ran.
            ValueError: if the tables were made for another number of layers, fields or experts, or the forward has
                another number of tokens than ``field``.
        """
        if tables.control.shape[0] != len(self.routers):
            raise ValueError(
                f"tables.control of shape {tuple(tables.control.shape)} holds {tables.control.shape[0]} layers, but "
                f"{self._attachment.model_name} has {len(self.routers)} routers"
            )
        check_ids("field", field, tables.control.shape[1], f"tables.control of shape {tuple(tables.control.shape)}")
        settings = partial(
            RouterInjection,
            lambda_turn=self.lambda_turn,
            lambda_token=self.lambda_token,
            gap_threshold=self.gap_threshold,
            target=self.target,
            rho=self.rho,
            scale=scale,
        )
        phase = Binding(field.detach().reshape(-1), tables, settings, self._survival)
        with self._attachment.during(phase):
            yield
        if not phase.seen:
            raise RuntimeError(
                f"no router of {self._attachment.model_name} ran inside bind(): the forward bypasses its router "
                "modules (as fused mxfp4 experts do), was compiled without them, or lies outside"
            )
        if phase.acts and not phase.reached:
            warnings.warn(UNREACHED, RuntimeWarning, stacklevel=3)

    def metrics(self) -> dict[str, float]:
        """The gate's state, and of what was injected since the last call the share that survived rounding.

        Nothing injected, no share: 0 would read as if all of it had been lost.
        """
        gate = {} if self.gate is None else self.gate.metrics()
        whole = self._survival.collect()
        survived = {"survived": float(whole.compute())} if whole is not None and whole.count > 0 else {}
        return {f"routing/{key}": value for key, value in (gate | survived).items()}

    def detach(self) -> None:
        """Remove every hook; the model is as it was. Calling it twice does nothing."""
        self._attachment.detach()

    def __enter__(self) -> "RoutingControl":
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        device = next(self.routers[0].module.parameters()).device
        return f"RoutingControl({self._attachment}, router_gradient in {IMPLEMENTATIONS[kernel_choice(device)]})"
