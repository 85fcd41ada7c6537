"""Rows of `moe_routing` that steer: the injected gradient, the tables behind it, and the losses and objectives."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from benchmarks.routing_cases import gradient_candidates
from benchmarks.speed import peer
from benchmarks.speed_table_case import Case, Made, gradient_of, size_of
from benchmarks.speed_table_routed import EXPERTS, OPERATIONS, K, Routed, Turns, case_of, plain, routed
from moe_routing import (
    TurnStatistics,
    add_injection,
    count_pairs,
    injection_survival,
    kappa_advantage_objective,
    kappa_ratio_objective,
    load_balancing_loss,
    outlier_reg,
    router_injection,
    router_z_loss,
    routing_reg,
    switch_reg,
    token_consistency_loss,
    token_objective,
    turn_control,
    turn_objective,
    turn_switch_reg,
    turn_usage,
)


def gradient_case(tokens: int) -> Made:
    tokens = max(tokens, 256)  # with fewer than eight turns there is no signal, which the explicit objective ignores
    found, it = gradient_candidates(tokens, EXPERTS, K), routed(tokens)
    traffic = size_of(it.logits, it.selected, it.field) + 2 * size_of(it.grad_in)
    return Made(found["ours"], found["autograd"], traffic)


def injection_case(tokens: int) -> Made:
    it = routed(tokens)
    control = 1e-3 * torch.randn(it.fields, EXPERTS, generator=torch.Generator().manual_seed(9))

    def autograd() -> Tensor:
        leaf = it.logits.clone().requires_grad_()
        (slope,) = torch.autograd.grad((leaf.softmax(-1) * control[it.field]).sum(), leaf)
        norm = it.grad_in.norm(dim=-1)
        top = norm.new_zeros(it.fields).scatter_reduce(0, it.field, norm, "amax")
        return -(norm / top[it.field])[:, None] * slope

    def ours() -> Tensor:
        return router_injection(
            it.logits, it.grad_in, field=it.field, control=control, selected=it.selected, num_pairs=0, lambda_turn=1.0
        )

    return Made(ours, autograd, size_of(it.logits, it.grad_in, it.field, control) + size_of(it.logits))


def _sum(loss: tuple[Tensor, Tensor]) -> Tensor:
    return loss[0].sum()


def _losses(ours: Callable[[Routed, Tensor], Tensor], naive: Callable[[Routed, Tensor], Tensor]) -> Any:
    """Forward and backward to the logits: they are read, with the selection, and as much is written."""

    def make(tokens: int) -> Made:
        it = routed(tokens)
        traffic = 2 * size_of(it.logits) + size_of(it.selected, it.field)
        return Made(
            gradient_of(lambda z: ours(it, z), it.logits), gradient_of(lambda z: naive(it, z), it.logits), traffic
        )

    return make


def pair_loop(it: Routed, z: Tensor) -> Tensor:
    """The loss of each close pair, one after the other, as the formula reads."""
    p, sets, total = z.softmax(-1), it.selected.tolist(), z.new_zeros(())
    for t, here in enumerate(it.valid()):
        if here and len(set(sets[t]) & set(sets[t - 1])) >= K / 2:
            target = p[t - 1, sets[t - 1]].detach()
            total = total - (target / target.sum() * p[t, sets[t - 1]].log()).sum()
    return total


def members(it: Routed) -> Tensor:
    """The consensus of each token's field as a mask over experts."""
    return torch.zeros(it.tokens, EXPERTS, dtype=torch.bool).scatter(1, it.consensus()[it.field], True)


def outlier(it: Routed, z: Tensor) -> Tensor:
    chosen = torch.zeros(it.tokens, EXPERTS, dtype=torch.bool).scatter(1, it.selected, True)
    return (z - z.detach().logsumexp(-1, keepdim=True)).exp()[chosen & ~members(it)].sum()


