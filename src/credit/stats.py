"""Statistics of a policy update, kept as sums and counts so that micro-batches and ranks add up."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from credit._safe import (
    MAX_LOG_RATIO,
    compute_dtype,
    on_processor,
    require_shape,
    safe_divide,
    safe_sqrt,
    statistics_dtype,
)


@dataclass(frozen=True)
class ClipStatistics:
    """Sums behind the clip fractions of a policy loss: scalars, or one entry per segment.

    ``a + b`` joins two shards; :meth:`compute` divides once. Build with :func:`clip_statistics`.
    """

    tokens: Float[Tensor, "*segments"]
    clipped_low: Float[Tensor, "*segments"]
    clipped_high: Float[Tensor, "*segments"]
    clipped_dual: Float[Tensor, "*segments"]
    kl_sum: Float[Tensor, "*segments"]
    ratio_max: Float[Tensor, "*segments"]

    def __add__(self, other: "ClipStatistics") -> "ClipStatistics":
        joined = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        joined["ratio_max"] = torch.maximum(self.ratio_max, other.ratio_max)
        return ClipStatistics(**joined)

    def compute(self) -> dict[str, Float[Tensor, "*segments"]]:
        """Fractions and means; 0 where there is no token."""
        sums = {"clip_low": self.clipped_low, "clip_high": self.clipped_high, "clip_dual": self.clipped_dual}
        means = {name: safe_divide(total, self.tokens) for name, total in (*sums.items(), ("kl", self.kl_sum))}
        return {**means, "ratio_max": self.ratio_max}


@dataclass(frozen=True)
class SegmentStatistics:
    """Sums behind the advantage statistics of each segment; ``a + b`` joins two shards."""

    tokens: Float[Tensor, " segments"]
    total: Float[Tensor, " segments"]
    squares: Float[Tensor, " segments"]
    zeros: Float[Tensor, " segments"]

    def __add__(self, other: "SegmentStatistics") -> "SegmentStatistics":
        return SegmentStatistics(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def compute(self) -> dict[str, Float[Tensor, " segments"]]:
        """Token share, and mean, population standard deviation and share of exact zeros of the advantage."""
        mean = safe_divide(self.total, self.tokens)
        variance = safe_divide(self.squares, self.tokens) - mean * mean
        return {
            "token_share": safe_divide(self.tokens, self.tokens.sum().expand_as(self.tokens)),
            "mean": mean,
            "std": safe_sqrt(variance),
            "zero": safe_divide(self.zeros, self.tokens),
        }


def segment_statistics(
    advantages: Float[Tensor, "batch tokens"], segments: Int[Tensor, "batch tokens"], num_segments: int = 2
) -> SegmentStatistics:
    """Advantage statistics of segments ``0 … num_segments - 1``; other tokens are left out.

    Args:
        advantages: credit per token; tokens of no segment may hold anything.
        segments: segment of each token, negative for none.
        num_segments: how many segments to report.

    Returns:
        Sums, in float64 where the device has it.

    Raises:
        ValueError: shapes differ.

    Example:
        >>> stats = segment_statistics(torch.tensor([[1.0, 3.0, 0.0]]), torch.tensor([[0, 0, 1]]))
        >>> stats.compute()["mean"]
        tensor([2., 0.], dtype=torch.float64)

    Reference:
        Ours.
    """
    require_shape("segments", segments, tuple(advantages.shape), "advantages")
    wide = statistics_dtype(advantages)
    sums = _empty_sums(4, num_segments, wide, advantages.device)
    for credit, kinds in _blocks(advantages.detach(), segments):
        values = credit.to(wide, copy=True)
        cells = _cells(kinds, num_segments)
        _add(sums, 0, values.new_ones(1).expand(values.shape), cells)
        _add(sums, 1, values, cells)
        _add(sums, 2, values * values, cells)
        _add(sums, 3, values.eq_(0), cells)
    return SegmentStatistics(*_of_segments(sums.sum(1)))


def clip_statistics(
    logp: Float[Tensor, "batch tokens"],
    old_logp: Float[Tensor, "batch tokens"],
    advantages: Float[Tensor, "batch tokens"],
    segments: Int[Tensor, "batch tokens"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    num_segments: int = 2,
) -> ClipStatistics:
    """Clip statistics of each segment; :func:`credit.losses.policy_loss` returns those of the whole batch.

    A token counts as clipped where the clip stops its gradient: low where A < 0 and r < 1 - clip_low, high where A > 0
    and r > 1 + clip_high, dual where A < 0 and r > dual_clip. ``kl`` is the k3 estimate of KL(old || new).

    Args:
        logp: log-probabilities under the current policy; tokens of no segment may hold anything.
        old_logp: log-probabilities under the policy that sampled.
        advantages: credit per token.
        segments: segment of each token, negative for none.
        clip_low: as in the loss, like ``clip_high`` and ``dual_clip``.
        clip_high: upper clip width.
        dual_clip: bound on the ratio where A < 0, or None.
        num_segments: how many segments to report.

    Returns:
        One entry per segment.

    Raises:
        ValueError: shapes differ.

    Example:
        >>> logp, advantages = torch.tensor([[0.0, 0.5]]), torch.tensor([[1.0, 1.0]])
        >>> stats = clip_statistics(logp, torch.zeros(1, 2), advantages, torch.tensor([[0, 1]]))
        >>> stats.compute()["clip_high"]
        tensor([0., 1.], dtype=torch.float64)

    Reference:
        Ours.
    """
    for name, value in (("old_logp", old_logp), ("advantages", advantages), ("segments", segments)):
        require_shape(name, value, tuple(logp.shape), "logp")
    # The loss's own dtype, so that a ratio at the edge of the clip falls on the same side in both.
    dtype, wide = compute_dtype(logp), statistics_dtype(logp)
    sums = _empty_sums(5, num_segments, wide, logp.device)
    largest = sums.new_zeros(sums.shape[1:], dtype=dtype)
    for new, old, credit, kinds in _blocks(logp.detach(), old_logp.detach(), advantages.detach(), segments):
        change = (new.to(dtype) - old.to(dtype)).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = change.exp()
        cells = _cells(kinds, num_segments)
        _add(sums, 0, sums.new_ones(1).expand(ratio.shape), cells)
        for kind, found in enumerate(clipped(ratio, credit.to(dtype), clip_low, clip_high, dual_clip)):
            _add(sums, 1 + kind, found.to(wide), cells)
        _add(sums, 4, torch.expm1(change).sub_(change).to(wide), cells)
        largest.view(-1).scatter_reduce_(0, cells, ratio.flatten(), "amax")
    return ClipStatistics(*_of_segments(sums.sum(1)), *_of_segments(largest.amax(0, keepdim=True).to(wide)))


def clipped(
    ratio: Float[Tensor, "..."],
    advantages: Float[Tensor, "..."],
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Shaped[Tensor, "..."], Shaped[Tensor, "..."], Shaped[Tensor, "..."]]:
    """Where the clips stop the gradient: (low, high, dual)."""
    falls, rises = advantages < 0, advantages > 0
    dual = falls & (ratio > (torch.inf if dual_clip is None else dual_clip))
    return falls & (ratio < 1 - clip_low), rises & (ratio > 1 + clip_high), dual


# A sum must wait for the one before it to reach its cell; neighbouring tokens go to different sets of cells.
_SETS = 8
# Tokens whose wide copies stay in a CPU's cache: new memory for whole ones takes longer than the sums.
_BLOCK = 1 << 16


def _blocks(*tensors: Shaped[Tensor, "batch tokens"]) -> Iterable[tuple[Shaped[Tensor, "rows tokens"], ...]]:
    """The tensors some rows at a time on a CPU, whole elsewhere and under ``torch.compile``, which fuses them."""
    if not on_processor(tensors[0]):
        return [tensors]
    rows = max(_BLOCK // max(tensors[0].shape[1], 1), 1)
    return zip(*(torch.split(each, rows) for each in tensors), strict=True)


def _empty_sums(
    quantities: int, num_segments: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "quantities sets cells"]:
    return torch.zeros(quantities, _SETS, num_segments + 2, dtype=dtype, device=device)


def _add(
    sums: Float[Tensor, "quantities sets cells"],
    quantity: int,
    values: Float[Tensor, "rows tokens"],
    cells: Int[Tensor, " entries"],
) -> None:
    """Add each value to its cell; what tokens of no segment hold goes into cells that are thrown away."""
    sums[quantity].view(-1).scatter_add_(0, cells, values.flatten())


def _of_segments(sums: Float[Tensor, "quantities cells"]) -> tuple[Float[Tensor, " segments"], ...]:
    return sums[:, 1:-1].unbind()


def _cells(segments: Int[Tensor, "rows tokens"], num_segments: int) -> Int[Tensor, " entries"]:
    """Cell of each token. In a set, 0 is no segment and ``num_segments + 1`` one that is not reported."""
    sets = torch.arange(segments.shape[1], device=segments.device) % _SETS
    return segments.long().clamp(-1, num_segments).add_(sets * (num_segments + 2) + 1).flatten()
