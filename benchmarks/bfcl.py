"""BFCL's single-turn rows as training and evaluation rows: questions, OpenAI schemas, gold calls, simulated answers."""

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.bfcl_checker import UNANSWERABLE
from benchmarks.scoring import result_facts

CATEGORIES = ("simple_python", "live_simple", "multiple", "parallel")
SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True)
class BfclRow:
    """One question with its schemas and gold, for the trainers and (last two fields) for BFCL's checker.

    Attributes:
        id: BFCL's name of the row.
        category: the file it stands in.
        prompt: chat messages, the first of them the system's.
        tools: OpenAI schemas, with the types of JSON Schema.
        gold: steps of calls; an argument may hold several accepted values (`rewards.gold.Accepted` as JSON).
        answer: plain calls that satisfy the gold, arguments that may be left out left out.
        functions: the schemas as BFCL writes them.
        ground_truth: the gold as BFCL writes it.
    """

    id: str
    category: str
    prompt: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    gold: list[list[dict[str, Any]]]
    answer: list[dict[str, Any]]
    functions: list[dict[str, Any]]
    ground_truth: list[dict[str, Any]]

    @property
    def held_out(self) -> bool:
        """Which half: by a hash of the function to be called, so that no function is called in both halves."""
        return hashlib.sha256(self.answer[0]["name"].encode()).digest()[0] % 2 == 1

    def columns(self) -> dict[str, Any]:
        """Columns of the dataset: what the trainer, the rewards and the omission guard read."""
        return {
            "id": self.id,
            "prompt": self.prompt,
            # As text: a table would fill each schema up with the keys of all others.
            "tools": json.dumps(self.tools),
            "gold": json.dumps(self.gold),
            "tool_required": bool(self.answer),
        }

    def conversation(self) -> list[dict[str, Any]]:
        """The row answered well: the gold calls in one step, the simulator's answers, and what they say."""
        from rewards.simulator import simulate

        calls = [{"type": "function", "function": call} for call in self.answer]
        answers = [{"role": "tool", "content": simulate(call, self.tools).content} for call in self.answer]
        return [
            *self.prompt,
            {"role": "assistant", "content": "", "tool_calls": calls},
            *answers,
            {"role": "assistant", "content": summary(answers)},
        ]


def summary(answers: Sequence[Mapping[str, Any]]) -> str:
    """A final answer that states each scalar of the tools' answers once."""
    facts = result_facts(answers)
    return f"The result is {', '.join(facts)}." if facts else "The call returned nothing."


def respond(text: str, tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The simulator's answers to the calls of one assistant turn, as `ToolRollout` asks for them."""
    from rewards.simulator import answer_calls

    return [answer.content for answer in answer_calls(text, tools)]


def data_folder() -> Path:
    """BFCL's data inside the installed package, which is not imported: it would make folders beside itself.

    Raises:
        FileNotFoundError: with the command that installs it.
    """
    spec = importlib.util.find_spec("bfcl_eval")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        return Path(folder) / "data"
    raise FileNotFoundError("no BFCL data: run `pip install --no-deps bfcl-eval`, or `make demo-real`")


def load_rows(categories: Iterable[str] = CATEGORIES) -> list[BfclRow]:
    """All rows of `categories`, in their files' order, without the few whose own gold BFCL's checker rejects."""
    return [row for category in categories for row in read_category(category) if row.id not in UNANSWERABLE]


def read_category(category: str) -> list[BfclRow]:
    """All rows of one file of BFCL."""
    from rewards.readers import read_bfcl

    file = data_folder() / f"BFCL_v4_{category}.json"
    gold_file = file.parent / "possible_answer" / file.name
    questions = {row["id"]: row for row in map(json.loads, file.read_text(encoding="utf-8").splitlines())}
    answers = {row["id"]: row for row in map(json.loads, gold_file.read_text(encoding="utf-8").splitlines())}
    rows = []
    for task in read_bfcl(file, gold_file):
        prompt = [dict(message) for message in task.prompt]
        if prompt[0]["role"] != "system":
            # Else the template introduces the model as another one.
            prompt.insert(0, {"role": "system", "content": SYSTEM})
        assert task.gold is not None  # read_bfcl reports a row without an answer
        rows.append(
            BfclRow(
                id=task.id,
                category=category,
                prompt=prompt,
                tools=[dict(tool) for tool in task.tools],
                gold=json.loads(task.gold.to_json()),
                answer=_shortest(task.gold),
                functions=questions[task.id]["function"],
                ground_truth=answers[task.id]["ground_truth"],
            )
        )
    return rows


def _shortest(gold: Any) -> list[dict[str, Any]]:
    """Plain calls that satisfy the gold, without what may be left out of it."""
    from rewards.accepted import Accepted

    def needed(arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in arguments.items() if not (isinstance(v, Accepted) and v.optional)}

    steps = [tuple(call._replace(arguments=needed(call.arguments)) for call in step) for step in gold.steps]
    return [call for step in replace(gold, steps=tuple(steps)).calls() for call in step]


def fits(row: BfclRow, tokenizer: Any, max_prompt: int, max_call: int) -> bool:
    """True if the prompt with its schemas, and the gold calls as text, stay within so many tokens."""
    prompt = tokenizer.apply_chat_template(row.prompt, tools=row.tools, add_generation_prompt=True, tokenize=False)
    calls = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in row.answer)
    lengths = [len(ids) for ids in tokenizer([prompt, calls], add_special_tokens=False)["input_ids"]]
    return lengths[0] <= max_prompt and lengths[1] <= max_call
