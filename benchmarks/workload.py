"""What the main job works on: the embedded office, BFCL's questions, or a file of rows."""

import json
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """Rows to train on and to be judged on, and conversations to warm up with.

    Attributes:
        train: rows for the race; see `benchmarks.scoring` for their columns.
        held_out: rows for evaluation.
        conversations: messages and tool schemas of each warm-up conversation, efficient and wasteful by halves.
        own_tools: rows bring their own tools, answered by the simulator.
        values: words that a tokenizer made for this workload keeps apart.
    """

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    conversations: list[tuple[list[Message], list[dict[str, Any]]]]
    own_tools: bool
    values: tuple[str, ...] = ()

    def fitting(self, tokenizer: Any, max_prompt: int, held_out: int) -> "tuple[Workload, int]":
        """Without the rows whose prompt has more than `max_prompt` tokens, and their number.

        Raises:
            ValueError: no row is left to train on, or none to be judged by.
        """

        def fits(row: dict[str, Any]) -> bool:
            ids = tokenizer.apply_chat_template(
                row["prompt"], tools=json.loads(row["tools"]) or None, add_generation_prompt=True, return_dict=False
            )
            return len(ids) <= max_prompt

        if not self.own_tools:
            return self, 0
        train, test = list(filter(fits, self.train)), list(filter(fits, self.held_out))
        kept = [pair for pair in self.conversations if fits({"prompt": pair[0], "tools": json.dumps(pair[1])})]
        if not (train and test and kept):
            raise ValueError(f"max_prompt: too few rows of {len(self.conversations)} have at most {max_prompt} tokens")
        dropped = len(self.train) + len(self.held_out) - len(train) - len(test)
        return replace(self, train=train, held_out=test[:held_out], conversations=kept), dropped


def office(*, train: int = 600, held_out: int = 96, warm: int = 4000, seed: int = 0) -> Workload:
    """The embedded office; warm-up conversations are of other days than the questions of the race."""
    from benchmarks.office import ITEMS, PEOPLE, ROOMS, schemas_json
    from benchmarks.tasks import make_tasks

    tools = json.loads(schemas_json())
    rng = random.Random(seed)
    tasks = make_tasks(warm, seed, days=365)
    return Workload(
        train=[task.row() for task in make_tasks(train, seed + 1)],
        held_out=[task.row() for task in make_tasks(held_out, seed + 2, split="eval")],
        conversations=[(task.messages(wasteful=rng.random() < 0.5), tools) for task in tasks],
        own_tools=False,
        values=(*PEOPLE, *ITEMS, *ROOMS),
    )


def real(source: str, *, seed: int = 0) -> Workload:
    """Real rows, answered by the simulator.

    Args:
        source: "bfcl", or a file of JSON lines with `prompt` (messages), `tools` (OpenAI schemas) and `gold` (steps of
            calls), each a value or its JSON text; `facts` and `tool_required` are optional.
        seed: of the order and of the warm-up's habits.

    Raises:
        ValueError: a line that is not such a row; the message names file, line and column.
    """
    pairs = _bfcl() if source == "bfcl" else _file(Path(source))
    rng = random.Random(seed)
    train, test, conversations = [], [], []
    for row, messages, is_held_out in pairs:
        if is_held_out:
            test.append(row)
            continue
        train.append(row)
        conversations.append((serialised(messages) if rng.random() < 0.5 else messages, json.loads(row["tools"])))
    if not train or not test:
        raise ValueError(f"{source}: {len(train)} rows to train on and {len(test)} to judge by; both are needed")
    rng.shuffle(train)
    rng.shuffle(test)
    rng.shuffle(conversations)
    return Workload(train, test, conversations, own_tools=True)


def _bfcl() -> Iterator[tuple[dict[str, Any], list[Message], bool]]:
    from benchmarks.bfcl import load_rows

    for row in load_rows():
        yield {**row.columns(), "kind": row.category}, row.conversation(), row.held_out


def _file(path: Path) -> Iterator[tuple[dict[str, Any], list[Message], bool]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            cells = json.loads(line)
            row = {name: _decoded(cells[name]) for name in ("prompt", "tools", "gold")}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{where}: not a row with prompt, tools and gold: {error!r}") from error
        columns = {
            "prompt": row["prompt"],
            "tools": json.dumps(row["tools"]),
            "gold": json.dumps(row["gold"]),
            "tool_required": bool(cells.get("tool_required", row["gold"])),
            "kind": str(cells.get("kind", "all")),
        }
        if "facts" in cells:
            columns["facts"] = json.dumps(_decoded(cells["facts"]))
        is_held_out = zlib.crc32(json.dumps(row["prompt"]).encode()) % 4 == 0
        yield columns, answered(row["prompt"], row["gold"], row["tools"]), is_held_out


def _decoded(cell: Any) -> Any:
    return json.loads(cell) if isinstance(cell, str) else cell


def answered(
    prompt: Sequence[Mapping[str, Any]], gold: Sequence[Sequence[dict[str, Any]]], tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """A row answered well: its gold steps, the simulator's answers, and a summary that states them."""
    from benchmarks.bfcl import summary
    from rewards import simulate

    messages: list[Message] = [dict(message) for message in prompt]
    results: list[Message] = []
    for step in gold:
        calls = [{"type": "function", "function": call} for call in step]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        answers = [{"role": "tool", "content": simulate(call, tools).content} for call in step]
        messages += answers
        results += answers
    return [*messages, {"role": "assistant", "content": summary(results)}]


def serialised(messages: Sequence[Message]) -> list[Message]:
    """The wasteful way through a conversation: one call at a time, and its very first call made twice.

    The second copy stands beside the first where the step has one call, and in a step of its own where it has
    several: either way the first step has another number of calls than gold's.
    """
    wasteful: list[Message] = []
    first = True
    for at, message in enumerate(messages):
        calls = message.get("tool_calls") or []
        answers = messages[at + 1 : at + 1 + len(calls)]
        if message["role"] != "tool" and not calls:
            wasteful.append(message)
        for call, answer in zip(calls, answers, strict=True):
            alone = first and len(calls) == 1
            step = [{**message, "tool_calls": [call] * (1 + alone)}, *[answer] * (1 + alone)]
            wasteful += step * (1 + (first and not alone))
            first = False
    return wasteful
