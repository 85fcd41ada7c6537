# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Device code of the fused router gradient: the Triton twin of ``moe_routing.injection``.

Two kernels. ``norms`` takes the length of each token's gradient and the longest of each field; ``inject`` reads the
logits, the gradient, the control row and the previous token's experts once and writes the new gradient.
:func:`moe_routing.fused.fused_router_gradient` launches them. The functions below become device functions on the first
call of :func:`kernels`, so that this module imports without Triton; until then they must not be called.
"""

import functools
import inspect
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

tl: Any = None

if TYPE_CHECKING:
    constexpr = Any
else:

    class constexpr:  # noqa: N801 - Triton looks for this name in annotations
        """Marks an argument that is known when a kernel is compiled."""


MAX_EXPERTS, MAX_K = 1024, 32
# (BLOCK_N, num_warps) that the autotuner may choose from, where a thread gets 8 to 32 entries of a row block.
BLOCKS = ((4, 4), (8, 4), (16, 4), (32, 4), (16, 8), (32, 8))
TUNING_KEY = ["M", "K", "TARGET", "SIGMOID", "RHO", "SURVIVAL", "size"]
# Numbers that change from step to step: specialising on their values would compile again.
STEP_ARGUMENTS = ["N", "F", "size"]


def _scores(z, SIGMOID: constexpr):
    """Logarithms of the unnormalised probabilities."""
    if SIGMOID:
        z = tl.minimum(z, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(z)))
    return z


def _row_softmax(z, SIGMOID: constexpr):
    """``exp(score - highest)``, the highest score, 1 / sum, and whether the row is usable: no NaN, no +inf, not all -inf."""
    peak = tl.max(z, axis=1)
    top = _scores(peak, SIGMOID)
    mass = tl.exp(_scores(z, SIGMOID) - top[:, None])
    total = tl.sum(mass, axis=1)
    return mass, top, tl.div_rn(1.0, total), (total == total) & (peak < float("inf"))


def _load_row(ptr, row, present, row_stride, column_stride, M: constexpr, BLOCK_M: constexpr):
    columns = tl.arange(0, BLOCK_M)
    where = ptr + row * row_stride + columns.to(tl.int64) * column_stride
    return tl.load(where, mask=(columns < M) & present, other=float("-inf")).to(tl.float32)


def _norms(
    g_ptr, field_ptr, norm_ptr, highest_ptr, N, F, size, g_row, g_column, field_stride,
    M: constexpr, BLOCK_M: constexpr, K: constexpr, BLOCK_N: constexpr,
):  # fmt: skip
    """Norm of each row that counts, 0 for the rest, and the highest of each field as the bits of a float."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_M)
    here = rows < N
    where = g_ptr + rows[:, None] * g_row + columns[None, :].to(tl.int64) * g_column
    g = tl.load(where, mask=here[:, None] & (columns < M)[None, :], other=0.0).to(tl.float32)
    field = tl.load(field_ptr + rows * field_stride, mask=here, other=-1)
    # Bits of floats that are not negative sort like the floats, and every NaN lies above infinity.
    peak = tl.max(tl.abs(g).to(tl.int32, bitcast=True), axis=1)
    counted = (field >= 0) & (field < F) & (peak > 0) & (peak < 0x7F800000)
    # A power of two near 1 / peak: squares of small gradients underflow, those of large ones overflow.
    unit = (tl.maximum(254 - (peak >> 23), 1) << 23).to(tl.float32, bitcast=True)
    unit = tl.where(counted, unit, 1.0)
    scaled = g * unit[:, None]
    norm = tl.minimum(tl.div_rn(tl.sqrt_rn(tl.sum(scaled * scaled, axis=1)), unit), 3.4028234663852886e38)
    norm = tl.where(counted, norm, 0.0)
    tl.store(norm_ptr + rows, norm, mask=here)
    # One atomic per field of the block: a field that spans everything would queue every row at one address.
    index = tl.arange(0, BLOCK_N)
    same = (field[:, None] == field[None, :]) & counted[None, :]
    highest = tl.max(tl.where(same, norm[None, :], 0.0), axis=1)
    earlier = tl.sum((same & (index[None, :] < index[:, None])).to(tl.int32), axis=1)
    first = counted & (earlier == 0)
    tl.atomic_max(highest_ptr + field, highest.to(tl.int32, bitcast=True), mask=first, sem="relaxed")


