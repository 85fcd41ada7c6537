"""A server that stays silent, answers that may not be kept, proxies of the environment."""

import time
from pathlib import Path

import pytest

from rewards.judge import JudgeItem, SummaryJudge
from tests.rewards.judge_checks import rated
from tests.rewards.servers import fails, hangs_up, says, serving, waits

ITEMS = [JudgeItem(str(n), (), "a") for n in range(12)]
GOOD = says(rated("good"))


def test_a_silent_server_is_left_alone_and_found_again() -> None:
    with serving(waits(3.0)) as server:
        judge = SummaryJudge(server.url, "m", timeout=0.2, retries=1, backoff=0.0, concurrency=2, cooldown=1.0)
        start = time.monotonic()
        results = judge.batch(ITEMS)
        assert time.monotonic() - start < 1.0
        assert {result.score for result in results} == {None}
        assert "not asked" in str(results[-1].reason)
        asked = len(server.requests)
        assert asked <= 5  # two requests of two tries, and one sent between the ends of the two
        time.sleep(1.1)
        assert judge.batch(ITEMS)[-1].score is None
        assert len(server.requests) == asked + 1  # one finds out, once
        server.script[:] = [GOOD]
        assert "not asked" in str(judge("q", [], "a").reason)
        time.sleep(1.1)
        assert judge("q", [], "a").score == 0.75
        assert {result.score for result in judge.batch(ITEMS)} == {0.75}


@pytest.mark.parametrize("answer", [fails(400), fails(500), says("junk")])
def test_an_answer_of_any_kind_is_no_silence(answer: object) -> None:
    with serving(answer) as server:  # type: ignore[arg-type]
        judge = SummaryJudge(server.url, "m", retries=0, concurrency=1)
        for _ in range(3):
            judge("q", [], "a")
        assert len(server.requests) == 3


def test_no_cooldown_asks_on_and_an_answer_between_counts() -> None:
    with serving(hangs_up) as server:
        judge = SummaryJudge(server.url, "m", retries=0, concurrency=1, cooldown=0.0)
        assert [judge("q", [], "a").score for _ in range(3)] == [None] * 3
        assert len(server.requests) == 3
    with serving(hangs_up, GOOD, hangs_up, GOOD) as server:
        judge = SummaryJudge(server.url, "m", retries=0, concurrency=2)
        assert [judge("q", [], "a").score for _ in range(4)] == [None, 0.75, None, 0.75]


def test_only_verdicts_are_kept(tmp_path: Path) -> None:
    with serving(says("junk"), says(None), GOOD, says(rated("poor"))) as server:
        judge = SummaryJudge(server.url, "m", cache_dir=tmp_path)
        assert [judge("q", [], "a").score for _ in range(4)] == [0.0, 0.0, 0.75, 0.75]
        file = next(tmp_path.rglob("*.json"))
        file.write_text('"junk"')
        assert judge("q", [], "a").score == 0.25


@pytest.mark.parametrize("value", ["foo://x", "http://[::1"])
def test_a_proxy_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HTTP_PROXY", value)
    with serving(GOOD) as server, pytest.raises(ValueError, match="HTTP_PROXY"):
        SummaryJudge(server.url, "m")("q", [], "a")


def test_proxies_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(says(rated("poor"))) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.removesuffix("/v1"))
        with serving(GOOD) as server:
            assert SummaryJudge(server.url, "m")("q", [], "a").score == 0.25
            assert proxy.paths == [f"{server.url}/chat/completions"]
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with serving(GOOD) as server:
            assert SummaryJudge(server.url, "m")("q", [], "a").score == 0.75