def neighbours(it: Routed, z: Tensor) -> Tensor:
    p, pair = z.softmax(-1), it.field[1:] == it.field[:-1]
    return (1 - (p[1:] * p[:-1]).sum(-1))[pair].sum()


def balance_case(tokens: int) -> Made:
    it = routed(tokens)
    selected, every = it.logits.topk(K).indices, torch.ones(tokens)

    def composed(z: Tensor) -> Tensor:
        share = torch.nn.functional.one_hot(selected, EXPERTS).sum(1).float().mean(0)
        return EXPERTS / K * (share * z.softmax(-1).mean(0)).sum()

    peers, mixtral = {}, peer("transformers.models.mixtral.modeling_mixtral", "its balance loss is")
    if mixtral is not None:
        peers["transformers"] = gradient_of(lambda z: mixtral.load_balancing_loss_func((z,), EXPERTS, K) / K, it.logits)
    ours = gradient_of(lambda z: load_balancing_loss(z.softmax(-1), selected, every), it.logits)
    return Made(ours, gradient_of(composed, it.logits), 2 * size_of(it.logits) + size_of(selected, every), peers)


def kappa_case(ours: Callable[..., Tensor], of_advantage: bool) -> Callable[[int], Made]:
    def make(tokens: int) -> Made:
        random = torch.Generator().manual_seed(10)
        change, credit = torch.randn(2, tokens, generator=random).unbind()
        kappa, mask = torch.rand(tokens, generator=random), torch.rand(tokens, generator=random) < 0.8

        def composed(x: Tensor) -> Tensor:
            ratio, a = (x.exp(), kappa * credit) if of_advantage else (kappa * x.exp(), credit)
            return (torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a) * mask).sum()

        return Made(
            gradient_of(lambda x: ours(x, credit, kappa, mask).sum(), change), gradient_of(composed, change),
            size_of(change, credit, kappa, mask, change, change),
        )  # fmt: skip

    return make


def usage_case(tokens: int) -> Made:
    it = routed(tokens)

    def loop() -> Tensor:
        return torch.stack([it.probs[it.field == f].mean(0) for f in range(it.fields)])

    traffic = size_of(it.probs, it.field) + 4 * EXPERTS * it.fields
    return Made(lambda: turn_usage(it.probs, it.field, it.fields)[0], loop, traffic)


def statistics_case(turns: int) -> Made:
    it = Turns(turns)

    def loop() -> list[Tensor]:
        return [it.usage.sum(0), torch.stack([it.usage[it.labels[:, o]].sum(0) for o in range(OPERATIONS)])]

    def ours() -> list[Tensor]:
        found = TurnStatistics.from_usage(it.usage, it.labels, it.every)
        return [found.usage_sum, found.joint_sum]

    return Made(ours, loop, size_of(it.usage, it.labels, it.every))


def control_case(turns: int) -> Made:
    it = Turns(turns)
    return Made(
        lambda: turn_control(it.pmi, it.labels, it.tokens, turns),
        lambda: it.rows() / (turns * it.tokens[:, None]),
        size_of(it.labels, it.tokens, it.usage),
    )


def objective_case(turns: int) -> Made:
    it = Turns(turns)
    return Made(
        gradient_of(lambda q: turn_objective(q, it.labels, it.every, it.statistics), it.usage),
        gradient_of(lambda q: (q * it.rows()).sum() / turns, it.usage),
        size_of(it.usage, it.labels, it.every, it.usage),
    )


def switch_case(turns: int) -> Made:
    it = Turns(turns)

    def loop(q: Tensor) -> Tensor:
        owner = it.trajectory.tolist()
        each = [1 - (q[t] * q[t - 1]).sum() for t in range(1, turns) if owner[t] == owner[t - 1]]
        return torch.stack(each).mean()

    ours = gradient_of(lambda q: turn_switch_reg(q, it.trajectory, it.tokens).compute(), it.usage)
    return Made(ours, gradient_of(loop, it.usage), size_of(it.usage, it.trajectory, it.tokens, it.usage))


