"""Reward functions for TRL: the arguments are TRL's, the names read well, and everything pickles."""

import json
import pickle
import time
from typing import Any

import pytest

from rewards import parse_tool_calls
from rewards.adapters.trl import (
    ActionReward,
    AnswerReward,
    PlannerReward,
    ProcessReward,
    ReferenceReward,
    SolvedReward,
    SummaryJudgeReward,
)
from rewards.baselines import planner_score
from rewards.conversation import assistant_turns, closing_answer, content_text, question_text, tool_results
from rewards.gold import GoldError
from rewards.guard import guard_omission
from rewards.judge import SummaryJudge
from rewards.process import process_score
from rewards.schema import ToolSchemaError
from rewards.verdicts import CompletenessJudge, SolvedJudge
from tests.rewards.checks import TOOLS, block, call
from tests.rewards.format_checks import FORMATS, write
from tests.rewards.judge_checks import FAST, rated
from tests.rewards.servers import completion, fails, says, serving

URL = "http://127.0.0.1:9/v1"  # nobody listens
REWARDS = [
    (ProcessReward(), "process"),
    (ReferenceReward(), "reference_rule"),
    (ActionReward(), "toolpo_action"),
    (SummaryJudgeReward(), "summary_judge"),
    (SummaryJudgeReward(SummaryJudge(URL, "m")), "summary_judge"),
    (SolvedReward(SolvedJudge(URL, "m")), "toolpo_solved"),
    (PlannerReward(CompletenessJudge(URL, "m")), "rltr_planner"),
    (AnswerReward(), "answer"),
]
GOLD = [[call("add", a=1)]]
CHAT = [
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call("add", a=1)}]},
    {"role": "tool", "name": "add", "content": '{"sum": 7}'},
    {"role": "assistant", "content": "<think>7</think>It is 7."},
]


