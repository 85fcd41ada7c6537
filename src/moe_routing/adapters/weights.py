"""Families whose router returns ``(logits, weights, indices)`` that its block uses as they are, and their formula.

Only there can a hook on the router replace the selection. The formula of each is checked bitwise against its router.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moe_routing.adapters.routers import RouterSite, find_routers
from moe_routing.interventions import Scoring, selected_weights

Hook = Callable[[nn.Module, Any, Any], Any]


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
    """A router whose weights and indices a forward hook may replace."""

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
    """One selection per layer as the array that rollout engines record."""
    return torch.stack([layers[layer] for layer in range(count)], dim=1)


def attach(
    routers: list[ReplaceableRouter], hook: Callable[[int, ReplaceableRouter], Hook], first: bool = True
) -> list[RemovableHandle]:
    """Put a forward hook on every router, before those of others: they are to see the replaced selection."""
    return [
        router.site.module.register_forward_hook(hook(layer, router), prepend=first)
        for layer, router in enumerate(routers)
    ]


def remove(handles: list[RemovableHandle]) -> None:
    """Remove the hooks and forget them."""
    for handle in handles:
        handle.remove()
    handles.clear()
