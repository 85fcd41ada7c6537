"""What each format must read, and refuse; the mutants fail these."""

import json
from typing import Any

from rewards import ParsedCalls, parse_tool_calls

FORMATS = ("chat", "llama3_json", "mistral", "pythonic")


def write(step: list[dict[str, Any]], format: str) -> str:
    """One step of calls in a format."""
    if format == "chat":
        functions = [{"name": c["name"], "arguments": json.dumps(c["arguments"])} for c in step]
        return json.dumps({"role": "assistant", "content": "", "tool_calls": [{"function": f} for f in functions]})
    if format == "llama3_json":
        return "; ".join(json.dumps({"name": c["name"], "parameters": c["arguments"]}) for c in step)
    if format == "mistral":
        return "".join(f"[TOOL_CALLS]{c['name']}[ARGS]{json.dumps(c['arguments'])}" for c in step)
    if format == "pythonic":
        return "[" + ", ".join(f"{c['name']}({_python(c['arguments'])})" for c in step) + "]"
    return "\n".join(
        f"<tool_call>\n<function={c['name']}>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in c["arguments"].items())
        + "</function>\n</tool_call>"
        for c in step
    )


def _python(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def statuses(text: str, format: str) -> list[str]:
    """The status of each attempt."""
    return [call.status for call in parse_tool_calls(text, format).calls]


def names(text: str, format: str, think: Any = "reasoning") -> list[str]:
    """The names of the calls."""
    return [call.name for call in parse_tool_calls(text, format, think).valid]


def check_reasoning_holds_no_call() -> None:
    for format in (*FORMATS, "qwen3_coder"):
        call = write([{"name": "f", "arguments": {}}], format)
        assert names(f"<think>{call}</think>{call}", format) == ["f"], format
        assert names(f"[THINK]{call}[/THINK]\n{call}", format) == ["f"], format
        assert parse_tool_calls(f"<think>{call}", format) == ParsedCalls(), format
        assert names(f"so: {call}</think>{call}", format) == ["f"], format
    for format in ("mistral", "qwen3_coder"):
        call = write([{"name": "f", "arguments": {}}], format)
        assert names(f"<think>{call}</think>{call}", format, "text") == ["f", "f"]
        # Only the first end of a block that the prompt opened ends reasoning.
        assert names(f"<think></think>{call}</think>{call}", format) == ["f", "f"]


def check_prose_holds_no_call() -> None:
    for text in ("It is 4.", "", '{"answer": 4}', "[1] See (a).", "[1, 2]", "[]", "f(x) = 2", "{broken", "[broken"):
        for format in (*FORMATS, "qwen3_coder"):
            assert parse_tool_calls(text, format) == ParsedCalls(), (format, text)


def check_tags_in_strings_are_text() -> None:
    tags = {"mistral": "[TOOL_CALLS]", "llama3_json": "<|python_tag|>", "qwen3_coder": "</tool_call>"}
    for format, tag in tags.items():
        step = [{"name": "f", "arguments": {"a": f"x {tag} y"}}]
        (call,) = parse_tool_calls(write(step, format), format).calls
        assert call.arguments == step[0]["arguments"]


def check_counts() -> None:
    one = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": "{\\"a\\": 1}"}]'
    parsed = parse_tool_calls(one, "mistral")
    assert (len(parsed.valid), parsed.num_open, parsed.num_close) == (2, 1, 1)
    assert {call.block for call in parsed.calls} == {0}
    assert one[slice(*parsed.calls[1].key_spans["a"])] == "a"
    both = parse_tool_calls("[TOOL_CALLS]f[CALL_ID]12ab[ARGS]{}[TOOL_CALLS]g{}", "mistral")
    assert ([call.name for call in both.valid], both.num_open, both.num_close) == (["f", "g"], 2, 2)
    quoted = '[TOOL_CALLS]f "{\\"a\\": 1}"'
    assert quoted[slice(*parse_tool_calls(quoted, "mistral").calls[0].key_spans["a"])] == "a"
    tagged = parse_tool_calls('<|python_tag|>{"name": "f"}; {"name": "g"}<|eom_id|>', "llama3_json")
    assert ([call.name for call in tagged.valid], tagged.num_open, tagged.num_close) == (["f", "g"], 2, 2)
    prose = parse_tool_calls('I call <|python_tag|>{"name": "f"}', "llama3_json")
    assert [call.name for call in prose.valid] == ["f"]
    listed = parse_tool_calls("[f(), g()]", "pythonic")
    assert (len(listed.valid), listed.num_open, listed.num_close) == (2, 1, 1)
    xml = "<tool_call><function=f></function><function=g></function></tool_call></tool_call>"
    stray = parse_tool_calls(xml, "qwen3_coder")
    assert (len(stray.valid), stray.num_open, stray.num_close) == (2, 1, 2)
    assert xml[slice(*stray.calls[1].span)].endswith("</tool_call>")


def check_broken_calls() -> None:
    for format, text, want in (
        ("chat", '{"tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}', "invalid_arguments"),
        ("chat", '{"tool_calls": [{"function": {"arguments": "{}"}}]}', "missing_name"),
        ("chat", '{"tool_calls": [{"function": {"name": "f"', "unclosed"),
        ("chat", '{"tool_calls": [{"function": {"name": NaN}}]}', "invalid_json"),
        ("chat", '{"tool_calls": "f"}', "not_an_object"),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1', "unclosed"),
        ("llama3_json", '{"name": "f", "name": "g"}', "invalid_json"),
        ("llama3_json", '{"name": "f", "parameters": [1]}', "invalid_arguments"),
        ("llama3_json", "<|python_tag|>print(1)", "invalid_json"),
        ("mistral", "[TOOL_CALLS]", "missing_name"),
        ("mistral", "[TOOL_CALLS]f", "unclosed"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{'a': 1}", "invalid_json"),
        ("mistral", "[TOOL_CALLS]f[ARGS][1]", "invalid_arguments"),
        ("mistral", '[TOOL_CALLS][{"name": "f"', "unclosed"),
        ("pythonic", "[f(a=1", "unclosed"),
        ("pythonic", "[f(a='x", "unclosed"),
        ("pythonic", "[f(1)]", "invalid_syntax"),
        ("pythonic", "[f(a=1, a=2)]", "invalid_syntax"),
        ("pythonic", "[f(a={1, 2})]", "invalid_syntax"),
        ("pythonic", "[f(a={1: 2})]", "invalid_syntax"),
        ("pythonic", "[f(a={'x': 1, 'x': 2})]", "invalid_syntax"),
        ("pythonic", "[f(a=(1))]", "invalid_syntax"),
        ("pythonic", "[f(a=b'x')]", "invalid_syntax"),
        ("pythonic", "[f(a=1 + 1)]", "invalid_syntax"),
        ("pythonic", "[f(a=g())]", "invalid_syntax"),
        ("pythonic", "[f(a=true)]", "invalid_syntax"),
        ("pythonic", "[f(a=1e999)]", "invalid_syntax"),
        ("pythonic", "[f(a=007)]", "invalid_syntax"),
        ("pythonic", "[f(a='\\ud800')]", "invalid_syntax"),
        ("pythonic", "[f(a=" + "9" * 5000 + ")]", "invalid_syntax"),
        ("pythonic", "[f(a=" + "[" * 10_000 + "]" * 10_000 + ")]", "invalid_syntax"),
        ("qwen3_coder", "<tool_call></tool_call>", "missing_name"),
        ("qwen3_coder", "<tool_call>", "unclosed"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1", "unclosed"),
        ("qwen3_coder", "<tool_call><function=f>", "unclosed"),
        ("qwen3_coder", "<tool_call><function= ></function></tool_call>", "missing_name"),
        ("qwen3_coder", "<tool_call><function=f>a=1</function></tool_call>", "invalid_syntax"),
    ):  # fmt: skip
        assert statuses(text, format) == [want], (format, text, parse_tool_calls(text, format))
        assert parse_tool_calls(text, format).num_open == 1
    twice = "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>"
    assert statuses(twice, "qwen3_coder") == ["invalid_arguments"]
    half = parse_tool_calls("<tool_call><function=f></function><function=g>", "qwen3_coder")
    assert half.valid == ()
    assert (half.num_open, half.num_close) == (1, 0)


def check_a_broken_block_does_not_swallow_the_next() -> None:
    assert names('[TOOL_CALLS]f[ARGS]{"a": "x}[TOOL_CALLS]g[ARGS]{}', "mistral") == ["g"]
    assert names('[TOOL_CALLS]f[ARGS]{"a": "x}[TOOL_CALLS]g[ARGS]{"b": 1}', "mistral") == ["g"]
    assert names('<|python_tag|>{"name": "f}<|python_tag|>{"name": "g"}', "llama3_json") == ["g"]
    whole = write([{"name": "g", "arguments": {}}], "qwen3_coder")
    assert names("<tool_call><function=f><parameter=a>" + whole, "qwen3_coder") == ["g"]


def check_python_values() -> None:
    text = r"""[a.b(x=(1, 2), y=-1.5e3, z={'k': [True, None,],}, w="it's \d \n", v=(), u=(1,),
        t='\x41 \d'), Get Weather(a=.5)]"""
    first, second = parse_tool_calls(text, "pythonic").valid
    assert first.name == "a.b"
    assert first.arguments == {
        "x": [1, 2], "y": -1500.0, "z": {"k": [True, None]}, "w": "it's \\d \n", "v": [], "u": [1], "t": "A \\d",
    }  # fmt: skip
    assert isinstance(first.arguments["x"][0], int)
    assert (second.name, second.arguments) == ("Get Weather", {"a": 0.5})
    assert names("<|python_start|>[f(a=1)]<|python_end|>", "pythonic") == ["f"]


def check_xml_values() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=a>\n\n x</y> \n</parameter>\n</function>\n</tool_call>"
    (call,) = parse_tool_calls(text, "qwen3_coder").valid
    assert call.arguments == {"a": "\n x</y> "}
    assert call.notes == ("untyped",)
    assert call.name_span is not None
    assert text[slice(*call.name_span)] == "f"


CHECKS = [check for name, check in list(globals().items()) if name.startswith("check_")]
