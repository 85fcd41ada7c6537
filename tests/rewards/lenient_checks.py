"""What lenient reading repairs and refuses; the mutants fail these."""

from typing import Any

from rewards import parse_lenient, parse_tool_calls

WANT = {"a": 1, "s": "it's"}


def kinds(text: str) -> list[str]:
    """The kinds of repair that a text of one call needs."""
    found = parse_lenient(text)
    (call,) = found.calls
    assert (call.name, call.arguments, call.status) == ("f", WANT, "ok"), (text, call)
    return sorted({repair.kind for repair in found.repairs})


def check_repairs() -> None:
    for inner, want in (
        ('{"name": "f", "arguments": {"a": 1, "s": "it\'s"}}', []),
        ("{'name': 'f', 'arguments': {'a': 1, 's': 'it\\'s'}}", ["single quotes"]),
        ('{"name": "f", "arguments": {"a": 1, "s": "it\'s",},}', ["trailing comma"]),
        ('{"name": "f", "arguments": {"a": 1, "s": "it\'s"', ["missing brace"]),
        ('{"name": "f", "arguments": {"a": 1, "s": "it\'s",', ["missing brace", "trailing comma"]),
        ('{"name": "f", "arguments": {"a": 1, "s": "it\'s"}}}', ["extra brace"]),
        ('{"name": "f", // {"x"\n "arguments": /* , */ {"a": 1, "s": "it\'s"} # end\n}', ["comment"]),
        ('{name: "f", arguments: {a: 1, "s": "it\'s"}}', ["unquoted key"]),
        ('```json\n{"name": "f", "arguments": {"a": 1, "s": "it\'s"}}\n```', ["code fence"]),
    ):
        assert kinds(f"<tool_call>{inner}</tool_call>") == want, inner
        assert kinds(f"so: <tool_call>\n{inner}\n") == sorted([*want, "missing closing tag"]), inner
        if want:
            assert any(call.status != "ok" for call in parse_tool_calls(f"<tool_call>{inner}</tool_call>").calls)
    python = parse_lenient("<tool_call>{'name': 'f', 'arguments': {'a': [True, None], 's': 'x\n\\xe9'}}</tool_call>")
    assert python.valid[0].arguments == {"a": [True, None], "s": "x\né"}
    control = parse_lenient('<tool_call>{"name": "f", "arguments": {"s": "x\n"}}</tool_call>')
    assert [repair.kind for repair in control.repairs] == ["control character"]
    text = "<tool_call>{'name': \"f\"}</tool_call>"
    assert text[parse_lenient(text).repairs[0].at] == "'"


def check_refusals() -> None:
    values: list[tuple[str, str]] = [
        ("{1, 2}", "a set is not JSON"),
        ("{'x'}", "a set is not JSON"),
        ("(1, 2)", "a tuple is not JSON"),
        ("NaN", "'NaN' is not JSON"),
        ("Infinity", "'Infinity' is not JSON"),
        ("set()", "'set' is not JSON"),
        ("{1: 2}", "a key that is not a string"),
        ("{'x': 1, 'x': 2}", "duplicate key 'x'"),
        ("'\\ud800'", "half of a surrogate pair"),
        ("'\\q'", "an escape that is not one"),
        ("1e999", "number out of range"),
        ("9" * 5000, "number out of range"),
        ("[1 2]", "expected a comma or ], got '2'"),
        ("[" * 10_000, "nested deeper than 128"),
        ("'x", "a string without its end"),
        ("[" + "1," * 100_000 + "]", "more than 100000 values"),
        ("007", "'0' is not JSON"),
    ]
    for value, reason in values:
        (call,) = parse_lenient("<tool_call>{'name': 'f', 'arguments': {'a': " + value + "}}").calls
        assert call.reason == reason, (value, call)
        assert call.status in ("invalid_json", "unclosed")


def check_several() -> None:
    text = "<think><tool_call>{'name': 'r'}</think><tool_call>{'name': 'f'} {'name': 'g'}</tool_call>"
    both = text + "<tool_call>{'name': 'x</tool_call><tool_call>[{'name': 'h',}, {}]</tool_call>"
    assert [call.name for call in parse_lenient(text).valid] == ["f", "g"]
    found = parse_lenient(both)
    assert [(call.name, call.status) for call in found.calls] == [
        ("f", "ok"), ("g", "ok"), ("", "invalid_json"), ("h", "ok"), ("", "missing_name"),
    ]  # fmt: skip
    quoted = parse_lenient("<tool_call>{'name': 'f', 'arguments': {'a': '</tool_call>'}}</tool_call>")
    assert quoted.valid[0].arguments == {"a": "</tool_call>"}
    left = parse_lenient("<tool_call>{'name': 'f'}} x</tool_call>")
    assert [call.status for call in left.calls] == ["ok", "invalid_json"]
    assert {repair.kind for repair in left.repairs} == {"single quotes"}
    assert parse_lenient("").calls == ()
    inner: Any = parse_lenient("<tool_call>{'name': 'f'}\n```\n</tool_call>").valid
    assert [call.name for call in inner] == ["f"]


CHECKS = [check for name, check in list(globals().items()) if name.startswith("check_")]
