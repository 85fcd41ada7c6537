"""The routing report: sums that add up, numbers that are those drawn, files that stand alone."""

import dataclasses
import math
import re
import sys
from html.parser import HTMLParser

import pytest
import torch

import moe_routing as mr
from moe_routing.report import CURVES, report_data
from moe_routing.selection import FieldSelection

LAYERS, TOKENS, EXPERTS, K, OPERATIONS = 3, 24, 5, 2, ["read", "create", "<script>$x_1$"]


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(LAYERS, TOKENS, EXPERTS, generator=generator).softmax(-1)
    field = torch.arange(TOKENS) // 4 - 1  # the first four tokens are a prompt
    labels = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 0], [1, 0, 0]]).bool()
    return {
        "selected": probs.topk(K).indices,
        "probs": probs,
        "field": field,
        "labels": labels,
        "trajectory": torch.arange(TOKENS) // 12,
    }


HISTORY = [
    {
        "step": 1,
        "routing/jaccard": 0.1,
        "routing/information_think": 0.01,
        "routing/gate": 0.0,
        "routing/gate_entropy": 0.3,
    },
    {
        "step": 2,
        "routing/gate_entropy": 0.1,
        "routing/jaccard": math.nan,
        "routing/gate": 1.0,
        "routing/load_cv": 0.5,
        "loss": 3.0,
    },
    {"step": 3, "loss": 3.0, "routing/jaccard": 0.4, "routing/gate": 1.0, "routing/router_entropy": 1.2},
]


def test_usage_counts_each_selection_under_each_operation_of_its_turn():
    given = batch()
    summary = mr.RoutingSummary.of(**given)
    want = torch.zeros(LAYERS, 3, EXPERTS, dtype=torch.long)
    for layer in range(LAYERS):
        for token, field in enumerate(given["field"].tolist()):
            for operation in range(3):
                if field >= 0 and given["labels"][field, operation]:
                    for expert in given["selected"][layer, token].tolist():
                        want[layer, operation, expert] += 1
    assert torch.equal(summary.usage, want)


def test_metrics_are_those_of_the_primitives():
    given = batch()
    found = mr.RoutingSummary.of(**given).metrics()
    inside = given["field"] >= 0
    owner = torch.where(inside, given["trajectory"], -1)
    pairs = [mr.SumCount.of(*mr.jaccard_similarity(layer, given["field"])) for layer in given["selected"]]
    found_gaps = [mr.expert_set_gap(layer, given["field"]) for layer in given["selected"]]
    gaps = [gap[valid] for gap, valid in found_gaps]
    want = {
        "jaccard": (pairs[0] + pairs[1] + pairs[2]).compute(),
        "mean_shift": K * torch.stack([gap.mean() for gap in gaps]).mean(),
        "load_cv": torch.stack([mr.load_cv(layer, owner, EXPERTS).mean() for layer in given["selected"]]).mean(),
        "router_entropy": torch.stack([mr.router_entropy(layer, inside) for layer in given["probs"]]).mean(),
    }
    for name, value in want.items():
        assert found[f"routing/{name}"] == pytest.approx(float(value), rel=1e-6), name


def test_summaries_of_trajectories_add_up():
    given = batch()
    parts = []
    for rows in (slice(0, 12), slice(12, 24)):
        part = {key: value[:, rows] for key, value in given.items() if key in ("selected", "probs")}
        part |= {key: given[key][rows] for key in ("field", "trajectory")} | {"labels": given["labels"]}
        parts.append(mr.RoutingSummary.of(**part))
    whole, joined = mr.RoutingSummary.of(**given), parts[0] + parts[1]
    assert torch.equal(joined.usage, whole.usage)
    assert torch.equal(joined.shifts, whole.shifts)
    assert joined.metrics() == pytest.approx(whole.metrics(), rel=1e-12)
    assert whole.reduce().metrics() == whole.metrics()


def test_load_is_that_of_trajectories_that_selected_anything():
    given = batch()
    selected, inside = given["selected"].clone(), given["field"] >= 0
    selected[:, 12:] = -1  # the second trajectory was not recorded
    found = mr.RoutingSummary.of(**given | {"selected": selected}).load_cv
    assert found.count.tolist() == [1] * LAYERS
    first = torch.where(inside & (torch.arange(TOKENS) < 12), 0, -1)
    want = torch.cat([mr.load_cv(layer, first, EXPERTS) for layer in given["selected"]])
    torch.testing.assert_close(found.compute().float(), want)
    fields = FieldSelection.stack(
        [
            FieldSelection.of(layer, torch.zeros(TOKENS), given["field"], len(given["labels"]), EXPERTS)
            for layer in given["selected"]
        ]
    )
    outside = mr.RoutingSummary.from_fields(fields, given["labels"], torch.tensor([0, 0, -1, -1, -1])).load_cv
    assert outside.count.tolist() == [1] * LAYERS
    torch.testing.assert_close(outside.compute().float(), want)


def test_divergence_is_nothing_for_one_usage_and_everything_for_disjoint_experts():
    same = torch.tensor([[[3, 1], [6, 2], [0, 0]], [[4, 0], [0, 9], [0, 0]]])
    one = mr.SumCount(torch.zeros(2), torch.ones(2))
    found = mr.RoutingSummary(same, torch.zeros(2, 2, dtype=torch.long), one, one).usage_divergence()
    torch.testing.assert_close(found, torch.tensor([0.0, math.log(2)]).double())


