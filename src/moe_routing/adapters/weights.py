"""Families whose router returns ``(logits, weights, indices)`` that its block uses as they are, and their formula.

Only there does the router's output decide what the experts receive. Each formula is checked bitwise against its router.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from moe_routing.adapters.routers import RouterSite, find_routers
from moe_routing.adapters.wiring import (
    Attached,
    Replace,
    Role,
    acts_here,
    check_free,
    in_backward,
    in_reentrant_checkpoint,
    wire,
)
from moe_routing.interventions import Scoring, selected_weights


@dataclass(frozen=True)
class WeightRule:
    """How a router turns scores into combining weights.

    Attributes:
        scoring: as in :func:`moe_routing.selected_weights`.
        renormalise: whether the selected scores are divided by their sum; None asks the router's ``norm_topk_prob``.
    """

    scoring: Scoring
    renormalise: bool | None = None

    def weights(
        self, router: Any, logits: Float[Tensor, "tokens experts"], selected: Int[Tensor, "tokens k"]
    ) -> Float[Tensor, "tokens k"]:
        """Weights of ``selected`` by the settings of this very router."""
        renormalise = bool(router.norm_topk_prob) if self.renormalise is None else self.renormalise
        scale = float(getattr(router, "routed_scaling_factor", 1.0))
        return selected_weights(logits, selected, scoring=self.scoring, renormalise=renormalise, scale=scale)


RECOMPUTED_OUTSIDE = (
    "reentrant checkpointing runs the routers again in the backward pass, which did not run inside this context: there "
    "they will route on their own, and the gradient will be that of another selection"
)

_FAMILIES: dict[WeightRule, str] = {
    WeightRule("softmax"): "qwen2_moe qwen3_moe qwen3_next qwen4_exp olmoe flex_olmo mellum qwen3_omni_moe",
    WeightRule("softmax", True): "qwen3_5_moe qwen3_vl_moe mixtral minimax hunyuan_v1_moe",
    WeightRule("softmax", False): "jamba deepseek_v2",
    WeightRule("topk_softmax", True): "gpt_oss granitemoe granitemoeshared aria",
    WeightRule("sigmoid"): (
        "deepseek_v3 deepseek_v32 axk1 dots1 exaone_moe glm4_moe glm4_moe_lite glm4v_moe glm_moe_dsa kimi_linear "
        "mimo_v2_flash nemotron_h solar_open"
    ),
}

WEIGHT_RULES: dict[str, WeightRule] = {name: rule for rule, names in _FAMILIES.items() for name in names.split()}


@dataclass(frozen=True)
class ReplaceableRouter:
    """A router whose weights and indices may be replaced in its output."""

    site: RouterSite
    rule: WeightRule
    num_experts: int
    top_k: int

    def replace(
        self, output: Any, logits: Float[Tensor, "tokens experts"], selected: Int[Tensor, "tokens k"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The router's output with another selection, weighted from ``logits`` in the dtype that it returned."""
        weights = self.rule.weights(self.site.module, logits, selected)
        return logits, weights.to(output[1].dtype), selected


def replaceable_routers(model: nn.Module) -> list[ReplaceableRouter]:
    """Every router below ``model``, in the order of its modules.

    Raises:
        ValueError: if there is none.
        NotImplementedError: if the selection of one of them cannot be replaced; the message names its class.
    """
    return [_replaceable(site) for site in find_routers(model)]


def _replaceable(site: RouterSite) -> ReplaceableRouter:
    router: Any = site.module
    rule = WEIGHT_RULES.get(site.family_name)
    if rule is None:
        raise NotImplementedError(
            f"the selection of {type(router).__name__} ({site.family_name}) cannot be replaced by a hook; known to "
            f"work: {', '.join(sorted(WEIGHT_RULES))}"
        )
    return ReplaceableRouter(site, rule, int(router.num_experts), int(router.top_k))


def stacked(layers: dict[int, Tensor], count: int) -> Int[Tensor, "tokens layers k"]:
    """One selection per layer as the array that rollout engines record, on the device of the first."""
    return torch.stack([layers[layer].to(layers[0].device) for layer in range(count)], dim=1)


@contextmanager
def replaced(
    routers: list[ReplaceableRouter], role: Role, change: Callable[[int, ReplaceableRouter], Replace]
) -> Iterator[None]:
    """Replace the output of every router in the forwards of this thread, before any hook on it runs.

    Warns:
        RuntimeWarning: at the end, if reentrant checkpointing will run a router again after it.

    Raises:
        RuntimeError: if another context replaces the same part of the output; then nothing is attached.
    """
    for router in routers:
        check_free(router.site.module, role)
    thread, waiting = threading.get_ident(), set[int]()

    def within(layer: int, replace: Replace) -> Replace:
        def run(output: Any) -> Any:
            if not acts_here(thread):
                return output
            if in_backward():
                waiting.discard(layer)
            elif in_reentrant_checkpoint():
                waiting.add(layer)
            return replace(output)

        return run

    attached: list[Attached] = []
    try:
        for layer, router in enumerate(routers):
            attached.append(wire(router.site.module).replace(role, within(layer, change(layer, router))))
        yield
    finally:
        remove(attached)
    if len(waiting) == len(routers):  # without gradient an input may want one, but what is computed from it does not
        warnings.warn(RECOMPUTED_OUTSIDE, RuntimeWarning, stacklevel=4)


def remove(attached: list[Attached]) -> None:
    """Take everything off and forget it."""
    for one in attached:
        one.remove()
    attached.clear()