def _inject(
    z_ptr, g_ptr, out_ptr, field_ptr, selected_ptr, control_ptr, norm_ptr, highest_ptr, survival_ptr,
    gate_ptr, pairs_ptr, gate, pairs, lambda_turn, lambda_token, gap_threshold, largest, N, F, size,
    z_row, z_column, g_row, g_column, out_row, out_column, field_stride,
    selected_row, selected_column, control_row, control_column,
    M: constexpr, BLOCK_M: constexpr, K: constexpr, BLOCK_K: constexpr, TARGET: constexpr,
    SIGMOID: constexpr, RHO: constexpr, SURVIVAL: constexpr, SLOTS: constexpr, BLOCK_N: constexpr,
):  # fmt: skip
    """The new gradient of ``BLOCK_N`` tokens; ``out`` may be ``g``, since neighbours read only each other's logits."""
    index = tl.arange(0, BLOCK_N)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + index
    columns = tl.arange(0, BLOCK_M)
    experts = columns[None, :].to(tl.int64)
    here = rows < N
    tile = here[:, None] & (columns < M)[None, :]
    z_rows = z_ptr + rows[:, None] * z_row
    z = tl.load(z_rows + experts * z_column, mask=tile, other=float("-inf")).to(tl.float32)
    raw = tl.load(g_ptr + rows[:, None] * g_row + experts * g_column, mask=tile, other=0.0)
    g = raw.to(tl.float32)
    field = tl.load(field_ptr + rows * field_stride, mask=here, other=-1)
    before = tl.load(field_ptr + (rows - 1) * field_stride, mask=here & (rows > 0), other=-1)
    inside = (field >= 0) & (field < F)
    neighbour = inside & (before == field)
    mass, top, per_mass, usable = _row_softmax(z, SIGMOID)
    p = mass * per_mass[:, None]

    # rho, gate and the row's scale.
    if gate_ptr is not None:
        gate = gate * tl.load(gate_ptr).to(tl.float32)
    if pairs_ptr is not None:
        pairs = tl.load(pairs_ptr).to(tl.float32)
    divisor = tl.where(pairs != 0.0, pairs, 1.0)
    per_pair = tl.where(pairs != 0.0, lambda_token / divisor, 0.0)
    if RHO:
        norm = tl.load(norm_ptr + rows, mask=inside, other=0.0)
        share = tl.div_rn(norm, tl.load(highest_ptr + field, mask=norm > 0.0, other=1.0))
        scale = -gate * share
        active = inside & usable & (scale != 0.0)
    else:
        scale = -gate * tl.where(inside, 1.0, 0.0)
        finite = tl.max(tl.abs(g).to(tl.int32, bitcast=True), axis=1) < 0x7F800000
        active = inside & finite & usable & (scale != 0.0)

    # The previous row must define a distribution too: its flag moves down by one, the block's first comes from memory.
    if TARGET == "overlap":
        z_before = tl.load(z_rows - z_row + experts * z_column, mask=tile & (rows > 0)[:, None], other=float("-inf"))
        mass_before, _, per_mass_before, usable_before = _row_softmax(z_before.to(tl.float32), SIGMOID)
    else:
        start = tl.program_id(0).to(tl.int64) * BLOCK_N - 1
        edge = _load_row(z_ptr, start, start >= 0, z_row, z_column, M, BLOCK_M)
        peak = tl.max(edge, axis=0)
        defined = (tl.sum((edge != edge).to(tl.int32), axis=0) == 0) & (peak < float("inf")) & (peak > float("-inf"))
        above = tl.sum(tl.where(index[None, :] + 1 == index[:, None], usable.to(tl.int32)[None, :], 0), axis=1)
        usable_before = tl.where(index == 0, defined.to(tl.int32), above) > 0

    # Experts of this token and of the previous one.
    slot = tl.arange(0, BLOCK_K)
    chosen = neighbour[:, None] & (slot < K)[None, :]
    picks = selected_ptr + rows[:, None] * selected_row + slot[None, :].to(tl.int64) * selected_column
    current = tl.load(picks, mask=chosen, other=-1)
    previous = tl.load(picks - selected_row, mask=chosen, other=-1)
    exist = (current >= 0) & (current < M) & (previous >= 0) & (previous < M)
    recorded = tl.sum(exist.to(tl.int32), axis=1) == K
    kept = tl.zeros([BLOCK_N, BLOCK_K], tl.int32)
    for i in range(K):
        one = tl.load(selected_ptr + (rows - 1) * selected_row + i * selected_column, mask=neighbour, other=-2)
        kept = kept | (current == one[:, None]).to(tl.int32)
    gap = tl.div_rn((K - tl.sum(kept, axis=1)).to(tl.float32), K * 1.0)
    acting = neighbour & recorded & usable & usable_before & (gap <= gap_threshold)

    # The control row, the mean direction, and the injection away from the previous experts.
    table = control_ptr + field.to(tl.int64)[:, None] * control_row
    control = tl.load(table + experts * control_column, mask=tile & inside[:, None], other=0.0).to(tl.float32)
    turn = lambda_turn * scale
    direction = control * turn[:, None]
    weight = tl.where(acting, scale * per_pair, 0.0)
    if TARGET == "overlap":
        p_before = tl.where(acting[:, None], mass_before * per_mass_before[:, None], 0.0)
        direction = direction + weight[:, None] * p_before
        mean = tl.sum(p * direction, axis=1)
    else:
        at = chosen & acting[:, None]
        expert = tl.where(at, previous, 0).to(tl.int64)
        score = _scores(tl.load(z_rows + expert * z_column, mask=at, other=0.0).to(tl.float32), SIGMOID)
        if TARGET == "uniform_topk":
            q = tl.where(at, 1.0 / K, 0.0)
        else:
            if TARGET == "mass":
                wanted = score
            else:
                old = tl.load(z_rows - z_row + expert * z_column, mask=at, other=0.0)
                wanted = _scores(old.to(tl.float32), SIGMOID)
            wanted = tl.where(at, wanted, float("-inf"))
            # Rows without a pair hold -inf alone: their NaN stays behind the mask.
            q = tl.exp(wanted - tl.max(wanted, axis=1)[:, None])
            q = tl.where(at, q * tl.div_rn(1.0, tl.sum(q, axis=1))[:, None], 0.0)
        # Not finite when a weight meets log p = -inf, or is NaN itself because every candidate was pruned.
        reach = tl.sum(q + tl.where(q > 0.0, score, 0.0), axis=1)
        weight = tl.where(tl.abs(reach) < float("inf"), weight, 0.0)
        mean = tl.sum(p * direction, axis=1) + weight
    d = (direction - mean[:, None]) * p
    if SIGMOID:
        d = d * tl.sigmoid(-z)
    squares = tl.sum(d * d, axis=1)
    row_mass = tl.sum(tl.abs(d), axis=1)

    # The previous experts get q on top. Each is worked out again in its own lane: k entries, not k passes over a row.
    if TARGET != "overlap":
        at = at & (weight != 0.0)[:, None]
        base = tl.load(table + expert * control_column, mask=at, other=0.0).to(tl.float32) * turn[:, None]
        base = (base - mean[:, None]) * (tl.exp(score - top[:, None]) * per_mass[:, None])
        pull = weight[:, None] * q
        if SIGMOID:
            slope = tl.sigmoid(-tl.load(z_rows + expert * z_column, mask=at, other=0.0).to(tl.float32))
            base, pull = base * slope, pull * slope
        base = tl.where(at, base, 0.0)
        total = tl.where(at, base + pull, 0.0)
        squares = tl.maximum(squares + tl.sum(total * total - base * base, axis=1), 0.0)
        row_mass = row_mass + tl.sum(tl.abs(total) - tl.abs(base), axis=1)
        raw_at = tl.load(g_ptr + rows[:, None] * g_row + expert * g_column, mask=at, other=0.0)
        new_at = (raw_at.to(tl.float32) + total).to(raw.dtype)

    # A sum of norms below the largest number of the dtype bounds every entry, and NaN fails the comparison.
    bound = tl.sqrt_rn(tl.sum(g * g, axis=1)) + tl.sqrt_rn(squares)
    added = active & (bound < largest)
    new = tl.where(added[:, None], (g + d).to(raw.dtype), raw)
    if SURVIVAL:
        lost = tl.sum(tl.where(new == raw, tl.abs(d), 0.0), axis=1)
        if TARGET != "overlap":
            without = (raw_at.to(tl.float32) + base).to(raw.dtype)
            lost += tl.sum(tl.where(new_at == raw_at, tl.abs(total), 0.0), axis=1)
            lost -= tl.sum(tl.where(without == raw_at, tl.abs(base), 0.0), axis=1)
        row_mass = tl.where(active & (row_mass < float("inf")), row_mass, 0.0)
        stayed = tl.where(added, tl.maximum(row_mass - tl.maximum(lost, 0.0), 0.0), 0.0)
        share_ptr = survival_ptr + (tl.program_id(0) % SLOTS) * 2
        tl.atomic_add(share_ptr, tl.sum(stayed, axis=0).to(tl.float64), sem="relaxed")
        tl.atomic_add(share_ptr + 1, tl.sum(row_mass, axis=0).to(tl.float64), sem="relaxed")
    out_rows = out_ptr + rows[:, None] * out_row
    # Other threads have read entries of g that may now be overwritten, and will overwrite entries written here.
    tl.debug_barrier()
    tl.store(out_rows + experts * out_column, new, mask=tile)
    if TARGET != "overlap":
        tl.debug_barrier()
        tl.store(out_rows + expert * out_column, new_at, mask=at & added[:, None])