@pytest.mark.parametrize("case", ["prompt only", "nan outside", "nan inside", "no token", "not recorded"])
def test_degenerate_batches_give_finite_numbers(case):
    given = batch()
    if case == "prompt only":
        given["field"] = torch.full_like(given["field"], -1)
    elif case == "nan outside":
        given["probs"][:, :4] = math.nan
    elif case == "nan inside":
        given["probs"][1, 5] = math.nan
    elif case == "no token":
        given |= {key: given[key][:, :0] for key in ("selected", "probs")}
        given |= {key: given[key][:0] for key in ("field", "trajectory")}
    else:
        given["selected"][:] = -1
    numbers = mr.routing_report(mr.RoutingSummary.of(**given), OPERATIONS)
    assert all(type(value) is float and math.isfinite(value) for value in numbers.values()), numbers


def test_numbers_are_flat_and_those_that_are_drawn(tmp_path):
    summaries = {"before": mr.RoutingSummary.of(**batch(0)), "after": mr.RoutingSummary.of(**batch(1))}
    page = tmp_path / "report.html"
    numbers = mr.routing_report(summaries, OPERATIONS, HISTORY, layer=-1, html=page)
    data = report_data(summaries, OPERATIONS, HISTORY, -1, "")
    assert numbers["routing/usage_layer"] == 2.0
    for name in summaries:
        for row, operation in enumerate(OPERATIONS):
            shares = [numbers[f"routing/{name}/usage/{operation}/expert_{e}"] for e in range(EXPERTS)]
            assert shares == data.usage[name][row] == summaries[name].usage_share()[2, row].tolist()
        assert [numbers[f"routing/{name}/shift/{c}"] for c in range(K + 1)] == data.shifts[name]
    assert numbers["routing/jaccard"] == 0.4
    assert numbers["routing/gate_open_share"] == pytest.approx(2 / 3)
    assert data.curves["routing/jaccard"] == [(1.0, 0.1), (3.0, 0.4)]
    assert "loss" not in " ".join(numbers)
    text = page.read_text(encoding="utf-8")
    assert all(CURVES[key] in text for key in data.curves)
    assert f"{numbers['routing/after/usage/read/expert_3']:.2%}" in text


def test_the_default_layer_is_the_most_telling_one():
    summary = mr.RoutingSummary.of(**batch())
    assert mr.routing_report(summary, OPERATIONS)["routing/usage_layer"] == float(summary.usage_divergence().argmax())


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.open = set(), []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        assert not {"src", "href"} & {name for name, _ in attributes}
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_runs_nothing(tmp_path):
    page = tmp_path / "report.html"
    mr.routing_report(mr.RoutingSummary.of(**batch()), OPERATIONS, HISTORY, html=page, title="<img src=x>")
    text = page.read_text(encoding="utf-8")
    parser = Tags()
    parser.feed(text)
    assert parser.open == []
    assert not {"script", "img", "link", "iframe"} & parser.tags
    assert not re.search(r"https?://|url\(", text)
    assert "&lt;script&gt;" in text


def test_the_figure_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / "report.png"
    summaries = {"before": mr.RoutingSummary.of(**batch(0)), "after": mr.RoutingSummary.of(**batch(1))}
    mr.routing_report(summaries, OPERATIONS, HISTORY, png=target)
    assert target.read_bytes().startswith(b"\x89PNG")


def test_a_figure_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        mr.routing_report(mr.RoutingSummary.of(**batch()), OPERATIONS, png=tmp_path / "report.png")


def test_what_does_not_fit_is_an_error():
    summary, given = mr.RoutingSummary.of(**batch()), batch()
    with pytest.raises(ValueError, match="at least one"):
        mr.routing_report({}, OPERATIONS)
    with pytest.raises(ValueError, match="3 distinct names"):
        mr.routing_report(summary, ["read", "read", "create"])
    with pytest.raises(ValueError, match="hold 3 layers"):
        mr.routing_report(summary, OPERATIONS, layer=3)
    nothing = mr.RoutingSummary.of(**given | {"labels": given["labels"][:, :0]})
    with pytest.raises(ValueError, match="no operation"):
        mr.routing_report(nothing, [])
    given["field"] = given["field"] + 1
    with pytest.raises(ValueError, match="field"):
        mr.RoutingSummary.of(**given)


WRONG = {
    "labels ignored": ("usage", lambda s: s.usage.sum(1, keepdim=True).expand_as(s.usage)),
    "one layer's shifts for all": ("shifts", lambda s: s.shifts[:1].expand_as(s.shifts)),
    "mean over all tokens": (
        "router_entropy", lambda s: mr.SumCount(s.router_entropy.total, s.router_entropy.count + 4),
    ),
}  # fmt: skip
CHECKS = [
    test_usage_counts_each_selection_under_each_operation_of_its_turn,
    test_metrics_are_those_of_the_primitives,
]


@pytest.mark.parametrize("name", WRONG)
def test_named_mistakes_are_caught(name, monkeypatch):
    attribute, wrong = WRONG[name]
    real = mr.RoutingSummary.of

    def mistaken(**given):
        summary = real(**given)
        return dataclasses.replace(summary, **{attribute: wrong(summary)})

    for check in CHECKS:
        check()
    monkeypatch.setattr(mr.RoutingSummary, "of", mistaken)
    caught = 0
    for check in CHECKS:
        try:
            check()
        except AssertionError:
            caught += 1
    assert caught
