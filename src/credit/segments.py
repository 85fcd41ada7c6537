"""Segments: which part of a multi-turn trajectory each completion token belongs to.

A *learnable mask* is true on tokens the policy generated and false on environment tokens and padding. Its *runs* are
the maximal stretches of true in a row. Segments are named by small integers; -1 means "no segment, no credit".
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Literal

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from credit._safe import as_mask, require_matrix, require_shape


class Segment(IntEnum):
    """Segments of a tool-calling trajectory (SLCA eqs. 7 and 8)."""

    NONE = -1
    TOOL = 0
    SUMMARY = 1


class Owner(IntEnum):
    """Who wrote a token where a controller calls expert models (RIVET stage I); observations earn nothing."""

    OBSERVATION = -1
    CONTROLLER = 0
    EXPERT = 1


class Field(IntEnum):
    """The two generated parts of a turn that routing control tells apart."""

    NONE = -1
    THINK = 0
    TOOL = 1


def run_ids(mask: Shaped[Tensor, "batch tokens"]) -> Int[Tensor, "batch tokens"]:
    """Number the runs of each row.

    0, 1, 2, … along each row, -1 where ``mask`` is false.

    Args:
        mask: learnable mask, boolean or 0/1.

    Returns:
        int64 run numbers.

    Raises:
        ValueError: ``mask`` is not two-dimensional.

    Example:
        >>> run_ids(torch.tensor([[1, 1, 0, 1, 0]]))
        tensor([[ 0,  0, -1,  1, -1]])

    Reference:
        SLCA eq. 6.
    """
    require_matrix("mask", mask)
    return _runs(as_mask(mask)).long()


def _runs(learnable: Bool[Tensor, "batch tokens"]) -> Int[Tensor, "batch tokens"]:
    """Run numbers in int32: a running sum of booleans takes five times as long in int64 on a CPU."""
    before = torch.nn.functional.pad(learnable, (1, 0))[:, :-1]
    begun = (learnable & ~before).cumsum(dim=1, dtype=torch.int32)
    return begun * learnable.to(torch.int32) - 1


def tool_summary_segments(
    mask: Shaped[Tensor, "batch tokens"],
    *,
    final: Literal["last_run", "unless_followed"] = "last_run",
    completion_mask: Shaped[Tensor, "batch tokens"] | None = None,
) -> Int[Tensor, "batch tokens"]:
    """Split the learnable tokens of each row into tool decisions and the final summary.

    The last run is ``SUMMARY``, every earlier run is ``TOOL``, the rest ``NONE``. A row with one run is all summary; a
    row without a run has no segment.

    Args:
        mask: learnable mask, boolean or 0/1.
        final: ``"last_run"`` is the paper's rule. ``"unless_followed"`` (ours) makes the last run ``TOOL`` when
            environment tokens stand after it: the rollout was cut after a tool answer and never summarised.
        completion_mask: true on real tokens, false on padding; tells environment tokens from padding for
            ``"unless_followed"``. Without it every position counts as a real token.

    Returns:
        int64 values of :class:`Segment`.

    Raises:
        ValueError: shapes differ, or ``final`` is unknown.

    Example:
        >>> tool_summary_segments(torch.tensor([[1, 0, 1, 1, 0]]))
        tensor([[ 0, -1,  1,  1, -1]])
        >>> tool_summary_segments(torch.tensor([[1, 0, 1, 1, 0]]), final="unless_followed")
        tensor([[ 0, -1,  0,  0, -1]])

    Reference:
        SLCA eqs. 7 and 8, appendix A.1; ``"unless_followed"`` is ours.
    """
    if final not in ("last_run", "unless_followed"):
        raise ValueError(f"final must be 'last_run' or 'unless_followed', got {final!r}")
    require_matrix("mask", mask)
    learnable = as_mask(mask)
    runs = _runs(learnable)
    summary = learnable & (runs == _row_max(runs))
    if final == "unless_followed":
        real = torch.ones_like(learnable) if completion_mask is None else as_mask(completion_mask)
        require_shape("completion_mask", real, tuple(mask.shape), "mask")
        position = torch.arange(mask.shape[1], device=mask.device)
        last_learnable = torch.where(learnable, position, -1)
        last_environment = torch.where(real & ~learnable, position, -1)
        followed = _row_max(last_environment) > _row_max(last_learnable)
        summary = summary & ~followed
    # None, tool and summary are -1, 0 and 1: one more for each of the two masks that is true.
    return (learnable.to(torch.int8) + summary.to(torch.int8) + int(Segment.NONE)).long()


def spans_to_segments(
    spans: Sequence[tuple[int, int, int, int]], tokens: int, rows: int | None = None
) -> Int[Tensor, "rows tokens"]:
    """Build a segment tensor from named token spans.

    Args:
        spans: ``(row, start, stop, segment)``, half open, any order. A span of no token, or of segment -1, marks
            nothing but must still be in range and must not overlap.
        tokens: width ``T`` of the result.
        rows: height of the result; the largest row of ``spans`` plus one by default.

    Returns:
        int64 segments on the CPU, -1 outside every span.

    Raises:
        ValueError: a span is out of range, is not a quadruple, or overlaps another; both are named. ``tokens`` or
            ``rows`` is negative.

    Example:
        >>> spans_to_segments([(0, 0, 2, 0), (0, 3, 4, 1)], tokens=5)
        tensor([[ 0,  0, -1,  1, -1]])

    Reference:
        Ours.
    """
    if tokens < 0 or (rows is not None and rows < 0):
        raise ValueError(f"tokens and rows must not be negative, got {tokens} and {rows}")
    odd = [span for span in spans if len(span) != 4]
    if odd:
        raise ValueError(f"spans: {odd[0]} is not (row, start, stop, segment)")
    table = torch.tensor(list(spans), dtype=torch.int64).reshape(-1, 4)
    row, start, stop, segment = table.unbind(dim=1)
    height = int(row.max()) + 1 if rows is None and len(table) else (rows or 0)
    bad = (row < 0) | (row >= height) | (start < 0) | (start > stop) | (stop > tokens) | (segment < -1)
    if bool(bad.any()):
        first = tuple(table[bad][0].tolist())
        raise ValueError(f"spans: {first} is out of range for shape {(height, tokens)} and segments >= -1")
    _require_disjoint(table[stop > start])
    # A span is +value where it starts and -value where it stops; the running sum is the value inside.
    edges = torch.zeros(height, tokens + 1, dtype=torch.int64)
    edges.index_put_((row, start), segment + 1, accumulate=True)
    edges.index_put_((row, stop), -(segment + 1), accumulate=True)
    return edges.cumsum(dim=1)[:, :tokens] - 1


def has_segment(segments: Int[Tensor, "batch tokens"], segment: int) -> Bool[Tensor, " batch"]:
    """Which rows have at least one token of ``segment``: the rows whose reward is compared.

    Args:
        segments: segment of each token.
        segment: the one to look for.

    Returns:
        A boolean per row.

    Example:
        >>> has_segment(torch.tensor([[0, 1], [1, 1]]), Segment.TOOL)
        tensor([ True, False])

    Reference:
        SLCA eq. 17.
    """
    # The maximum of bytes is vectorised where `any` is not: a quarter of the time on a CPU.
    return _row_max((segments == segment).view(torch.uint8)).squeeze(1) == 1


def learns(segments: Int[Tensor, "batch tokens"]) -> Bool[Tensor, " batch"]:
    """Which rows have a token of any segment.

    >>> learns(torch.tensor([[0, -1], [-1, -1]]))
    tensor([ True, False])
    """
    return _row_max(segments).squeeze(1) >= 0


def _row_max(values: Shaped[Tensor, "batch tokens"]) -> Shaped[Tensor, "batch 1"]:
    if values.shape[1] == 0:  # no maximum: nothing there, which -1 says among ids and 255 among bytes
        return values.new_full((values.shape[0], 1), -1)
    return values.amax(dim=1, keepdim=True)


def _require_disjoint(spans: Int[Tensor, "spans 4"]) -> None:
    by_start = spans[torch.argsort(spans[:, 1], stable=True)]
    ordered = by_start[torch.argsort(by_start[:, 0], stable=True)]
    earlier, later = ordered[:-1], ordered[1:]
    overlap = (earlier[:, 0] == later[:, 0]) & (later[:, 1] < earlier[:, 2])
    if bool(overlap.any()):
        first, second = tuple(earlier[overlap][0].tolist()), tuple(later[overlap][0].tolist())
        raise ValueError(f"spans: {first} and {second} overlap")
