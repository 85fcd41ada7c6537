"""Load balancing and router z-loss: the label-free regularisers of MoE training, over all tokens but padding."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from credit._safe import as_mask, compute_dtype, on_processor, require_shape, safe_divide, select, statistics_dtype
from moe_routing.blocks import select_rows
from moe_routing.fields import check_selection, recorded_rows
from moe_routing.partition import log_partition
from moe_routing.router import usable_rows
from moe_routing.sums import SumCount, all_reduce_sums


@dataclass(frozen=True)
class LoadBalance:
    """Sums of the load-balancing loss; add micro-batches, reduce over ranks, then take :meth:`loss`.

    Attributes:
        counts: tokens that selected each expert, per layer.
        prob_sum: summed router probabilities, differentiable.
        tokens: tokens in the sums, per layer.
        k: experts selected per token.
    """

    counts: Float[Tensor, "*layers experts"]
    prob_sum: Float[Tensor, "*layers experts"]
    tokens: Float[Tensor, "*layers"]
    k: int

    @classmethod
    def from_probs(
        cls,
        probs: Float[Tensor, "*layers tokens experts"],
        selected: Int[Tensor, "*layers tokens k"],
        mask: Shaped[Tensor, " tokens"],
    ) -> "LoadBalance":
        """Add up the tokens under ``mask``; rows with a negative expert or non-finite probabilities are left out.

        Raises:
            ValueError: if shapes disagree, ``k`` exceeds the number of experts, or an expert does not exist.
        """
        like = f"probs of shape {tuple(probs.shape)}"
        require_shape("selected", selected, (*probs.shape[:-1], selected.shape[-1]), like)
        require_shape("mask", mask, (probs.shape[-2],), like)
        check_selection(selected, probs.shape[-1], like)
        dtype = statistics_dtype(probs)
        # A sum of probabilities is finite just where all of them are.
        counted = as_mask(mask) & recorded_rows(selected) & torch.isfinite(probs.detach().sum(-1))
        hits = counted[..., None].to(dtype).expand(selected.shape).flatten(-2)
        empty = probs.new_zeros((*probs.shape[:-2], probs.shape[-1]), dtype=dtype)
        counts = empty.scatter_add(-1, selected.clamp(min=0).long().flatten(-2), hits)
        prob_sum = select_rows(counted, probs.to(compute_dtype(probs))).sum(-2, dtype=dtype)
        return cls(counts, prob_sum, counted.sum(-1).to(dtype), selected.shape[-1])

    def __add__(self, other: "LoadBalance") -> "LoadBalance":
        if self.k != other.k or self.counts.shape != other.counts.shape:
            raise ValueError(
                f"sums of shape {tuple(other.counts.shape)} with k={other.k} "
                f"do not add to {tuple(self.counts.shape)} with k={self.k}"
            )
        counts, prob_sum = self.counts + other.counts, self.prob_sum + other.prob_sum
        return LoadBalance(counts, prob_sum, self.tokens + other.tokens, self.k)

    def reduce(self, process_group: Any = None) -> "LoadBalance":
        """Add up over ranks. The gradient stays with each rank's own tokens: *add* gradients, do not average."""
        counts, prob_sum, tokens = all_reduce_sums([self.counts, self.prob_sum, self.tokens], process_group)
        # Straight through: the value is that of all ranks, the derivative that of the local sum.
        return LoadBalance(counts, self.prob_sum + (prob_sum - self.prob_sum).detach(), tokens, self.k)

    def loss(self) -> Float[Tensor, "*layers"]:
        """``(M/k) sum_e f_e p_e`` with ``f`` detached; 0 with zero gradient without tokens."""
        frequency = safe_divide(self.counts.detach(), self.tokens[..., None])
        mean_prob = safe_divide(self.prob_sum, self.tokens[..., None])
        return (frequency * mean_prob).sum(-1) * (self.counts.shape[-1] / max(self.k, 1))


def load_balancing_loss(
    probs: Float[Tensor, "*layers tokens experts"],
    selected: Int[Tensor, "*layers tokens k"],
    mask: Shaped[Tensor, " tokens"],
) -> Float[Tensor, "*layers"]:
    """Load-balancing loss of each layer, never pooled over layers before the product.

    ``(M/k) sum_e f_e p_e``: ``f_e`` the share of tokens that selected ``e``, detached, and ``p_e`` the mean
    probability of ``e``. It is 1 at uniform load.

    Args:
        probs: the router's own probabilities (its sigmoid or softmax, see ``router_probs``).
        selected: experts selected per token.
        mask: router input tokens that count: all but padding, prompts and tool results included.

    Returns:
        One value per layer; 0 with zero gradient when no token counts. :class:`LoadBalance` holds the sums.

    Raises:
        ValueError: if shapes disagree, ``k`` exceeds the number of experts, or an expert does not exist.

    Reference: paper appendix B.5 (Megatron's form); the factor ``1/k`` is ours.

    >>> probs = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    >>> load_balancing_loss(probs, torch.tensor([[0], [0]]), torch.tensor([True, True]))
    tensor(2.)
    """
    loss = LoadBalance.from_probs(probs, selected, mask).loss()
    return loss.to(compute_dtype(probs))


def router_z_loss(
    logits: Float[Tensor, "*layers tokens experts"], mask: Shaped[Tensor, " tokens"]
) -> Float[Tensor, "*layers"]:
    """Mean squared log-partition of each layer, ``mean_t (log sum_e exp z_t(e))^2``, which keeps logits small.

    Args:
        logits: raw router logits.
        mask: tokens that count; rows with NaN or +inf logits are left out.

    Returns:
        One value per layer, 0 with zero gradient when no token counts.

    Raises:
        ValueError: if the two disagree on the number of tokens.

    Reference: ST-MoE (Zoph et al., 2022), eq. 5.

    >>> router_z_loss(torch.zeros(3, 2), torch.tensor([True, True, False]))
    tensor(0.4805)
    """
    require_shape("mask", mask, (logits.shape[-2],), f"logits of shape {tuple(logits.shape)}")
    wide = logits.to(compute_dtype(logits))
    if on_processor(wide) and wide.numel():
        value, usable = log_partition(wide)
        counted = as_mask(mask) & usable
        value = select(counted, value)  # padding may hold the highest finite number, and twice that times 0 is NaN
    else:
        counted = as_mask(mask) & usable_rows(logits)
        value = torch.logsumexp(select_rows(counted, wide), dim=-1)
    return SumCount.of(value.square(), counted).compute().to(wide.dtype)
