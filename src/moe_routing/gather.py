"""Rows of all ranks, each of which holds a number of its own: for what pairs them and so has no sums to add up."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor


@dataclass(frozen=True)
class RankRows:
    """Where the rows of this rank stand among those of all.

    Attributes:
        sizes: rows of each rank of each group that is gathered over, one group after the other.
        first: number of rows before this rank's.

    Without ``torch.distributed`` this rank's rows are all:

    >>> rows = torch.arange(3)
    >>> place = RankRows.of(rows)
    >>> place.first, place.gather(rows)
    (0, tensor([0, 1, 2]))
    """

    sizes: tuple[tuple[Any, tuple[int, ...]], ...]
    first: int

    @classmethod
    def of(cls, rows: Shaped[Tensor, "rows *rest"], process_groups: Sequence[Any] = (None,)) -> "RankRows":
        """Ask the ranks for their number of rows; None is the group of all ranks."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return cls((), 0)
        sizes, first, count = [], 0, rows.shape[0]
        for group in process_groups:
            own = torch.tensor([count], device=rows.device)
            found = [torch.zeros_like(own) for _ in range(torch.distributed.get_world_size(group))]
            torch.distributed.all_gather(found, own, group=group)
            each: list[int] = torch.cat(found).tolist()
            sizes.append((group, tuple(each)))
            first += sum(each[: torch.distributed.get_rank(group)])
            count = sum(each)
        return cls(tuple(sizes), first)

    def gather(self, rows: Shaped[Tensor, "rows *rest"]) -> Shaped[Tensor, "all *rest"]:
        """The rows of all ranks, in the order of the ranks, detached."""
        rows = rows.detach()
        for group, each in self.sizes:
            padded = rows.new_zeros(max(each), *rows.shape[1:])
            padded[: rows.shape[0]] = rows
            found = [torch.empty_like(padded) for _ in each]
            torch.distributed.all_gather(found, padded, group=group)
            rows = torch.cat([part[:size] for part, size in zip(found, each)])
        return rows
