"""Rows with their own tools: rendering, budget, stop reasons, and training on what came out."""

import json
import os
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from credit.adapters.trl import CreditGRPOTrainer
from credit.adapters.trl_rollout import ToolRollout, row_tools
from rewards import LLMMocker
from rewards.simulator import answer_calls
from tests.credit.adapters.scripted import CALL, END, TEMPLATES, masks_of, record, script_generate
from tests.rewards.servers import says, serving

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


TRAINING = (TEMPLATES / "qwen3_training.jinja").read_text()


def answer(text, tools):
    """One result for each opening tag, naming the row's tools."""
    names = [tool["function"]["name"] for tool in tools]
    return [f"{names} {n}" for n in range(text.count("<tool_call>"))]


def by_turns(rollout_messages, rollout_stop, **_):
    return [len(turns) + (stop == "answered") for turns, stop in zip(rollout_messages, rollout_stop, strict=True)]


def calls_once(text, row):
    if row % 2 and "<tool_response>" not in text:
        return CALL + CALL * (row % 4 == 3) + END
    return "It is sunny." + END


@pytest.fixture
def trainer(model, tokenizer, dataset, config):
    def make(turns=calls_once, respond=answer, train_dataset=dataset, max_turns=8, **args):
        if turns is not None:
            script_generate(model, tokenizer, turns)
        return CreditGRPOTrainer(
            model,
            components={"tool": [by_turns], "summary": [by_turns]},
            rollout_func=ToolRollout(respond, max_turns=max_turns),
            train_dataset=train_dataset,
            processing_class=tokenizer,
            args=config(**({"max_completion_length": 256, "max_steps": 1} | args)),
        )

    return make


def test_each_row_is_rendered_with_its_own_tools_and_answered(trainer, tokenizer):
    run = trainer()
    batches = record(run)
    run.train()
    batch = batches[0]
    for row, source in enumerate(batch["rows"]):
        prompt = tokenizer.decode(batch["prompt_ids"][row])
        assert ("weather" in prompt) == source["needs_tool"]
        called = row % 2 == 1
        assert [turn["role"] for turn in source["rollout_messages"]] == (
            ["assistant", *["tool"] * (1 + (row % 4 == 3)), "assistant"] if called else ["assistant"]
        )
        names = ["weather"] if source["needs_tool"] else []
        if called:
            assert source["rollout_messages"][1]["content"] == f"{names} 0"
        assert source["rollout_stop"] == "answered"
        assert set(batch["segments"][row].tolist()) - {-1} == ({0, 1} if called else {1})
    assert run.state.log_history[0]["rollout/stop_budget"] == 0


def test_ids_are_those_of_the_template_and_the_mask_is_the_models_own(trainer, tokenizer):
    """The concatenated ids read as the conversation rendered in one piece, and the mask covers the model's turns."""
    run = trainer()
    batches = record(run)
    run.train()
    batch = batches[0]
    for row, mask in enumerate(masks_of(batch)):
        ids = batch["completion_ids"][row]
        own = tokenizer.decode(ids[torch.tensor(mask).bool()])
        turns = [t["content"] for t in batch["rows"][row]["rollout_messages"] if t["role"] == "assistant"]
        assert own == "".join(turn + END for turn in turns)
        results = [t["content"] for t in batch["rows"][row]["rollout_messages"] if t["role"] == "tool"]
        answered = "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in results)
        between = f"\n<|im_start|>user{answered}<|im_end|>\n<|im_start|>assistant\n"
        whole = (turns[0] + END + between + turns[1] + END) if results else turns[0] + END
        real = ids[batch["completion_mask"][row].bool()]
        assert tokenizer.decode(real) == whole
        assert real.tolist() == tokenizer(whole)["input_ids"]


def always_calls(text, row):
    return CALL + END


