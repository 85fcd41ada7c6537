"""Everything that can be attached to a model, under a name, for the checks that all of it must pass."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from moe_routing.adapters.consensus import fixed_consensus
from moe_routing.adapters.low_rank import low_rank_router
from moe_routing.adapters.replay import RoutingReplay, record_selection
from moe_routing.adapters.summary import SummaryRecorder
from moe_routing.adapters.transformers import RoutingControl
from tests.moe_routing.adapters import steering

TRAJECTORY = torch.arange(steering.ROWS)[:, None].expand(steering.ROWS, steering.LENGTH)

CONTEXTS: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "control": lambda model: RoutingControl(model, **steering.STRONG),
    "control of the router alone": lambda model: RoutingControl(model, reach="router", router_dtype=torch.float64),
    "replay": lambda model: RoutingReplay(model, foreign()),
    "consensus": lambda model: fixed_consensus(model, foreign(), steering.fields()),
    "record": record_selection,
    "summary": lambda model: SummaryRecorder(model, steering.fields(), steering.labels(), TRAJECTORY),
    "low rank": lambda model: low_rank_router(model, 3, num_ranks=2),
}
INTERVENTIONS = ("replay", "consensus", "low rank")


def foreign(k: int = 2, layers: int = 2, seed: int = 3) -> Tensor:
    """Experts that no router asked for."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(steering.ROWS * steering.LENGTH, layers, 8, generator=generator).argsort(-1)[..., :k]


def wiring(model: nn.Module) -> list[Any]:
    """What of a model is no tensor and yet must not change: its hooks and what stands on the instances."""
    return [
        (name, type(module), sorted(vars(module)), *(list(vars(module)[kind].values()) for kind in HOOKS))
        for name, module in model.named_modules()
    ]


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
