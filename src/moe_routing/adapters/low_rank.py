"""Routers collapsed to a few distinct rows (paper appendix C.1), without a change to their weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from moe_routing.adapters.weights import ReplaceableRouter, replaceable_routers, replaced
from moe_routing.adapters.wiring import Replace
from moe_routing.interventions import expert_tiers, low_rank_mix, tiered_topk


@contextmanager
def low_rank_router(model: nn.Module, num_groups: int, *, num_ranks: int = 1) -> Iterator[None]:
    """Collapse every router to ``num_groups`` distinct rows; equal logits are ordered by tier.

    Each row of weight, bias and selection bias is replaced by the mean row of its group. Logits are linear in the
    rows, so the mean is taken of the logits, in float32 or better: those of a group are equal exactly, adapters on the
    router count, the gradient reaches the router's own weights, and these stay as they are.

    Args:
        model: as in :class:`RoutingReplay`.
        num_groups: groups by index, ``G``.
        num_ranks: expert-parallel ranks over which equal experts are spread.

    Raises:
        ValueError: if a number does not fit the experts of the model.
        NotImplementedError: if the selection of a router cannot be replaced, or it selects within groups, which
            would keep the tiers from spreading.
        RuntimeError: if the model is collapsed already.

    Reference: paper appendix C.1; the lexicographic order and the mixing of biases are ours.

    >>> import torch
    >>> from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    >>> model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
    ...     vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=4,
    ...     num_experts=4, num_experts_per_tok=2, moe_intermediate_size=4)).eval()
    >>> ids = torch.arange(6).reshape(1, 6)
    >>> from moe_routing.adapters.replay import record_selection
    >>> with low_rank_router(model, 1, num_ranks=2), record_selection(model) as trace, torch.no_grad():
    ...     _ = model(ids)
    >>> trace.selected[0].tolist()  # the first expert of each rank
    [[0, 2]]
    """
    routers = replaceable_routers(model)
    tiers = [_tiers(router, num_groups, num_ranks) for router in routers]

    def change(layer: int, router: ReplaceableRouter) -> Replace:
        def collapse(output: Any) -> Any:
            logits = scores = _mixed(output[0], num_groups)
            bias: Any = getattr(router.site.module, "e_score_correction_bias", None)
            if bias is not None:
                scores = logits.sigmoid() + low_rank_mix(bias, num_groups)
            return router.replace(output, logits, tiered_topk(scores.detach(), tiers[layer], router.top_k))

        return collapse

    with replaced(routers, "scores", change):
        yield


def _mixed(logits: Float[Tensor, "tokens experts"], num_groups: int) -> Float[Tensor, "tokens experts"]:
    return low_rank_mix(logits.T, num_groups).T.contiguous()


def _tiers(router: ReplaceableRouter, num_groups: int, num_ranks: int) -> Int[Tensor, " experts"]:
    module: Any = router.site.module
    own_groups = int(getattr(module, "num_group", None) or 1)
    if own_groups > 1 and int(module.topk_group) < own_groups:
        raise NotImplementedError(
            f"{type(module).__name__} selects within {module.topk_group} of {own_groups} groups; low_rank_router "
            "cannot spread equal experts over ranks there"
        )
    return expert_tiers(router.num_experts, num_groups, num_ranks)
