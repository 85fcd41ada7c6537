"""The arm with routing control: its coefficients, what is measured of it, and what is said about it."""

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("trl")

import torch
from scipy.stats import ttest_1samp

import moe_routing as mr
from benchmarks import race as racing
from benchmarks import routing_arm, routing_report
from benchmarks.office import TOOLS
from benchmarks.rollouts import Batch
from benchmarks.routing_measure import from_plain, measure_routing, routing_of, steered_of
from benchmarks.scoring import RolloutScore
from benchmarks.tiny import build_model, build_tokenizer
from credit import tool_summary_segments

TURNS = (
    ("find", "query"),
    ("get_phone", "person"),
    ("get_owner", "room"),
    ("book_room", "room"),
    ("add", "a"),
)


def texts(row: int) -> list[tuple[bool, str]]:
    """Runs of one rollout: calls, answers of the tools, and a summary; True where the policy wrote it."""
    runs = []
    for name, argument in (TURNS[row % 5], TURNS[(row + 2) % 5])[: 1 + row % 2]:
        call = json.dumps({"name": name, "arguments": {argument: "Ada"}})
        runs += [(True, f"<tool_call>\n{call}\n</tool_call><|im_end|>"), (False, f"\n{row}7<|im_start|>assistant\n")]
    return [*runs, (True, f"It is {row}7.<|im_end|>")]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer([text for row in range(10) for _, text in texts(row)], vocab_size=400)


@pytest.fixture
def model(tokenizer):
    return build_model(tokenizer, hidden=16, experts=4)


@pytest.fixture(scope="module")
def batch(tokenizer):
    """Ten rollouts of five prompts, the prompts padded on the left, the completions on the right."""
    rows = [
        [(token, own) for own, text in texts(row) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
        for row in range(10)
    ]
    width = max(map(len, rows))
    ids = torch.tensor([[token for token, _ in row] + [0] * (width - len(row)) for row in rows])
    shown = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    learnable = torch.tensor([[own for _, own in row] + [False] * (width - len(row)) for row in rows])
    prompt_mask = torch.tensor([[False] * (row % 3) + [True] * (6 - row % 3) for row in range(10)])
    scores = [RolloutScore(0.1 * row, 0.0, 1, 1, 0, (0.3 * row) % 1) for row in range(10)]
    prompts = torch.randint(10, 300, prompt_mask.shape, generator=torch.Generator().manual_seed(0))
    return Batch(
        *(prompts, prompt_mask, ids, shown, learnable),
        segments=tool_summary_segments(learnable),
        group=torch.arange(10) // 2,
        scores=scores,
        messages=[],
        rows=[{}] * 10,
    )


def router_weights(model):
    return [layer.mlp.gate.weight for layer in model.model.layers]


def flat_gradient(model, batch):
    """The gradient at the router weights of the same loss, in one forward and one backward of the whole model."""
    advantages = routing_arm.slca_advantages(batch, 0.5)
    ids = torch.cat([batch.prompt_ids, batch.completion_ids], dim=1)
    seen = torch.cat([batch.prompt_mask, batch.completion_mask], dim=1)
    logits = model(input_ids=ids, attention_mask=seen.long()).logits[:, batch.prompt_ids.shape[1] - 1 : -1]
    logp = torch.log_softmax(logits, dim=-1).gather(-1, batch.completion_ids[..., None]).squeeze(-1)
    loss = -torch.where(batch.learnable, advantages * logp, 0.0).sum() / batch.learnable.sum()
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, router_weights(model))])


def test_the_injection_has_the_wanted_share_of_the_gradient_at_the_router_weights(model, tokenizer, batch, monkeypatch):
    monkeypatch.setattr(routing_arm, "ROWS", 4)
    before = [p.clone() for p in model.parameters()]
    steering = routing_arm.settle(model, tokenizer, batch, sigma=0.5, share=0.25)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert not any(p.grad is not None for p in model.parameters())
    assert not any(module._forward_hooks or "forward" in module.__dict__ for module in model.modules())
    assert steering.lambda_token / steering.lambda_turn == pytest.approx(0.1)

    from credit import run_ids
    from moe_routing.adapters.transformers import RoutingControl
    from moe_routing.adapters.trl import TurnRouting

    plain = flat_gradient(model, batch)
    assert steering.incoming == pytest.approx(float(plain.norm()), rel=1e-4)
    weights = {"lambda_turn": steering.lambda_turn, "lambda_token": steering.lambda_token}
    with RoutingControl(model, **weights, gate=None, reach="router") as control:
        routing = TurnRouting(control, routing_arm.operations(False))
        field = routing.label(batch.completion_ids, run_ids(batch.learnable), tokenizer)
        ((rows, seen),) = [(slice(None), torch.nn.functional.pad(field, (6, 0), value=-1))]
        with routing.record(seen), torch.no_grad():
            model(input_ids=torch.cat([batch.prompt_ids, batch.completion_ids], dim=1)[rows],
                  attention_mask=torch.cat([batch.prompt_mask, batch.completion_mask], dim=1).long())  # fmt: skip
        routing.close(torch.zeros(field.shape), field)
        with routing.bind(seen, scale=1.0):
            steered = flat_gradient(model, batch)
    assert float((steered - plain).norm()) / float(plain.norm()) == pytest.approx(0.25, rel=1e-3)


