"""What is put around the forward of a router: logits in a wider dtype if asked for, and an injection that spares the
input."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moe_routing.adapters.phases import Binding, Recording
from moe_routing.adapters.routers import RouterSite

Reach = Literal["backbone", "router"]


def router_calls(
    routers: Sequence[RouterSite],
    phase: Callable[[], Recording | Binding | None],
    source_output: dict[int, Tensor],
    reach: Reach,
    dtype: torch.dtype | None,
) -> "list[RouterCall]":
    """A :class:`RouterCall` for each router.

    Raises:
        ValueError: for an unknown reach, or a dtype that holds no fractions.
        NotImplementedError: for a router that cannot be run twice, or not in another dtype.
    """
    if reach not in ("backbone", "router"):
        raise ValueError(f"reach must be 'backbone' or 'router', got {reach!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"router_dtype must be a floating-point dtype, got {dtype}")
    for site in routers:
        if reach == "router" and site.family.random:
            raise NotImplementedError(
                f"reach='router' cannot be had for {type(site.module).__name__} ({site.family_name}): it draws random "
                "numbers, and a second run of the router would draw others"
            )
        if dtype is not None and site.family.narrow:
            raise NotImplementedError(
                f"router_dtype cannot be had for {type(site.module).__name__} ({site.family_name}): its experts fail "
                "on routing weights wider than the hidden states"
            )
    return [RouterCall(layer, site, phase, source_output, reach, dtype) for layer, site in enumerate(routers)]


class RouterCall:
    """What runs in place of the ``forward`` of one router.

    With ``reach="router"`` the router runs a second time on a detached input, and only the logits of that run
    receive the injection. They hang on the input of the first run, whose gradient is complete only after the one
    at the logits: so the injection is known when it is due, the input's own gradient passes on as it is, and both
    runs meet in the gradient of the weights. Nothing depends on how the router computes its logits.
    """

    def __init__(
        self,
        layer: int,
        site: RouterSite,
        phase: Callable[[], Recording | Binding | None],
        source_output: dict[int, Tensor],
        reach: Reach,
        dtype: torch.dtype | None,
    ) -> None:
        self.layer = layer
        self.site = site
        self.phase = phase
        self.source_output = source_output
        self.reach = reach
        self.dtype = dtype

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        phase = self.phase()
        if phase is None or (self.reach == "backbone" and self.dtype is None):
            return forward(*args, **kwargs)
        with WideProducts(self.dtype):
            if self.reach == "router" and isinstance(phase, Binding) and phase.acts and torch.is_grad_enabled():
                args, kwargs = self._sidetrack(phase, forward, args, kwargs)
            return forward(*args, **kwargs)

    def _sidetrack(
        self, phase: Binding, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with a second run of the router hung on the first tensor of numbers among them."""
        output = forward(*map(_detached, args), **{name: _detached(value) for name, value in kwargs.items()})
        site, waiting = self.site, list[Tensor]()
        logits = site.logits(output) if site.source is None else self.source_output.pop(self.layer)
        if not logits.requires_grad:
            phase.frozen.add(self.layer)
            return args, kwargs
        phase.side[self.layer] = waiting
        given: dict[int | str, Any] = dict(enumerate(args)) | kwargs
        at = next(key for key, value in given.items() if isinstance(value, Tensor) and value.is_floating_point())
        given[at] = _Sidetrack.apply(given[at], logits, waiting)  # type: ignore[no-untyped-call]
        return tuple(given[key] for key in range(len(args))), {name: given[name] for name in kwargs}


class WideProducts(TorchFunctionMode):
    """Runs every product with a weight in at least ``dtype``, autocast or not; None changes nothing.

    >>> a = torch.ones(2, 2, dtype=torch.bfloat16)
    >>> with WideProducts(torch.float32):
    ...     torch.nn.functional.linear(a, a).dtype
    torch.float32
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.dtype is None or func not in _PRODUCTS:
            return func(*args, **kwargs)
        device = next(value.device.type for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        with torch.autocast(device, enabled=False):
            return func(*map(self._widened, args), **{name: self._widened(value) for name, value in kwargs.items()})

    def _widened(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or self.dtype is None:
            return value
        return value.to(torch.promote_types(value.dtype, self.dtype))


_PRODUCTS = {
    torch.nn.functional.linear,
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.mm,
    Tensor.mm,
    torch.addmm,
}


class _Sidetrack(torch.autograd.Function):
    """The input unchanged in value and gradient; what waits when its gradient arrives goes to the second logits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, logits: Tensor, waiting: list[Tensor]) -> Tensor:
        ctx.waiting = waiting
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return grad, ctx.waiting.pop() if ctx.waiting else None, None


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
