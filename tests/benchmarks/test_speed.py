"""`make bench` on tiny sizes: what is compared must agree, and the report must say what was found. Never a time."""

import pytest
import torch

from benchmarks import speed, timing
from benchmarks.sections import read_section, write_section
from benchmarks.speed_cases import FLOOR, credit_candidates, loss_candidates, trajectories
from benchmarks.timing import Rounds, Spread
from credit import tool_summary_segments


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trainer():
    return pytest.importorskip("trl.trainer.grpo_trainer")


def without(monkeypatch, *packages):
    real = speed.import_module

    def refuse(name):
        if name.partition(".")[0] in packages:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name)

    monkeypatch.setattr(speed, "import_module", refuse)


def run(tmp_path, *more):
    target = tmp_path / "RESULTS.md"
    write_section(target, "Other", "kept")
    sizes = ["--sizes", "16x32", "24x16", "--loss-size", "4x32", "--rounds", "2", "--threads", "1"]
    assert speed.main([*sizes, "--output", str(target), *more]) == 0
    assert read_section(target, "Other") == "kept"
    return read_section(target, speed.TITLE)


def test_report_without_peers(tmp_path, monkeypatch, capsys):
    without(monkeypatch, "verl", "trl")
    monkeypatch.setattr(speed, "bandwidth", lambda: timing.bandwidth(megabytes=1, rounds=1))
    report = run(tmp_path)
    printed = capsys.readouterr().out
    assert "verl.trainer.ppo.core_algos is not available" in printed
    assert report in printed
    for expected in ("16×32", "24×16", "4×32", FLOOR, "TRL, expression", "Machine:", "torch", "GB/s"):
        assert expected in report
    assert "| verl" not in report


def test_every_trajectory_has_both_segments():
    segments = tool_summary_segments(trajectories(64, 32))
    assert bool((segments == 0).any(dim=1).all())
    assert bool((segments == 1).any(dim=1).all())


def test_estimators_agree():
    estimators = pytest.importorskip("verl.trainer.ppo.core_algos")
    for candidates in credit_candidates(32, 24, estimators):
        results = {name: candidate() for name, candidate in candidates.items() if name != FLOOR}
        assert {"ours", "verl, loop", "verl, vectorised"} < set(results)
        speed.require_agreement(results, 1e-4)
        with pytest.raises(AssertionError, match="verl, loop"):
            speed.require_agreement({**results, "verl, loop": results["verl, loop"] + 1e-2}, 1e-4)


def test_losses_and_their_gradients_agree(trainer):
    forwards, (logp, *_) = loss_candidates(6, 48, trainer)
    assert len(forwards) == 3
    values = {name: forward().detach() for name, forward in forwards.items()}
    gradients = {name: speed.gradient(forward, logp) for name, forward in forwards.items()}
    speed.require_agreement(values, 1e-6)
    speed.require_agreement(gradients, 1e-6)
    assert bool((gradients["ours"] != 0).any())


def test_the_loss_keeps_one_tensor():
    forwards, given = loss_candidates(6, 48, None)
    ours = timing.bytes_for_backward(forwards["ours"], given)
    one = given[0].nbytes
    assert one <= ours < 1.5 * one
    assert timing.bytes_for_backward(forwards["TRL, expression"], given) >= 2 * ours


def test_bytes_for_backward_leaves_arguments_out():
    x, y = torch.ones(10, requires_grad=True), torch.ones(10)
    assert timing.bytes_for_backward(lambda: (x * y).sum(), (x, y)) == 0
    assert timing.bytes_for_backward(lambda: (x * y).sum(), (x,)) == y.nbytes
    assert timing.bytes_for_backward(lambda: x.exp().sum(), (x,)) == x.nbytes


def test_rounds_turn_and_warm_up_is_not_counted():
    calls = []
    rounds = timing.interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2, warmup=1)
    assert "".join(calls) == "ba" + "ab" + "ba"
    assert {name: len(seconds) for name, seconds in rounds.seconds.items()} == {"a": 2, "b": 2}


def test_ratios_are_taken_within_a_round():
    rounds = Rounds({"a": (1.0, 20.0, 3.0), "b": (2.0, 10.0, 3.0)})
    assert rounds.ratio("a", "b") == Spread(0.5, 1.0, 2.0)
    assert rounds.time("a") == Spread(1.0, 3.0, 20.0)


@pytest.mark.parametrize(
    ("median", "at_least", "verdict"),
    [(2.0, True, "missed"), (4.0, True, "met"), (2.0, False, "met"), (4.0, False, "missed")],
)
def test_aims_are_judged_by_their_median(median, at_least, verdict):
    assert verdict in speed.Aim("ratio", Spread(0.0, median, 9.0), 3, at_least).row()