CHOICES = "`where`, which branches at every entry on a CPU"
PASSES = "softmax, its gradient and the choice of usable rows are passes of their own; one on a GPU with the kernel"
CASES: tuple[Case, ...] = (
    case_of("router_gradient", gradient_case, "autograd through the objective", largest=16384, note=PASSES),
    case_of("router_injection", injection_case, "autograd", note=PASSES),
    case_of("add_injection", plain(lambda it: add_injection(it.grad_in, it.logits),
            lambda it: it.grad_in + it.logits, lambda it: 3 * size_of(it.logits)), "`+`",
            note="the sum is read once more: a row of it that is not finite must stay as it was, and no operation of "
            "PyTorch adds and looks in one pass"),
    case_of("injection_survival",
            plain(lambda it: injection_survival(it.grad_in, it.grad_in + it.logits, it.logits).compute(),
                  lambda it: it.logits.abs()[it.grad_in + it.logits != it.grad_in].sum() / it.logits.abs().sum(),
                  lambda it: 3 * size_of(it.logits)), "masked sum", note="the addition is timed too"),
    case_of("token_consistency_loss",
            _losses(lambda it, z: _sum(token_consistency_loss(z, it.selected, it.field)), pair_loop),
            "loop over pairs", naive_at=512, note="`log_softmax` and its gradient are passes of their own"),
    case_of("token_objective",
            _losses(lambda it, z: -token_objective(z, it.selected, it.field),
                    lambda it, z: pair_loop(it, z) / count_pairs(it.field)), "loop over pairs", naive_at=512,
            note="as `token_consistency_loss`"),
    case_of("routing_reg",
            _losses(lambda it, z: _sum(routing_reg(z, it.selected, it.field)),
                    lambda it, z: -log_softmax(z, -1)[members(it)].sum() / K), "loop over fields", naive_at=4096,
            note=f"the consensus is ranked and spread over its tokens as a mask; {CHOICES}"),
    case_of("switch_reg", _losses(lambda it, z: _sum(switch_reg(z, it.selected, it.field)), neighbours),
            "`softmax` and a product",
            note="softmax, its gradient and that of both neighbours are passes of their own"),
    case_of("outlier_reg", _losses(lambda it, z: _sum(outlier_reg(z, it.selected, it.field, size=K)), outlier),
            "loop over fields", naive_at=4096, note=f"as `routing_reg`; {CHOICES}"),
    case_of("load_balancing_loss", balance_case, "`one_hot` and `mean`", what="softmax included",
            note="softmax and its gradient are passes of their own"),
    case_of("router_z_loss",
            _losses(lambda it, z: router_z_loss(z, it.mask), lambda it, z: (z.logsumexp(-1) ** 2)[it.mask].mean()),
            "`logsumexp`, masked mean", note="an exponential for each entry, there and back"),
    case_of("kappa_advantage_objective", kappa_case(kappa_advantage_objective, True), "composed", largest=1 << 20,
            note="each step of the chain is a pass, there and back"),
    case_of("kappa_ratio_objective", kappa_case(kappa_ratio_objective, False), "composed", largest=1 << 20,
            note="each step of the chain is a pass, there and back"),
    case_of("turn_usage", usage_case, "loop over fields", naive_at=4096, note="rows go to single addresses"),
    case_of("TurnStatistics", statistics_case, "loop over operations", what="`from_usage`", unit="turns",
            note="sums in float64"),
    case_of("turn_control", control_case, "loop over operations", unit="turns", note=CHOICES),
    case_of("turn_objective", objective_case, "loop over operations", unit="turns",
            note="usage is searched for NaN, and the pmi of each turn is a product in float64"),
    case_of("turn_switch_reg", switch_case, "loop over turns", unit="turns", naive_at=512,
            note=f"sums in float64; {CHOICES}"),
)  # fmt: skip
