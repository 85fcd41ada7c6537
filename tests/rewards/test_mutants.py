"""The checks can fail: each of these faults, put into the code, is caught by the check named beside it."""

# ruff: noqa: E501  # a mutant is a line of the source, as it stands there

from collections.abc import Callable

import pytest

from tests.rewards import checks
from tests.rewards.mutants import mutated

MUTANTS: dict[str, tuple[str, str, str, Callable[[], None]]] = {
    # parser
    "ends a block at the first closing tag": (
        "hermes:_values",
        "if value.cut and end < len(text):",
        "if False:",
        checks.check_tags_in_strings_are_text,
    ),
    "takes an unclosed block for a call": (
        "hermes:_attempts",
        "if not closed:",
        "if False:",
        checks.check_unclosed_blocks,
    ),
    "counts calls in reasoning": ("hermes:parse_hermes", 'kind == "<think>"', "False", checks.check_think_rule),
    "ignores the end of a prompt's think block": (
        "hermes:parse_hermes",
        "elif not thought:",
        "elif False:",
        checks.check_think_rule,
    ),
    "lets a second think end discard calls": (
        "hermes:parse_hermes",
        "elif not thought:",
        "else:",
        checks.check_think_rule,
    ),
    "reads only the first of several values": (
        "hermes:_values",
        "if not value.whole:",
        "if True:",
        checks.check_reads_calls,
    ),
    "does not read lists of calls": ("hermes:_attempts", "bool(found.value)", "False", checks.check_reads_calls),
    "loses the call after a lost quote": (
        "hermes:_last_string",
        "return begin if",
        "return stop if",
        checks.check_unclosed_blocks,
    ),
    "accepts NaN": (
        "_json:_constant",
        'raise _RefusedError(f"{name} is not JSON")',
        "return float(name)",
        checks.check_strict_json,
    ),
    "accepts overflow": ("_json:_float", 'float("inf")', "None", checks.check_strict_json),
    "accepts duplicate keys": (
        "_json:_object",
        "len(found) != len(pairs)",
        "False",
        checks.check_strict_json,
    ),
    "accepts half a surrogate pair": (
        "_json:_fault",
        'return "half of a surrogate pair"',
        "pass",
        checks.check_strict_json,
    ),
    "accepts any depth": ("_json:_fault", "return _TOO_DEEP", "pass", checks.check_strict_json),
    "ignores parameters": ("calls:read_call", '"parameters" in value', "False", checks.check_reads_calls),
    "keeps arguments a string": (
        "calls:read_call",
        "isinstance(arguments, str) and arguments.strip()",
        "False",
        checks.check_reads_calls,
    ),
    "accepts a call without a name": (
        "calls:read_call",
        'return "", {}, "missing_name"',
        'return "x", {}, "ok"',
        checks.check_broken_calls,
    ),
    "key spans with the quotes": ("_json:members", "mark.start() + 1", "mark.start()", checks.check_spans),
    "sees only the first key": ("_json:members", "value_start = -1", "pass", checks.check_spans),
    "forgets escapes in spans": ("_json:string_offsets", 'if text[at] != "\\\\":', "if True:", checks.check_spans),
    # schema
    "does not look at the schema": (
        "schema:ToolSet.is_valid",
        "bool(validator.is_valid(call.arguments))",
        "True",
        checks.check_schema,
    ),
    "field of a missing argument unnamed": ("schema:_problem", '[detail["property"]]', "[]", checks.check_schema),
    # matching
    "true is 1": ("matching:_key", "if isinstance(value, bool):", "if False:", checks.check_loose_match),
    "case counts": (
        "matching:_key",
        'return "text", text.casefold()\n    if not number[2]',
        'return "text", text\n    if not number[2]',
        checks.check_loose_match,
    ),
    "space counts": ("matching:_key", "value.strip()", "value", checks.check_loose_match),
    "lower instead of casefold": (
        "matching:_key",
        'return "text", text.casefold()\n    if not number[2]',
        'return "text", text.lower()\n    if not number[2]',
        checks.check_loose_match,
    ),
    "big integers as floats": (
        "matching:_key",
        'return "number", value\n    if isinstance(value, float)',
        'return "number", float(value) if abs(value) < 2**60 else value\n    if isinstance(value, float)',
        checks.check_loose_match,
    ),
    "NaN equals NaN": (
        "matching:_key",
        "return None if math.isnan(value) else",
        'return ("nan", 0) if math.isnan(value) else',
        checks.check_loose_match,
    ),
    "lists as sets": (
        "matching:_matches",
        "zip(predicted, gold)",
        "zip(sorted(predicted, key=str), sorted(gold, key=str))",
        checks.check_loose_match,
    ),
    "list length ignored": ("matching:_matches", "len(predicted) == len(gold)", "True", checks.check_loose_match),
    "null is text everywhere": ("matching:_matches", "and _allows_null(schema)", "", checks.check_loose_match),
    "null is missing though required": (
        "matching:_may_be_missing",
        'or key in (schema.get("required") or ())',
        "",
        checks.check_loose_match,
    ),
    "only the first accepted value": (
        "matching:_matches",
        "in gold.values)",
        "in gold.values[:1])",
        checks.check_accepted,
    ),
    "optional counts as missing": (
        "matching:compare_arguments",
        "and value.optional",
        "and False",
        checks.check_accepted,
    ),
    # process score
    "format over opening tags only": (
        "process:_format",
        "max(opened, closed)",
        "max(opened, 1)",
        checks.check_process_parts,
    ),
    "format counts calls, not blocks": (
        "process:valid_blocks",
        "blocks[call.block] = blocks.get(call.block, True) and valid",
        "blocks[id(call)] = valid",
        checks.check_process_parts,
    ),
    "a block is valid if its last call is": (
        "process:valid_blocks",
        "blocks.get(call.block, True) and valid",
        "valid",
        checks.check_process_parts,
    ),
    "format ignores schemas": (
        "process:valid_blocks",
        "if tools is None else tools.is_valid(call)",
        "",
        checks.check_process_parts,
    ),
    "no tags scores 1": (
        "process:_format",
        "return 0.0 if expects_calls else 1.0",
        "return 1.0",
        checks.check_process_parts,
    ),
    "names as sets": ("process:common_names", "wanted[call.name] -= 1", "pass", checks.check_process_parts),
    "parallel over all turns": (
        "process:first_step",
        "next((len(calls) for calls in steps if calls), 0)",
        "sum(len(calls) for calls in steps)",
        checks.check_process_parts,
    ),
    "first turn, though it called nothing": (
        "process:first_step",
        "for calls in steps if calls",
        "for calls in steps",
        checks.check_process_parts,
    ),
    "key over gold keys": (
        "matching:Pair.key",
        "self.expected + self.extra",
        "self.expected",
        checks.check_process_parts,
    ),
    "value over shared keys": (
        "matching:Pair.value",
        "self.hits / self.expected if self.expected",
        "self.hits / self.shared if self.shared",
        checks.check_process_parts,
    ),
    "greedy pairing": (
        "matching:best_pairs",
        "maximize=True)",
        "maximize=True)\n    free = set(range(columns))\n    found = [list(range(min(rows, columns))), []]\n    for i in found[0]:\n        found[1].append(max(sorted(free), key=lambda j: score(pairs[i][j])))\n        free.discard(found[1][-1])",
        checks.check_one_to_one,
    ),
    "pairs in order": (
        "matching:best_pairs",
        "maximize=True)",
        "maximize=True)\n    found = [range(min(rows, columns))] * 2",
        checks.check_one_to_one,
    ),
    "many gold calls to one prediction": (
        "matching:best_pairs",
        "return [(max(range(rows), key=lambda i: score(pairs[i][0])), 0)]",
        "return [(i, 0) for i in range(rows)]",
        checks.check_one_to_one,
    ),
    # rule
    "rule: unbalanced tags pass": (
        "outcomes:reference_rule",
        "== sum([step.num_close for step in steps])",
        "",
        checks.check_reference_rule,
    ),
    "rule: any first step": (
        "outcomes:reference_rule",
        "first_step(made) != first_step(expected.steps)",
        "False",
        checks.check_reference_rule,
    ),
    "rule: names as sets": (
        "outcomes:reference_rule",
        "not len(predicted) == len(expected.flat) == common_names(predicted, expected.flat)",
        "{call.name for call in predicted} != {call.name for call in expected.flat}",
        checks.check_reference_rule,
    ),
    "rule: one right call is enough": (
        "outcomes:reference_rule",
        "or all(",
        "or any(",
        checks.check_reference_rule,
    ),
    # simulator
    "simulator does not validate": (
        "simulator:simulate",
        "problems = toolset.validate(made)",
        "problems = []",
        checks.check_simulator,
    ),
    "mocker ignores arguments": (
        "simulator:DeterministicMocker.__call__",
        "[self.seed, call.name, arguments]",
        "[self.seed, call.name]",
        checks.check_simulator,
    ),
    "order of arguments matters": ("_json:canonical", "sort_keys=True", "sort_keys=False", checks.check_simulator),
    "answers only valid calls": (
        "simulator:answer_calls",
        "toolset).calls",
        "toolset).valid",
        checks.check_simulator,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_is_killed(name: str) -> None:
    function, old, new, check = MUTANTS[name]
    check()
    with mutated(function, old, new), pytest.raises(AssertionError):
        check()
    check()
