"""The checks of formats and of rows can fail: each of these faults, put into the code, is caught."""

from collections.abc import Callable

import pytest

from rewards import decompose, read_chat, read_toucan, split_by_conversation
from tests.rewards import format_checks
from tests.rewards.mutants import mutated
from tests.rewards.test_row_formats import dialogue, test_parallel_calls_are_joined_and_others_are_not, toucan

STEPS = [[{"name": "f", "arguments": {}}], [{"name": "g", "arguments": {"a": 1}}], [{"name": "f", "arguments": {}}]]


def check_decomposition() -> None:
    (row,) = read_chat([{"messages": dialogue(STEPS), "id": "c"}])
    pairs = decompose(row)
    assert [(pair.id, len(pair.context), pair.gold.calls()) for pair in pairs] == [
        ("c#2", 3, [STEPS[1]]), ("c#3", 5, [STEPS[2]]),
    ]  # fmt: skip


def check_split() -> None:
    rows = []
    for index in range(40):
        spoken = [{"role": "user", "content": f"q{index // 2}"}, *dialogue(STEPS)[1:]]
        rows += [pair for row in read_chat([{"messages": spoken, "id": str(index)}]) for pair in decompose(row)]
    train, held = split_by_conversation(rows, 0.3)
    assert train
    assert held
    assert not {pair.context[0]["content"] for pair in train} & {pair.context[0]["content"] for pair in held}


def check_toucan() -> None:
    (row,) = read_toucan([toucan(STEPS)])
    assert row.gold is not None
    assert row.gold.calls() == STEPS
    test_parallel_calls_are_joined_and_others_are_not()


MUTANTS: dict[str, tuple[str, str, str, Callable[[], None]]] = {
    "counts calls in reasoning": (
        "formats._blocks:walk", "if kind in _ENDS:", "if False:", format_checks.check_reasoning_holds_no_call,
    ),
    "lets a second think end discard calls": (
        "formats._blocks:walk", '"reasoning" and not thought', '"reasoning"',
        format_checks.check_reasoning_holds_no_call,
    ),
    "reads an untagged call in reasoning": (
        "formats._blocks:after_reasoning", "return len(text) if end < 0 else end + len(ending)", "return 0",
        format_checks.check_reasoning_holds_no_call,
    ),
    "ends JSON at the first tag": (
        "formats._blocks:decode_to", "while found.cut and", "while False and",
        format_checks.check_tags_in_strings_are_text,
    ),
    "swallows the block after a lost quote": (
        "formats.mistral:_resume", "found.end if found.whole else found.start", "found.end",
        format_checks.check_a_broken_block_does_not_swallow_the_next,
    ),
    "swallows the run after a lost quote": (
        "formats.llama:_run", "if not found.whole:", "if False:",
        format_checks.check_a_broken_block_does_not_swallow_the_next,
    ),
    "takes any object for a call": (
        "formats.llama:parse_llama3_json", "_BEGINS.match(text, begin) and text[begin] ==", "text[begin:begin + 1] ==",
        format_checks.check_prose_holds_no_call,
    ),
    "takes any list for calls": (
        "formats.chat:parse_chat", "if not any(key in text for key in _KEYS):", "if False:",
        format_checks.check_prose_holds_no_call,
    ),
    "accepts an argument twice": (
        "formats.pythonic:_Reader.call", "if key in arguments:", "if False:", format_checks.check_broken_calls,
    ),
    "accepts a key twice": (
        "formats.pythonic:_Reader.dictionary", "if key in found:", "if False:", format_checks.check_broken_calls,
    ),
    "accepts any depth": (
        "formats.pythonic:_Reader.value", "if depth > MAX_DEPTH:", "if False:", format_checks.check_broken_calls,
    ),
    "accepts parentheses around a value": (
        "formats.pythonic:_Reader.sequence", "if items and not comma:", "if False:", format_checks.check_broken_calls,
    ),
    "accepts infinity": (
        "formats.pythonic:_number", 'float("inf"), float("-inf")', "None, None", format_checks.check_broken_calls,
    ),
    "loses the backslash of an unknown escape": (
        "formats.pythonic:_unescaped", "escape[0])", "escape[1])", format_checks.check_python_values,
    ),
    "loses the backslash of an unknown escape beside a number": (
        "formats.pythonic:_kept", '"\\\\" + escape[0]', "escape[1]", format_checks.check_python_values,
    ),
    "accepts a parameter twice": (
        "formats.qwen_xml:_function", "if twice is not None:", "if False:", format_checks.check_broken_calls,
    ),
    "strips a value": ("formats.qwen_xml:_value", "text[1:] if", "text.strip() if", format_checks.check_xml_values),
    "decomposes from the first turn": ("decomposition:decompose", "if turn < first:", "if False:", check_decomposition),
    "gives the action away": (
        "decomposition:decompose", "trajectory.messages[:index]", "trajectory.messages[:index + 1]",
        check_decomposition,
    ),
    "splits by row": (
        "decomposition:split_by_conversation", "[seed, key(row)]", "[seed, key(row), row.id]", check_split,
    ),
    "knows a conversation by its id": ("decomposition:opening", "if not text:", "if True:", check_split),
    "does not join parallel calls": (
        "readers.toucan:_merged", "if joins and not content:", "if False:", check_toucan,
    ),
    "joins calls of different turns": (
        "readers.toucan:_merged", "found.append(kept)\n            joins = False", "found.append(kept)", check_toucan,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str) -> None:
    function, old, new, check = MUTANTS[name]
    check()
    with mutated(function, old, new), pytest.raises((AssertionError, ValueError, RecursionError, KeyError, IndexError)):
        check()