def test_stops_after_max_turns_and_says_so(trainer):
    run = trainer(always_calls, max_turns=2)
    batches = record(run)
    run.train()
    for row in batches[0]["rows"]:
        assert row["rollout_stop"] == "turns"
        assert [turn["role"] for turn in row["rollout_messages"]].count("assistant") == 3
    assert run.state.log_history[0]["rollout/stop_turns"] == 1


def test_results_that_do_not_fit_are_left_out_whole(trainer):
    run = trainer(respond=lambda text, tools: ["x" * 600] if CALL in text else [])
    batches = record(run)
    run.train()
    for number, row in enumerate(batches[0]["rows"]):
        assert row["rollout_stop"] == ("budget" if number % 2 else "answered")
        assert len(row["rollout_messages"]) == 1
    assert (batches[0]["completion_ids"].shape[1]) <= 256
    assert run.state.log_history[0]["rollout/stop_budget"] == 0.5


@pytest.mark.parametrize("budget", [1, 16, 60, 90])
def test_the_budget_bounds_every_rollout(trainer, budget):
    run = trainer(always_calls, max_completion_length=budget)
    batches = record(run)
    run.train()
    assert batches[0]["completion_ids"].shape[1] <= budget
    assert {row["rollout_stop"] for row in batches[0]["rows"]} <= {"length", "budget"}


def test_samples_from_the_model_itself(trainer):
    """No script: a random model writes until the budget ends."""
    run = trainer(None, max_completion_length=12, max_steps=2)
    batches = record(run)
    run.train()
    assert any(row["rollout_stop"] == "length" for row in batches[0]["rows"])
    assert batches[0]["completion_ids"].unique().numel() > 10


def test_evaluation(trainer, dataset):
    run = trainer(num_generations_eval=2, per_device_eval_batch_size=4)
    run.train()
    batches = record(run)
    run.evaluate(dataset.select(range(2)))
    assert batches[0]["advantages"].shape[0] == 4


def test_results_wait_for_all_rows_of_a_turn(trainer):
    """Rows are answered side by side, in the order of the rows."""
    seen = []

    def slow(text, tools):
        seen.append(len(tools))
        return answer(text, tools)

    run = trainer(respond=slow)
    run.train()
    assert sorted(seen) == sorted([1] * 4 + [0] * 4 + [1] * 2 + [0] * 2)


class FakeVLLM:
    """vLLM as TRL talks to it, writing a script; every token has log-probability -1."""

    def __init__(self, tokenizer, max_model_len=2048):
        self.tokenizer, self.synced, self.sizes = tokenizer, 0, []
        self.llm = SimpleNamespace(
            llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len))
        )

    def sync_weights(self):
        self.synced += 1

    def generate(self, prompts, images, num_generations, profiler):
        assert images is None
        self.sizes.append((len(prompts), num_generations))
        texts = self.tokenizer.batch_decode(prompts)
        ids = [self.tokenizer(calls_once(text, row))["input_ids"] for row, text in enumerate(texts)]
        return prompts, ids, [[[-1.0] for _ in row] for row in ids], None


def test_vllm_generates_and_its_log_probabilities_are_kept(trainer, tokenizer):
    run = trainer(None, vllm_importance_sampling_mode="token_truncate")
    engine = FakeVLLM(tokenizer)
    run.use_vllm, run.vllm_mode, run.vllm_generation, run._last_loaded_step = True, "colocate", engine, -1
    batches = record(run)
    run.train()
    batch = batches[0]
    assert engine.synced == 1
    assert engine.sizes == [(8, 4), (4, 1)]  # the second turn is of those that called
    own = batch["segments"] >= 0
    assert (batch["sampling_per_token_logps"][own] == -1).all()
    assert (batch["sampling_per_token_logps"][~own] == 0).all()
    assert (batch["importance_sampling_ratio"][~own] == 1).all()


