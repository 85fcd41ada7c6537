"""The job on real input: BFCL's rows and checker, the clock and the ledger, and real steps with a tiny model."""

import json
import math
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bfcl_checker import UNANSWERABLE, bfcl_valid
from benchmarks.real_ledger import Clock, Ledger

pytest.importorskip("bfcl_eval", reason="pip install --no-deps bfcl-eval")

from benchmarks.bfcl import CATEGORIES, BfclRow, load_rows, respond


@cache
def rows() -> list[BfclRow]:
    return load_rows(CATEGORIES)


def named(name: str) -> BfclRow:
    return next(row for row in rows() if row.id == name)


def text(*calls: dict[str, Any]) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


# --- rows ---------------------------------------------------------------------------------------------------------


def test_every_row_but_the_known_ones_is_read():
    assert len(rows()) == 400 + 258 + 200 + 200 - 2
    assert len({row.id for row in rows()}) == len(rows())
    assert not UNANSWERABLE & {row.id for row in rows()}


def test_columns_are_what_trainer_and_rewards_read():
    columns = named("simple_python_0").columns()
    assert columns["prompt"][0]["role"] == "system"
    assert columns["prompt"][-1]["role"] == "user"
    assert json.loads(columns["tools"])[0]["function"]["parameters"]["type"] == "object"
    assert json.loads(columns["gold"])[0][0]["name"] == "calculate_triangle_area"
    assert columns["tool_required"] is True


def test_gold_answers_satisfy_both_scorers_and_the_simulator():
    from rewards import process_score

    for row in rows():
        assert bfcl_valid(row.functions, row.answer, row.ground_truth, row.category), row.id
    for row in rows()[::4]:
        assert process_score([text(*row.answer)], row.gold, row.tools).total == pytest.approx(1.0), row.id
        answers = respond(text(*row.answer), row.tools)
        assert len(answers) == len(row.answer), row.id
        assert not any("error" in json.loads(answer) for answer in answers), row.id


def test_arguments_that_may_be_left_out_are():
    assert named("simple_python_0").answer == [
        {"name": "calculate_triangle_area", "arguments": {"base": 10, "height": 5}}
    ]


def test_no_function_is_called_in_both_halves():
    train = {row.answer[0]["name"] for row in rows() if not row.held_out}
    held_out = {row.answer[0]["name"] for row in rows() if row.held_out}
    assert not train & held_out
    assert 0.4 < sum(row.held_out for row in rows()) / len(rows()) < 0.6


def test_a_conversation_ends_with_what_the_tools_said():
    from benchmarks.scoring import summary_score

    for row in rows()[::50]:
        messages = row.conversation()
        assert [m["role"] for m in messages[len(row.prompt) :]] == [
            "assistant",
            *["tool"] * len(row.answer),
            "assistant",
        ]
        assert summary_score(messages, None) == 1.0


# --- BFCL's checker -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "accepted"),
    [
        ({"base": 10, "height": 5}, True),
        ({"base": 10, "height": 5, "unit": "UNITS"}, True),
        ({"base": 10, "height": 6}, False),
        ({"base": 10.0, "height": 5}, False),
        ({"base": "10", "height": 5}, False),
        ({"base": 10}, False),
        ({"base": 10, "height": 5, "extra": 1}, False),
    ],
)
def test_checker_accepts_what_bfcl_accepts(arguments: dict[str, Any], accepted: bool):
    row = named("simple_python_0")
    calls = [{"name": "calculate_triangle_area", "arguments": arguments}]
    assert bfcl_valid(row.functions, calls, row.ground_truth, row.category) is accepted


def test_checker_wants_all_parallel_calls_in_any_order_and_no_other():
    row = named("parallel_0")
    first, second = row.answer

    def valid(*calls: dict[str, Any]) -> bool:
        return bfcl_valid(row.functions, calls, row.ground_truth, row.category)

    assert valid(first, second)
    assert valid(second, first)
    assert not valid(first)
    assert not valid(first, second, second)
    assert not valid()


@pytest.mark.parametrize("arguments", [None, [], "10", {"base": {"a": [1]}, "height": [[]]}, {"base": None}])
def test_checker_survives_what_models_write(arguments: Any):
    row = named("simple_python_0")
    calls = [{"name": "calculate_triangle_area", "arguments": arguments}]
    assert bfcl_valid(row.functions, calls, row.ground_truth, row.category) is False


