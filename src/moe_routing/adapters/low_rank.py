"""Routers collapsed to a few distinct rows (paper appendix C.1), and given back bit for bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moe_routing.adapters.weights import Hook, ReplaceableRouter, attach, remove, replaceable_routers
from moe_routing.interventions import expert_groups, expert_tiers, low_rank_mix, tiered_topk


@contextmanager
def low_rank_router(model: nn.Module, num_groups: int, *, num_ranks: int = 1) -> Iterator[None]:
    """Collapse every router to ``num_groups`` distinct rows; equal logits are ordered by tier.

    Weight, bias and selection bias are replaced by their group means and given back bit for bit at the end, whatever
    happened to them inside. Logits are equal within a group exactly, not only up to the order of a matrix product.

    Args:
        model: as in :class:`RoutingReplay`.
        num_groups: groups by index, ``G``.
        num_ranks: expert-parallel ranks over which equal experts are spread.

    Raises:
        ValueError: if a number does not fit the experts of the model.
        NotImplementedError: if the selection of a router cannot be replaced, its weight is not its own, or it
            selects within groups, which would keep the tiers from spreading.

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
    tables = [_low_rank_tables(router, num_groups, num_ranks) for router in routers]

    def hook(layer: int, router: ReplaceableRouter) -> Hook:
        first, tiers = tables[layer]

        def collapse(module: Any, args: Any, output: Any) -> Any:
            logits = output[0][:, first.to(output[0].device)]
            bias = getattr(module, "e_score_correction_bias", None)
            scores = logits if bias is None else logits.sigmoid() + bias
            return router.replace(output, logits, tiered_topk(scores, tiers, router.top_k))

        return collapse

    saved = [(tensor, tensor.detach().clone()) for router in routers for tensor in _router_tensors(router)]
    handles: list[RemovableHandle] = []
    try:
        with torch.no_grad():
            for tensor, own in saved:
                tensor.copy_(low_rank_mix(own, num_groups))
        handles = attach(routers, hook)
        yield
    finally:
        remove(handles)
        with torch.no_grad():
            for tensor, own in saved:
                tensor.copy_(own)


def _low_rank_tables(
    router: ReplaceableRouter, num_groups: int, num_ranks: int
) -> tuple[Int[Tensor, " experts"], Int[Tensor, " experts"]]:
    """The first expert of each expert's group, and the tiers."""
    module: Any = router.site.module
    if not isinstance(getattr(module, "weight", None), Tensor):
        raise NotImplementedError(
            f"{type(module).__name__} holds no weight of its own (wrapped by an adapter, or in a submodule), so "
            "low_rank_router cannot mix its rows"
        )
    own_groups = int(getattr(module, "num_group", None) or 1)
    if own_groups > 1 and int(module.topk_group) < own_groups:
        raise NotImplementedError(
            f"{type(module).__name__} selects within {module.topk_group} of {own_groups} groups; low_rank_router "
            "cannot spread equal experts over ranks there"
        )
    group = expert_groups(router.num_experts, num_groups)
    return torch.searchsorted(group, group), expert_tiers(router.num_experts, num_groups, num_ranks)


def _router_tensors(router: ReplaceableRouter) -> list[Tensor]:
    names = ("weight", "bias", "e_score_correction_bias")
    found = [getattr(router.site.module, name, None) for name in names]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]
