# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""What the kernels do with a block of rows: device functions that ``moe_routing.kernels`` hands to Triton.

Blocks of tokens by experts are ``[rows, experts]``. Blocks of the previous token's experts are ``[slots, rows]``: the
compiler gives neighbouring threads the first axis, and turned round it would move whole blocks through shared memory.
"""

from typing import TYPE_CHECKING, Any

# Both come from Triton once a kernel is built. Until then nothing here may be called.
tl: Any = None

if TYPE_CHECKING:
    constexpr = Any
else:

    class constexpr:  # noqa: N801 - Triton looks for this name in annotations
        """Marks an argument that is known when a kernel is compiled."""


def number(pointer, value):
    """A number of the whole launch: the one on the device, or the value where there is none."""
    if pointer is not None:
        value = tl.load(pointer).to(tl.float32)
    return value


def masses(z, top, SIGMOID: constexpr):
    """Probabilities up to a factor per row that brings the largest near 1, so that a row never underflows whole."""
    if SIGMOID:
        mass = tl.exp(tl.minimum(z, 0.0) - tl.minimum(top, 0.0)) / (1.0 + tl.exp(-tl.abs(z)))
    else:
        mass = tl.exp(z - top)
    return mass


def row_masses(z, SIGMOID: constexpr):
    """Masses of a block, the largest logits, 1 / sums, and the rows that are usable: no NaN, no +inf, not all -inf."""
    top = tl.max(z, axis=1)
    mass = masses(z, top[:, None], SIGMOID)
    total = tl.sum(mass, axis=1)
    return mass, top, tl.div_rn(1.0, total), (total == total) & (top < float("inf"))


def usable_row(z_row, present, column_stride, M: constexpr, BLOCK_M: constexpr):
    """Whether one row that is read for this alone is usable."""
    columns = tl.arange(0, BLOCK_M)
    mask = columns < tl.where(present, M, 0)
    z = tl.load(z_row + columns.to(tl.int64) * column_stride, mask=mask, other=float("-inf")).to(tl.float32)
    kind = tl.where(z < float("inf"), tl.where(z > float("-inf"), 1, 0), 2)  # NaN compares with nothing
    return tl.max(kind, axis=0) == 1


def shares(norm_ptr, highest_ptr, rows, field, inside, RHO: constexpr):
    """Norm of the gradient, rho, and the rows that have one; a norm of -1 marks a gradient that is not finite."""
    norm = tl.load(norm_ptr + rows, mask=inside, other=-1.0)
    if RHO:
        counted = norm > 0.0
        share = tl.where(counted, tl.div_rn(norm, tl.load(highest_ptr + field, mask=counted, other=1.0)), 0.0)
    else:
        counted = norm >= 0.0
        share = tl.where(counted, 1.0, 0.0)
    return norm, share, counted


def close_pairs(
    selected_ptr, rows, selected_row, selected_column, neighbour, gap_threshold,
    M: constexpr, K: constexpr, BLOCK_K: constexpr,
):  # fmt: skip
    """The previous token's experts, the slots where they count, and the pairs whose gap is within the threshold."""
    slots = tl.arange(0, BLOCK_K)
    here = selected_ptr + rows * selected_row
    at = neighbour[None, :] & (slots < K)[:, None]
    where = here[None, :] + slots[:, None].to(tl.int64) * selected_column
    current = tl.load(where, mask=at, other=-1)
    previous = tl.load(where - selected_row, mask=at, other=-1)
    exist = (current >= 0) & (current < M) & (previous >= 0) & (previous < M)
    kept = tl.zeros_like(current).to(tl.int1)
    column = tl.cast(selected_column, tl.int64)
    for i in range(K):  # k x k comparisons of a row at once would fill the registers
        one = tl.load(here - selected_row + i * column, mask=neighbour, other=-2)
        kept = kept | (current == one[None, :])
    # Both counts in one number, for one reduction.
    counts = tl.sum(exist.to(tl.int32) * 64 + (kept & exist).to(tl.int32), axis=0)
    gap = tl.div_rn((K - counts % 64).to(tl.float32), K * 1.0)
    close = neighbour & (counts >= K * 64) & (gap <= gap_threshold)
    return previous, at & exist & close[None, :], close


def target_weights(z_at, z_before, at, K: constexpr, TARGET: constexpr, SIGMOID: constexpr):
    """Weights ``q`` on the previous experts, and the rows where the loss is finite."""
    if TARGET == "uniform_topk":
        q = tl.where(at, 1.0 / K, 0.0)
    else:
        z = tl.where(at, z_at if TARGET == "mass" else z_before, float("-inf"))
        mass = masses(z, tl.max(z, axis=0)[None, :], SIGMOID)
        # Where there is no pair, all is NaN and stays behind the mask.
        q = tl.where(at, mass * tl.div_rn(1.0, tl.sum(mass, axis=0))[None, :], 0.0)
    # Infinite when a weight meets log p = -inf; NaN when every candidate was pruned.
    lost = (q != q) | ((q > 0.0) & (z_at == float("-inf")))
    return q, tl.max((lost & at).to(tl.int32), axis=0) == 0


def block_sum(x):
    """Sum of all entries."""
    return tl.sum(tl.sum(x, axis=1), axis=0)
