"""Reward functions become components: weights, shared functions, and missing values."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from credit import group_advantage
from credit.adapters.trl_batch import learnable_mask, rows_that_must_call, rows_with_call
from credit.adapters.trl_components import environment_reward, reward_plan


def first(**_): ...


def second(**_): ...


def third(**_): ...


NAN = math.nan
ONE_GROUP = torch.zeros(4, dtype=torch.int64)


def combine(rewards, group, weights):
    """The same sum in plain Python: a missing value is its group's mean, a component without a value is absent."""
    totals = []
    for row, own in zip(rewards, group, strict=True):
        total, scored = 0.0, False
        for f, weight in enumerate(weights):
            peers = [r[f] for r, g in zip(rewards, group, strict=True) if g == own and not math.isnan(r[f])]
            missing = math.isnan(row[f])
            scored |= not missing and weight != 0
            total += weight * ((sum(peers) / len(peers) if peers else 0.0) if missing else row[f])
        totals.append(total if scored else NAN)
    return totals


def test_a_function_is_listed_once_and_feeds_all_its_components():
    plan = reward_plan({"tool": [first, second], "summary": [second, third]}, {"summary": [2.0, 0.5]})
    assert plan.functions == (first, second, third)
    assert plan.weights.tolist() == [[1.0, 0.0], [1.0, 2.0], [0.0, 0.5]]
    named = plan(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([0]))
    assert named["tool"].tolist() == [3.0]
    assert named["summary"].tolist() == [6.0]


def test_methods_and_model_names_are_listed_once_too():
    class Judge:
        def score(self, **_): ...

    one, other = Judge(), Judge()
    plan = reward_plan({"a": [one.score, "org/model"], "b": [one.score, other.score, "org/model"]})
    assert plan.functions == (one.score, "org/model", other.score)


@settings(max_examples=50, deadline=None)
@given(
    rewards=st.lists(
        st.lists(st.one_of(st.just(NAN), st.floats(-4, 4, width=32)), min_size=3, max_size=3),
        min_size=1,
        max_size=8,
    ),
    seed=st.integers(0, 99),
)
def test_components_equal_the_plain_sum(rewards, seed):
    chance = torch.Generator().manual_seed(seed)
    group = torch.randint(-2, 2, (len(rewards),), generator=chance) * 10**9
    plan = reward_plan({"a": [first, second, third], "b": third}, {"a": [1.0, 0.0, -0.5]})
    named = plan(torch.tensor(rewards), group)
    for name, weights in (("a", [1.0, 0.0, -0.5]), ("b", [0.0, 0.0, 1.0])):
        expected = torch.tensor(combine(rewards, group.tolist(), weights))
        torch.testing.assert_close(named[name], expected, atol=1e-5, rtol=1e-5, equal_nan=True)
    order = torch.randperm(len(rewards), generator=chance)
    again = plan(torch.tensor(rewards)[order], group[order])
    torch.testing.assert_close(again["a"], named["a"][order], equal_nan=True)


@settings(max_examples=50, deadline=None)
@given(value=st.sampled_from([0.1, 3.3, 1000.1, 1e-30, -7.7]), missing=st.lists(st.booleans(), min_size=8, max_size=8))
def test_equal_rewards_stay_equal_to_the_last_bit(value, missing):
    """A mean that is off by one bit would turn eight equal rewards into large advantages."""
    shared = torch.full((8,), value)
    partly = torch.where(torch.tensor(missing), NAN, shared)
    plan = reward_plan({"a": [first, second]}, {"a": [1.0, 0.3]})
    group = torch.zeros(8, dtype=torch.int64)
    total = plan(torch.stack([shared, partly], dim=1), group)["a"]
    assert (total == total[0]).all() or all(missing)
    assert (group_advantage(total, group) == 0).all()


def test_missing_values_neither_lift_nor_lower():
    plan = reward_plan({"a": [first, second]})
    rewards = torch.tensor([[1.0, 5.0], [1.0, NAN], [1.0, 7.0], [NAN, NAN]])
    named = plan(rewards, ONE_GROUP)["a"]
    assert named[:3].tolist() == [6.0, 7.0, 8.0]
    assert named[3].isnan()


def test_zero_weight_logs_only():
    plan = reward_plan({"a": [first, second]}, {"a": [1.0, 0.0]})
    named = plan(torch.tensor([[1.0, 9.0], [NAN, 9.0], [3.0, NAN], [2.0, 1.0]]), ONE_GROUP)["a"]
    assert named[[0, 2, 3]].tolist() == [1.0, 3.0, 2.0]
    assert named[1].isnan()


def test_environment_reward_is_none_without_one():
    class Scored:
        def get_reward(self):
            return 2.0

    assert environment_reward(environments=[Scored(), object()], prompts=[]) == [2.0, None]


class Letters:
    """A tokenizer of single letters whose token 0 is padding."""

    pad_token_id = 0

    def batch_decode(self, rows, skip_special_tokens):
        assert not skip_special_tokens
        return ["".join(" " if t == 0 else chr(t) for t in row) for row in rows.tolist()]


def test_only_the_models_own_tags_are_calls():
    texts = ["<tool_call>..", "..<tool_call>", "<tool_.._call", "............."[:13]]
    ids = torch.tensor([[ord(c) for c in text.ljust(13)] for text in texts])
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 2:] = False  # the environment quoted the tag
    messages = [{"role": "assistant", "tool_calls": [{"name": "f"}]}]
    completions = [texts[0], texts[1], texts[2], messages]
    assert rows_with_call(ids, mask, completions, Letters()) == [True, False, False, True]


def test_a_tag_does_not_form_across_runs():
    text = "<tool_|||call>"
    ids = torch.tensor([[ord(c) for c in text]])
    mask = torch.tensor([[c != "|" for c in text]])
    assert rows_with_call(ids, mask, [text], Letters()) == [False]


def test_rows_that_must_call():
    rows = [{"need": 1}, {"need": 0}]
    assert rows_that_must_call(rows, None) == [False, False]
    assert rows_that_must_call(rows, "need") == [True, False]
    assert rows_that_must_call(rows, lambda row: row["need"] == 0) == [False, True]
    with pytest.raises(ValueError, match=r"no column 'needs'.*\['need'\]"):
        rows_that_must_call(rows, "needs")


def test_learnable_mask_of_padded_tool_mask():
    completion, tool = torch.tensor([[1, 1, 1, 0]]), torch.tensor([[1, 0, 1, 1]])
    assert learnable_mask({"completion_mask": completion, "tool_mask": tool}).tolist() == [[True, False, True, False]]
    assert learnable_mask({"completion_mask": completion}).tolist() == [[True, True, True, False]]


def test_an_infinity_stays_in_the_components_of_its_function():
    """A product with weight 0 would make NaN of it, and the other component would silently be absent."""
    plan = reward_plan({"tool": [first, second], "summary": [third]}, {"tool": [1.0, 0.0]})
    rewards = torch.tensor([[1.0, math.inf, 5.0], [2.0, NAN, 6.0], [3.0, -math.inf, 7.0], [4.0, 0.0, 8.0]])
    named = plan(rewards, ONE_GROUP)
    assert named["tool"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert named["summary"].tolist() == [5.0, 6.0, 7.0, 8.0]


def test_infinities_without_a_sum_are_named():
    plan = reward_plan({"tool": [first, second], "summary": [third]})
    with pytest.raises(ValueError, match=r"components\['tool'\] of row 1.*infinities: \[inf, -inf, 1\.0\]"):
        plan(torch.tensor([[1.0, 1.0, 1.0], [math.inf, -math.inf, 1.0]]), ONE_GROUP[:2])
