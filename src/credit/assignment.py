"""Credit as a matrix: every method is one linear map from component advantages to segments."""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from credit._safe import on_processor, require_floating, require_shape, select
from credit.segments import run_ids


def assign_credit(
    advantages: Float[Tensor, "batch *runs components"],
    segments: Int[Tensor, "batch tokens"],
    weights: Float[Tensor, "segments components"],
    *,
    runs: Int[Tensor, "batch tokens"] | None = None,
) -> Float[Tensor, "batch tokens"]:
    r"""Give every token the credit of its segment.

    .. math:: A_{b,t} = \sum_c W_{s(b,t),c} \, \hat A_{b,c}

    and 0 where ``segments`` is negative. A component whose weight is 0 for a segment cannot reach that segment, not
    even with a NaN. Linear in ``advantages`` and in ``weights``, and differentiable in both.

    Args:
        advantages: one value per rollout and component ``[B, C]``, or per run ``[B, R, C]``.
        segments: segment of each token, negative for none.
        weights: ``[S, C]``; row ``s`` says how much of each component segment ``s`` receives.
        runs: run of each token, for per-run advantages; by default the runs of ``segments >= 0``.

    Returns:
        Credit per token, in the dtype of ``advantages``.

    Raises:
        ValueError: shapes do not fit, ``advantages`` are integers, or a segment or run has no row in ``weights`` or
            ``advantages``.

    Example:
        >>> segments = torch.tensor([[0, 0, -1, 1]])
        >>> assign_credit(torch.tensor([[2.0, -1.0]]), segments, torch.eye(2))
        tensor([[ 2.,  2.,  0., -1.]])

    Reference:
        SLCA eq. 3, written as a matrix (ours); the rows of the methods are in :mod:`credit.rules`.
    """
    _require_fit(advantages, segments, weights)
    require_floating("advantages", advantages)
    kinds = weights.shape[0]
    table = _of_segments(advantages, weights.to(advantages.dtype))
    # Column 0 is "no segment", so that -1 needs no second pass over the tokens.
    columns = torch.nn.functional.pad(table.flatten(1), (1, 0))
    if advantages.dim() == 2:
        return _pick(columns, segments.long() + 1, segments, weights)
    runs = run_ids(segments >= 0) if runs is None else runs
    require_shape("runs", runs, tuple(segments.shape), "segments")
    _require_below("runs", torch.where(segments >= 0, runs, -1), advantages.shape[1], "advantages", advantages)
    _require_below("segments", segments, kinds, "weights", weights)
    return _pick(columns, torch.where(segments >= 0, runs.long() * kinds + segments.long() + 1, 0), segments, weights)


def _of_segments(
    advantages: Float[Tensor, "*rows components"], weights: Float[Tensor, "segments components"]
) -> Float[Tensor, "*rows segments"]:
    """Sum of weight times advantage. One that is not finite is loud where a weight admits it, never in a gradient."""
    finite = advantages.isfinite()
    # Autocast would run the product in half precision.
    if on_processor(advantages) and not torch.is_autocast_enabled("cpu") and bool(finite.all()):
        return advantages @ weights.T + 0.0  # all that the rest comes to, in a tenth of its time; no -0.0
    each, finite = advantages.unsqueeze(-2), finite.unsqueeze(-2)
    loud = select(weights != 0, weights.detach() * each)
    return torch.where(finite, weights * select(finite, each), loud).sum(-1)


def _pick(
    columns: Float[Tensor, "batch columns"],
    index: Int[Tensor, "batch tokens"],
    segments: Int[Tensor, "batch tokens"],
    weights: Float[Tensor, "segments components"],
) -> Float[Tensor, "batch tokens"]:
    """Gather, trusting the device's own bounds check where it raises instead of paying for one more pass."""
    if torch.compiler.is_compiling():
        return columns.gather(1, index.clamp(min=0))
    if segments.device.type != "cpu":
        _require_below("segments", segments, len(weights), "weights", weights)
        return columns.gather(1, index.clamp(min=0))
    try:
        return columns.gather(1, index)
    except RuntimeError:  # an id below -1, which is as good as -1, or one that is too large
        _require_below("segments", segments, len(weights), "weights", weights)
        return columns.gather(1, index.clamp(min=0))


def _require_fit(advantages: Float[Tensor, "..."], segments: Int[Tensor, "..."], weights: Float[Tensor, "..."]) -> None:
    shapes = f"{tuple(advantages.shape)} and segments of shape {tuple(segments.shape)}"
    if advantages.dim() not in (2, 3) or segments.dim() != 2 or advantages.shape[0] != segments.shape[0]:
        raise ValueError(f"advantages has shape {shapes}: [B, C] or [B, R, C] goes with [B, T]")
    if weights.dim() != 2 or weights.shape[1] != advantages.shape[-1]:
        raise ValueError(
            f"weights has shape {tuple(weights.shape)}, but advantages of shape {tuple(advantages.shape)} "
            f"ask for (segments, {advantages.shape[-1]})"
        )


def _require_below(
    name: str, ids: Int[Tensor, "batch tokens"], bound: int, like: str, source: Shaped[Tensor, "..."]
) -> None:
    if torch.compiler.is_compiling() or ids.numel() == 0:
        return
    largest = int(ids.max())
    if largest >= bound:
        raise ValueError(
            f"{name} of shape {tuple(ids.shape)} holds {largest}, but {like} of shape {tuple(source.shape)} "
            f"has rows 0 to {bound - 1}"
        )
