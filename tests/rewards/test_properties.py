"""Relations that hold for every input: against the slow twin, under reordering, and of the loose match."""

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rewards import Accepted, ToolSet, as_gold, loose_match, parse_tool_calls, process_score, reference_rule
from rewards._marks import mark_given, mark_wanted
from rewards._table import score_table
from rewards.calls import ToolCall
from rewards.formats.hermes import parse_hermes, read_well_formed
from rewards.matching import EXACT, compare_arguments
from rewards.pairing import _solved, best_pairs
from rewards.process import ProcessWeights
from tests.rewards import reference
from tests.rewards.checks import block
from tests.rewards.mutants import mutated

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


_few = st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 2), max_size=3), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(_few, _few, st.sampled_from([(0.15, 0.2), (0.0, 0.35), (0.35, 0.0)]))
def test_the_bound_finds_what_the_solver_finds(made: list[Any], gold: list[Any], parts: tuple[float, float]) -> None:
    weights = ProcessWeights(key=parts[0], value=parts[1])
    wanted = as_gold([[{"name": "f", "arguments": arguments} for arguments in gold]]).wanted["f"]
    table = [[compare_arguments(arguments, one, None) for arguments in made] for one in wanted]
    solved = [table[i][j] for i, j in _solved([[weights.of_pair(pair) for pair in row] for row in table])]
    found = best_pairs([ToolCall("f", arguments) for arguments in made], wanted, None, weights.of_pair)
    assert len(found) == len(solved) == min(len(made), len(gold))
    assert abs(sum(map(weights.of_pair, found)) - sum(map(weights.of_pair, solved))) < 1e-9
    if all(parts):
        assert abs(sum(pair.key for pair in found) - sum(pair.key for pair in solved)) < 1e-9
        assert abs(sum(pair.value for pair in found) - sum(pair.value for pair in solved)) < 1e-9


_loose = st.sampled_from([1, 1.0, "1", " x", "X", True, "true", None, "null", [1], float("nan"), 2])
_maybe = _loose | st.builds(Accepted, st.lists(_loose, min_size=1, max_size=2).map(tuple), st.booleans())
_nullable = {"properties": {"a": {"type": ["integer", "null"]}, "b": {}}, "required": ["b"]}


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from("ab"), _loose), st.dictionaries(st.sampled_from("ab"), _maybe), st.booleans())
def test_equal_marks_are_exact_pairs(given_: Any, gold: Any, with_schema: bool) -> None:
    (wanted,) = as_gold([[{"name": "f", "arguments": gold}]]).wanted["f"]
    marks = mark_given(given_), mark_wanted(wanted)
    if None not in marks:
        schema = _nullable if with_schema else None
        assert (marks[0] == marks[1]) == (compare_arguments(given_, wanted, schema) is EXACT)


_many = st.lists(st.dictionaries(st.sampled_from("ab"), _loose, max_size=2), min_size=5, max_size=9)


@settings(max_examples=100, deadline=None)
@given(_many, st.integers(0, 4), st.integers(0, 4), st.randoms(use_true_random=False))
def test_marks_change_no_pair(gold: list[Any], fewer: int, others: int, shuffle: random.Random) -> None:
    made = shuffle.sample(gold, len(gold) - fewer) + [{"a": number} for number in range(others)]
    wanted = as_gold([[{"name": "f", "arguments": arguments} for arguments in gold]]).wanted["f"]
    calls = [ToolCall("f", arguments) for arguments in made]
    found = best_pairs(calls, wanted, _nullable, ProcessWeights().of_pair)
    with mutated("pairing:best_pairs", "if len(wrong) > _FEW", "if False"):
        assert best_pairs(calls, wanted, _nullable, ProcessWeights().of_pair) == found


_pieces = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<think>", "</think>", "\n", "so: ", "a < b", '{"name": "f"}', "[]", "é",
        "\ud800",
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "b: </tool_call>", "c":{"a" : [1]}}}</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": "\\ud83d\\ude00 \\u00e9"}, "more": 1}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": 1, "a": 2}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "parameters": {}}\n</tool_call>',
    ]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(_pieces, max_size=6).map("".join), st.sampled_from(["reasoning", "text"]))
def test_well_formed_texts_are_read_as_all_others(text: str, think: Any) -> None:
    quick = read_well_formed(text, think)
    with mutated("formats.hermes:parse_hermes", "if found is None", "if True"):
        slow = parse_hermes(text, think)
    assert parse_tool_calls(text, think=think) == slow
    if quick is not None:
        assert quick == slow
        assert quick.valid == slow.valid
        for one, other in zip(quick.calls, slow.calls):
            assert (one.name_span, one.key_spans) == (other.name_span, other.key_spans)


def test_what_models_are_trained_to_write_is_well_formed() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"at": "10:30", "of": [{"b": 1}]}}\n</tool_call>'
    for text in (
        "",
        "No call.",
        call,
        f"{call}\n{call}",
        "\n".join([call] * 300),
        f"<think>\nhm <b>\n</think>\n\nSo: {call}\n{call}",
    ):
        assert read_well_formed(text, "reasoning") is not None, text


_deep = st.recursive(
    _loose, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
)
_deep_gold = _deep | st.builds(Accepted, st.lists(_deep, min_size=1, max_size=2).map(tuple), st.booleans())
_keyed = st.sampled_from("abc")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.dictionaries(_keyed, _deep, max_size=3), min_size=1, max_size=6),
    st.lists(st.dictionaries(_keyed, _deep_gold, max_size=3), min_size=1, max_size=6),
    st.sampled_from([None, True, _nullable]),
)
def test_the_table_counts_what_a_comparison_counts(made: list[Any], gold: list[Any], schema: Any) -> None:
    wanted = as_gold([[{"name": "f", "arguments": arguments} for arguments in [*gold, *gold[:1]]]]).wanted["f"]
    made = [*made, *[arguments for arguments in gold if not any(isinstance(v, Accepted) for v in arguments.values())]]
    weigh = ProcessWeights().of_pair
    scores = score_table(made, wanted, schema, weigh)
    assert scores.tolist() == [
        [weigh(compare_arguments(arguments, one, schema)) for arguments in made] for one in wanted
    ]
    calls = [ToolCall("f", arguments) for arguments in made]
    found = best_pairs(calls, wanted, schema, weigh)
    with mutated("pairing:best_pairs", "> _MANY or", ">= 0 or"):
        assert best_pairs(calls, wanted, schema, weigh) == found
