"""Relations that hold for every input: against the slow twin, under reordering, and of the loose match."""

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rewards import Accepted, ToolSet, as_gold, loose_match, process_score, reference_rule
from tests.rewards import reference
from tests.rewards.checks import block

_values = st.integers(0, 2) | st.sampled_from(["x", "X", "y", 1.0, True, [1], ["x", 2]])
_calls = st.fixed_dictionaries(
    {"name": st.sampled_from("fg"), "arguments": st.dictionaries(st.sampled_from("abc"), _values, max_size=3)}
)
_steps = st.lists(st.lists(_calls, max_size=2), max_size=2)


@settings(max_examples=120, deadline=None)
@given(_steps, _steps)
def test_equals_the_slow_twin(predicted: list[Any], gold: list[Any]) -> None:
    score = process_score([block(*step) for step in predicted], gold, None)
    slow = reference.process(predicted, gold)
    for part, value in slow.items():
        assert abs(getattr(score, part) - value) < 1e-9, part
    weights = {"format": 0.1, "name": 0.25, "key": 0.15, "value": 0.2, "parallel": 0.3}
    assert abs(score.total - sum(weights[part] * value for part, value in slow.items())) < 1e-9


@settings(max_examples=80, deadline=None)
@given(_steps)
def test_gold_itself_scores_one(gold: list[Any]) -> None:
    turns = [block(*step) for step in gold]
    assert process_score(turns, gold, None).total == 1.0
    assert reference_rule(turns, gold, None)
    assert as_gold(as_gold(gold).to_json()) == as_gold(gold)


@settings(max_examples=80, deadline=None)
@given(_steps, _steps, st.randoms(use_true_random=False))
def test_order_within_a_step_changes_nothing(predicted: list[Any], gold: list[Any], chance: random.Random) -> None:
    before = process_score([block(*step) for step in predicted], gold, None)
    mixed = [chance.sample(step, len(step)) for step in predicted]
    shuffled = [chance.sample(step, len(step)) for step in gold]
    after = process_score([block(*step) for step in mixed], shuffled, None)
    for part in ("format", "name", "key", "value", "parallel", "total"):
        assert abs(getattr(before, part) - getattr(after, part)) < 1e-9


@settings(max_examples=80, deadline=None)
@given(_steps, _steps)
def test_the_rule_implies_a_full_process_score(predicted: list[Any], gold: list[Any]) -> None:
    turns = [block(*step) for step in predicted]
    score = process_score(turns, gold, None)
    if reference_rule(turns, gold, None):
        assert score.format == score.name == score.parallel == score.value == 1.0
        assert score.redundant_calls == 0
    if score.total == 1.0:
        assert reference_rule(turns, gold, None)


@settings(max_examples=100, deadline=None)
@given(_steps, _steps)
def test_a_compiled_toolset_changes_nothing(predicted: list[Any], gold: list[Any]) -> None:
    tools = [
        {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"]}}
    ]
    turns = [block(*step) for step in predicted]
    assert process_score(turns, gold, tools) == process_score(turns, as_gold(gold), ToolSet(tools))


_scalars = (
    st.booleans()
    | st.integers(-3, 3)
    | st.integers(2**53 - 2, 2**53 + 2)
    | st.floats(-2, 2).map(lambda x: round(x, 1))
    | st.sampled_from(
        ["true", "TRUE ", "1", "1.0", "-0", "0.1", "1e0", "007", "null", "x", " X", "9007199254740993", "1e400"]
    )
    | st.sampled_from([float(2**53), 1e300, 10**400, float("inf")])
)
_trees = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner)
)


@settings(max_examples=200, deadline=None)
@given(_trees, _trees, _trees)
def test_loose_match_is_an_equivalence(a: Any, b: Any, c: Any) -> None:
    assert loose_match(a, a)
    assert loose_match(a, b) == loose_match(b, a)
    if loose_match(a, b) and loose_match(b, c):
        assert loose_match(a, c)


@settings(max_examples=80, deadline=None)
@given(_trees, st.lists(_trees, min_size=1, max_size=3))
def test_accepted_is_any(predicted: Any, values: list[Any]) -> None:
    assert loose_match(predicted, Accepted(tuple(values))) == any(loose_match(predicted, value) for value in values)
