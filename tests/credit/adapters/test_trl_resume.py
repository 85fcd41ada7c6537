"""A run resumed from a checkpoint goes on as the whole run would have: gate, gradients, log, summaries."""

import pytest
import torch

import moe_routing as mr
from credit.adapters.trl_checkpoints import WholeCheckpoints
from moe_routing.adapters.trl import TurnRouting
from tests.credit.adapters import routed as run


def check_resumed(whole, resumed):
    """Gradients to the last bit, the log, and what the next checkpoint would hold."""
    assert [entry["routing/gate"] for entry in whole["log"]] == [0.0, 0.0, 0.0, 1.0]
    assert len(whole["gradients"]) == 4
    assert len(resumed["gradients"]) == 2
    for want, got in zip(whole["gradients"][2:], resumed["gradients"], strict=True):
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert resumed["log"] == whole["log"]
    for name in ("first", "last"):
        want, got = (run["state"]["summaries"][name]["usage"] for run in (whole, resumed))
        assert torch.equal(want, got)
    assert resumed["state"]["gate"] == whole["state"]["gate"]


@pytest.fixture(scope="module")
def whole(tokenizer, tmp_path_factory):
    """A run of four steps, and where it left its checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    return run.four_steps(tokenizer, folder), folder


def test_a_resumed_run_goes_on_as_it_would_have(tokenizer, whole):
    check_resumed(whole[0], run.four_steps(tokenizer, whole[1], checkpoint="checkpoint-2"))


LOSES = {
    "the gate": (mr.EntropyGate, "load_state_dict", lambda gate, state: None),
    "the first summary": (TurnRouting, "load_state_dict", lambda hook, s: hook.control.gate.load_state_dict(s["gate"])),
    "the experts": (WholeCheckpoints, "_issue_warnings_after_load", lambda trainer, result: None),
}


@pytest.mark.parametrize("lost", LOSES)
def test_what_a_resumed_run_loses_is_noticed(tokenizer, whole, monkeypatch, lost):
    monkeypatch.setattr(*LOSES[lost])
    with pytest.raises(AssertionError):
        test_a_resumed_run_goes_on_as_it_would_have(tokenizer, whole)


def test_every_rank_resumes(two):
    for rank in two:
        check_resumed(rank["routing"]["whole"], rank["routing"]["resumed"])


def test_a_checkpoint_without_routing_is_told(tokenizer, tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 1}
    run.train(tokenizer, tmp_path, **saved)
    with pytest.warns(RuntimeWarning, match=r"checkpoint-1 holds no routing_state\.pt: routing control starts anew"):
        run.train(tokenizer, tmp_path, run.STRONG, resume=str(tmp_path / "checkpoint-1"), max_steps=2)


def test_within_a_generation_batch_it_is_generated_anew(tokenizer, tmp_path):
    """TRL keeps no rollouts in a checkpoint: both steps of the new batch follow the objective of that batch."""
    changes = {
        "gradient_accumulation_steps": 1, "steps_per_generation": 2, "learning_rate": 0.0,
        "save_strategy": "steps", "save_steps": 1,
    }  # fmt: skip
    strong, middle = run.STRONG | {"rho": False}, str(tmp_path / "checkpoint-1")
    run.train(tokenizer, tmp_path, strong, **changes)
    changes |= {"save_strategy": "no", "max_steps": 3, "resume": middle}
    _, batches, routed, _ = run.train(tokenizer, tmp_path, strong, **changes)
    _, _, plain, _ = run.train(tokenizer, tmp_path, **changes)
    assert len(batches) == 1
    assert len(routed) == 2
    parts = [run.difference(a, b) for a, b in zip(routed, plain, strict=True)]
    model = run.tiny_moe(tokenizer).train()
    (-2 * run.objective(model, batches[0], tokenizer, **run.STRONG)).backward()
    want = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    run.assert_close({name: parts[0][name] + parts[1][name] for name in want}, want)