def test_checker_leaves_no_trace(tmp_path: Path):
    script = (
        "import os, sys\n"
        "from benchmarks.bfcl_checker import bfcl_valid\n"
        "gold = [{'f': {'x': [1]}}]\n"
        "schema = [{'name': 'f', 'parameters': {'type': 'dict', 'properties': {'x': {'type': 'integer'}},"
        " 'required': ['x']}}]\n"
        "assert bfcl_valid(schema, [{'name': 'f', 'arguments': {'x': 1}}], gold, 'simple_python')\n"
        "left = [name for name in sys.modules if name.startswith('bfcl_eval')]\n"
        "assert not left, left\n"
        "assert os.environ['BFCL_PROJECT_ROOT'] == 'mine'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=_environment("mine"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _environment(root: str) -> dict[str, str]:
    import os

    return os.environ | {"BFCL_PROJECT_ROOT": root, "PYTHONPATH": str(Path(__file__).parents[2])}


# --- clock, ledger, intervals -------------------------------------------------------------------------------------


def test_a_stage_gets_its_share_of_what_is_left(tmp_path: Path):
    ledger = Ledger(tmp_path, 1.0, {"a": 1.0, "b": 3.0}, {})
    assert ledger.open("a").seconds == pytest.approx(15.0)
    ledger.close("a", {})
    # What the first stage did not need goes to the second.
    assert ledger.open("b").seconds == pytest.approx(60.0, abs=0.1)
    with pytest.raises(ValueError, match="'c'"):
        ledger.open("c")


def test_a_rerun_knows_what_is_done_and_what_was_noted(tmp_path: Path):
    ledger = Ledger(tmp_path, 1.0, {"a": 1.0, "b": 1.0}, {"seed": 0})
    ledger.open("a")
    ledger.close("a", {"n": 1})
    ledger.open("b")
    time.sleep(0.05)
    ledger.note("b", step=3)
    again = Ledger(tmp_path, 1.0, {"a": 1.0, "b": 1.0}, {"seed": 0})
    assert again.result("a") == {"n": 1}
    assert again.result("b") is None
    assert again.notes("b") == {"step": 3}
    assert again.seconds("b") >= 0.05
    with pytest.raises(ValueError, match="other settings"):
        Ledger(tmp_path, 1.0, {"a": 1.0, "b": 1.0}, {"seed": 1})


def test_a_clock_without_time_fits_nothing():
    clock = Clock(0.0)
    assert clock.share == 1.0
    assert not clock.fits(0.0)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"), [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (0, 0, 0.0, 1.0)]
)
def test_wilson_interval(successes: int, trials: int, low: float, high: float):
    from benchmarks.real_eval import wilson

    assert wilson(successes, trials) == pytest.approx((low, high), abs=1e-4)


def test_sign_test_counts_rows_that_differ():
    from benchmarks.real_eval import sign_test

    assert sign_test([1, 1, 0, 1], [1, 0, 0, 0]) == {"only_first": 2, "only_second": 0, "p": 0.5}
    assert sign_test([0.0], [0.0]) == {"only_first": 0, "only_second": 0, "p": 1.0}
    assert math.isclose(sign_test([1] * 6, [0] * 6)["p"], 2 / 64)


