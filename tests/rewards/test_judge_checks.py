"""Each check of `judge_checks`, against the package as it is; and what is no primitive's property."""

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.answers import outcome_reward, verify_answer, verify_answers
from rewards.baselines import planner_score
from rewards.calls import ToolCall
from rewards.endpoint import ChatEndpoint
from rewards.judge import JudgeItem, SummaryJudge, parse_rating
from rewards.mocker import LLMMocker, tool_response
from rewards.rule_judge import RuleJudge
from rewards.verdicts import CompletenessJudge, SolvedJudge
from tests.rewards import judge_checks
from tests.rewards.servers import fails, says, serving

ALL = [value for name, value in vars(judge_checks).items() if name.startswith("check_")]


@pytest.mark.parametrize("check", ALL, ids=lambda check: check.__name__)
def test_holds(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"base_url": "localhost"}, "base_url"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"retries": -1}, "retries"),
        ({"timeout": 0.0}, "timeout"),
        ({"concurrency": 0}, "concurrency"),
    ],
)
def test_a_setting_out_of_range_is_named(setting: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ChatEndpoint(**{"base_url": "http://h/v1", "model": "m", **setting})


@pytest.mark.parametrize("kind", [ChatEndpoint, SummaryJudge, SolvedJudge, CompletenessJudge, LLMMocker])
def test_endpoints_pickle(kind: type) -> None:
    judge = kind("http://h/v1", "m", cache_dir=Path("c"))
    assert pickle.loads(pickle.dumps(judge)) == judge


@pytest.mark.parametrize("key", ["k\n", "k\u20ac", "k\x00"])
def test_a_key_that_is_no_header_is_named_and_not_shown(key: str) -> None:
    for judge in (SummaryJudge("http://127.0.0.1:9/v1", "m", api_key=key), ChatEndpoint("http://x/v1", "m", key)):
        with pytest.raises(ValueError, match="api_key") as error:
            judge("?", [], "!") if isinstance(judge, SummaryJudge) else judge.chat([])
        assert key not in str(error.value)


def test_one_text_is_no_list_of_results() -> None:
    judge = SummaryJudge("http://h/v1", "m")
    with pytest.raises(TypeError, match="tool_results"):
        judge("?", "4", "!")
    with pytest.raises(TypeError, match=r"items\[0\].tool_results"):
        judge.batch([JudgeItem("?", "4", "!")])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="facts"):
        RuleJudge()("?", [], "!", facts="4")


def test_a_mocker_that_is_down_is_no_answer() -> None:
    with serving(fails(500)) as server, pytest.raises(Exception, match="HTTP 500"):
        LLMMocker(server.url, "m", backoff=0.0, retries=1)(ToolCall("add", {"a": 1}), None)


def test_a_full_disk_costs_no_answer(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with serving(says("yes")) as server, pytest.warns(UserWarning, match="cache_dir"):
        assert ChatEndpoint(server.url, "m", cache_dir=blocked).chat(judge_checks.HELLO) == "yes"


FILL = """
import sys
from pathlib import Path
from rewards._disk import read_entry, write_entry
for n in range(200):
    write_entry(Path(sys.argv[1]), "key", sys.argv[2] * 10_000)
    found = read_entry(Path(sys.argv[1]), "key")
    assert found is not None and len(set(found)) == 1 and len(found) == 10_000, found
"""


def test_several_processes_share_a_cache(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", FILL, str(tmp_path), letter]) for letter in "abc"]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert [file.name for file in tmp_path.rglob("*.*")] == ["key.json"]


FORK = r"""
import os, sys
from rewards.answers import verify_answer
from rewards.endpoint import ChatEndpoint
endpoint = ChatEndpoint(sys.argv[1], "m", retries=0)
def ask():
    assert endpoint.chat([{"role": "user", "content": "?"}]) == "yes"
    assert verify_answer(r"Answer: \boxed{1/2}", "0.5", timeout=20.0)
ask()
child = os.fork()
ask()
if not child:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
ask()
"""


def test_a_fork_has_its_own_connections_and_processes() -> None:
    with serving(says("yes")) as server:
        subprocess.run([sys.executable, "-c", FORK, server.url], check=True, timeout=60)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from(["<rating>", "</rating>", "<response_quality>", "</response_quality>", "good", "5", " "]))
)
def test_a_rating_is_one_of_five_or_failed(pieces: list[str]) -> None:
    result = parse_rating("".join(pieces))
    shape = "".join(pieces).replace(" ", "")
    start, end = shape.find("<rating>"), shape.find("</rating>")
    inner = shape[start + 8 : end] if 0 <= start < end else None
    assert result.judge_failed == (result.score != 0.75)
    assert result.score != 0.75 or inner == "good"


@settings(max_examples=50, deadline=None)
@given(st.text(), st.lists(st.one_of(st.text(), st.floats(), st.integers(), st.booleans(), st.none())))
def test_any_answer_is_judged(answer: str, facts: list[Any]) -> None:
    score = RuleJudge()("", [answer], answer, facts=facts).score
    assert score is not None
    assert 0 <= score <= 1


def test_hostile_text_costs_linear_time() -> None:
    start = time.monotonic()
    for text in ("1," * 300_000, "111," * 200_000 + "x", "-" * 1_000_000, "9" * 1_000_000, "a" * 1_000_000):
        RuleJudge()("", [], text, facts=["4", "b"])
        parse_rating(text)
        tool_response(text)
        verify_answer(text, "4")
    for tag in ("<rating>", "<tool_response>", "</think>", "Answer: \\boxed{"):
        parse_rating(tag * 60_000)
        tool_response(tag * 60_000)
        verify_answer(tag * 60_000, "4")
    assert time.monotonic() - start < 5.0


def test_verdicts_keep_their_order_off_the_main_thread() -> None:
    texts = [rf"Answer: \boxed{{{n}/2}}" for n in range(6)]
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.extend(verify_answers(texts, ["0.5"] * 6, timeout=20.0)))
    thread.start()
    thread.join()
    assert found == [False, True, False, False, False, False]
    assert outcome_reward("no answer", "4") == -1.0


def test_references_that_are_none_are_named() -> None:
    with pytest.raises(ValueError, match="reference"):
        verify_answer(r"Answer: \boxed{4}", " ")
    with pytest.raises(ValueError, match="references: 1 for 2 texts"):
        verify_answers(["", ""], ["4"])
    with pytest.raises(ValueError, match="completeness"):
        planner_score(["x"], 1.5)
