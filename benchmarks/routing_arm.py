"""The arm with routing control: its coefficients, settled from one batch before the race, and the hook it trains with.

The paper's λ_turn = 2e-6 and λ_token = 2e-7 belong to a model of thirty billion parameters and its gradients. What
carries over is their ratio and a rule: at the weights of the routers the injection shall be a stated share of the
gradient that arrives there anyway.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.rollouts import Batch

# Size of the injection at the router weights, relative to the gradient that arrives there: neither outweighs the other.
# Of 0.1, 0.3 and 1, tried on a seed outside the race, none cost task score; the information grew with the share.
SHARE = 1.0
# λ_token / λ_turn of the paper.
RATIO = 0.1
# The paper's upper bound of the gate, in nats, and how far a policy that starts near or above it may rise.
PAPER_HIGH = 0.2
HEADROOM = 1.5
ROWS = 32  # of one forward: the logits of a whole batch would not fit everywhere
OFFICE_OPERATIONS = {
    "search": "^find$",
    "look_up": "^get_(phone|desk|stock|price|seats)$",
    "follow_link": "^get_(manager|owner)$",
    "book": "^book_",
    "compute": "^add$",
}
RULE = (
    "‖λ_turn D_turn + λ_token D_token‖ = {share:g} ‖G‖ with λ_token / λ_turn = {ratio:g} as in the paper, where G is "
    "SLCA's gradient of one batch at the weights of all routers, and D_turn and D_token are what the two terms add to "
    "it at λ = 1. The gate is open from 0 to the larger of the paper's {paper:g} nats and {headroom:g} times the "
    "policy entropy of the warm checkpoint. The load-balancing loss that TRL adds, weighted by the architecture's own "
    "coefficient, is in every arm, and not in G."
)


@dataclass(frozen=True)
class Steering:
    """Coefficients of routing control, and the measurements that they follow from.

    Attributes:
        lambda_turn: weight of the turn-level term.
        lambda_token: weight of the token-level term.
        high: upper bound of the entropy gate; the lower one is 0.
        share: wanted size of the injection at the router weights, relative to the incoming gradient.
        incoming: `‖G‖`, norm of the incoming gradient at the weights of all routers.
        turn: `‖D_turn‖`, what the turn term adds there at λ = 1.
        token: `‖D_token‖`, the same of the token term.
        entropy: mean policy entropy of the batch in nats.
        own_tools: rows bring their own tools, so operations are told by verbs and not by the office's tools.
    """

    lambda_turn: float
    lambda_token: float
    high: float
    share: float
    incoming: float
    turn: float
    token: float
    entropy: float
    own_tools: bool = False


def no_routers(model: Any) -> str:
    """Why this model cannot be steered, or "" if it can."""
    from moe_routing.adapters.routers import find_routers

    try:
        find_routers(model)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return ""


def operations(own_tools: bool) -> Any:
    """The `OperationRules` of a workload: what the office's tools do, or the first verb of a tool's name."""
    from moe_routing import OperationRules

    return OperationRules.tool_calls() if own_tools else OperationRules(OFFICE_OPERATIONS)


def make_routing(model: Any, steering: Steering) -> Any:
    """Routing control with these coefficients, attached to `model`, as the trainer's hook."""
    from moe_routing import EntropyGate
    from moe_routing.adapters.transformers import RoutingControl
    from moe_routing.adapters.trl import TurnRouting

    control = RoutingControl(
        model,
        lambda_turn=steering.lambda_turn,
        lambda_token=steering.lambda_token,
        gate=EntropyGate(0.0, steering.high),
    )
    return TurnRouting(control, operations(steering.own_tools))