def trl_batch(**columns: Any) -> dict[str, Any]:
    """What TRL hands to a reward function, for three rollouts of one prompt."""
    return {
        "prompts": [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 6?"}]] * 3,
        "completions": [CHAT, CHAT[:1], [{"role": "assistant", "content": block(call("add", a=2))}]],
        "completion_ids": [[1, 2], [3], []],
        "trainer_state": object(),
        "log_extra": lambda column, values: None,
        "gold": [json.dumps(GOLD)] * 3,
        "tools": [json.dumps(TOOLS)] * 3,
        **columns,
    }


@pytest.mark.parametrize(("reward", "name"), REWARDS)
def test_pickles_and_has_a_name(reward: Any, name: str) -> None:
    assert reward.__name__ == name
    again = pickle.loads(pickle.dumps(reward))
    assert again == reward
    assert again.__name__ == name


def test_scores_are_those_of_the_functions() -> None:
    batch = trl_batch()
    expected = [process_score(assistant_turns(rollout), GOLD, TOOLS).total for rollout in batch["completions"]]
    assert ProcessReward()(**batch) == expected
    assert expected[0] == 1.0
    assert ReferenceReward()(**batch) == [1.0, 1.0, 0.0]
    assert ActionReward()(**batch) == [1.0, 1.0, 0.0]
    assert ProcessReward()(**trl_batch(gold=[GOLD, None, []], tools=[TOOLS] * 3))[1] is None
    assert ProcessReward()(completions=[], gold=[]) == []


def test_rollout_messages_go_before_completions() -> None:
    batch = trl_batch(rollout_messages=[CHAT] * 3)
    assert ProcessReward()(**batch) == [1.0] * 3
    assert SummaryJudgeReward()(**batch) == [1.0] * 3


def test_the_rule_judge_reads_facts_or_results() -> None:
    logged: dict[str, float] = {}
    batch = trl_batch(log_metric=logged.__setitem__)
    assert SummaryJudgeReward()(**batch) == [1.0, 0.0, 0.0]
    assert logged == {"summary_judge/failed": 0.0, "summary_judge/absent": 0.0}
    assert SummaryJudgeReward()(**trl_batch(facts=['["7", "8"]', None, ["7"]])) == [0.5, 0.0, 0.0]


def test_the_judge_sees_question_results_and_answer_side_by_side() -> None:
    def reply(handler: Any) -> None:
        time.sleep(0.1)
        item = json.loads(handler.body["messages"][1]["content"])
        handler.send(completion(rated("good") if item["final_answer"] else "no form"))

    logged: dict[str, float] = {}
    with serving(reply) as server:
        reward = SummaryJudgeReward(SummaryJudge(server.url, "m", **FAST))
        assert reward(**trl_batch(log_metric=logged.__setitem__)) == [0.75, 0.0, 0.0]
        seen = [json.loads(request["messages"][1]["content"]) for request in server.requests]
        assert {"question": "1 + 6?", "tool_results": ['{"sum": 7}'], "final_answer": "It is 7."} in seen
        assert len(seen) == 2  # the two without results and answer are one question
        assert server.most == 2
    assert logged == {"summary_judge/failed": 2 / 3, "summary_judge/absent": 0.0}
    with serving(fails(500)) as server:
        reward = SummaryJudgeReward(SummaryJudge(server.url, "m", **FAST))
        assert reward(**trl_batch(log_metric=logged.__setitem__)) == [None] * 3
    assert logged == {"summary_judge/failed": 0.0, "summary_judge/absent": 1.0}


def test_the_baselines() -> None:
    def verdict(word: str) -> str:
        return f"<outcome><verdict>{word}</verdict></outcome>"

    with serving(says(verdict("solved"))) as server:
        assert SolvedReward(SolvedJudge(server.url, "m", **FAST))(**trl_batch()) == [1.0] * 3
    twice = [*CHAT[:1], {"role": "tool", "content": '{"error": "x"}'}, *CHAT]
    broken = "<tool_call>{}</tool_call>"
    with serving(says(verdict("complete"))) as server:
        batch = trl_batch(completions=[CHAT, twice, broken])
        scores = PlannerReward(CompletenessJudge(server.url, "m", **FAST))(**batch)
        assert scores == pytest.approx([1.0, 1.0 - 0.1 - 0.2, -1.0])
    texts = [r"Answer: \boxed{1/2}", [{"role": "assistant", "content": r"Answer: \boxed{3}"}], ""]
    assert AnswerReward(timeout=20.0)(completions=texts, answer=["0.5", "2", "4"]) == [1.0, -1.0, -1.0]
    assert AnswerReward()(completions=texts, answer=["0.5", None, "4"]) == [1.0, None, -1.0]


def test_nulls_of_a_table_are_taken_out_of_tools() -> None:
    table = [{**tool, "strict": None} if "function" not in tool else {**tool, "function": {
        **tool["function"], "description": None,
        "parameters": {**tool["function"]["parameters"], "properties": {
            **tool["function"]["parameters"].get("properties", {}), "of_another_tool": None}},
    }} for tool in TOOLS]  # fmt: skip
    batch = trl_batch()
    assert ProcessReward()(**trl_batch(tools=[table] * 3)) == ProcessReward()(**batch)
    with pytest.raises(ToolSchemaError, match="row 0"):
        ProcessReward()(**trl_batch(tools=[json.dumps(table)] * 3))


def test_errors_name_the_row_and_the_field() -> None:
    with pytest.raises(GoldError, match="row 1: gold"):
        ProcessReward()(**trl_batch(gold=["[]", "{", "[]"]))
    with pytest.raises(ToolSchemaError, match=r"row 2: tools\[0\]"):
        ProcessReward()(**trl_batch(tools=[None, "[]", [{}]]))
    with pytest.raises(ValueError, match="row 0: tools: not JSON"):
        ProcessReward()(**trl_batch(tools=["[", "[]", "[]"]))
    with pytest.raises(ValueError, match="gold: 1 cells for 3 rollouts"):
        ProcessReward()(**trl_batch(gold=["[]"]))
    with pytest.raises(ValueError, match="facts: 1 cells for 3 rollouts"):
        SummaryJudgeReward()(**trl_batch(facts=["[]"]))
    with pytest.raises(ValueError, match="row 1: facts: expected a list, got str"):
        SummaryJudgeReward()(**trl_batch(facts=["[]", '"7"', "[]"]))
    with pytest.raises(ValueError, match="row 2: tools: expected a list, got dict"):
        ProcessReward()(**trl_batch(tools=["[]", "[]", "{}"]))
    with pytest.raises(ValueError, match="row 1: answer: reference"):
        AnswerReward()(completions=["Answer: 4"] * 2, answer=[None, ""])
    with pytest.raises(ValueError, match="answer: 1 cells"):
        AnswerReward()(completions=["a", "b"], answer=["4"])


@pytest.mark.parametrize("format", [*FORMATS, "qwen3_coder"])
def test_every_format_is_scored(format: str) -> None:
    raw = [{"role": "assistant", "content": write([call("add", a=1)], format)}]
    parsed = [{"role": "assistant", "content": "", "tool_calls": [{"function": call("add", a=1)}]}]
    batch = trl_batch(completions=[raw, parsed, raw[0]["content"]])
    for reward in (ProcessReward(format=format), ReferenceReward(format), ActionReward(format)):
        assert reward(**batch) == [1.0] * 3, reward
    assert SummaryJudgeReward(format=format)(**batch) == [0.0] * 3
    one = raw[0]["content"]
    assert not guard_omission([one], 1.0, True, required=True, format=format).omitted
    assert planner_score([one, one], 1.0, format=format).repeats == 1


def test_no_message_of_a_model_raises() -> None:
    """What TRL's parser made of a model's text may be no call at all."""
    for calls in ("x", ["x"], [{"function": "f"}], [{"function": [{"name": "add"}]}], [3], [{}], {"name": 3}):
        rollout = [{"role": "assistant", "content": [3], "tool_calls": calls}]
        (score,) = ProcessReward()(completions=[rollout], gold=['[[{"name": "g"}]]'])
        assert score is not None
        assert score < 0.5
    for arguments in ([], 0, False):
        entry = {"function": {"name": "add", "arguments": arguments}}
        (turn,) = assistant_turns([{"role": "assistant", "tool_calls": [entry]}])
        assert parse_tool_calls(turn).calls[0].status == "invalid_arguments"


def test_the_trainers_plan_takes_them() -> None:
    components = pytest.importorskip("credit.adapters.trl_components")
    from credit import SLCA

    tool, summary = ProcessReward(), SummaryJudgeReward(SummaryJudge(URL, "m"))
    plan = components.reward_plan({"tool": [tool, ActionReward()], "summary": summary}, {"tool": [1.0, 0.5]})
    components.require_fit(SLCA(), plan, guarded=True)
    assert plan.functions == (tool, ActionReward(), summary)
    assert [function.__name__ for function in plan.functions] == ["process", "toolpo_action", "summary_judge"]


def test_conversations() -> None:
    assert tool_results(CHAT) == ['{"sum": 7}']
    assert tool_results("text") == []
    assert assistant_turns("text") == ["text"]
    assert assistant_turns([{"role": "assistant", "content": None}]) == [""]
    assert closing_answer(CHAT) == "It is 7."
    assert closing_answer(CHAT[:2]) == closing_answer(CHAT[:1]) == closing_answer([]) == ""
    assert closing_answer("a <think> b") == "a"
    assert closing_answer("b</think> a <tool_call>") == ""
    assert question_text("q") == "q"
    assert question_text([]) == ""
    assert content_text({"content": [{"type": "text", "text": "a"}, {"type": "image"}, {"text": "b"}]}) == "a\nb"
    text_arguments = [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}]
    assert process_score(assistant_turns(text_arguments), GOLD, TOOLS).total == 1.0
