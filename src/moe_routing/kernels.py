# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""The fused router gradient in Triton, twin of ``moe_routing.injection``.

Two kernels: ``norms`` takes the length of each token's gradient and the longest of each field; ``inject`` reads the
logits, the gradient, the control row and the previous token's experts once and writes the new gradient.
``moe_routing.fused`` launches them. The functions here become kernels on the first call of :func:`kernels`, so that
this module imports without Triton.
"""

import functools
import inspect
import threading
from types import SimpleNamespace
from typing import Any

from moe_routing import device
from moe_routing.device import (
    block_sum,
    close_pairs,
    constexpr,
    masses,
    number,
    row_masses,
    shares,
    target_weights,
    usable_row,
)

tl: Any = None

MAX_EXPERTS, MAX_K = 1024, 32
# (BLOCK_N, num_warps) that the autotuner may choose from, where a thread gets 8 to 32 entries of a block of rows.
BLOCKS = ((4, 1), (8, 1), (4, 2), (8, 2), (4, 4), (8, 4), (16, 4), (32, 4), (16, 8))
TUNING_KEY = ["M", "K", "TARGET", "SIGMOID", "RHO", "SURVIVAL", "size"]
# Numbers that change from step to step: specialising on their values would compile again.
STEP_ARGUMENTS = ["N", "F", "size"]
# Single numbers: where they lie changes nothing either, and one may be an entry of a larger tensor.
NUMBERS = ["gate_ptr", "pairs_ptr", "turn_ptr", "token_ptr"]


def _norms(
    g_ptr, field_ptr, norm_ptr, highest_ptr, N, F, size, g_row, g_column, field_stride,
    M: constexpr, BLOCK_M: constexpr, K: constexpr, BLOCK_N: constexpr,
):  # fmt: skip
    """Norm of each row, -1 if it is not finite, and the highest of each field as the bits of a float."""
    index = tl.arange(0, BLOCK_N)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + index
    columns = tl.arange(0, BLOCK_M)
    here = rows < N
    where = g_ptr + rows[:, None] * g_row + columns[None, :].to(tl.int64) * g_column
    g = tl.load(where, mask=here[:, None] & (columns < M)[None, :], other=0.0).to(tl.float32)
    field = tl.load(field_ptr + rows * field_stride, mask=here, other=-1)
    # Bits of floats that are not negative sort like the floats, and every NaN lies above infinity.
    peak = tl.max(tl.abs(g).to(tl.int32, bitcast=True), axis=1)
    finite = peak < 0x7F800000
    # A power of two near 1 / peak: squares of small gradients underflow, those of large ones overflow.
    unit = tl.where(finite, (tl.maximum(254 - (peak >> 23), 1) << 23).to(tl.float32, bitcast=True), 1.0)
    scaled = g * unit[:, None]
    norm = tl.minimum(tl.div_rn(tl.sqrt_rn(tl.sum(scaled * scaled, axis=1)), unit), 3.4028234663852886e38)
    norm = tl.where(finite, norm, -1.0)
    tl.store(norm_ptr + rows, norm, mask=here)
    # One atomic per field of the block: where a field spans everything, all rows would queue at one address.
    counted = (field >= 0) & (field < F) & (norm > 0.0)
    same = (field[:, None] == field[None, :]) & counted[None, :]
    highest = tl.max(tl.where(same, norm[None, :], 0.0), axis=1)
    earlier = tl.sum((same & (index[None, :] < index[:, None])).to(tl.int32), axis=1)
    first = counted & (earlier == 0)
    tl.atomic_max(highest_ptr + field, highest.to(tl.int32, bitcast=True), mask=first, sem="relaxed")


def _inject(
    z_ptr, g_ptr, out_ptr, field_ptr, selected_ptr, control_ptr, norm_ptr, highest_ptr, survival_ptr,
    gate_ptr, pairs_ptr, turn_ptr, token_ptr, gate, pairs, lambda_turn, lambda_token, gap_threshold, largest,
    N, F, size,
    z_row, z_column, g_row, g_column, out_row, out_column, field_stride,
    selected_row, selected_column, control_row, control_column,
    M: constexpr, BLOCK_M: constexpr, K: constexpr, BLOCK_K: constexpr, TARGET: constexpr,
    SIGMOID: constexpr, RHO: constexpr, SURVIVAL: constexpr, SLOTS: constexpr, BLOCK_N: constexpr,
):  # fmt: skip
    """The new gradient of ``BLOCK_N`` tokens; ``out`` may be ``g``, since neighbours read only each other's logits."""
    start = tl.program_id(0).to(tl.int64) * BLOCK_N
    index = tl.arange(0, BLOCK_N)
    rows = start + index
    columns = tl.arange(0, BLOCK_M)
    experts = columns[None, :].to(tl.int64)
    here = rows < N
    tile = here[:, None] & (columns < M)[None, :]
    z_rows, g_rows = z_ptr + rows * z_row, g_ptr + rows * g_row
    field = tl.load(field_ptr + rows * field_stride, mask=here, other=-1)
    before = tl.load(field_ptr + (rows - 1) * field_stride, mask=here & (rows > 0), other=-1)
    inside = (field >= 0) & (field < F)
    neighbour = inside & (before == field)
    control_rows = control_ptr + field.to(tl.int64) * control_row
    z = tl.load(z_rows[:, None] + experts * z_column, mask=tile, other=float("-inf")).to(tl.float32)
    raw = tl.load(g_rows[:, None] + experts * g_column, mask=tile, other=0.0)
    control = tl.load(control_rows[:, None] + experts * control_column, mask=tile & inside[:, None], other=0.0)
    control = control.to(tl.float32)
    mass, top, per_mass, usable = row_masses(z, SIGMOID)

    gate, pairs = gate * number(gate_ptr, 1.0), number(pairs_ptr, pairs)
    divisor = tl.where(pairs != 0.0, pairs, 1.0)
    per_pair = tl.where(pairs != 0.0, number(token_ptr, lambda_token) / divisor, 0.0)
    norm, share, counted = shares(norm_ptr, highest_ptr, rows, field, inside, RHO)
    scale = -gate * share
    turn = number(turn_ptr, lambda_turn) * scale

    # The token term, away from the previous experts: -weight p.
    previous, at, close = close_pairs(
        selected_ptr, rows, selected_row, selected_column, neighbour, gap_threshold, M, K, BLOCK_K
    )
    if TARGET == "overlap":
        z_before = tl.load(
            z_rows[:, None] - z_row + experts * z_column, mask=tile & close[:, None], other=float("-inf")
        )
        mass_before, _, per_mass_before, usable_before = row_masses(z_before.to(tl.float32), SIGMOID)
        weight = tl.where(close & usable & usable_before, scale * per_pair, 0.0)
        beside = tl.where((weight != 0.0)[:, None], mass_before * (weight * per_mass_before)[:, None], 0.0)
        direction = control * turn[:, None] + beside
        mean = tl.sum(mass * direction, axis=1) * per_mass
        d = (direction - mean[:, None]) * (mass * per_mass[:, None])
    else:
        # A pair needs its previous row whole; the block's first row has it in another block.
        edge = usable_row(z_ptr + (start - 1) * z_row, start > 0, z_column, M, BLOCK_M)
        above = tl.gather(usable.to(tl.int32), tl.maximum(index - 1, 0), axis=0) > 0
        usable_before = tl.where(index == 0, edge, above)
        expert = tl.where(at, previous, 0).to(tl.int64)
        z_at = tl.load(z_rows[None, :] + expert * z_column, mask=at, other=0.0).to(tl.float32)
        z_before = tl.load(z_rows[None, :] - z_row + expert * z_column, mask=at, other=0.0).to(tl.float32)
        q, reachable = target_weights(z_at, z_before, at, K, TARGET, SIGMOID)
        weight = tl.where(close & reachable & usable & usable_before, scale * per_pair, 0.0)
        mean = tl.sum(mass * control, axis=1) * (per_mass * turn) + weight
        by_control, by_mean = turn * per_mass, mean * per_mass
        d = mass * (control * by_control[:, None] - by_mean[:, None])
    if SIGMOID:
        d = d * tl.sigmoid(-z)

    # No entry of d exceeds this sum, nor one of g the norm; NaN fails the comparison. Where d is 0 g keeps its bits.
    size_d = tl.sum(tl.abs(d), axis=1) + tl.abs(weight)
    active = inside & counted & usable & (scale != 0.0) & (size_d != 0.0) & (size_d < float("inf"))
    highest = norm
    if raw.dtype == tl.float16:  # of so short a range that a row of ordinary entries may have a norm outside
        highest = tl.max(tl.abs(raw.to(tl.float32)), axis=1)
    added = active & (highest + size_d < largest)
    new = tl.where(added[:, None], (raw.to(tl.float32) + d).to(raw.dtype), raw)
    if SURVIVAL:
        total = tl.where(active[:, None], tl.abs(d), 0.0)
        stayed = block_sum(tl.where(new != raw, total, 0.0))
        total = block_sum(total)
    if TARGET != "overlap":
        # The previous experts get weight q on top, each in a lane of its own: k entries, not k passes over a row.
        at = at & (active & (weight != 0.0))[None, :]
        written = at & added[None, :]
        c_at = tl.load(control_rows[None, :] + expert * control_column, mask=at, other=0.0).to(tl.float32)
        base = masses(z_at, top[None, :], SIGMOID) * (c_at * by_control[None, :] - by_mean[None, :])
        whole = weight[None, :] * q
        if SIGMOID:
            base, whole = base * tl.sigmoid(-z_at), whole * tl.sigmoid(-z_at)
        whole = base + whole
        raw_at = tl.load(g_rows[None, :] + expert * g_column, mask=at, other=0.0)
        new_at = (raw_at.to(tl.float32) + whole).to(raw.dtype)
        if SURVIVAL:
            without = tl.where((raw_at.to(tl.float32) + base).to(raw.dtype) != raw_at, tl.abs(base), 0.0)
            stays = tl.where(new_at != raw_at, tl.abs(whole), 0.0)
            stayed += block_sum(tl.where(written, stays - without, 0.0))
            total += block_sum(tl.where(at, tl.abs(whole) - tl.abs(base), 0.0))
        tl.debug_barrier()  # other threads have read entries of g that may be overwritten now
    out_rows = out_ptr + rows * out_row  # not before: held through the kernel it spills on sm_80 and sm_100
    tl.store(out_rows[:, None] + experts * out_column, new, mask=tile)
    if TARGET != "overlap":
        tl.debug_barrier()
        tl.store(out_rows[None, :] + expert * out_column, new_at, mask=written)
    if SURVIVAL:
        sums = survival_ptr + (tl.program_id(0) % SLOTS) * 2
        tl.atomic_add(sums, stayed.to(tl.float64), sem="relaxed")
        tl.atomic_add(sums + 1, total.to(tl.float64), sem="relaxed")


_LOCK = threading.Lock()
_DEVICE = (block_sum, close_pairs, masses, number, row_masses, shares, target_weights, usable_row)


@functools.cache
def _build() -> SimpleNamespace:
    import triton
    import triton.language

    names = {"tl": triton.language, "constexpr": triton.language.constexpr}
    # The import hook of type checkers wraps functions; Triton reads the source and the globals of the function itself.
    names |= {function.__name__: triton.jit(inspect.unwrap(function)) for function in _DEVICE}
    vars(device).update(names)
    globals().update(names)
    norms = triton.jit(inspect.unwrap(_norms), do_not_specialize=STEP_ARGUMENTS)
    anywhere = {"do_not_specialize_on_alignment": NUMBERS}
    inject = triton.jit(inspect.unwrap(_inject), do_not_specialize=STEP_ARGUMENTS, **anywhere)
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
    """Configurations that give each thread 8 to 32 entries; the widest load where experts are few."""
    load = {config: config.kwargs["BLOCK_N"] * constants["BLOCK_M"] / (32 * config.num_warps) for config in configs}
    return [config for config in configs if 8 <= load[config] <= 32] or [max(load, key=lambda c: load[c])]
