"""Sums and counts: the form in which every metric travels between micro-batches and ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from credit._safe import masked_sum, safe_divide, statistics_dtype


@dataclass(frozen=True)
class SumCount:
    """A mean that has not been divided yet, so that shards add up exactly.

    Reference: ours.

    >>> left = SumCount.of(torch.tensor([1.0, 2.0]), torch.tensor([True, True]))
    >>> right = SumCount.of(torch.tensor([9.0, 0.0]), torch.tensor([True, False]))
    >>> (left + right).compute()
    tensor(4., dtype=torch.float64)
    """

    total: Float[Tensor, "*layers"]
    count: Float[Tensor, "*layers"]

    @classmethod
    def of(cls, values: Float[Tensor, "... tokens"], valid: Bool[Tensor, "... tokens"]) -> "SumCount":
        """Sum ``values`` over the last axis where ``valid``; whatever hides elsewhere, NaN too, is left out."""
        dtype = statistics_dtype(values)
        return cls(masked_sum(values.to(dtype), valid), valid.sum(-1).to(dtype).expand(values.shape[:-1]))

    def __add__(self, other: "SumCount") -> "SumCount":
        return SumCount(self.total + other.total, self.count + other.count)

    def reduce(self, process_group: Any = None) -> "SumCount":
        """Add up over the ranks of ``process_group``; without ``torch.distributed`` the value itself."""
        return SumCount(*all_reduce_sums([self.total, self.count], process_group))

    def compute(self) -> Float[Tensor, "*layers"]:
        """Divide once; 0 when nothing was counted."""
        return safe_divide(self.total, self.count)


def all_reduce_sums(tensors: Sequence[Shaped[Tensor, "..."]], process_group: Any = None) -> list[Tensor]:
    """Sum each tensor over the ranks with one all-reduce of one flat buffer, detached.

    Counts travel in the statistics dtype and return in their own: float64 holds integers exactly up to 2**53.

    Raises:
        ValueError: for an empty list.
    """
    if not tensors:
        raise ValueError("all_reduce_sums needs at least one tensor")
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return list(tensors)
    dtype = statistics_dtype(tensors[0])
    flat = torch.cat([tensor.detach().to(dtype).reshape(-1) for tensor in tensors])
    torch.distributed.all_reduce(flat, group=process_group)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.reshape(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, tensors)]