def settle(
    model: Any,
    tokenizer: Any,
    batch: Batch,
    *,
    sigma: float,
    share: float = SHARE,
    own_tools: bool = False,
    seed: int = 0,
) -> Steering:
    """Coefficients by `RULE`, from one batch of rollouts; no parameter is changed.

    The trainer's omission guard and load-balancing loss are left out; of the tiny model's `G` the latter is 4 %.

    Args:
        model: the checkpoint to steer.
        tokenizer: its tokenizer.
        batch: rollouts of that checkpoint.
        sigma: noise on the summary reward, as in the race.
        share: wanted size of the injection.
        own_tools: see `operations`.
        seed: of the noise.

    Raises:
        ValueError: the batch gives no gradient or no injection, so that no coefficient has this share.
    """
    from credit import run_ids
    from moe_routing.adapters.transformers import RoutingControl
    from moe_routing.adapters.trl import TurnRouting

    advantages = slca_advantages(batch, sigma, seed)
    # Only through the router's own weights: then what a term adds is linear in its λ.
    with RoutingControl(model, gate=None, reach="router") as control:
        routing = TurnRouting(control, operations(own_tools))
        field = routing.label(batch.completion_ids, run_ids(batch.learnable), tokenizer)
        entropy = record_old_policy(model, batch, field, routing)
        incoming, with_turn, with_token = (
            gradient_at_routers(model, batch, field, routing, advantages, *weights)
            for weights in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
        )
    turn, token = with_turn - incoming, with_token - incoming
    injected = float((turn + RATIO * token).norm())
    if not (injected > 0 and float(incoming.norm()) > 0):
        raise ValueError(
            f"no coefficient gives a share of {share}: at the router weights the gradient has norm "
            f"{float(incoming.norm()):.3g} and the injection {injected:.3g}"
        )
    scale = share * float(incoming.norm()) / injected
    return Steering(
        lambda_turn=scale,
        lambda_token=RATIO * scale,
        high=max(PAPER_HIGH, HEADROOM * entropy),
        share=share,
        incoming=float(incoming.norm()),
        turn=float(turn.norm()),
        token=float(token.norm()),
        entropy=entropy,
        own_tools=own_tools,
    )


def slca_advantages(batch: Batch, sigma: float, seed: int = 0) -> Tensor:
    """SLCA's advantage of each completion token under one draw of the noise, `[B, T]`."""
    from credit import SLCA

    generator = torch.Generator().manual_seed(seed)
    noise = sigma * torch.randn(len(batch.group), generator=generator, dtype=torch.float64)
    rewards = {"tool": batch.tool_reward, "summary": batch.summary_reward + noise}
    return SLCA()(rewards, batch.group, batch.segments)


def record_old_policy(model: Any, batch: Batch, field: Tensor, routing: Any) -> float:
    """Gather the batch's statistics as the trainer does before its steps; returns the mean policy entropy."""
    from moe_routing import SumCount
    from moe_routing.metrics import entropy

    parts = []
    with torch.no_grad():
        for rows, seen in chunks(batch, field):
            with routing.record(seen):
                parts.append(entropy(torch.softmax(completion_logits(model, batch, rows), dim=-1)).cpu())
    entropies = torch.cat(parts)
    routing.close(entropies, field)
    return float(SumCount.of(entropies.flatten(), (field >= 0).flatten()).compute())


def gradient_at_routers(
    model: Any, batch: Batch, field: Tensor, routing: Any, advantages: Tensor, turn: float, token: float
) -> Tensor:
    """Gradient of `−Σ A_t log π_t / N` at the weights of all routers, flat, under control with these two weights.

    At the first step on a batch every ratio is 1, so this is the trainer's own gradient.
    """
    control = routing.control
    control.lambda_turn, control.lambda_token = turn, token
    weights = [p for site in control.routers for p in site.module.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in weights]
    for rows, seen in chunks(batch, field):
        with routing.bind(seen, scale=1.0):
            logits = completion_logits(model, batch, rows)
            ids, own, weight = (x[rows].to(logits.device) for x in (batch.completion_ids, batch.learnable, advantages))
            logp = torch.log_softmax(logits, dim=-1).gather(-1, ids[..., None]).squeeze(-1)
            loss = -(weight.to(logp.dtype) * logp)[own].sum() / batch.learnable.sum()
            parts = torch.autograd.grad(loss, weights, allow_unused=True)
        for sums, part in zip(total, parts, strict=True):
            sums += 0 if part is None else part
    return torch.cat([part.flatten() for part in total]).double().cpu()


def chunks(batch: Batch, field: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of one forward each, and their fields over prompt and completion."""
    from credit.adapters.trl_routing import over_prompt

    width = batch.prompt_ids.shape[1] + batch.completion_ids.shape[1]
    for rows in torch.arange(len(field)).split(ROWS):
        yield rows, over_prompt(field[rows], width)


def completion_logits(model: Any, batch: Batch, rows: Tensor) -> Tensor:
    """Logits that predict each completion token of these rows, in float32."""
    ids = torch.cat([batch.prompt_ids[rows], batch.completion_ids[rows]], dim=1).to(model.device)
    seen = torch.cat([batch.prompt_mask[rows], batch.completion_mask[rows]], dim=1).to(model.device)
    keep = batch.completion_ids.shape[1] + 1
    logits: Tensor = model(input_ids=ids, attention_mask=seen.long(), logits_to_keep=keep, use_cache=False).logits
    return logits[:, :-1].float()
