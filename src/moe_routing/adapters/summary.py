"""The summary of expert selection, read off the routers of a Hugging Face model while it runs."""

import threading
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moe_routing.adapters.routers import RouterSite, find_routers
from moe_routing.adapters.wiring import Attached, Observe, acts_here, in_backward, wire
from moe_routing.fields import check_ids, check_tokens
from moe_routing.metrics import entropy_
from moe_routing.router import router_log_probs
from moe_routing.selection import FieldSelection
from moe_routing.summary import RoutingSummary, field_owner


class SelectionObserver:
    """Counts what the routers of one forward select, layer by layer, so that no layer's probabilities are kept.

    Args:
        field: field id of each token, flat.
        num_fields: above every id.

    >>> import torch
    >>> observer = SelectionObserver(torch.tensor([0, 0]), 1)
    >>> observer(0, torch.tensor([[0], [1]]), torch.zeros(2), 2)
    >>> observer.selection().counts.tolist()
    [[[1, 1]]]
    """

    def __init__(self, field: Int[Tensor, " tokens"], num_fields: int) -> None:
        self.field = field
        self.num_fields = num_fields
        self.layers: dict[int, FieldSelection] = {}

    def __call__(
        self, layer: int, selected: Int[Tensor, "tokens k"], entropy: Float[Tensor, " tokens"], num_experts: int
    ) -> None:
        """The router of ``layer`` ran; a later run of it replaces this one."""
        field = self.field.to(entropy.device)
        self.layers[layer] = FieldSelection.of(selected.detach().long(), entropy, field, self.num_fields, num_experts)

    def selection(self) -> FieldSelection:
        """All layers that ran, in order."""
        return FieldSelection.stack([self.layers[layer] for layer in sorted(self.layers)])


class SummaryRecorder:
    """Watches the forwards that run inside it; each must be of the same tokens, and the last one counts.

    Args:
        model: a transformers model with routers, or any wrapper around one. Nothing in it changes.
        field: field id of each token of the forward, in its own shape or flat; -1 outside fields.
        labels: operations of each field.
        trajectory: trajectory id of each token, in the shape of ``field``.

    Raises:
        ValueError: if the model has no router, shapes disagree, or the routers differ in experts or k.
        NotImplementedError: if a router of the model is not known.
        RuntimeError: from :attr:`summary`, if a router did not run.

    >>> import torch
    >>> from transformers import Qwen3MoeConfig, Qwen3MoeModel
    >>> model = Qwen3MoeModel(Qwen3MoeConfig(
    ...     vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=4,
    ...     num_experts=4, num_experts_per_tok=2, moe_intermediate_size=4))
    >>> ids = torch.arange(6).reshape(2, 3)
    >>> field, labels = torch.tensor([[-1, 0, 0], [-1, 1, 1]]), torch.tensor([[True], [False]])
    >>> with SummaryRecorder(model, field, labels, torch.arange(2)[:, None].expand(2, 3)) as recorder, torch.no_grad():
    ...     _ = model(ids)
    >>> int(recorder.summary.usage.sum()), int(recorder.summary.shifts.sum())
    (4, 2)
    """

    def __init__(
        self,
        model: nn.Module,
        field: Int[Tensor, "*batch"],
        labels: Bool[Tensor, "fields operations"],
        trajectory: Int[Tensor, "*batch"],
    ) -> None:
        self.routers: list[RouterSite] = find_routers(model)
        self.field = field.detach().reshape(-1)
        self.labels = labels
        self.trajectory = trajectory.detach().reshape(-1)
        check_tokens("trajectory", self.trajectory, self.field.shape[0], f"field of shape {tuple(field.shape)}")
        check_ids("field", self.field, labels.shape[0], f"labels of shape {tuple(labels.shape)}")
        self._observer = SelectionObserver(self.field, labels.shape[0])
        self._source_output: dict[int, Tensor] = {}
        self._attached: list[Attached] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> "SummaryRecorder":
        if self._attached:
            raise RuntimeError("this SummaryRecorder is already active")
        self._thread = threading.get_ident()
        for layer, site in enumerate(self.routers):
            if site.source is not None:
                self._attached.append(wire(site.source).observe(self._source_hook(layer)))
            self._attached.append(wire(site.module).observe(self._router_hook(layer, site)))
        return self

    def __exit__(self, *error: object) -> None:
        for attached in self._attached:
            attached.remove()
        self._attached.clear()
        self._source_output.clear()

    @property
    def summary(self) -> RoutingSummary:
        """What the routers did."""
        missing = [site.name for layer, site in enumerate(self.routers) if layer not in self._observer.layers]
        if missing:
            raise RuntimeError(f"routers that did not run inside SummaryRecorder: {missing}")
        owner = field_owner(self.field, self.trajectory, self.labels.shape[0])
        return RoutingSummary.from_fields(self._observer.selection(), self.labels, owner)

    def _looks(self) -> bool:
        # What runs again in a backward pass was counted when it ran first.
        return acts_here(self._thread) and not in_backward()

    def _source_hook(self, layer: int) -> Observe:
        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            if self._looks():
                self._source_output[layer] = output.detach()

        return keep

    def _router_hook(self, layer: int, site: RouterSite) -> Observe:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if not self._looks():
                return
            logits = site.logits(output) if site.source is None else self._source_output.pop(layer)
            flat = logits.detach().reshape(-1, logits.shape[-1])
            check_tokens("field", self.field, flat.shape[0], f"the logits of {site.name} {tuple(logits.shape)}")
            log_probs = router_log_probs(flat, site.activation)
            entropy = entropy_(log_probs.exp(), log_probs)
            if layer in self._observer.layers:  # the next forward, which must not mix with one that was broken off
                self._observer.layers.clear()
            self._observer(layer, site.selected(output, logits), entropy, log_probs.shape[-1])

        return after
