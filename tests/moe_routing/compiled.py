"""Run as a script, without the type checker: everything that sits in a hot path compiles into one graph.

An argument names the backend. The default captures the graphs and compiles no C++, which takes more than a minute.
"""

import sys

import torch

import moe_routing as mr
from moe_routing.turns import per_turn_pmi
from tests.moe_routing import checks
from tests.moe_routing.cases import rich_case


def step_metrics(logits, selected, field, probs):
    mask = field >= 0
    gap, valid = mr.expert_set_gap(selected, field)
    similarity, _ = mr.jaccard_similarity(selected, field)
    counts = mr.expert_counts(selected, field, 64, logits.shape[1])
    consensus = mr.consensus_experts(selected, field, logits.shape[1], 2, 64)
    return (
        mr.SumCount.of(gap, valid).compute(),
        similarity,
        mr.shift_histogram(selected, field),
        mr.coefficient_of_variation(counts),
        mr.router_entropy(probs, mask),
        mr.consensus_overlap(selected, field, consensus),
        mr.load_balancing_loss(probs, selected, mask),
        mr.router_z_loss(logits, mask),
        mr.routing_drift(selected, selected, probs, mask).jaccard,
        *mr.token_consistency_loss(logits, selected, field),
        *mr.switch_reg(logits, selected, field),
    )


def table(probs, field, labels):
    usage, tokens = mr.turn_usage(probs, field, labels.shape[0])
    stats = mr.TurnStatistics.from_usage(usage, labels, tokens > 0)
    control = mr.turn_control(stats.pmi(), labels, tokens, stats.num_turns)
    return control, stats.information(), per_turn_pmi(stats.pmi(), labels)


def same(fn, backend, *args, **options):
    compiled = torch.compile(fn, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*args, **options), fn(*args, **options), rtol=1e-5, atol=1e-6)


def steps(logits, grad_in, options, backend):
    """Weights and a gate that are tensors: new values compile nothing again, and nothing waits to read them."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(mr.router_gradient, fullgraph=True, backend=backend)
    for values in ((1.0, 0.5, 0.25), (0.5, 2.0, 3.0), (0.0, 1.0, 1.0), (1.0, 0.0, 0.0)):
        names = ("gate", "lambda_turn", "lambda_token")
        given = options | dict(zip(names, values))
        tensors = options | dict(zip(names, map(torch.tensor, values)))
        got = compiled(logits, grad_in, **tensors)
        torch.testing.assert_close(got, mr.router_gradient(logits, grad_in, **given), rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def main(backend: str) -> None:
    case = rich_case(41)
    logits, grad_in = case.logits.float(), case.grad_in.float()
    options = checks.plain(case, control=checks.control_of(case, "softmax").float())
    same(mr.router_gradient, backend, logits, grad_in, **options)
    same(mr.router_gradient, backend, logits, grad_in, **options, target="overlap", activation="sigmoid")
    steps(logits, grad_in, options, backend)
    probs = mr.router_probs(logits)
    same(step_metrics, backend, logits, case.selected, case.field, probs)
    same(table, backend, probs, case.field, case.labels)
    sys.stdout.write("compiled\n")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["eager"])
