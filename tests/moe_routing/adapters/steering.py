"""A steered backward pass, and the same gradient from autograd through the objective written out."""

from typing import Any

import torch
from torch import Tensor, nn

from moe_routing.adapters.routers import find_routers
from moe_routing.adapters.tables import RoutingTables
from moe_routing.adapters.transformers import RoutingControl

ROWS, LENGTH, FIELDS = 4, 7, 16
STRONG = {"lambda_turn": 30.0, "lambda_token": 3.0, "gap_threshold": 1.0, "rho": False}


def tokens() -> Tensor:
    return torch.randint(3, 40, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def fields() -> Tensor:
    """Each row: a prompt token, then two turns of one THINK and one TOOL field each; the last row ends in padding."""
    field = torch.tensor([[-1, 0, 0, 1, 2, 2, 3]]).repeat(ROWS, 1)
    field = torch.where(field >= 0, field + 4 * torch.arange(ROWS)[:, None], -1)
    field[-1, -1] = -1
    return field


def labels() -> Tensor:
    """Operations of the 16 fields; both fields of a turn share them."""
    return torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0], [1, 0], [1, 0], [0, 1], [0, 1]]).bool().repeat_interleave(2, 0)


def kinds() -> Tensor:
    return torch.tensor([0, 1]).repeat(FIELDS // 2)


def forward(model: nn.Module, ids: Tensor) -> Tensor:
    """A loss of the last hidden states that depends on every one of them."""
    config: Any = model.config
    extra = {"decoder_input_ids": ids} if config.is_encoder_decoder else {}
    hidden: Tensor = model(input_ids=ids, use_cache=False, **extra)[0]
    weight = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2)).double()
    return (hidden * weight.to(hidden.dtype)).tanh().sum()


def record(control: RoutingControl, model: nn.Module, entropy: float | None = 0.1) -> RoutingTables:
    with torch.no_grad(), control.record(fields(), labels(), kinds()):
        forward(model, tokens())
    return control.tables(entropy)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def steered(model: nn.Module, control: RoutingControl, tables: RoutingTables) -> dict[str, Tensor]:
    with control.bind(fields(), tables):
        forward(model, tokens()).backward()
    return gradients(model)


def plain(model: nn.Module) -> dict[str, Tensor]:
    forward(model, tokens()).backward()
    return gradients(model)


def capture(model: nn.Module, control: RoutingControl) -> tuple[Tensor, list[tuple[Any, Any]]]:
    """The loss, and what each router was given and returned in that forward."""
    seen: dict[int, tuple[Any, Any]] = {}
    handles = [
        site.module.register_forward_hook(lambda module, args, output: seen.update({id(module): (args, output)}))
        for site in control.routers
    ]
    loss = forward(model, tokens())
    for handle in handles:
        handle.remove()
    return loss, [seen[id(site.module)] for site in control.routers]


def objective(z: Tensor, selected: Tensor, control: Tensor, sigmoid: bool, num_pairs: int) -> Tensor:
    """``lambda_turn J_turn - lambda_token mean(loss)`` of one router, token by token, control rows held constant."""
    field = fields().reshape(-1).tolist()
    p = torch.sigmoid(z) / torch.sigmoid(z).sum(-1, keepdim=True) if sigmoid else torch.softmax(z, -1)
    total = z.new_zeros(())
    for t, f in enumerate(field):
        if f < 0:
            continue
        total = total + STRONG["lambda_turn"] * (p[t] * control[f].to(z.dtype)).sum()
        if t and field[t - 1] == f and int(selected[t - 1].min()) >= 0 and int(selected[t].min()) >= 0:
            q = p[t - 1, selected[t - 1]].detach()
            q = q / q.sum()
            total = total + STRONG["lambda_token"] / num_pairs * (q * p[t, selected[t - 1]].log()).sum()
    return total


def recorded_logits(output: Any, index: int, probabilities: bool) -> Tensor:
    """The tensor that the library records, as logits: log-probabilities are logits up to a constant per token."""
    z = output[index] if isinstance(output, tuple) else output
    z = z.reshape(-1, z.shape[-1])
    return z.log() if probabilities else z


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def relative_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert got.keys() == want.keys()
    scale = max(float(w.abs().max()) for w in want.values())
    return max(float((got[name] - want[name]).abs().max()) for name in want) / scale


class AtLogits:
    """What each router returned, the gradient that arrived at its logits, and the one that was passed on."""

    def __init__(self) -> None:
        self.outputs: dict[int, Any] = {}
        self.arrived: dict[int, Tensor] = {}
        self.passed: dict[int, Tensor] = {}
        self._handles: list[Any] = []

    def watch(self, routers: list[nn.Module], gradients: dict[int, Tensor]) -> None:
        """Hooks run in the order in which they were put on, those of a control among them."""
        for layer, module in enumerate(routers):

            def hook(module: nn.Module, args: Any, output: Any, layer: int = layer) -> None:
                self.outputs[layer] = output
                if output[0].requires_grad:
                    output[0].register_hook(lambda grad: gradients.update({layer: grad.clone()}))

            self._handles.append(module.register_forward_hook(hook))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def watched(model: nn.Module, **options: Any) -> tuple[RoutingControl, AtLogits]:
    """A control whose hooks on the logits run between two that watch."""
    routers, seen = [site.module for site in find_routers(model)], AtLogits()
    seen.watch(routers, seen.arrived)
    control = RoutingControl(model, **options)
    seen.watch(routers, seen.passed)
    return control, seen
