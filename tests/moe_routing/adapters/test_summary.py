"""The summary that is read off a live model is that of its own logits and selections."""

import pytest
import torch

import moe_routing as mr
from moe_routing.adapters.summary import SummaryRecorder
from moe_routing.adapters.transformers import RoutingControl
from tests.moe_routing.adapters import steering
from tests.moe_routing.adapters.tiny_families import tiny_model

TRAJECTORY = torch.arange(steering.ROWS)[:, None].expand(steering.ROWS, steering.LENGTH)


def recorder(model):
    return SummaryRecorder(model, steering.fields(), steering.labels(), TRAJECTORY)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "gemma4"])
def test_summary_is_that_of_what_the_routers_returned(family):
    model = tiny_model(family)
    with torch.no_grad(), RoutingControl(model) as control:
        want_values = steering.forward(model, steering.tokens())
        _, seen = steering.capture(model, control)
    with torch.no_grad(), recorder(model) as found:
        assert torch.equal(steering.forward(model, steering.tokens()), want_values)
    assert not any(site.module._forward_hooks for site in found.routers)
    probs = [
        mr.router_probs(steering.recorded_logits(output, site.index, family == "gemma4"), site.activation)
        for site, (_, output) in zip(found.routers, seen)
    ]
    want = mr.RoutingSummary.of(
        torch.stack([output[2].reshape(-1, output[2].shape[-1]) for _, output in seen]),
        torch.stack(probs), steering.fields().reshape(-1), steering.labels(), TRAJECTORY.reshape(-1),
    )  # fmt: skip
    assert torch.equal(found.summary.usage, want.usage)
    assert torch.equal(found.summary.shifts, want.shifts)
    assert found.summary.metrics() == pytest.approx(want.metrics(), rel=1e-6)


def test_it_reports_from_a_model_to_a_page(tmp_path):
    model = tiny_model("qwen3_moe")
    with torch.no_grad(), recorder(model) as found:
        steering.forward(model, steering.tokens())
    numbers = mr.routing_report(found.summary, ["read", "write"], html=tmp_path / "report.html")
    assert 0.0 <= numbers["routing/jaccard"] <= 1.0
    assert sum(numbers[f"routing/usage/read/expert_{e}"] for e in range(8)) == pytest.approx(1.0)


def test_misuse_is_an_error():
    model = tiny_model("qwen3_moe")
    with recorder(model) as found:
        pass
    with pytest.raises(RuntimeError, match="did not run"):
        _ = found.summary
    with pytest.raises(ValueError, match="field"), recorder(model):
        model(input_ids=steering.tokens()[:1])
    assert not any(module._forward_hooks for module in model.modules())
