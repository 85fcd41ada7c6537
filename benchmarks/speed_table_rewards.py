"""Rows of `rewards`: reading calls from text, and the two scores beside BFCL's checker. Text has no floor."""

import ast
import importlib.util
import json
import random
import re
from collections.abc import Callable
from typing import Any

from benchmarks.speed_table_case import Case, Made
from rewards import (
    ToolSet,
    action_score,
    as_gold,
    parse_llama3_json,
    parse_mistral,
    parse_pythonic,
    parse_qwen3_coder,
    parse_tool_calls,
    planner_score,
    process_score,
    reference_rule,
)

Call = dict[str, Any]
FUNCTION: Call = {
    "name": "book_flight",
    "description": "Book a flight.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "seats": {"type": "integer"},
            "refundable": {"type": "boolean"},
        },
        "required": ["city", "seats"],
    },
}


def calls(count: int) -> list[Call]:
    """Calls of one function, no two alike."""
    return [
        {"name": "book_flight", "arguments": {"city": f"City {i}", "seats": i, "refundable": i % 2 == 0}}
        for i in range(count)
    ]


def hermes(made: list[Call]) -> str:
    """The calls as Qwen writes them."""
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in made)


def _arguments(call: Call) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in call["arguments"].items())


def _python(call: Call) -> str:
    return f"{call['name']}({_arguments(call)})"


def _coder(call: Call) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in call["arguments"].items())
    return f"<tool_call>\n<function={call['name']}>\n{inside}</function>\n</tool_call>"


WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "parse_tool_calls": hermes,
    "parse_qwen3_coder": lambda made: "\n".join(map(_coder, made)),
    "parse_llama3_json": lambda made: "; ".join(
        json.dumps({"name": call["name"], "parameters": call["arguments"]}) for call in made
    ),
    "parse_mistral": lambda made: f"[TOOL_CALLS]{json.dumps(made)}",
    "parse_pythonic": lambda made: f"[{', '.join(map(_python, made))}]",
}
READERS = {
    "parse_tool_calls": parse_tool_calls,
    "parse_qwen3_coder": parse_qwen3_coder,
    "parse_llama3_json": parse_llama3_json,
    "parse_mistral": parse_mistral,
    "parse_pythonic": parse_pythonic,
}


def by_regex(text: str) -> list[Call]:
    """What is written first for Hermes: a pattern and a JSON decoder."""
    return [json.loads(body) for body in re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL)]


def _regex_coder(text: str) -> list[Call]:
    found = []
    for name, body in re.findall(r"<function=(.*?)>(.*?)</function>", text, re.DOTALL):
        pairs = re.findall(r"<parameter=(.*?)>\n(.*?)\n</parameter>", body, re.DOTALL)
        found.append({"name": name, "arguments": dict(pairs)})
    return found


def _split(text: str) -> list[Call]:
    made = [json.loads(part) for part in text.split("; ")]
    return [{"name": call["name"], "arguments": call["parameters"]} for call in made]


def _syntax(text: str) -> list[Call]:
    tree: Any = ast.parse(text, mode="eval")
    return [
        {"name": node.func.id, "arguments": {word.arg: ast.literal_eval(word.value) for word in node.keywords}}
        for node in tree.body.elts
    ]


TWINS: dict[str, tuple[str, Callable[[str], list[Call]]]] = {
    "parse_tool_calls": ("regex and `json.loads`", by_regex),
    "parse_qwen3_coder": ("two regexes", _regex_coder),
    "parse_llama3_json": ("`split` and `json.loads`", _split),
    "parse_mistral": ("`json.loads`", lambda text: list(json.loads(text.removeprefix("[TOOL_CALLS]")))),
    "parse_pythonic": ("`ast.parse`", _syntax),
}


def parse_case(name: str) -> Case:
    """A reader beside what is written first for its format, which accepts what is no call as well."""
    twin, first = TWINS[name]

    def make(count: int) -> Made:
        text, read = WRITERS[name](calls(count)), READERS[name]

        def ours() -> list[Call]:
            return [{"name": call.name, "arguments": dict(call.arguments)} for call in read(text).calls]

        return Made(ours, lambda: first(text))

    covers = {"parse_tool_calls": ("rewards.parse_tool_calls", "rewards.parse_hermes")}
    return Case(
        covers=covers.get(name, (f"rewards.{name}",)), make=make, largest=400, unit="calls", naive=twin,
        note="the twin takes the text at its word; here what is no call, in a call or around it, is looked for",
    )  # fmt: skip


class Answer:
    """Right calls in another order than gold's, as text for ours and as calls for BFCL's checker."""

    def __init__(self, count: int) -> None:
        made = calls(count)
        self.gold = as_gold([made])
        self.said = random.Random(0).sample(made, count)
        self.text = hermes(self.said)
        self.tools = ToolSet([{"type": "function", "function": FUNCTION}])
        self.wanted = made

    def every_pair(self) -> float:
        """Every call of gold looked for among all that were made."""
        found = by_regex(self.text)
        return sum(any(one == wanted for one in found) for wanted in self.wanted) / len(self.wanted)

    def peers(self) -> dict[str, Callable[[], float]]:
        """BFCL's checker, which is given the calls and need not read them."""
        if importlib.util.find_spec("bfcl_eval") is None:
            return {}
        from benchmarks.bfcl_checker import bfcl_valid

        parameters = {**FUNCTION["parameters"], "type": "dict"}
        truth = [{call["name"]: {key: [value] for key, value in call["arguments"].items()}} for call in self.wanted]
        functions = [{**FUNCTION, "parameters": parameters}]
        return {"BFCL, checker": lambda: float(bfcl_valid(functions, self.said, truth, "parallel"))}


def _score(name: str, value: Callable[[Answer], float], with_peer: bool = True) -> Case:
    """A score of calls that all have one name and stand in another order than gold's: the dearest case to pair."""

    def make(count: int) -> Made:
        it = Answer(count)
        return Made(lambda: value(it), it.every_pair, peers=it.peers() if with_peer else {})

    return Case(
        covers=(f"rewards.{name}",), make=make, largest=100, unit="calls in another order",
        naive="regex, every pair compared",
        note="calls are checked too, which the twin leaves out; linear where calls are right; wrong ones of one name "
        "are compared with all of that name",
    )  # fmt: skip


CASES: tuple[Case, ...] = (
    *map(parse_case, READERS),
    _score("process_score", lambda it: process_score([it.text], it.gold, it.tools).total),
    _score("reference_rule", lambda it: float(reference_rule([it.text], it.gold, it.tools))),
    _score("action_score", lambda it: action_score([it.text], it.gold, it.tools).score),
    _score("planner_score", lambda it: planner_score([it.text], 1.0).total, with_peer=False),
)
