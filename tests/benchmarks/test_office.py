"""The office, its tasks, the tokenizer made for them, and the marks of the warm-up."""

import json
import pickle

import pytest

from benchmarks.office import ITEMS, PEOPLE, ROOMS, TOOLS, respond, schemas_json
from benchmarks.scoring import (
    ProcessReward,
    ScoreLog,
    SummaryReward,
    assistant_turns,
    final_answer,
    result_facts,
    score_rollout,
    states,
    summary_score,
)
from benchmarks.tasks import HELD_OUT, MIX, held_out, make_tasks

pytest.importorskip("transformers")
SCHEMAS = json.loads(schemas_json())


def test_ten_tools_have_schemas_that_fit_their_functions():
    assert len(SCHEMAS) == len(TOOLS) == 10
    for tool, schema in zip(TOOLS, SCHEMAS, strict=True):
        parameters = schema["function"]["parameters"]
        names = tool.__code__.co_varnames[: tool.__code__.co_argcount]
        assert schema["function"]["name"] == tool.__name__
        assert sorted(parameters["required"]) == sorted(parameters["properties"]) == sorted(names)


def test_tools_answer_as_the_office_does_today_and_others_on_other_days():
    by_name = {tool.__name__: tool for tool in TOOLS}
    assert by_name["get_phone"](person="Ada") == respond("get_phone", {"person": "Ada"})
    assert by_name["add"](a="2", b=40) == "42"
    assert by_name["find"](query="Oak") == "room"
    assert by_name["find"](query=["Oak"]) == "nothing"
    answers = {respond("get_phone", {"person": "Ada"}, day) for day in range(20)}
    assert len(answers) > 5


@pytest.mark.parametrize(("name", "arguments"), [("get_phone", {"person": "Zeus"}), ("fly", {})])
def test_what_the_office_does_not_know_is_an_error(name, arguments):
    with pytest.raises(ValueError, match="unknown"):
        respond(name, arguments)


def test_nobody_is_their_own_manager():
    assert all(respond("get_manager", {"person": p}, day) != p for p in PEOPLE for day in range(30))


@pytest.mark.parametrize("split", ["train", "eval"])
def test_gold_way_is_perfect_wasteful_way_is_not_and_both_summaries_are_good(split):
    for task in make_tasks(150, 5, split=split, days=30):
        efficient = score_rollout(task.messages()[1:], task.gold, SCHEMAS, task.facts)
        assert (efficient.process, efficient.success, efficient.summary) == (pytest.approx(1.0), 1.0, 1.0)
        assert efficient.redundant == 0
        assert held_out(task.question) == (split == "eval")
        if task.gold:
            wasteful = score_rollout(task.messages(wasteful=True)[1:], task.gold, SCHEMAS, task.facts)
            assert wasteful.summary == 1.0
            assert wasteful.success == 0.0
            assert wasteful.redundant == 1


def test_wasteful_parallel_task_scores_as_the_papers_case():
    task = next(task for task in make_tasks(50, 1) if task.kind == "parallel")
    turns = task.messages(wasteful=True)[1:]
    assert score_rollout(turns, task.gold, SCHEMAS).process == pytest.approx(0.65)
    assert score_rollout(turns, task.gold, SCHEMAS).tool_turns == 3


def test_tasks_are_reproducible_mixed_and_never_in_both_splits():
    tasks = make_tasks(2000, 3)
    assert [t.question for t in tasks] == [t.question for t in make_tasks(2000, 3)]
    for kind, share in MIX.items():
        assert sum(t.kind == kind for t in tasks) / 2000 == pytest.approx(share, abs=0.06)
    other = {t.question for t in make_tasks(2000, 4, split="eval")}
    assert not other & {t.question for t in tasks}
    assert 0.0 < HELD_OUT < 1.0
    with pytest.raises(ValueError, match="split"):
        make_tasks(1, 0, split="test")


def test_a_fact_is_stated_by_whole_words_only():
    assert states("It is 42.", "42")
    assert not states("It is 142.", "42")
    assert states("ADA manages it", "Ada")


def test_summary_needs_a_final_answer():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    tool = {"role": "tool", "content": "17"}
    assert final_answer([call, tool]) == ""
    assert final_answer([call, tool, {"role": "assistant", "content": "17"}]) == "17"
    assert summary_score([call, tool], ["17"]) == 0.0
    assert final_answer([{"role": "assistant", "content": "<tool_call>\n{broken"}]) == ""
    assert final_answer([]) == ""


def test_without_gold_facts_the_tool_results_are_the_facts():
    tool = {"role": "tool", "content": '{"city": "Rome", "days": [3, 4], "note": null}'}
    answer = {"role": "assistant", "content": "Rome, 3 days"}
    assert result_facts([tool, answer]) == ["Rome", "3", "4"]
    assert summary_score([tool, answer], None) == pytest.approx(2 / 3)
    assert summary_score([answer], None) == 1.0
    assert summary_score([{"role": "assistant", "content": " "}], None) == 0.0


