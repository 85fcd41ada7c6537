"""The checks can fail: each of these faults, put into the code, is caught by the check named beside it."""

# ruff: noqa: E501  # a mutant is a line of the source, as it stands there

from collections.abc import Callable

import pytest

from tests.rewards import checks
from tests.rewards.mutants import mutated

MUTANTS: dict[str, tuple[str, str, str, Callable[[], None]]] = {
    # parser
    "ends a block at the first closing tag": (
        "formats.hermes:_values",
        "if value.cut and end < len(text):",
        "if False:",
        checks.check_tags_in_strings_are_text,
    ),
    "takes an unclosed block for a call": (
        "formats.hermes:_attempts",
        "if not closed:",
        "if False:",
        checks.check_unclosed_blocks,
    ),
    "counts calls in reasoning": ("formats._blocks:walk", "if kind in _ENDS:", "if False:", checks.check_think_rule),
    "ignores the end of a prompt's think block": (
        "formats._blocks:walk",
        '"reasoning" and not thought',
        '"reasoning" and False',
        checks.check_think_rule,
    ),
    "lets a second think end discard calls": (
        "formats._blocks:walk",
        '"reasoning" and not thought',
        '"reasoning"',
        checks.check_think_rule,
    ),
    "reads only the first of several values": (
        "formats.hermes:_values",
        "if not value.whole:",
        "if True:",
        checks.check_reads_calls,
    ),
    "does not read lists of calls": ("formats.hermes:_attempts", "bool(one.value)", "False", checks.check_reads_calls),
    "loses the call after a lost quote": (
        "formats.hermes:_last_string",
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
    "trusts the count of keys": ("_json:_has_keys", "return count == number", "return True", checks.check_colons),
    "trusts colons in strings": (
        "formats.hermes:read_well_formed",
        "and not keys_differ(text, value, begin, end)",
        "and False",
        checks.check_colons,
    ),
    "takes half a pair for text": (
        "_json:is_encodable",
        "return text.isascii() or _encodes(text)",
        "return True",
        checks.check_colons,
    ),
    "takes half an escape for text": ("_json:is_encodable", '"\\\\ud" in text', "False", checks.check_strict_json),
    "takes any depth for text": ("_json:may_nest", "end) > MAX_DEPTH", "end) > 10**9", checks.check_strict_json),
    "asks no call how deep it is": (
        "formats.hermes:read_well_formed",
        "if unsure and may_nest",
        "if False and may_nest",
        checks.check_strict_json,
    ),
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
    "key spans with the quotes": ("_places:members", "at + 1, key_end - 1", "at, key_end", checks.check_spans),
    "sees only the first key": (
        "_places:members",
        "at = skip_space(text, scan_plainly(text, begin)[1])",
        "return",
        checks.check_spans,
    ),
    "forgets escapes in spans": ("_places:string_offsets", 'if text[at] != "\\\\":', "if True:", checks.check_spans),
    # schema
    "does not look at the schema": (
        "schema:ToolSet.is_valid",
        "bool(found[0](call.arguments))",
        "True",
        checks.check_schema,
    ),
    "field of a missing argument unnamed": ("schema:_problem", '[detail["property"]]', "[]", checks.check_schema),
    # matching
    "true is 1": ("matching:meaning", "if isinstance(value, bool):", "if False:", checks.check_loose_match),
    "case counts": (
        "matching:meaning",
        'return "text", text.casefold()\n    if not number[2]',
        'return "text", text\n    if not number[2]',
        checks.check_loose_match,
    ),
    "space counts": ("matching:meaning", "value.strip()", "value", checks.check_loose_match),
    "lower instead of casefold": (
        "matching:meaning",
        'return "text", text.casefold()\n    if not number[2]',
        'return "text", text.lower()\n    if not number[2]',
        checks.check_loose_match,
    ),
    "big integers as floats": (
        "matching:meaning",
        'return "number", value\n    if isinstance(value, float)',
        'return "number", float(value) if abs(value) < 2**60 else value\n    if isinstance(value, float)',
        checks.check_loose_match,
    ),
    "NaN equals NaN": (
        "matching:meaning",
        "return None if math.isnan(value) else",
        'return ("nan", 0) if math.isnan(value) else',
        checks.check_loose_match,
    ),
    "lists as sets": (
        "matching:_lists_match",
        "return len(predicted) == len(wanted) and all(",
        "predicted, wanted = sorted(predicted, key=str), sorted(wanted, key=str)\n    return len(predicted) == len(wanted) and all(",
        checks.check_loose_match,
    ),
    "list length ignored": ("matching:_lists_match", "len(predicted) == len(wanted)", "True", checks.check_loose_match),
    "null is text everywhere": ("matching:_matches", "and _allows_null(schema)", "", checks.check_loose_match),
    "null is missing though required": (
        "matching:_may_be_missing",
        'or key in (schema.get("required") or ())',
        "",
        checks.check_loose_match,
    ),
    "only the first accepted value": (
        "matching:_alternatives",
        "in gold.values:",
        "in gold.values[:1]:",
        checks.check_accepted,
    ),
    "optional counts as missing": (
        "matching:_wanted_member",
        "and gold.optional",
        "and False",
        checks.check_accepted,
    ),
    # process score
    "format over opening tags only": (
        "process:_format",
        "max(made.opened, made.closed)",
        "max(made.opened, 1)",
        checks.check_process_parts,
    ),
    "format counts calls, not blocks": (
        "process:valid_blocks",
        "blocks[call.block] = valid and blocks.get(call.block, True)",
        "blocks[id(call)] = valid",
        checks.check_process_parts,
    ),
    "a block is valid if its last call is": (
        "process:valid_blocks",
        "valid and blocks.get(call.block, True)",
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
    "names as sets": (
        "process:process_score",
        "2 * len(pairs)",
        "(predicted + len(pairs))",
        checks.check_process_parts,
    ),
    "parallel over all turns": (
        "process:tally",
        "first = first or len(step.valid)",
        "first += len(step.valid)",
        checks.check_process_parts,
    ),
    "last turn for the first": (
        "process:tally",
        "first = first or len(step.valid)",
        "first = len(step.valid)",
        checks.check_process_parts,
    ),
    "key over gold keys": (
        "matching:compare_arguments",
        "(expected + extra)",
        "max(expected, 1)",
        checks.check_process_parts,
    ),
    "value over shared keys": (
        "matching:compare_arguments",
        "(shared - wrong) / expected if expected",
        "(shared - wrong) / shared if shared",
        checks.check_process_parts,
    ),
    "greedy pairing": (
        "pairing:_solved",
        "maximize=True)",
        "maximize=True)\n    free = set(range(len(scores[0])))\n    found = [list(range(min(len(scores), len(free)))), []]\n    for i in found[0]:\n        found[1].append(max(sorted(free), key=lambda j: scores[i][j]))\n        free.discard(found[1][-1])",
        checks.check_one_to_one,
    ),
    "pairs in order": (
        "pairing:best_pairs",
        "alone[i] = _best_alone(table, i, score)",
        "alone[i] = i",
        checks.check_one_to_one,
    ),
    "many gold calls to one prediction": (
        "pairing:best_pairs",
        "if len(set(alone)) == count:",
        "if True:",
        checks.check_one_to_one,
    ),
    "exact partners from the end": (
        "pairing:_exact_partners",
        "found[i] = j",
        "found[i] = len(long) - 1 - j",
        checks.check_one_to_one,
    ),
    "takes a call of another name": (
        "pairing:pair_calls",
        "if name in calls:",
        "if name in calls or calls.setdefault(name, list(predicted[:1])):",
        checks.check_process_parts,
    ),
    # rule
    "rule: unbalanced tags pass": (
        "outcomes:reference_rule",
        "== made.closed",
        "",
        checks.check_reference_rule,
    ),
    "rule: any first step": (
        "outcomes:reference_rule",
        "made.first != expected.first",
        "False",
        checks.check_reference_rule,
    ),
    "rule: names as sets": (
        "outcomes:reference_rule",
        "len(pairs) == len(made.calls) and",
        "",
        checks.check_reference_rule,
    ),
    "rule: one right call is enough": (
        "outcomes:reference_rule",
        "not sum([pair.missed_required for pair in pairs])",
        "any(not pair.missed_required for pair in pairs)",
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
    "order of arguments matters": ("_json:_written", "sort_keys=True", "sort_keys=False", checks.check_simulator),
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