def test_the_gate_keeps_the_papers_bound_unless_the_policy_starts_near_it(model, tokenizer, batch, monkeypatch):
    steering = routing_arm.settle(model, tokenizer, batch, sigma=0.5)
    assert steering.entropy == pytest.approx(math.log(len(tokenizer)), rel=0.1)  # an untrained model
    assert steering.high == pytest.approx(1.5 * steering.entropy)
    monkeypatch.setattr(routing_arm, "record_old_policy", certain(routing_arm.record_old_policy))
    assert routing_arm.settle(model, tokenizer, batch, sigma=0.5).high == 0.2


def certain(record):
    return lambda *args: record(*args) * 0 + 0.05


def test_a_batch_without_a_gradient_has_no_coefficient(model, tokenizer, batch):
    from dataclasses import replace

    level = replace(batch, scores=[RolloutScore(0.5, 0.0, 1, 1, 0, 0.5)] * 10)
    with pytest.raises(ValueError, match="no coefficient"):
        routing_arm.settle(model, tokenizer, level, sigma=0.0)


def test_a_model_without_routers_has_no_such_arm(model):
    assert routing_arm.no_routers(model) == ""
    assert "no router" in routing_arm.no_routers(torch.nn.Linear(2, 2))
    race = racing.Race("x", [], [], sigma=0.0, steps=1, seeds=1)
    assert race.arms == ("GRPO", "SLCA")
    assert routing_report.report_routing(None, {}, {}, Path("."), None) == {}


def test_every_tool_of_the_office_does_one_operation():
    rules = routing_arm.operations(False)
    found = {tool.__name__: rules({"name": tool.__name__, "arguments": {}}) for tool in TOOLS}
    assert all(len(operations) == 1 for operations in found.values()), found
    assert {operation for (operation,) in found.values()} == set(rules.operations)


def test_measured_routing_is_that_of_the_models_own_router_logits(model, tokenizer, batch, monkeypatch):
    monkeypatch.setattr(routing_arm, "ROWS", 3)
    found = measure_routing(model, tokenizer, batch)
    ids = torch.cat([batch.prompt_ids, batch.completion_ids], dim=1)
    seen = torch.cat([batch.prompt_mask, batch.completion_mask], dim=1)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=seen.long(), output_router_logits=True).router_logits
    # Fields by hand: a call's block, what stands after it, and the summary.
    opening, closing = (tokenizer.convert_tokens_to_ids(tag) for tag in ("<tool_call>", "</tool_call>"))
    field = torch.full(ids.shape, -1)
    labels, kinds = [], []
    rules = routing_arm.operations(False)
    for row in range(10):
        at = 6
        for own, text in texts(row):
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            if own:
                cut = tokens.index(closing) + 1 if opening in tokens else 0
                for kind, start, stop in (("tool", 0, cut), ("think", cut, len(tokens))):
                    if stop > start:
                        field[row, at + start : at + stop] = len(labels)
                        labels.append([operation in rules(text) for operation in rules.operations])
                        kinds.append(kind)
            at += len(tokens)
    flat, labels = field.flatten(), torch.tensor(labels)
    owner = torch.where(flat >= 0, torch.arange(10).repeat_interleave(ids.shape[1]), -1)
    want: dict[str, list[float]] = {}
    for layer in logits:
        probs, (_, selected) = torch.softmax(layer.float(), dim=-1), layer.topk(2)
        gap, valid = mr.expert_set_gap(selected, flat)
        same, _ = mr.jaccard_similarity(selected, flat)
        usage, tokens = mr.turn_usage(probs, flat, len(kinds))
        counts = mr.expert_counts(selected, flat, len(kinds), 4)
        values = {
            "jaccard": same[valid].mean(),
            "mean_shift": 2 * gap[valid].mean(),
            "load_cv": mr.load_cv(selected, owner, 4).mean(),
            "router_entropy": mr.router_entropy(probs, flat >= 0),
        }
        for kind in ("tool", "think"):
            those = torch.tensor([k == kind for k in kinds])
            information = mr.TurnStatistics.from_usage(usage, labels, those & (tokens > 0)).information()
            values[f"information_{kind}"] = information.mean()
            values[f"specialization_gap_{kind}"] = mr.specialization_gap(counts, labels, those)
        for name, value in values.items():
            want.setdefault(name, []).append(float(value))
    for name, values in want.items():
        assert found[name] == pytest.approx(sum(values) / len(values), rel=1e-4, abs=1e-6), name
    assert found["information"] == pytest.approx((found["information_tool"] + found["information_think"]) / 2)
    assert found["policy_entropy"] == pytest.approx(math.log(len(tokenizer)), rel=0.1)
    summary = from_plain(json.loads(json.dumps(found["summary"])))
    assert {
        f"routing/{name}": found[name] for name in ("jaccard", "load_cv", "router_entropy", "mean_shift")
    }.items() <= (summary.metrics().items())
    assert "routing/summary" not in routing_of({"routing": found})


