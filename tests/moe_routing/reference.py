"""Float64 references in plain loops, written from the specification and sharing no code with the package."""

import math

import torch
from torch import Tensor


def pairs(field: Tensor) -> list[int]:
    """Positions t whose predecessor t-1 lies in the same field."""
    ids = field.tolist()
    return [t for t in range(1, len(ids)) if ids[t] >= 0 and ids[t] == ids[t - 1]]


def common(selected: Tensor, t: int) -> int:
    return len(set(selected[t].tolist()) & set(selected[t - 1].tolist()))


def gap(selected: Tensor, t: int) -> float:
    k = selected.shape[1]
    return (k - common(selected, t)) / k


def jaccard(selected: Tensor, t: int) -> float:
    return common(selected, t) / len(set(selected[t].tolist()) | set(selected[t - 1].tolist()))


def shift_histogram(selected: Tensor, field: Tensor) -> list[int]:
    histogram = [0] * (selected.shape[1] + 1)
    for t in pairs(field):
        histogram[selected.shape[1] - common(selected, t)] += 1
    return histogram


def counts(selected: Tensor, group: Tensor, which: int, experts: int) -> list[int]:
    result = [0] * experts
    for t, owner in enumerate(group.tolist()):
        if owner == which:
            for expert in selected[t].tolist():
                result[expert] += 1
    return result


def load_cv(load: list[int]) -> float:
    mean = sum(load) / len(load)
    return math.sqrt(sum((c - mean) ** 2 for c in load) / len(load)) / mean


def entropy(distribution: list[float]) -> float:
    return -sum(p * math.log(p) for p in distribution if p > 0)


def consensus(selected: Tensor, field: Tensor, which: int, experts: int, size: int) -> list[int]:
    load = counts(selected, field, which, experts)
    if not sum(load):
        return [-1] * size
    return sorted(range(experts), key=lambda e: (-load[e], e))[:size]


def probs(logits: Tensor, activation: str) -> Tensor:
    if activation == "softmax":
        weights = (logits - logits.max(-1, keepdim=True).values).exp()
    else:
        weights = 1 / (1 + (-logits).exp())
    return weights / weights.sum(-1, keepdim=True)


def usage(p: Tensor, field: Tensor, num_fields: int) -> list[Tensor | None]:
    result: list[Tensor | None] = []
    for f in range(num_fields):
        rows = [p[t] for t, owner in enumerate(field.tolist()) if owner == f]
        result.append(sum(rows[1:], rows[0]) / len(rows) if rows else None)
    return result


def joint(q: list[Tensor | None], labels: Tensor, operation: int) -> tuple[Tensor, list[float]]:
    """``P(e, y)`` as a 2 x M table and ``P(y)``, over the turns that exist."""
    present = [i for i, row in enumerate(q) if row is not None]
    experts = next(row for row in q if row is not None).numel()
    table = torch.zeros(2, experts, dtype=torch.float64)
    share = [0.0, 0.0]
    for i in present:
        y = int(labels[i, operation])
        table[y] += q[i].detach() / len(present)
        share[y] += 1 / len(present)
    return table, share


def pmi(q: list[Tensor | None], labels: Tensor, operation: int, eps: float = 1e-12, clamp: float = 20.0) -> Tensor:
    table, share = joint(q, labels, operation)
    marginal = table.sum(0)
    result = torch.zeros_like(table)
    if (
        0
        < sum(bool(labels[i, operation]) for i, row in enumerate(q) if row is not None)
        < sum(row is not None for row in q)
    ):
        for y in (0, 1):
            for e in range(table.shape[1]):
                ratio = (float(table[y, e]) + eps) / (float(marginal[e]) * share[y] + eps)
                result[y, e] = min(max(math.log(ratio), -clamp), clamp)
    return result


def information(q: list[Tensor | None], labels: Tensor, operation: int) -> float:
    table, share = joint(q, labels, operation)
    marginal = table.sum(0)
    total = 0.0
    for y in (0, 1):
        for e in range(table.shape[1]):
            if float(table[y, e]) > 0:
                total += float(table[y, e]) * math.log(float(table[y, e]) / (float(marginal[e]) * share[y]))
    return total


def turn_objective(q: list[Tensor | None], labels: Tensor, min_turns: int = 8) -> Tensor:
    """``J_turn``, differentiable in q with pmi held constant."""
    present = [i for i, row in enumerate(q) if row is not None]
    total = torch.zeros((), dtype=torch.float64)
    if len(present) < min_turns:
        return total
    for o in range(labels.shape[1]):
        table = pmi(q, labels, o)
        for i in present:
            total = total + (q[i] * table[int(labels[i, o])]).sum() / len(present)
    return total


def token_loss(p: Tensor, selected: Tensor, t: int, target: str) -> Tensor:
    previous = selected[t - 1].tolist()
    before = p[t - 1].detach()
    if target == "overlap":
        return 1 - (before * p[t]).sum()
    if target == "mass":
        return -torch.log(sum(p[t, e] for e in previous))
    total = sum(float(before[e]) for e in previous)
    q = {e: (float(before[e]) / total if target == "previous_topk" else 1 / len(previous)) for e in previous}
    return -sum(q[e] * torch.log(p[t, e]) for e in previous)


def token_objective(
    p: Tensor, selected: Tensor, field: Tensor, num_pairs: int, threshold: float, target: str
) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for t in pairs(field):
        if gap(selected, t) <= threshold:
            total = total - token_loss(p, selected, t, target) / num_pairs
    return total


def rho(grad_in: Tensor, field: Tensor) -> list[float]:
    ids, norms = field.tolist(), [math.sqrt(sum(x * x for x in row)) for row in grad_in.tolist()]
    result = []
    for t, owner in enumerate(ids):
        top = max((norms[s] for s in range(len(ids)) if ids[s] == owner), default=0.0)
        result.append(norms[t] / top if owner >= 0 and top > 0 else 0.0)
    return result


def injection(case, *, lambda_turn, lambda_token, threshold, activation, target, num_pairs, use_rho) -> Tensor:
    """What is added to the gradient: autograd of the explicit objective, scaled token by token."""
    z = case.logits.clone().requires_grad_()
    p = probs(z, activation)
    objective = lambda_token * token_objective(p, case.selected, case.field, num_pairs, threshold, target)
    objective = objective + lambda_turn * turn_objective(usage(p, case.field, case.num_fields), case.labels)
    if not objective.requires_grad:
        return torch.zeros_like(case.logits)
    (gradient,) = torch.autograd.grad(objective, z)
    factors = rho(case.grad_in, case.field) if use_rho else [1.0] * len(case.field)
    return torch.stack([-factor * row for factor, row in zip(factors, gradient)]) if len(factors) else gradient
