"""What is known about the routers of each family of Hugging Face models, keyed by the folder of its modelling file.

The library records "router logits" in 72 families, but not always the tensor that the scores are computed from, nor
the selection that was made. This table says how to get both, and why a family is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from moe_routing.router import Activation

Selection = Callable[[nn.Module, nn.Module, Any, Tensor], Tensor]


def recorded_indices(
    router: nn.Module, parent: nn.Module, output: Any, logits: Float[Tensor, "tokens experts"]
) -> Int[Tensor, "tokens k"]:
    """The third entry of the router's output: ``(logits, weights, indices)`` is the common form."""
    indices: Tensor = output[2]
    return indices.reshape(-1, indices.shape[-1])


def highest_logits(
    router: nn.Module, parent: nn.Module, output: Any, logits: Float[Tensor, "tokens experts"]
) -> Int[Tensor, "tokens k"]:
    """The top-k of the logits, for routers that return no indices; k is the router's, or else its block's."""
    k: Any = getattr(router, "top_k", None) or parent.top_k
    return logits.topk(int(k), dim=-1).indices


def one_hot_dispatch(
    router: nn.Module, parent: nn.Module, output: Any, logits: Float[Tensor, "tokens experts"]
) -> Int[Tensor, "tokens 1"]:
    """Switch: a one-hot row per token, all zeros beyond the expert's capacity (then -1, which forms no pair)."""
    dispatch = output[0].reshape(logits.shape)
    return torch.where(dispatch.any(-1), dispatch.argmax(-1), -1)[:, None]


def positive_weights(
    router: nn.Module, parent: nn.Module, output: Any, logits: Float[Tensor, "tokens experts"]
) -> Int[Tensor, "tokens 2"]:
    """NLLB: the two largest combining weights; an expert dropped by capacity or chance becomes -1."""
    weight, index = output[1].reshape(logits.shape).topk(2, dim=-1)
    return torch.where(weight > 0, index, -1)


def biased_softmax(
    router: nn.Module, parent: nn.Module, output: Any, logits: Float[Tensor, "tokens experts"]
) -> Int[Tensor, "tokens k"]:
    """Zaya returns 0 in place of its skip expert, so the selection is made again from the same scores."""
    scores = torch.softmax(logits, dim=-1).float() + router.balancing_biases  # type: ignore[operator]
    return scores.topk(int(router.top_k), dim=-1).indices  # type: ignore[arg-type]


@dataclass(frozen=True)
class RouterFamily:
    """How the routers of one modelling file behave.

    Attributes:
        kind: the router in words, for the table in the docs.
        activation: its score function, or the name of the attribute of router or config that holds it.
        selected: reads the selection off the router's output.
        source: submodule of the router whose output the scores are computed from, where that is not the recorded
            tensor.
        attach: path from the recorded module to the router, where the library records an enclosing block.
        routers: names of the recorded classes to take, where a router is recorded under two classes.
        random: whether the router draws random numbers in training, so that it cannot be run twice.
        narrow: whether its experts fail on routing weights wider than the hidden states.
        limits: where the control of the family ends in an error, or adds nothing.
        refused: why the family cannot be controlled; empty when it can.
    """

    kind: str
    activation: str = "softmax"
    selected: Selection = recorded_indices
    source: str = ""
    attach: str = ""
    routers: tuple[str, ...] = ()
    random: bool = False
    narrow: bool = False
    limits: str = ""
    refused: str = ""

    def activation_of(self, router: nn.Module, config: Any) -> Activation:
        """The score function of this very router.

        Raises:
            NotImplementedError: if the configuration asks for one that has no formula here.
        """
        value: Any = self.activation
        if value not in ("softmax", "sigmoid"):
            value = getattr(router, value, None) or getattr(config, value, None)
        if value == "softmax":
            return "softmax"
        if value == "sigmoid":
            return "sigmoid"
        raise NotImplementedError(
            f"{type(router).__name__} scores its experts with {value!r}; RoutingControl has the derivative of "
            "'softmax' and of 'sigmoid' only"
        )


