"""One rank of two, run as a script: its half of a batch, reduced over both."""

import datetime
import sys

import torch

from moe_routing import (
    LoadBalance,
    RoutingSummary,
    SumCount,
    TurnStatistics,
    entropy,
    router_gradient,
    router_probs,
    routing_drift,
    turn_control,
    turn_usage,
)
from moe_routing.fields import count_pairs
from moe_routing.selection import FieldSelection
from moe_routing.sums import all_reduce_sums
from tests.moe_routing import checks
from tests.moe_routing.cases import rich_case


def halves(case):
    """A cut between two fields."""
    pairs = {t for t in range(1, len(case.field)) if case.field[t] == case.field[t - 1] >= 0}
    cut = next(t for t in range(len(case.field) // 2, len(case.field)) if t not in pairs)
    return slice(0, cut), slice(cut, None)


def one_step(case, rows):
    """Statistics of some rows, reduced over whatever ranks there are, and the gradients that follow from them."""
    z = case.logits[rows].float()
    probs, field, selected = router_probs(z), case.field[rows], case.selected[rows]
    usage, tokens = turn_usage(probs, field, case.num_fields)
    stats = TurnStatistics.from_usage(usage, case.labels, tokens > 0).reduce()
    (pairs,) = all_reduce_sums([count_pairs(field)])
    control = turn_control(stats.pmi(), case.labels, tokens, stats.num_turns).float()
    options = checks.plain(case, field=field, selected=selected, control=control, num_pairs=pairs)
    gradient = router_gradient(z, case.grad_in[rows].float(), **options)

    leaf = probs.clone().requires_grad_()
    balance = LoadBalance.from_probs(leaf, selected, field >= 0).reduce()
    (slope,) = torch.autograd.grad(balance.loss(), leaf)
    drift = routing_drift(selected.roll(1, 1), selected, probs, field >= 0).reduce()
    mean_entropy = SumCount.of(entropy(probs), field >= 0).reduce().compute()
    # Fields stand for trajectories here: no field is on both ranks.
    summary = RoutingSummary.of(selected[None], probs[None], field, case.labels, field).reduce()
    counts = FieldSelection.of(selected, entropy(probs), field, case.num_fields, probs.shape[1])
    some = torch.arange(case.num_fields) % 3 != 1
    gap = counts.specialization(case.labels, some)
    assert stats.num_turns.dtype == torch.int64
    table = {"pmi": stats.pmi(), "turns": stats.num_turns, "pairs": pairs, "entropy": mean_entropy}
    table |= {"usage": summary.usage, "shifts": summary.shifts, "summary": torch.tensor([*summary.metrics().values()])}
    table |= {"gap": gap, "nothing": counts.specialization(case.labels, some & False)}
    table |= {"balance": balance.loss().detach(), "exact": drift.exact_match, "information": stats.information()}
    return table, gradient, slope


def main(rank: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=120),
    )
    try:
        case = rich_case(31)
        torch.save(one_step(case, halves(case)[rank]), f"{folder}/{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
