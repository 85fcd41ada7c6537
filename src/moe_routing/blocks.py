"""Cache blocking: on a processor a table of tokens by experts is worked through a few rows at a time.

An operation on the whole table moves it through main memory, and its result needs fresh pages; a chain of operations
on rows that stay in a core's own cache pays for that once. Every operation used that way treats rows alone, so the
values are those of the whole table: bit for bit, but for the last bit of a sigmoid where a block ends inside a vector
register. Accelerators and compiled graphs get a single block.
"""

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from credit._safe import on_processor, select

# Per thread: 512 KiB of float32. Four such tables share a core's 2 MiB; of much smaller ones, calls are what costs.
BLOCK_ELEMENTS = 2**17


def row_blocks(x: Shaped[Tensor, "rows ..."], width: int | None = None) -> list[slice]:
    """Slices that cover the rows of ``x``, at ``width`` numbers a row; at least one.

    >>> row_blocks(torch.zeros(5, 2), width=BLOCK_ELEMENTS * torch.get_num_threads() // 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    rows = x.shape[0]
    if not on_processor(x) or rows == 0:
        return [slice(0, rows)]
    step = max(BLOCK_ELEMENTS * torch.get_num_threads() // max(x[0].numel() if width is None else width, 1), 1)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def replace_rows_(
    x: Shaped[Tensor, "rows ..."], rows: Bool[Tensor, " rows"], values: Shaped[Tensor, "rows ..."]
) -> Shaped[Tensor, "rows ..."]:
    """Overwrite the given rows with those of ``values``.

    >>> replace_rows_(torch.zeros(2, 2), torch.tensor([False, True]), torch.ones(2, 2))
    tensor([[0., 0.],
            [1., 1.]])
    """
    if not on_processor(x):
        return x.copy_(torch.where(rows.reshape(-1, *[1] * (x.dim() - 1)), values, x))
    # A masked copy of the whole table costs more than a softmax; here the common case, no row, costs nothing.
    index = rows.nonzero()[:, 0]
    return x.index_copy_(0, index, values.index_select(0, index)) if index.numel() else x


def select_rows(
    rows: Bool[Tensor, "*layers rows"], x: Shaped[Tensor, "*layers rows width"]
) -> Shaped[Tensor, "*layers rows width"]:
    """``x`` in the given rows and an exact 0 elsewhere, in the gradient too; ``x`` itself if no row is left out.

    >>> select_rows(torch.tensor([True, False]), torch.tensor([[1.0], [float("nan")]]))
    tensor([[1.],
            [0.]])
    """
    # Usually none is, and a masked copy costs more than a softmax.
    return x if on_processor(x) and bool(rows.all()) else select(rows[..., None], x)