def test_the_context_of_vllm_bounds_a_rollout(trainer, tokenizer):
    run = trainer(None)
    run.use_vllm, run.vllm_mode, run.vllm_generation = True, "colocate", FakeVLLM(tokenizer, max_model_len=60)
    run._last_loaded_step = -1
    batches = record(run)
    run.train()
    assert {row["rollout_stop"] for row in batches[0]["rows"][1::2]} == {"budget"}


def test_the_simulator_answers(trainer, dataset):
    run = trainer(respond=answer_calls)
    batches = record(run)
    run.train()
    for number, row in enumerate(batches[0]["rows"]):
        results = [turn for turn in row["rollout_messages"] if turn["role"] == "tool"]
        assert len(results) == (number % 2) * (1 + (number % 4 == 3))
        # Only rows that bring the tool get an answer that is no error.
        assert all(("error" in turn["content"]) != row["needs_tool"] for turn in results)
        assert all(turn["name"] == "weather" for turn in results)


def test_a_language_model_behind_an_endpoint_answers_the_calls_of_a_step_side_by_side(trainer):
    def slowly(handler):
        time.sleep(0.2)
        says("<tool_response>sunny</tool_response>")(handler)

    with serving(slowly) as server:
        run = trainer(respond=partial(answer_calls, mocker=LLMMocker(server.url, "mocker")))
        batches = record(run)
        run.train()
    results = [m for row in batches[0]["rows"] for m in row["rollout_messages"] if m["role"] == "tool"]
    assert {result["content"] for result in results if "error" not in result["content"]} == {"sunny"}
    # A row that does not bring the tool is refused before any model is asked.
    assert any("error" in result["content"] for result in results)
    assert server.most > 1


def test_a_template_that_names_the_tool_asks_for_names(trainer, tokenizer, monkeypatch):
    def naming(template):
        return template.replace("<tool_response>\\n'", "<tool_response>' + message.name + '\\n'")

    assert naming(TRAINING) != TRAINING
    monkeypatch.setattr(tokenizer, "chat_template", naming(tokenizer.chat_template))
    run = trainer()
    run.chat_template = naming(TRAINING)
    with pytest.raises(ValueError, match="results with a `name`"):
        run.train()
    run = trainer(respond=answer_calls)
    run.chat_template = naming(TRAINING)
    batches = record(run)
    run.train()
    assert "<tool_response>weather" in tokenizer.batch_decode(batches[0]["completion_ids"])[1]


SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"enum": ["a", None]}}}


def test_row_tools_reads_lists_json_and_nothing():
    assert row_tools({"tools": json.dumps([SCHEMA])}) == [SCHEMA]
    assert row_tools({"tools": None}) == row_tools({"tools": ""}) == row_tools({"tools": []}) == []
    rows = Dataset.from_list([{"tools": [{"a": {"x": 1}}]}, {"tools": [{"b": [{"y": 2}, {"z": 3}]}]}])
    assert [row_tools(row) for row in rows] == [[{"a": {"x": 1}}], [{"b": [{"y": 2}, {"z": 3}]}]]
    assert row_tools({"tools": [SCHEMA]})[0]["function"]["parameters"]["enum"] == ["a", None]


@pytest.mark.parametrize("tools", ["7", '{"name": "f"}', ["f"], [[1]]])
def test_row_tools_refuses_what_is_no_list_of_schemas(tools):
    with pytest.raises(ValueError, match="column 'tools' must hold a list"):
        row_tools({"tools": tools})


def test_bad_use_is_named(trainer, dataset, tokenizer):
    with pytest.raises(ValueError, match=r"no column 'tools'"):
        trainer(train_dataset=dataset.remove_columns("tools")).train()
    with pytest.raises(ValueError, match="conversational"):
        trainer(train_dataset=dataset.remove_columns("prompt").add_column("prompt", ["x"] * 8)).train()
    with pytest.raises(ValueError, match="max_turns"):
        ToolRollout(answer, max_turns=-1)
    with pytest.raises(ValueError, match="CreditGRPOTrainer"):
        ToolRollout(answer)([[]], object())