_LOCK = threading.Lock()
_HELPERS = ("_scores", "_row_softmax", "_load_row")


@functools.cache
def _build() -> SimpleNamespace:
    import triton
    import triton.language

    scope = globals()
    scope["tl"], scope["constexpr"] = triton.language, triton.language.constexpr
    # The import hook of type checkers wraps functions; Triton reads the source and the globals of the function itself.
    for name in _HELPERS:
        scope[name] = triton.jit(inspect.unwrap(scope[name]))
    norms = triton.jit(inspect.unwrap(_norms), do_not_specialize=STEP_ARGUMENTS)
    inject = triton.jit(inspect.unwrap(_inject), do_not_specialize=STEP_ARGUMENTS)
    configs = [triton.Config({"BLOCK_N": rows}, num_warps=warps) for rows, warps in BLOCKS]
    tune = functools.partial(triton.autotune, configs, prune_configs_by={"early_config_prune": _fitting})
    return SimpleNamespace(
        norms=norms,
        inject=inject,
        tuned_norms=tune(["M", "size"])(norms),
        # Tuning runs the kernel many times over: in place it would add up, and the survival sums would.
        tuned_inject=tune(TUNING_KEY, restore_value=["out_ptr", "survival_ptr"])(inject),
        interpreted=bool(triton.knobs.runtime.interpret),
    )


def kernels() -> SimpleNamespace:
    """The kernels, built on the first call: ``norms`` and ``inject`` plain, ``tuned_...`` with the autotuner on top.

    Raises:
        ImportError: without Triton.
    """
    with _LOCK:  # backward passes run in threads of their own, one per device
        return _build()


def _fitting(configs: list[Any], named: dict[str, Any], **constants: Any) -> list[Any]:
    """Configurations that give each thread 8 to 32 entries; the smallest block where experts are few."""
    load = {config: config.kwargs["BLOCK_N"] * constants["BLOCK_M"] / (32 * config.num_warps) for config in configs}
    return [config for config in configs if 8 <= load[config] <= 32] or [max(load, key=lambda c: load[c])]