_FAMILIES: dict[str, str] = {
    "softmax, renormalised over the top-k if the config says so": (
        "qwen2_moe qwen3_moe qwen3_next qwen4_exp olmoe flex_olmo mellum qwen3_omni_moe"
    ),
    "softmax, renormalised over the top-k": "qwen3_5_moe qwen3_vl_moe mixtral minimax hunyuan_v1_moe",
    "softmax, not renormalised": "jamba deepseek_v2 deepseek_ocr2 unlimited_ocr",
    "softmax, selection limited to groups": "mistral4 mistral_large4",
    "softmax, selection bias": "ernie4_5_moe longcat_flash",
    "softmax over the top-k": (
        "granitemoe granitemoe_swa granitemoehybrid granitemoeshared aria openai_privacy_filter"
    ),
    "sigmoid, selection bias, selection limited to groups": (
        "deepseek_v3 deepseek_v32 axk1 axk2 bailing_hybrid beam dots1 dots3_note exaone_moe glm4_moe glm4_moe_lite "
        "glm4v_moe glm5_next glm_moe_dsa hy_v4 kimi_linear mimo_v2_flash nemotron_h solar_open"
    ),
    "sigmoid, selection bias": "minimax_m2 minimax_m3_vl step3p7 hy_v3 afmoe inkling lfm2_moe",
    "sigmoid, selection bias added to the logits": "kolibri1",
    "sigmoid of scaled or soft-capped logits, recorded after that": "laguna muse_spark",
    "sigmoid": "flint",
}

FAMILIES: dict[str, RouterFamily] = {
    name: RouterFamily(kind, "sigmoid" if kind.startswith("sigmoid") else "softmax")
    for kind, names in _FAMILIES.items()
    for name in names.split()
} | {
    "cohere2_moe": RouterFamily("softmax or sigmoid over the top-k, by config", "expert_selection_fn"),
    "inkling2": RouterFamily("score function by config, selection bias", "scoring_func"),
    "deepseek_v4": RouterFamily(
        "score function by config, selection bias; hash layers are not recorded",
        "scoring_func",
        limits="only with `scoring_func` softmax or sigmoid; the default, sqrtsoftplus, is refused",
    ),
    "gpt_oss": RouterFamily("softmax over the top-k", limits="not with fused mxfp4 experts, which cannot be trained"),
    "llama4": RouterFamily("sigmoid of the top-k", "sigmoid", highest_logits, narrow=True),
    "jetmoe": RouterFamily(
        "softmax over the top-k; attention experts too", selected=highest_logits, routers=("JetMoeTopKGating",)
    ),
    "dbrx": RouterFamily("softmax; a bare tensor is recorded", selected=highest_logits, random=True, narrow=True),
    "switch_transformers": RouterFamily("softmax, top-1 with capacity", selected=one_hot_dispatch, random=True),
    "nllb_moe": RouterFamily(
        "softmax, top-2 with capacity",
        selected=positive_weights,
        random=True,
        limits="not with `second_expert_policy` sampling",
    ),
    "phimoe": RouterFamily(
        "softmax over the top-k, with a backward pass of its own (sparsemixer)",
        random=True,
        limits="only tokens whose best experts lie within `router_jitter_noise`: no gradient reaches the logits of "
        "the others, so ρ is 0",
    ),
    "gemma4": RouterFamily("softmax; probabilities are recorded", source="proj"),
    "diffusion_gemma": RouterFamily("softmax; probabilities are recorded", source="proj"),
    "zaya": RouterFamily("softmax, selection bias; a view is recorded", selected=biased_softmax, source="router_mlp"),
    "ernie4_5_vl_moe": RouterFamily(
        "softmax, selection bias; a view is recorded",
        attach="text_moe.gate",
        limits="text only: images split the tokens over two routers",
    ),
    "doge": RouterFamily(
        "softmax over product keys",
        refused="its scores are sums of two keys, so no tensor holds one logit per expert",
    ),
}


def family_name(cls: type) -> str:
    """Folder of the modelling file that defines ``cls``: ``qwen3_moe`` for ``Qwen3MoeTopKRouter``."""
    parts = cls.__module__.split(".")
    return parts[-2] if len(parts) > 1 else parts[-1]