def test_rewards_pickle_and_noise_depends_on_the_seed_alone():
    task = make_tasks(1, 0)[0]
    row = task.row()
    columns = {name: [row[name]] * 3 for name in ("gold", "tools", "facts")}
    completions = [task.messages()[1:]] * 3
    process, summary = pickle.loads(pickle.dumps((ProcessReward(), SummaryReward(0.5, seed=7))))
    assert process(completions, **columns) == pytest.approx([1.0] * 3)
    noisy = summary(completions, **columns)
    assert noisy == SummaryReward(0.5, seed=7)(completions, **columns)
    assert noisy != SummaryReward(0.5, seed=8)(completions, **columns)
    assert len(set(noisy)) == 3
    assert SummaryReward()(completions, **columns) == [1.0] * 3
    with pytest.raises(ValueError, match="sigma"):
        SummaryReward(-1.0)


def test_score_log_counts_for_nothing_and_prefers_the_rollouts_own_messages():
    task = make_tasks(1, 0)[0]
    row = task.row()
    log = ScoreLog()
    given = log(["", ""], [row["gold"]] * 2, [row["tools"]] * 2, [row["facts"]] * 2, [task.messages()[1:]] * 2)
    assert given == [0.0, 0.0]
    assert log.history[0]["process"] == pytest.approx(1.0)


@pytest.fixture(scope="module")
def tokenizer():
    from benchmarks.tiny import build_tokenizer, render

    tasks = make_tasks(200, 0, days=30)
    texts = [*render([task.messages() for task in tasks]), *render([tasks[0].messages()[:1]], SCHEMAS) * 5]
    return build_tokenizer(texts, [*PEOPLE, *ITEMS, *ROOMS])


def test_values_and_digits_are_tokens_of_their_own(tokenizer):
    for value in (*PEOPLE, *ITEMS, *ROOMS, "7"):
        for text in (f'"{value}"', f"of {value} is"):
            pieces = [tokenizer.decode([token]) for token in tokenizer(text)["input_ids"]]
            assert value in pieces
    assert len(tokenizer("4711")["input_ids"]) == 4


def test_any_text_survives_the_tokenizer(tokenizer):
    text = 'naïve 日本 \x07 {"a": "</tool_call>"}'
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_training_ids_are_those_of_generation(tokenizer):
    """A prompt's ids, then a completion's, then the tools' suffix: no merge may cross the joints."""
    for task in make_tasks(20, 9, days=9):
        messages = task.messages()
        whole = tokenizer.apply_chat_template(messages, tools=SCHEMAS, return_dict=False)
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                prefix = tokenizer.apply_chat_template(
                    messages[:at], tools=SCHEMAS, add_generation_prompt=True, return_dict=False
                )
                assert whole[: len(prefix)] == prefix


def test_warm_up_marks_what_the_model_writes_and_the_protocol_in_it(tokenizer):
    from benchmarks.warmup import encode

    task = next(task for task in make_tasks(50, 0) if task.kind == "sequential")
    example = encode(task.messages(), SCHEMAS, tokenizer)
    trained = tokenizer.decode([i for i, on in zip(example.ids, example.trained, strict=True) if on])
    protocol = tokenizer.decode([i for i, on in zip(example.ids, example.protocol, strict=True) if on])
    assert trained.count("<tool_call>") == 2
    assert trained.count("<|im_end|>") == 3
    assert "<tool_response>" not in trained
    assert task.answer in trained
    assert protocol.count("<tool_call>") == protocol.count("</tool_call>") == 2
    for call in (call for step in task.gold for call in step):
        assert call["name"] in protocol
        assert all(key in protocol for key in call["arguments"])
        assert not any(value in protocol for value in call["arguments"].values())
    assert all(on for on, format_on in zip(example.trained, example.protocol, strict=True) if format_on)


def test_a_call_that_says_parameters_is_scored_as_it_was_written(tokenizer):
    """TRL's parser leaves `arguments` empty for it; the score is of what the model wrote."""
    from trl.chat_template_utils import parse_response

    from rewards import process_score

    prefix = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}], add_generation_prompt=True, return_dict=False
    )
    call = '<tool_call>\n{"name": "get_desk", "parameters": {"person": "Ada"}}\n</tool_call>'
    ids = tokenizer(call + "<|im_end|>", add_special_tokens=False)["input_ids"]
    message = parse_response(tokenizer, ids, prefix=prefix)
    assert message["tool_calls"][0]["function"]["arguments"] == {}
    gold = [[{"name": "get_desk", "arguments": {"person": "Ada"}}]]
    assert process_score(assistant_turns([message]), gold, SCHEMAS) == process_score([call], gold, SCHEMAS)
