"""What a router's forward hook does while a forward is recorded, and while a micro-batch is bound."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit._safe import require_shape, select
from moe_routing.adapters.routers import RouterSite
from moe_routing.adapters.stash import Stash
from moe_routing.adapters.tables import RoutingRecord, RoutingTables
from moe_routing.fields import check_ids, check_tokens
from moe_routing.hooks import Report, RouterInjection
from moe_routing.information import field_means
from moe_routing.metrics import entropy_
from moe_routing.router import router_log_probs

Observer = Callable[[int, Int[Tensor, "tokens k"], Float[Tensor, " tokens"], int], None]


@dataclass
class Recording:
    """Keeps the usage of each field at each router.

    Stored by layer, not added: the second run of a checkpointed router puts the same value in the same place.

    Attributes:
        observe: called with the layer, its selection, its entropy and its number of experts whenever a router ran.
    """

    field: Int[Tensor, " tokens"]
    num_fields: int
    usage: dict[int, Tensor] = dataclass_field(default_factory=dict)
    observe: Observer | None = None

    def __post_init__(self) -> None:
        # Once, not at every router: it reads the data.
        check_ids("field", self.field, self.num_fields, f"labels of {self.num_fields} fields")

    def visit(self, layer: int, site: RouterSite, logits: Float[Tensor, "..."], output: Any) -> None:
        """Called with the logits of one router that just ran."""
        flat = logits.detach().reshape(-1, logits.shape[-1])
        check_tokens("field", self.field, flat.shape[0], f"the logits of {site.name} {tuple(logits.shape)}")
        log_probs = router_log_probs(flat, site.activation)
        probs = log_probs.exp()
        self.usage[layer], _ = field_means(probs, self.field.to(flat.device), self.num_fields)
        if self.observe is not None:
            self.observe(layer, site.selected(output, logits), entropy_(probs, log_probs), probs.shape[-1])

    def record(
        self,
        routers: Sequence[RouterSite],
        labels: Bool[Tensor, "fields operations"],
        kind: Int[Tensor, " fields"],
        model_name: str,
    ) -> RoutingRecord:
        """What the whole forward gave.

        Raises:
            RuntimeError: if a router did not run.
            ValueError: if the routers differ in their number of experts, or shapes disagree.
        """
        missing = [site.name for layer, site in enumerate(routers) if layer not in self.usage]
        if missing:
            raise RuntimeError(f"routers of {model_name} that did not run inside record(): {missing}")
        usage = [self.usage[layer] for layer in range(len(routers))]
        experts = sorted({layer.shape[-1] for layer in usage})
        if len(experts) > 1:
            raise ValueError(
                f"the routers of {model_name} differ in their number of experts {experts}; attach to one of its "
                "submodels"
            )
        return RoutingRecord.of(torch.stack([layer.to(usage[0].device) for layer in usage]), self.field, labels, kind)


@dataclass
class Binding:
    """Puts the injection of one micro-batch on the logits of every router that runs.

    Attributes:
        seen: whether a router ran.
        reached: whether the logits of one of them will get a gradient to steer.
        side: by layer, where the injection of a router waits if it must not pass through the router's input.
        frozen: layers that have nothing to steer, since only their weights may move and those are frozen.
    """

    field: Int[Tensor, " tokens"]
    tables: RoutingTables
    settings: Callable[..., RouterInjection]
    report: Report
    seen: bool = False
    reached: bool = False
    side: dict[int, list[Tensor]] = dataclass_field(default_factory=dict)
    frozen: set[int] = dataclass_field(default_factory=set)

    @property
    def acts(self) -> bool:
        """Whether anything is injected; if not, the backward pass is the baseline's."""
        return self.tables.gate != 0

    def visit(self, layer: int, site: RouterSite, logits: Float[Tensor, "..."], output: Any) -> None:
        """Called with the logits of one router that just ran."""
        self.seen = True
        if not logits.requires_grad:  # no gradient will come: evaluation, or a reentrant checkpoint's first pass
            return
        tokens = logits.numel() // logits.shape[-1]
        like = f"the logits of {site.name} {tuple(logits.shape)}"
        check_tokens("field", self.field, tokens, like)
        table = self.tables.control[layer]
        require_shape("control", table, (*table.shape[:1], logits.shape[-1]), like)
        if not self.acts or layer in self.frozen:
            return
        self.reached = True
        side = self.side.pop(layer, None)
        stash = Stash(logits, site.selected(output, logits))
        logits.register_hook(lambda grad: self._steer(layer, site, stash, grad, side))  # type: ignore[no-untyped-call]

    def _steer(
        self, layer: int, site: RouterSite, stash: Stash, grad: Tensor, side: list[Tensor] | None = None
    ) -> Tensor:
        logits, selected = stash.tensors()
        device = logits.device
        injection = self.settings(
            field=self.field.to(device),
            control=self.tables.control[layer].to(device),
            selected=selected,
            num_pairs=self.tables.divisor.to(device),
            gate=self.tables.gate,
            activation=site.activation,
        )
        if isinstance(injection.scale, Tensor):
            injection = replace(injection, scale=injection.scale.to(device))
        steered = injection(logits, grad, self.report)
        if side is None or steered is grad:
            return steered
        side.append(select(torch.isfinite(grad) & (steered != grad), steered - grad))
        return grad
