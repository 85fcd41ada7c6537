"""Fixed consensus routing on Hugging Face models, and what it costs in likelihood (paper table 5)."""

from dataclasses import dataclass

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from credit._safe import require_shape
from moe_routing.adapters.replay import RoutingReplay, record_selection
from moe_routing.adapters.weights import replaceable_routers, stacked
from moe_routing.fields import check_tokens
from moe_routing.interventions import consensus_selection, recorded_selection
from moe_routing.sums import SumCount


def fixed_consensus(
    model: nn.Module, selected: Int[Tensor, "tokens layers k"], field: Int[Tensor, "..."]
) -> RoutingReplay:
    """A context in which every token of a field is sent to the consensus set of that field.

    Args:
        model: as in :class:`RoutingReplay`.
        selected: the default selection of the same tokens, for instance from :func:`record_selection`.
        field: field id per token, in the shape of the batch or flat; outside fields (-1) the live choice stays.

    Raises:
        ValueError: if shapes disagree or an id is not an expert.
        NotImplementedError: if the selection of a router of the model cannot be replaced.

    Reference: paper appendix C.1, table 5; ties of the consensus go to the lower index.

    >>> import torch
    >>> from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    >>> model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
    ...     vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=4,
    ...     num_experts=4, num_experts_per_tok=2, moe_intermediate_size=4)).eval()
    >>> ids = torch.arange(6).reshape(1, 6)
    >>> field = torch.tensor([[-1, -1, 0, 0, 0, 0]])
    >>> default = torch.tensor([[[0, 1]], [[0, 1]], [[1, 2]], [[2, 3]], [[1, 2]], [[0, 2]]])
    >>> with fixed_consensus(model, default, field), record_selection(model) as trace, torch.no_grad():
    ...     _ = model(ids)
    >>> trace.selected[2:, 0].tolist()
    [[2, 1], [2, 1], [2, 1], [2, 1]]
    """
    flat = field.reshape(-1)
    check_tokens("field", flat, selected.shape[0], f"selected of shape {tuple(selected.shape)}")
    routers = replaceable_routers(model)
    require_shape(
        "selected", selected, (flat.shape[0], len(routers), routers[0].top_k), "[tokens, layers, k] of the model"
    )
    layers = {
        layer: consensus_selection(recorded_selection(selected[:, layer], router.num_experts), flat, router.num_experts)
        for layer, router in enumerate(routers)
    }
    return RoutingReplay(model, stacked(layers, len(layers)))


@dataclass(frozen=True)
class ConsensusLikelihood:
    """Log-likelihood of the field tokens under default and under fixed consensus routing, as sums and counts."""

    default: SumCount
    fixed: SumCount


@torch.no_grad()
def consensus_likelihood(
    model: nn.Module,
    input_ids: Int[Tensor, "batch length"],
    field: Int[Tensor, "batch length"],
    *,
    attention_mask: Shaped[Tensor, "batch length"] | None = None,
) -> ConsensusLikelihood:
    """Mean log-likelihood of given trajectories with default and with fixed consensus routing.

    ``mean_t log p(x_t | x_<t)`` over the tokens of all fields but the first of a row; two forwards, no gradient.

    Args:
        model: a causal language model with replaceable routers, in evaluation mode.
        input_ids: the trajectories.
        field: field id per token, -1 outside generated fields.
        attention_mask: False at padding.

    Returns:
        Both likelihoods; ``.default.compute()`` is the mean, and sums add up over batches.

    Raises:
        ValueError: if shapes disagree or the model is in training mode, where the two forwards would differ by noise.
        NotImplementedError: if the selection of a router of the model cannot be replaced.

    Reference: paper appendix C.1, table 5.

    >>> import torch
    >>> from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    >>> model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
    ...     vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=4,
    ...     num_experts=4, num_experts_per_tok=2, moe_intermediate_size=4)).eval()
    >>> ids = torch.arange(6).reshape(1, 6)
    >>> likelihood = consensus_likelihood(model, ids, torch.tensor([[-1, -1, 0, 0, 0, 0]]))
    >>> int(likelihood.fixed.count), bool(likelihood.default.compute() < 0)
    (4, True)
    """
    require_shape("field", field, tuple(input_ids.shape), "input_ids")
    if model.training:
        raise ValueError("model is in training mode: call model.eval() before comparing likelihoods")

    def likelihood() -> SumCount:
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.float().flatten(0, 1), input_ids[:, 1:].flatten(), reduction="none")
        return SumCount.of(-loss, (field[:, 1:] >= 0).flatten())

    with record_selection(model) as trace:
        default = likelihood()
    with fixed_consensus(model, trace.selected, field):
        return ConsensusLikelihood(default, likelihood())
