"""What must hold of each primitive of `rewards`; the tests run them, and the mutants must fail them."""

import json
import math
from collections.abc import Mapping
from typing import Any

from rewards import (
    Accepted,
    DeterministicMocker,
    ParsedCalls,
    ToolCall,
    answer_calls,
    as_gold,
    loose_match,
    parse_tool_calls,
    process_score,
    reference_rule,
    simulate,
    validate_call,
)

Call = Mapping[str, Any]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": ["number", "null"]}, "tag": {"type": "string"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
LOOK = {"type": "function", "function": {"name": "maps.look", "parameters": {"type": "object"}}}
TOOLS = [ADD, LOOK]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A plain call."""
    return {"name": name, "arguments": arguments}


def block(*calls: Call) -> str:
    """The text of some calls, each in a block of its own."""
    return "\n".join(f"{OPEN}\n{json.dumps(one)}\n{CLOSE}" for one in calls)


def one(text: str, **options: Any) -> ToolCall:
    """The single attempt in a text."""
    parsed = parse_tool_calls(text, **options)
    assert len(parsed.calls) == 1, parsed
    return parsed.calls[0]


def counts(parsed: ParsedCalls) -> tuple[int, int, int]:
    """Valid calls, opening tags, closing tags."""
    return len(parsed.valid), parsed.num_open, parsed.num_close


def check_reads_calls() -> None:
    """What is a call, in every shape in which models write one."""
    plain = one(f'{OPEN}{{"name": "f", "arguments": {{"x": 1}}}}{CLOSE}')
    assert (plain.name, plain.arguments, plain.status, plain.notes) == ("f", {"x": 1}, "ok", ())
    assert one(f'{OPEN}{{"name": "f"}}{CLOSE}').arguments == {}
    assert one(f'{OPEN}{{"name": "f", "arguments": null}}{CLOSE}').arguments == {}
    assert one(f'{OPEN}{{"name": "f", "arguments": ""}}{CLOSE}').arguments == {}
    alias = one(f'{OPEN}{{"name": "f", "parameters": {{"x": 1}}}}{CLOSE}')
    assert (alias.arguments, alias.status, alias.notes) == ({"x": 1}, "ok", ("parameters",))
    text = one(f'{OPEN}{{"name": "f", "arguments": "{{\\"x\\": 1}}"}}{CLOSE}')
    assert (text.arguments, text.status, text.notes) == ({"x": 1}, "ok", ("string",))
    twice = json.dumps(json.dumps({"x": 1}))
    assert one(f'{OPEN}{{"name": "f", "arguments": {json.dumps(twice)}}}{CLOSE}').status == "invalid_arguments"
    listed = parse_tool_calls(f'{OPEN}[{{"name": "f"}}, {{"name": "g"}}]{CLOSE}')
    assert [c.name for c in listed.valid] == ["f", "g"]
    assert (listed.num_open, {c.block for c in listed.calls}) == (1, {0})
    several = parse_tool_calls(f'{OPEN}\n{{"name": "f"}}\n{{"name": "g"}}\n{CLOSE}')
    assert [c.name for c in several.valid] == ["f", "g"]
    assert counts(parse_tool_calls(block(call("f"), call("g")))) == (2, 2, 2)
    escaped = one(f'{OPEN}{{"name": "\\u0066", "arguments": {{"caf\\u00e9": "\\ud83d\\ude00"}}}}{CLOSE}')
    assert (escaped.name, escaped.arguments) == ("f", {"café": "😀"})


def check_tags_in_strings_are_text() -> None:
    """A tag inside a JSON string neither ends nor begins a block."""
    for inner in ("echo </tool_call> x", "<tool_call>", "</think>", "<think>", "}}]]{{", '"</tool_call>"', "\\"):
        found = parse_tool_calls(block(call("f", s=inner), call("g")))
        assert counts(found) == (2, 2, 2), inner
        assert found.calls[0].arguments == {"s": inner}
    broken = parse_tool_calls(f'{OPEN}{{"name": "f", "arguments": {{"s": "</tool_call>"}},}}{CLOSE}')
    assert counts(broken) == (0, 1, 1)
    twice = parse_tool_calls(f'{OPEN}{{"name": "f", "name": "</tool_call>"}}{CLOSE}')
    assert counts(twice) == (0, 1, 1)


def check_strict_json() -> None:
    """Nothing that is not JSON is read, and each refusal has a reason."""
    for bad in (
        '{"name": "f", "arguments": {"n": NaN}}',
        '{"name": "f", "arguments": {"n": Infinity}}',
        '{"name": "f", "arguments": {"n": -Infinity}}',
        '{"name": "f", "arguments": {"n": 1e999}}',
        '{"name": "f", "arguments": {"a": 1, "a": 2}}',
        '{"name": "f", "name": "g"}',
        '{"name": "f",}',
        "{'name': 'f'}",
        '{"name": "f", "arguments": {"a": True}}',
        '{"name": "f", "arguments": {"a": "line\nbreak"}}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "f" "arguments": {}}',
        '{"name": "f", "arguments": {"a": ' + "[" * 10_000 + "]" * 10_000 + "}}",
        '{"name": "f", "arguments": {"a": ' + "[" * 200 + "]" * 200 + "}}",
        '{"name": "f", "arguments": {"a": ' + "9" * 5_000 + "}}",
        "",
        "just text",
        "// a comment\n{}",
    ):
        found = one(f"{OPEN}{bad}{CLOSE}")
        assert found.status == "invalid_json", bad[:60]
        assert found.reason, bad[:60]
    fine = one(f'{OPEN}{{"name": "f", "arguments": {{"a": {"[" * 100}{"]" * 100}}}}}{CLOSE}')
    assert fine.status == "ok"
    # Among many flat calls, each is still asked how deep it is.
    flat = [f'{OPEN}{{"name": "f", "arguments": {{}}}}{CLOSE}'] * 200
    deep = f'{OPEN}{{"name": "f", "arguments": {{"a": {"[" * 200}{"]" * 200}}}}}{CLOSE}'
    assert [c.status for c in parse_tool_calls("".join([*flat, deep])).calls] == ["ok"] * 200 + ["invalid_json"]
    trailing = parse_tool_calls(f'{OPEN}{{"name": "f"}} and so on{CLOSE}')
    assert [c.status for c in trailing.calls] == ["ok", "invalid_json"]
    assert len({c.block for c in trailing.calls}) == 1


def check_colons() -> None:
    """Keys are told apart by counting colons: those in strings, and in every kind of place, must not mislead."""
    for arguments in (
        '{"a": "10:30"}', '{"a": "b : c"}', '{"a" : 1}', '{"a"\n:1, "b"\t: 2}', '{"a": "\\":"}', "{}",
        '{"a:": {"b": [{"c": 1}]}}', '{"a": [[{}, {"b": 1}], {"b": 1}]}', '{"a": {"b": 1}, "b": {"a": 1}}',
        '{"a": "é", "b": "\\u00e9"}',
    ):  # fmt: skip
        found = one(f'{OPEN}{{"name": "f", "arguments": {arguments}}}{CLOSE}')
        assert (found.status, found.arguments) == ("ok", json.loads(arguments)), arguments
    for arguments in (
        '{"a": [{"b": 1, "b": 1}]}', '{"a": {"b": 1, "b": ":"}}', '{"a": ":", "a": 1}', '{"a" : 1, "a": 2}',
        '{"a": 1, "\\u0061": 2}', '{"a": [[{"b": {}, "b" :{}}]]}', '{"a": "\ud800"}', '{"\udfff": 1}',
    ):  # fmt: skip
        found = one(f'{OPEN}{{"name": "f", "arguments": {arguments}}}{CLOSE}')
        assert found.status == "invalid_json", arguments


def check_broken_calls() -> None:
    """What is JSON and no call says why."""
    for text, status in (
        ("{}", "missing_name"),
        ('{"name": 3}', "missing_name"),
        ('{"name": ""}', "missing_name"),
        ('{"arguments": {}}', "missing_name"),
        ("3", "not_an_object"),
        ("[]", "not_an_object"),
        ('"f"', "not_an_object"),
        ("[1]", "not_an_object"),
        ('{"name": "f", "arguments": [1]}', "invalid_arguments"),
        ('{"name": "f", "arguments": 3}', "invalid_arguments"),
        ('{"name": "f", "arguments": "x=1"}', "invalid_arguments"),
        ('{"name": "f", "arguments": "[1]"}', "invalid_arguments"),
    ):
        found = one(f"{OPEN}{text}{CLOSE}")
        assert (found.status, bool(found.reason)) == (status, True), text


def check_unclosed_blocks() -> None:
    """An unclosed block is counted as open, and is no call."""
    cut = parse_tool_calls(f'{OPEN}{{"name": "f", "arguments": {{}}}}')
    assert (counts(cut), cut.calls[0].status) == ((0, 1, 0), "unclosed")
    assert counts(parse_tool_calls(f'{OPEN}{{"name": "f", "argu')) == (0, 1, 0)
    doubled = parse_tool_calls(f'{OPEN}{OPEN}{{"name": "f"}}{CLOSE}')
    assert (counts(doubled), [c.status for c in doubled.calls]) == ((1, 2, 1), ["unclosed", "ok"])
    assert counts(parse_tool_calls(f"no call {CLOSE}")) == (0, 0, 1)
    assert counts(parse_tool_calls("")) == (0, 0, 0)
    for lost in ('{"name": "x}', '{"name": "x, "arguments": {}}', '{"name: "x"}', '{"s": "\\q", "'):
        for second in (block(call("g")), f'{OPEN}{{"name":"g"}}{CLOSE}'):
            quote = parse_tool_calls(f"{OPEN}{lost}{CLOSE} then {second}")
            assert [c.name for c in quote.valid] == ["g"], lost


def check_think_rule() -> None:
    """Reasoning is no place for calls, unless the caller says so."""
    quoted = f"<think>maybe {block(call('f'))}</think>{block(call('g'))}"
    assert [c.name for c in parse_tool_calls(quoted).valid] == ["g"]
    assert parse_tool_calls(quoted).num_open == 1
    assert [c.name for c in parse_tool_calls(quoted, think="text").valid] == ["f", "g"]
    assert counts(parse_tool_calls(f"<think>cut {block(call('f'))}")) == (0, 0, 0)
    assert [c.name for c in parse_tool_calls(f"{block(call('f'))}</think>{block(call('g'))}").valid] == ["g"]
    stray = f"<think>a</think>{block(call('f'))}</think>{block(call('g'))}"
    assert [c.name for c in parse_tool_calls(stray).valid] == ["f", "g"]


def check_spans() -> None:
    """Spans cut the block, the name and each key out of the text they were read from."""
    for body, keys in (
        ('{"name": "get.x", "arguments": {"city": "name", "n": {"inner": [1, "a,b"]}}}', ["city", "n"]),
        ('{ "arguments" : { "city" : "Rome" } , "name" : "get.x" }', ["city"]),
        ('[{"name": "get.x", "arguments": {"city": 1}}]', ["city"]),
        ('{"name": "get.x", "arguments": "{\\"city\\": \\"Ro\\u006de\\", \\"n\\": 1}"}', ["city", "n"]),
        ('{"name": "get.x"}', []),
    ):
        text = f"so: {OPEN}{body}{CLOSE} done"
        found = one(text)
        assert text[slice(*found.span)] == f"{OPEN}{body}{CLOSE}"
        assert found.name_span is not None
        assert text[slice(*found.name_span)] == "get.x"
        assert [text[slice(*span)] for span in found.key_spans.values()] == keys == list(found.key_spans)
    both = parse_tool_calls(f'{OPEN}[{{"name":"f","arguments":{{"a":1}}}},{{"name":"g","arguments":{{"b":1}}}}]{CLOSE}')
    first, second = both.calls
    assert first.name_span
    assert second.name_span
    assert first.name_span[1] < second.name_span[0]
    assert first.key_spans["a"][1] < second.key_spans["b"][0]
    assert ToolCall("f", {"a": 1}).name_span is None
    assert ToolCall("f", {"a": 1}).key_spans == {}


def check_schema() -> None:
    """Each kind of problem, named with its field."""

    def kinds(one_call: object) -> list[tuple[str, str]]:
        return [(problem.kind, problem.field) for problem in validate_call(one_call, TOOLS)]  # type: ignore[arg-type]

    assert kinds(call("add", a=1, b=None)) == []
    assert kinds(call("maps.look", anything=[1])) == []
    assert kinds(call("sub", a=1)) == [("unknown_tool", "")]
    assert kinds(call("add")) == [("missing_required", "a")]
    assert kinds(call("add", a="1")) == [("wrong_type", "a")]
    assert kinds(call("add", a=True)) == [("wrong_type", "a")]
    assert kinds(call("add", a=1, c=2)) == [("extra_property", "c")]
    assert kinds({"arguments": {}}) == [("invalid_call", "")]
    assert kinds(one(f"{OPEN}{{'a'}}{CLOSE}")) == [("invalid_call", "")]


def check_loose_match() -> None:
    """The table of what means the same."""
    same = [
        (" Paris", "paris "), ("STRASSE", "straße"), (1, 1.0), (1, "1"), ("1.0", 1), (1e3, "1000"), ("1e3", 1000),
        (0.1, "0.1"), (True, "true"), ("False ", False), (True, True), (None, None), ([12, 15], [12.0, "15"]),
        ({"a": [{"b": 1}]}, {"a": [{"b": "1"}]}), ({}, {}), ([], []), (2**53 + 1, 2**53 + 1),
        (str(2**53 + 1), 2**53 + 1), (f"{2**53 + 1}.0", 2**53 + 1), (-0.0, 0), ("", " "), (10**400, 10**400),
        ("7", "7.0"), (math.inf, math.inf),
    ]  # fmt: skip
    other = [
        (True, 1), (1, True), (False, 0), ("true", 1), (2**53, 2**53 + 1), (float(2**53), 2**53 + 1),
        (str(2**53), 2**53 + 1), (math.nan, math.nan), ([math.nan], [math.nan]), (None, "null"), ("null", None),
        (None, 0), (None, False), (None, ""), ([15, 12], [12, 15]), ([1], [1, 2]), ([1, 2], [1]), ([], {}), ("", []),
        ([1], 1), (1, [1]), ({"a": 1}, {"a": 2}), ({"a": 1}, {"b": 1}), ({"a": 1, "b": 1}, {"a": 1}), ({}, {"a": 1}),
        ("007", 7), ("1_0", 10), ("+5", 5), ("٣", 3), ("0x10", 16), ("nan", math.nan), ("a b", "ab"), ([[1]], [[2]]),
        ("1e99999", 10), ("[1]", [1]),
    ]  # fmt: skip
    for predicted, gold in same:
        assert loose_match(predicted, gold), (predicted, gold)
        assert loose_match(gold, predicted), (gold, predicted)
    for predicted, gold in other:
        assert not loose_match(predicted, gold), (predicted, gold)
    nullable: dict[str, Any]
    for nullable in ({"type": ["string", "null"]}, {"enum": [None, 1]}, {"anyOf": [{"type": "null"}]}, {"const": None}):
        assert loose_match("NULL", None, nullable)
        assert loose_match(None, "null", nullable)
        assert not loose_match(None, "", nullable)
    assert not loose_match("null", None, {"type": "string"})
    assert not loose_match("null", None, {"$ref": "#/x"})
    within = {"type": "object", "properties": {"a": {"type": ["integer", "null"]}, "b": {"type": "integer"}}}
    assert loose_match({}, {"a": None}, within)
    assert loose_match({"a": None}, {}, within)
    assert not loose_match({}, {"b": None}, within)
    assert not loose_match({"b": None}, {}, within)
    assert not loose_match({}, {"a": None}, {**within, "required": ["a"]})
    assert loose_match([["null"]], [[None]], {"items": {"items": {"type": "null"}}})


def check_accepted() -> None:
    """Alternatives and optional values, at any depth, as objects and as JSON."""
    for some in (Accepted(("C", "celsius")), {"$accepted": ["C", "celsius"]}):
        assert loose_match("c", some)
        assert loose_match("Celsius", some)
        assert not loose_match("F", some)
        assert loose_match({"u": ["C"]}, {"u": [some]})
    gold = {"u": {"$accepted": [1, 2], "$optional": True}}
    assert loose_match({}, gold)
    assert loose_match({"u": 2}, gold)
    assert not loose_match({"u": 3}, gold)
    assert not loose_match({}, {"u": {"$accepted": [1, 2]}})
    only_missing = {"u": Accepted((), optional=True)}
    assert loose_match({}, only_missing)
    assert not loose_match({"u": 1}, only_missing)
    turned = as_gold([[{"name": "f", "arguments": {"u": Accepted((1, 2), optional=True)}}]])
    assert as_gold(turned.to_json()) == turned
    assert turned.calls() == [[call("f", u=1)]]


def check_process_paper_case() -> None:
    """The case of the paper: a needless search, then the two parallel calls one per turn."""
    gold = [[call("get_stock_price", symbol="A"), call("get_stock_price", symbol="B")]]
    turns = [block(call("search_company_info")), block(gold[0][0]), block(gold[0][1]), "A is up, B is down."]
    score = process_score(turns, gold, None)
    assert (score.format, score.name, score.key, score.value, score.parallel) == (1.0, 0.8, 1.0, 1.0, 0.0)
    assert abs(score.total - 0.65) < 1e-12
    assert (score.success, score.redundant_calls, score.tool_turns, score.arg_match) == (False, 1, 3, 1.0)
    assert process_score([block(*gold[0])], gold, None).total == 1.0


def check_process_parts() -> None:
    """Each part on its own."""
    gold = [[call("add", a=1, b=2)]]

    def parts(*turns: str, wanted: object = gold) -> tuple[float, ...]:
        s = process_score(turns, wanted, TOOLS)
        return s.format, s.name, s.key, s.value, s.parallel

    assert parts(block(call("add", a=1, b=2))) == (1, 1, 1, 1, 1)
    assert parts(block(call("add", a=1, b=3))) == (1, 1, 1, 0.5, 1)
    assert parts(block(call("add", a=1))) == (1, 1, 0.5, 0.5, 1)
    assert parts(block(call("add", a=1, b=2, tag="x"))) == (1, 1, 2 / 3, 1, 1)
    assert parts(block(call("add", a="1", b=2))) == (0, 1, 1, 1, 1)
    assert parts(block(call("add", a=1, b=2), call("add", a=1, b=2))) == (1, 2 / 3, 1, 1, 0)
    assert parts(block(call("maps.look"))) == (1, 0, 0, 0, 1)
    assert parts("I cannot.") == (0, 0, 0, 0, 0)
    assert parts("Hello.", wanted=[]) == (1, 1, 1, 1, 1)
    assert parts("Hello.", wanted=[[]]) == (1, 1, 1, 1, 1)
    assert parts(block(call("maps.look")), wanted=[]) == (1, 0, 0, 0, 0)
    assert parts("thinking", block(call("add", a=1, b=2))) == (1, 1, 1, 1, 1)
    assert parts(block(call("add", a=1, b=2)) + CLOSE) == (0.5, 1, 1, 1, 1)
    assert parts(block(call("add", a=1, b=2)) + OPEN) == (0.5, 1, 1, 1, 1)
    assert parts(f"{OPEN}{json.dumps([call('add', a=1, b=2), call('sub')])}{CLOSE}")[0] == 0
    assert parts(f"{OPEN}{json.dumps([call('sub'), call('add', a=1, b=2)])}{CLOSE}")[0] == 0
    assert parts(f"{OPEN}{json.dumps([call('add', a=1), call('add', a=1)])}{CLOSE}")[0] == 1
    assert parts(block(call("maps.look")), wanted=[[call("maps.look")]]) == (1, 1, 1, 1, 1)
    steps = [[call("add", a=1), call("add", a=2)], [call("maps.look")]]
    assert parts(block(*steps[0]), block(*steps[1]), wanted=steps) == (1, 1, 1, 1, 1)
    assert parts(block(steps[0][0]), block(steps[0][1], *steps[1]), wanted=steps) == (1, 1, 1, 1, 0)
    assert process_score([block(call("add", a=1, b=2))], [[call("add", a=1, b=2)] * 2], TOOLS).value == 0.5
    nine = process_score([f"{block(*gold[0])}"], gold, [LOOK])
    assert (nine.format, nine.success) == (0.0, True)


def check_one_to_one() -> None:
    """Calls are paired so that the total is largest, whatever their order, and no call serves twice."""
    gold = [[call("f", x=1, y=1), call("f", x=1, y=2)]]
    turns = [block(call("f", x=1, y=2), call("f", x=1, y=1))]
    assert process_score(turns, gold, None).total == 1.0
    # Greedy gives the call that fits both to the first gold call, and leaves the second with nothing.
    trap = [[call("f", a=1, b=1), call("f", a=1, c=1)]]
    trapped = process_score([block(call("f", a=1, b=1, c=1), call("f", b=1))], trap, None)
    assert abs(trapped.key - 7 / 12) < 1e-12
    assert trapped.value == 0.75
    tempting = [[call("f", x=1), call("f", x=1, y=2)]]
    assert process_score([block(call("f", x=1, y=2), call("f", x=1))], tempting, None).total == 1.0
    assert process_score([block(call("f", x=1, y=1))], [[call("f", x=1, y=1)] * 3], None).key == 1 / 3
    assert process_score([block(call("g", x=1), call("f"))], [[call("f"), call("g", x=1)]], None).total == 1.0
    # So many that marks find the partners; what a mark must not say is in the last four.
    many: list[Any] = [call("f", x=number) for number in range(6)]
    loose: list[Any] = [call("f", x=[7]), call("f", x=[8]), call("f", x={"$accepted": [9, 10]}), call("f", x=None)]
    said = [*many, call("f", x=[7.0]), call("f", x=["8"]), call("f", x=10), call("f")]
    assert process_score([block(*reversed(many))], [many], None).total == 1.0
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}}}}}]
    assert process_score([block(*reversed(said))], [[*many, *loose]], tools).total == 1.0


def check_reference_rule() -> None:
    """Each conjunct alone makes the rule fail."""
    gold = [[call("add", a=1, b=2), call("add", a=2)], [call("maps.look", q="x")]]
    first, last = block(*gold[0]), block(*gold[1])
    assert reference_rule([first, last], gold, TOOLS)
    assert reference_rule([block(*reversed(gold[0])), last, "Done."], gold, TOOLS)
    assert reference_rule([first, block(call("maps.look", q=" X", more=1))], gold, TOOLS)
    assert reference_rule(["Hello."], [], TOOLS)
    for wrong in (
        [first],
        [first, last, last],
        [first, block(call("maps.look", q="y"))],
        [first, block(call("maps.look"))],
        [block(gold[0][0]), block(gold[0][1]), last],
        [first, last + CLOSE],
        [first, last + OPEN],
        [block(call("add", a=1, b=2), call("add", a="2")), last],
        [block(call("add", a=1, b=2), call("add", a=1, b=2)), last],
        [block(call("sub", a=1, b=2), call("add", a=2)), last],
        [block(call("maps.look", q="x"), call("add", a=2)), last],
        ["Hello."],
    ):
        assert not reference_rule(wrong, gold, TOOLS), wrong
    optional = [[{"name": "maps.look", "arguments": {"q": 1, "r": {"$accepted": [1], "$optional": True}}}]]
    assert reference_rule([block(call("maps.look", q=1))], optional, TOOLS)
    assert not reference_rule([block(call("maps.look", r=1))], optional, TOOLS)


def check_simulator() -> None:
    """Wrong calls get a fixed error with the field, the same call the same answer, and calls are answered in order."""
    wrong = simulate(call("add", a="x"), TOOLS)
    assert wrong.error == "wrong_type"
    assert json.loads(wrong.content)["field"] == "a"
    assert simulate(call("sub"), TOOLS).error == "unknown_tool"
    assert simulate(call("add"), TOOLS) == simulate(call("add"), TOOLS)
    assert json.loads(simulate(call("add"), TOOLS).content)["field"] == "a"
    two = [{"name": "f", "parameters": {"type": "object", "required": ["x", "y", "z"]}}]
    assert json.loads(simulate(call("f", y=1), two).content) == {
        "error": "missing_required", "field": "x, z",
        "message": '"x" is a required property; "z" is a required property',
    }  # fmt: skip
    right = simulate(call("add", a=1, b=2), TOOLS)
    assert right.error is None
    assert right.name == "add"
    assert right == simulate({"name": "add", "arguments": {"b": 2.0, "a": 1}}, TOOLS)
    assert right != simulate(call("add", a=1, b=3), TOOLS)
    assert right != simulate(call("add", a=1, b=2), TOOLS, DeterministicMocker(seed=1))
    assert simulate(call("sub", a="x"), TOOLS, validate=False).error is None
    assert [a.error for a in answer_calls(f"{OPEN}broken{CLOSE}", TOOLS, validate=False)] == ["invalid_call"]

    seen: list[str] = []

    def mocker(made: ToolCall, function: Mapping[str, Any] | None) -> str:
        seen.append(made.name)
        return f"{made.name}:{'with' if function else 'without'}"

    assert simulate(call("add", a=1), TOOLS, mocker).content == "add:with"
    assert simulate(call("add"), TOOLS, mocker, validate=False).content == "add:without"
    seen.clear()
    text = block(call("add", a=1), call("sub"), call("maps.look")) + f"{OPEN}broken{CLOSE}"
    answers = answer_calls(text, TOOLS, mocker)
    assert [(a.name, a.error) for a in answers] == [
        ("add", None), ("sub", "unknown_tool"), ("maps.look", None), ("", "invalid_call"),
    ]  # fmt: skip
    assert sorted(seen) == ["add", "maps.look"]
    assert answer_calls("No call.", TOOLS) == []
