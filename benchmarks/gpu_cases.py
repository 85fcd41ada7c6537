"""Calls of the router gradient for `benchmarks.gpu_router_gradient`: the sizes of real routers, and ugly ones."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_routing import count_pairs

# Far above the paper's weights, so that the injection is as large as the gradient and no error hides behind it.
LAMBDA_TURN, LAMBDA_TOKEN_PER_PAIR = 1.0, 0.1


@dataclass(frozen=True)
class Router:
    """Experts, experts per token and score function of a published model."""

    name: str
    experts: int
    k: int
    activation: str


ROUTERS = (
    Router("Qwen3-30B-A3B", 128, 8, "softmax"),
    Router("DeepSeek-V3", 256, 8, "sigmoid"),
    Router("Qwen3-Next", 512, 10, "softmax"),
)


@dataclass(frozen=True)
class Call:
    """Arguments of one `router_gradient`."""

    logits: Tensor
    grad_in: Tensor
    field: Tensor
    control: Tensor
    selected: Tensor
    num_pairs: Tensor
    lambda_token: float | Tensor
    lambda_turn: float | Tensor = LAMBDA_TURN
    activation: str = "softmax"
    target: str = "previous_topk"
    rho: bool = True
    gate: float | Tensor = 1.0
    gap_threshold: float = 0.5

    @property
    def size(self) -> tuple[int, int, int]:
        """Tokens, experts, experts per token."""
        return *self.logits.shape, self.selected.shape[1]

    def keywords(self) -> dict[str, Any]:
        """Every argument after the two positional ones."""
        return {name: value for name, value in vars(self).items() if name not in ("logits", "grad_in")}

    def rows(self, start: int, stop: int) -> "Call":
        """The same call on some of the tokens; exact where no field reaches over either end."""
        cut = {name: getattr(self, name)[start:stop] for name in ("logits", "grad_in", "field", "selected")}
        return replace(self, **cut)

    def wide(self) -> "Call":
        """The same numbers in float64."""
        return replace(self, logits=self.logits.double(), grad_in=self.grad_in.double(), control=self.control.double())

    def floor_bytes(self) -> int:
        """Bytes that have to move: every input once, the result once, and with rho the gradient and field ids twice.

        rho divides by a maximum over the field, so all of the gradient is read before the first value can be
        written; only a cache saves the second read, and only at small sizes. The norms in between count as well.
        """
        once = [self.logits, self.grad_in, self.field, self.control, self.selected, self.grad_in]
        norms = 2 * 4 * self.field.numel() if self.rho else 0
        again = [self.grad_in, self.field] if self.rho else []
        return sum(tensor.numel() * tensor.element_size() for tensor in once + again) + norms


def make_call(
    router: Router,
    tokens: int,
    dtype: torch.dtype,
    device: str,
    *,
    seed: int = 0,
    mean_field: int = 128,
    holes: bool = False,
    target: str = "previous_topk",
    rho: bool = True,
) -> Call:
    """A random call. Neighbours pick similar experts, as a trained router does: else no pair is close enough to act.

    ``holes`` puts every fourth span of tokens outside all fields; timings leave it off, since such rows are cheap.
    """
    random = torch.Generator(device).manual_seed(seed)
    spans = _spans(tokens, mean_field, device, random)
    count = int(spans.max()) + 1 if tokens else 1
    shape = (tokens, router.experts)
    wide: dict[str, Any] = {"device": device, "generator": random}
    drift = torch.randn(count, router.experts, **wide)
    logits = torch.randn(shape, **wide).mul_(0.5).add_(drift[spans])
    field = count - 1 - spans  # descending: nothing may rely on ids that ascend
    if holes:
        field = torch.where(field % 4 == 3, -1, field)
    pairs = count_pairs(field)
    return Call(
        logits=logits.to(dtype),
        grad_in=torch.randn(shape, **wide).to(dtype),
        field=field,
        control=torch.randn(count, router.experts, **wide),
        selected=logits.topk(router.k).indices,
        num_pairs=pairs,
        lambda_token=LAMBDA_TOKEN_PER_PAIR * float(pairs),
        activation=router.activation,
        target=target,
        rho=rho,
    )


def whole_fields(field: Tensor, rows: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of at least ``rows`` tokens that end where a field ends; each field must be one run."""
    tokens = field.shape[0]
    changes = (field[1:] != field[:-1]).nonzero()[:, 0] + 1
    place = torch.searchsorted(changes, torch.arange(rows, max(tokens, rows), rows, device=field.device))
    inner = changes[place[place < changes.shape[0]]].unique().tolist()
    edges = [0, *inner, tokens]
    return itertools.pairwise(edges)


def _spans(tokens: int, mean: int, device: str, random: torch.Generator) -> Tensor:
    """Number of the span of each token, ascending from 0; lengths are uniform around the mean."""
    count = 2 * tokens // mean + 8
    length = torch.randint(1, max(2 * mean, 2), (count,), device=device, generator=random)
    length[-1] += tokens
    return torch.arange(count, device=device).repeat_interleave(length)[:tokens]
