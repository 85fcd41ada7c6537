"""The cost of routing control on tiny sizes: what is compared must agree, and the section must land. Never a time."""

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import speed_routing
from benchmarks.routing_cases import GradientCase, Step, fields, gradient_candidates, moe_model, peak_bytes
from benchmarks.sections import read_section


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def step():
    return Step(moe_model(layers=1, hidden=32, experts=8), rows=2, tokens=96)


def test_section_is_written_replaced_and_kept(tmp_path, capsys):
    target = tmp_path / "RESULTS.md"
    target.write_text("# Speed\n\nfigures\n", encoding="utf-8")
    size = ["--layers", "1", "--hidden", "32", "--experts", "8", "--rows", "2", "--tokens", "64", "--rounds", "1"]
    for _ in range(2):
        assert speed_routing.main([*size, "--gradient-tokens", "160", "--output", str(target)]) == 0
    text = target.read_text(encoding="utf-8")
    assert text.startswith("# Speed\n\nfigures\n")
    assert text.count(f"# {speed_routing.TITLE}\n") == 1
    section = read_section(target, speed_routing.TITLE)
    assert section in capsys.readouterr().out
    for expected in ("1 layers", "8 experts", "2×64 tokens", "control on / off: peak memory", "Machine:", "torch"):
        assert expected in section


def test_both_gradients_are_the_same_and_not_the_one_given():
    found = {name: candidate() for name, candidate in gradient_candidates(160, 8, 2).items()}
    speed_routing.require_agreement(found, 1e-5)
    untouched = GradientCase.random(160, 8, 2).grad_in
    assert float((found["ours"] - untouched).abs().mean()) > 0.05


def test_the_step_with_control_steers(step):
    step.on()
    assert step.logged["routing/survived"] > 0.0
    assert step.logged["routing/router_entropy"] > 0.0
    assert not any(
        module._forward_hooks for module in step.model.model.layers.modules() if "Router" in type(module).__name__
    )


def test_fields_start_after_a_prompt_and_do_not_cross_rows():
    field = fields(3, 64)
    assert bool((field[:, :16] == -1).all())
    assert torch.equal(field.unique(), torch.arange(-1, 9))
    assert not set(field[0].tolist()) & set(field[1].tolist()) - {-1}


def test_peak_counts_what_is_alive_at_once():
    def one_after_the_other():
        for _ in range(4):
            torch.ones(1000)

    def together():
        return [torch.ones(1000) for _ in range(4)]

    def views():
        x = torch.ones(1000)
        return x.view(10, 100), x[:5], x.add_(1)

    x = torch.ones(1000, requires_grad=True)
    assert peak_bytes(one_after_the_other) == 4000
    assert peak_bytes(together) == 16000
    assert peak_bytes(views) == 4000
    assert peak_bytes(lambda: x.detach()) == 0
    # exp keeps its result; backward adds the gradient of the sum, which is expanded, and that of x.
    assert 8000 <= peak_bytes(lambda: x.exp().sum().backward()) <= 12100


def test_control_costs_little_memory(step):
    assert peak_bytes(step.on) < 1.5 * peak_bytes(step.off)