# --- real steps ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and tokenizer with the real one's template, on disk."""
    from benchmarks.smollm import tool_tokenizer
    from benchmarks.tiny import build_model, build_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    texts = [json.dumps(row.tools) for row in rows()[:40]]
    tokenizer = tool_tokenizer(build_tokenizer(texts, values=[], vocab_size=600))
    build_model(tokenizer, hidden=32, layers=1, experts=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("rule", ["GRPO", "SLCA"])
def test_two_steps_on_bfcl_rows(tiny: Path, tmp_path: Path, rule: str):
    import torch

    import credit
    from benchmarks.real_training import Sizes, make_trainer
    from benchmarks.smollm import load_model

    model, tokenizer = load_model(tiny)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    sizes = Sizes(prompts=1, generations=4, micro=2, max_tokens=24, learning_rate=1e-3)
    some = rows()[:4]
    trainer = make_trainer(model, tokenizer, some, getattr(credit, rule)(), tmp_path, sizes, max_steps=2, seed=0)
    # A random model never calls: have its rollouts write the row's gold call first, every second one of them.
    trainer.rollout_func = _Prompted(trainer.rollout_func, {row.columns()["tools"]: text(*row.answer) for row in some})
    trainer.train()
    assert trainer.state.global_step == 2
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 2
    assert all(math.isfinite(entry["loss"]) for entry in logged)
    assert logged[0]["rewards/process/mean"] > 0
    assert any(not torch.equal(weight, before[name]) for name, weight in model.named_parameters())


class _Prompted:
    """Puts a gold call, its answer and the model's own next turn in place of every second rollout."""

    def __init__(self, rollout: Any, calls: dict[str, str]) -> None:
        self.rollout, self.calls = rollout, calls

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        tokenizer, original = trainer.processing_class, trainer._generate_single_turn
        served: list[int] = []

        def generate(ids: list[list[int]], *rest: Any) -> Any:
            turns, scores = original(ids, *rest)
            if not served:
                served.append(1)
                for at in range(0, len(turns), 2):
                    call = self.calls[trainer.rollout_rows[at]["tools"]]
                    turns[at] = [*tokenizer(call, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            return turns, scores

        limit, trainer.max_completion_length = trainer.max_completion_length, 400
        trainer._generate_single_turn = generate
        try:
            return self.rollout(prompts, trainer)
        finally:
            trainer._generate_single_turn, trainer.max_completion_length = original, limit


@pytest.mark.parametrize("name", ["sft", "slca"])
def test_an_interrupted_stage_goes_on_from_its_checkpoint(
    tiny: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    import torch

    from benchmarks import real_training
    from benchmarks.smollm import load_model
    from credit import SLCA

    monkeypatch.setattr(real_training, "SAVE_EVERY", -1.0)
    sizes = real_training.Sizes(sft_rows=4, sft_epochs=1, prompts=1, generations=2, micro=2, max_tokens=8)

    def run(folder: Path, stop_at: int = 0) -> dict[str, Any]:
        def report(share: float, now: str) -> None:
            if now.startswith(f"step {stop_at},"):
                raise KeyboardInterrupt

        ledger = Ledger(folder, 9.0, {name: 1.0}, {})
        stage = real_training.Stage(name, ledger, ledger.open(name), report, folder / name)
        model, tokenizer = load_model(tiny)
        if name == "sft":
            return real_training.supervise(stage, model, tokenizer, rows()[:12], sizes)
        return real_training.reinforce(stage, model, tokenizer, rows()[:12], SLCA(), sizes, max_steps=3)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", stop_at=2)
    resumed, whole = run(tmp_path / "cut"), run(tmp_path / "whole")
    assert [entry["step"] for entry in resumed["history"]] == [1, 2, 3]
    assert resumed["steps"] == whole["steps"] == 3
    if name == "sft":
        assert [e["loss"] for e in resumed["history"]] == pytest.approx([e["loss"] for e in whole["history"]])
        weights = [load_model(tmp_path / run / name / "final")[0].state_dict() for run in ("cut", "whole")]
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_the_whole_job_with_a_tiny_model_and_its_rerun(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from benchmarks.real import main
    from benchmarks.real_training import Sizes

    for name in ("TRL_EXPERIMENTAL_SILENCE", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "1")  # the job sets them; the tests after this one shall not see it
    out = tmp_path / "out"
    arguments = ["--model", str(tiny), "--out", str(out), "--minutes", "9", "--threads", "1", "--max-steps", "1"]
    arguments += ["--categories", "simple_python", "--max-prompt", "700", "--max-call", "200"]
    arguments += ["--eval-batch", "2", "--eval-rows", "2"]
    sizes = Sizes(sft_rows=64, sft_epochs=1, prompts=1, generations=2, micro=2, max_tokens=8)
    results = main(arguments, sizes)
    assert results["training"]["grpo"]["steps"] == results["training"]["slca"]["steps"] == 1
    assert [row["rows"] for row in results["models"].values()] == [2, 2, 2, 2]
    assert results == json.loads((out / "results.json").read_text())
    printed = " ".join(capsys.readouterr().out.split())
    assert "checker" in printed
    assert "sign test" in printed
    began = time.monotonic()
    assert main(arguments, sizes) == results
    assert time.monotonic() - began < 5
