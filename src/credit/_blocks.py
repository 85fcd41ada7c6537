"""Cache blocking: on a CPU a batch is worked through some rows at a time, whole elsewhere.

A chain of operations on rows that stay in a core's cache pays for main memory once; on the whole batch every
operation moves it, and its result needs fresh pages, which takes longer than the arithmetic does.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Shaped
from torch import Tensor

# Entries of a block for each thread: half a dozen such float32 tables share a core's 2 MiB.
BLOCK = 1 << 16


def on_processor(x: Shaped[Tensor, "..."]) -> bool:
    """Whether operations run one by one on a CPU: there data may be read without waiting for a device."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def row_blocks(
    *tensors: Shaped[Tensor, "batch ..."], spare: int = 0, dtype: torch.dtype | None = None
) -> Iterator[tuple[Shaped[Tensor, "rows ..."], ...]]:
    """The tensors some rows at a time on a CPU, at least once; whole elsewhere and in a compiled graph, which fuses.

    Each block is followed by ``spare`` tables of ``dtype`` and of the first tensor's shape to work in. The next block
    gets the same ones: new memory for each would come from the system page by page.

    >>> [len(rows) for rows, room in row_blocks(torch.zeros(3, BLOCK * torch.get_num_threads()), spare=1)]
    [1, 1, 1]
    """
    first = tensors[0]
    dtype = dtype or first.dtype
    if not on_processor(first):
        yield *tensors, *(torch.empty(first.shape, dtype=dtype, device=first.device) for _ in range(spare))
        return
    rows, width = len(first), first[0].numel() if len(first) else 0
    step = max(BLOCK * torch.get_num_threads() // max(width, 1), 1)
    room = [torch.empty((min(step, rows), *first.shape[1:]), dtype=dtype) for _ in range(spare)]
    # Split, as the gradient of one slice is as large as the batch.
    for part in zip(*(torch.split(each, step) for each in tensors), strict=True):
        yield *part, *(each[: len(part[0])] for each in room)
