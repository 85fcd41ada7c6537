"""One row of the table of primitives: what is timed, at which sizes, beside what."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Made:
    """Calls on data of one size, ready to be timed.

    Attributes:
        ours: the primitive.
        naive: the same by a plain loop, or by the composition of PyTorch calls that a user would write.
        traffic: bytes that must be read plus bytes that must be written once, 0 for text.
        peers: the same by other libraries.
    """

    ours: Callable[[], Any]
    naive: Callable[[], Any]
    traffic: int = 0
    peers: Mapping[str, Callable[[], Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A primitive and how to call it.

    Attributes:
        covers: public names, with their package, that this row stands for.
        what: how the row calls it, where the name alone does not say it.
        make: data of ``n`` units.
        largest: units of the largest size; three smaller ones span a decade.
        unit: what is counted.
        naive: what the naive twin is.
        naive_at: units at which the twin runs where the largest size would take it too long.
        note: what stands between it and twice its floor.
        tolerance: of the comparison with twin and peers, before anything is timed.
    """

    covers: tuple[str, ...]
    make: Callable[[int], Made]
    largest: int
    unit: str
    naive: str
    what: str = ""
    naive_at: int | None = None
    note: str = ""
    tolerance: float = 1e-4

    @property
    def name(self) -> str:
        """How the row is called."""
        return f"`{self.covers[0].partition('.')[2]}`{self.what and f', {self.what}'}"

    def sizes(self, scale: float = 1.0) -> list[int]:
        """Four sizes over a decade, ascending."""
        largest = max(round(self.largest * scale), 40)
        return [round(largest / 10 ** (step / 3)) for step in (3, 2, 1, 0)]


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Slope of the least-squares line through log seconds over log size: 1 is linear, 2 quadratic.

    >>> round(exponent([1, 2, 4], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    x, y = [math.log(size) for size in sizes], [math.log(max(second, 1e-9)) for second in seconds]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sum((a - mean_x) ** 2 for a in x)


def require_same(case: Case, made: Made) -> None:
    """Refuse to time calls that do not compute the same thing.

    Raises:
        AssertionError: the twin or a peer differs; it is named.
    """
    wanted = tree_leaves(made.ours())
    for name, call in {case.naive: made.naive, **made.peers}.items():
        for found, value in zip(tree_leaves(call()), wanted, strict=True):
            if not isinstance(value, Tensor):
                assert found == value, f"{case.name}: {name} gives {found}, ours {value}"
                continue
            torch.testing.assert_close(
                torch.as_tensor(found).to(torch.float64), value.detach().to(torch.float64),
                rtol=case.tolerance, atol=case.tolerance, msg=lambda text, name=name: f"{case.name}, {name}: {text}",
            )  # fmt: skip


def gradient_of(loss: Callable[[Tensor], Tensor], leaf: Tensor) -> Callable[[], Tensor]:
    """Forward and backward through a scalar of ``leaf``."""
    variable = leaf.detach().clone().requires_grad_()

    def both() -> Tensor:
        (slope,) = torch.autograd.grad(loss(variable), variable)
        return slope

    return both


def size_of(*tensors: Tensor) -> int:
    """Bytes of the tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