def run(process: float, jaccard: float, gates: tuple[float, ...] = (), **routing: float) -> dict[str, object]:
    curve = [{"grad_norm": 1.0, **({"routing/gate": gate} if gates else {})} for gate in gates or (0, 0)]
    if gates:
        curve[0]["routing/survived"] = 0.5
    measured = {"jaccard": jaccard, **routing}
    final = {"process": process, "kinds": {}, "routing": measured}
    return {"final": final, "curve": curve, "wall_seconds": 1.0, "cpu_seconds": 1.0}


def test_gate_and_survival_are_those_of_the_training():
    assert steered_of(run(0.5, 0.5, (1.0, 0.0))) == {"routing/gate_open": 0.5, "routing/survived": 0.5}
    assert steered_of(run(0.5, 0.5)) == {}


def test_claims_are_judged_by_the_numbers():
    warm = {"process": 0.5, "routing": {"jaccard": 0.5, "summary": {}}}
    results = {
        "GRPO": [run(0.5, j) for j in (0.40, 0.41, 0.39)],
        "SLCA": [run(0.6, j) for j in (0.30, 0.31, 0.32)],
        racing.ROUTED: [run(p, j) for p, j in ((0.6, 0.25), (0.7, 0.27), (0.5, 0.27))],
    }
    found = routing_report.findings(warm, results)
    assert [(f.claim.metric, f.claim.base) for f in found] == [
        ("routing/jaccard", "warm"),
        ("routing/jaccard", "SLCA"),
        ("process", "SLCA"),
    ]
    assert [f.verdict.split(" at ")[0] for f in found] == ["it shows", "the opposite shows", "it does not show"]
    assert found[0].mean == pytest.approx(-0.1)
    assert found[0].relative == pytest.approx(-0.2)
    assert "-0.1000 ± 0.0100 (-20.0%, p = 0.002): it shows at this scale." in str(found[0])
    one = routing_report.findings(warm, {arm: runs[:1] for arm, runs in results.items()})
    assert {f.verdict for f in one} == {"one seed cannot tell"}


@pytest.mark.parametrize("gaps", [[1.0, 2.0, 4.0], [-1.0, 0.5], [-3.0, -2.0, -2.5, -4.0]])
def test_chance_is_students(gaps):
    assert routing_report.chance_of(gaps) == pytest.approx(ttest_1samp(gaps, 0.0, alternative="greater").pvalue)
    assert routing_report.chance_of([1.0, 1.0]) == 0.0
    assert routing_report.chance_of([-1.0, -1.0]) == 1.0
    assert routing_report.verdict(routing_report.chance_of([0.0, 0.0])) == "it does not show at this scale"
    assert math.isnan(routing_report.chance_of([1.0]))


def test_the_course_of_training_is_the_mean_over_seeds():
    first = [{"routing/gate": 1.0, "routing/survived": 1.0, "process": 1.0}, {"routing/gate": 1.0}]
    second = [{"routing/gate": 0.0}, {"routing/gate": 1.0}]
    assert routing_report.mean_history([first, second]) == [
        {"step": 1.0, "routing/gate": 0.5},
        {"step": 2.0, "routing/gate": 1.0},
    ]
