"""What the fuzzer begins with: texts of every format, the ugly ones known by name, and the tokens of the formats."""

import json

FORMATS = ("hermes", "chat", "qwen3_coder", "llama3_json", "mistral", "pythonic")
_ADD = {"name": "add", "arguments": {"a": 1}}
_LOOK = {"name": "maps.look", "arguments": {"x": [1, "b", None]}}
_TRIANGLE = {"name": "triangle_area", "arguments": {"base": 10, "height": 5.0, "unit": "cm", "sides": {"a": [3, 4]}}}


def _hermes(*calls: object) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def _raw(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


_XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
_ENTRIES = [{"type": "function", "id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}]
CORPUS = (
    _hermes(_ADD, _LOOK),
    "I will add.\n" + _hermes(_TRIANGLE) + "\nDone.",
    _raw(json.dumps([_ADD, _LOOK])),
    _raw(json.dumps(_ADD) + "\n" + json.dumps(_LOOK)),
    _raw('{"name": "add", "parameters": {"a": 1}}'),
    _raw('{"name": "add", "arguments": "{\\"a\\": 1, \\"\\\\u00e9\\": {}}"}'),
    _raw('{"name": "add", "arguments": {"a": "}}{{ </tool_call> <tool_call>"}}'),
    _raw('{"name": "add", "arguments": {"a": 1, "a": 2}}'),
    _raw('{"name": "add", "arguments": {"a": NaN, "b": -Infinity, "c": 1e999, "d": 12345678901234567890}}'),
    _raw('{"name": "\\u0061dd", "arguments": {"\\ud83d\\ude00": "\\ud800", "a": true}}'),
    _raw("{'name': 'add', 'arguments': {'a': 1,}, /* no */ }"),
    "<tool_call>" + json.dumps(_ADD),
    "<think>I may <tool_call>" + json.dumps(_LOOK) + "</tool_call></think>" + _hermes(_ADD),
    "so</think>" + _hermes(_ADD),
    _raw("[" * 200 + "]" * 200),
    json.dumps({"role": "assistant", "content": None, "tool_calls": _ENTRIES}),
    json.dumps(_ENTRIES),
    json.dumps({"function_call": _ENTRIES[0]["function"]}),
    _XML + "\n" + _XML.replace("1", "<b>"),
    '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "maps.look", "parameters": {"x": []}}',
    '{"type": "function", "name": "add", "parameters": {"a": "1"}}',
    '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "maps.look", "arguments": {}}]',
    '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]maps.look[CALL_ID]abc123456[ARGS]{"x": [1]}',
    '[add(a=1), maps.look(x=[1, "b", None])]',
    "[triangle_area(base=10, height=-5., unit='c\\'m', sides={'a': (3, 4)}, ok=True)]",
    "<|python_start|>[add(a='\\x41\\n')]<|python_end|>",
    "<response_quality><rating>very poor</rating></response_quality>",
    "<think>good</think><response_quality>\n<rating> Excellent </rating>\n</response_quality>",
)
TOKENS = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]",
    "[CALL_ID]", "<|python_tag|>", "<|python_start|>", "<function=", "</function>", "<parameter=a>", "</parameter>",
    "<rating>", "</rating>", "<response_quality>", "</response_quality>", "good", "very poor", "{", "}", "[", "]",
    "(", ")", "<", ">", '"', "'", '\\"', "\\", "\\u", "\\ud800", "\\ud83d\\ude00", "\\x4", "\\N{DASH}", ",", ":", ";",
    "=", "\n", "\r\n", "\t", " ", "\0", "\x1c", "\u2028", "\ufeff", "\u00a0", "\u202e", "\ud800", "\udc00", "é",
    "e\u0301", "İ", "ß", "１", "٣", "😀", "null", "true", "True", "None", "NaN", "Infinity", "-", "0", "01", "1.",
    "-0.0", "1e999", "1e-999", "9" * 400, "0x1", "1_0", "```json\n", "```", "//", "/*", "*/", "#", '"name"', '"add"',
    '"arguments"', '"parameters"', '"function"', '"tool_calls"', "add", "maps.look", '{"name": "add"}', "[add(a=1)]",
)  # fmt: skip
