"""Where-safe arithmetic: no masked value, however ugly, reaches a result or a gradient.

Every function applies the double ``where``: once on the input, so that the derivative is taken at a harmless
point, and once on the output, so that the harmless point does not show.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

MAX_LOG_RATIO = 20.0


def statistics_dtype(tensor: Shaped[Tensor, "..."]) -> torch.dtype:
    """Dtype in which sums over ``tensor`` are taken: float64, or float32 on devices that have no float64."""
    return torch.float32 if tensor.device.type in ("mps", "xla") else torch.float64


def compute_dtype(tensor: Float[Tensor, "..."]) -> torch.dtype:
    """Dtype in which element-wise maths on ``tensor`` is done: at least float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def on_processor(x: Shaped[Tensor, "..."]) -> bool:
    """Whether operations run one by one on a CPU: there data may be read without waiting for a device."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def select(mask: Bool[Tensor, "..."], values: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """``values`` where ``mask`` is true and an exact 0 elsewhere; the gradient elsewhere is an exact 0 too.

    >>> select(torch.tensor([True, False]), torch.tensor([1.0, float("nan")]))
    tensor([1., 0.])
    """
    return torch.where(mask, values, values.new_zeros(()))


def bit_mask(mask: Bool[Tensor, "..."], dtype: torch.dtype) -> Shaped[Tensor, "..."]:
    """All bits set where ``mask`` is true, none elsewhere, in integers as wide as ``dtype``; see :func:`keep_`."""
    return mask.to({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]).neg_()


def keep_(values: Float[Tensor, "..."], bits: Shaped[Tensor, "..."]) -> Float[Tensor, "..."]:
    """:func:`select` in place and without a gradient, by a bitwise *and*, which no NaN survives.

    On a CPU ``where`` branches at every entry, which takes several times as long.

    >>> values = torch.tensor([1.0, float("nan")])
    >>> keep_(values, bit_mask(torch.tensor([True, False]), values.dtype))
    tensor([1., 0.])
    """
    values.view(bits.dtype).bitwise_and_(bits)
    return values


def keep(mask: Bool[Tensor, "*shape"], values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """:func:`select` for a mask of the shape of ``values``: on a CPU by bits, with all its derivatives.

    >>> keep(torch.tensor([True, False]), torch.tensor([1.0, float("nan")]))
    tensor([1., 0.])
    """
    return keep_bits(values, bit_mask(mask, values.dtype)) if on_processor(values) else select(mask, values)


def keep_bits(values: Float[Tensor, "..."], bits: Shaped[Tensor, "..."]) -> Float[Tensor, "..."]:
    """:func:`keep_` out of place and with its derivative."""
    kept: Tensor = _KeepBits.apply(values, bits)  # type: ignore[no-untyped-call]
    return kept


class _KeepBits(torch.autograd.Function):
    """:func:`keep_bits`; it is linear, so that its derivative is itself."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, bits: Tensor) -> Tensor:
        return (values.view(bits.dtype) & bits).view(values.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return keep_bits(slope, ctx.saved_tensors[0]), None


def safe_divide(
    numerator: Float[Tensor, "..."], denominator: Float[Tensor, "..."], fill: float = 0.0
) -> Float[Tensor, "..."]:
    """``numerator / denominator``, and ``fill`` with zero gradient where the denominator is 0.

    >>> safe_divide(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]))
    tensor([0.5000, 0.0000])
    """
    usable = denominator != 0
    quotient = numerator / torch.where(usable, denominator, torch.ones_like(denominator))
    return torch.where(usable, quotient, torch.full_like(quotient, fill))


def safe_log(x: Float[Tensor, "..."], fill: float = 0.0) -> Float[Tensor, "..."]:
    """``log(x)``, and ``fill`` with zero gradient where ``x <= 0``; a NaN stays a NaN.

    >>> safe_log(torch.tensor([1.0, 0.0]))
    tensor([0., 0.])
    """
    usable = ~(x <= 0)
    logarithm = torch.log(torch.where(usable, x, torch.ones_like(x)))
    return torch.where(usable, logarithm, torch.full_like(x, fill))


def safe_sqrt(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``sqrt(x)``, and 0 with zero gradient where ``x <= 0`` (plainly it is infinite); a NaN stays a NaN.

    >>> safe_sqrt(torch.tensor([4.0, 0.0]))
    tensor([2., 0.])
    """
    usable = ~(x <= 0)
    return select(usable, torch.sqrt(torch.where(usable, x, torch.ones_like(x))))


def masked_sum(x: Shaped[Tensor, "..."], mask: Bool[Tensor, "..."], dim: int = -1) -> Shaped[Tensor, "..."]:
    """Sum over ``dim`` of the entries where ``mask`` is true."""
    return select(mask, x).sum(dim)


def masked_mean(x: Float[Tensor, "..."], mask: Bool[Tensor, "..."], dim: int = -1) -> Float[Tensor, "..."]:
    """Mean over ``dim`` of the entries where ``mask`` is true; 0 with zero gradient where there is none.

    >>> masked_mean(torch.tensor([1.0, float("inf")]), torch.tensor([True, False]))
    tensor(1.)
    """
    wide = compute_dtype(x)  # float16 holds neither a long sum nor a count above 65504
    return safe_divide(masked_sum(x.to(wide), mask, dim), mask.sum(dim).to(wide)).to(x.dtype)


def as_mask(mask: Shaped[Tensor, "..."]) -> Bool[Tensor, "..."]:
    """A boolean mask from a boolean or 0/1 tensor (trainers carry masks as integers or floats)."""
    return mask if mask.dtype is torch.bool else mask != 0


def require_shape(name: str, tensor: Shaped[Tensor, "..."], shape: tuple[int, ...], like: str) -> None:
    """Raise ``ValueError`` naming both shapes unless ``tensor`` has ``shape``, the shape of ``like``."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but {like} asks for {tuple(shape)}")


def require_matrix(name: str, tensor: Shaped[Tensor, "..."], axes: str = "[batch, tokens]") -> None:
    """Raise ``ValueError`` unless ``tensor`` is two-dimensional."""
    if tensor.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but {axes} is wanted")


def require_floating(name: str, tensor: Shaped[Tensor, "..."]) -> None:
    """Raise ``ValueError`` unless ``tensor`` has a floating dtype: results keep it, and integers would cut them off."""
    if not tensor.dtype.is_floating_point:
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} has dtype {tensor.dtype}, but a floating dtype is wanted"
        )


def require_finite(name: str, values: Float[Tensor, "..."], present: Bool[Tensor, "..."]) -> None:
    """Raise ``ValueError`` naming the first present entry that is not finite; left out under ``torch.compile``."""
    if torch.compiler.is_compiling():
        return
    bad = present & ~torch.isfinite(values)
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        raise ValueError(f"{name}{place} is {float(values[tuple(place)])}, but it is present; an absent one may be NaN")
