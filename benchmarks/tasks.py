"""Templated office tasks with gold calls, gold facts and two habits.

Every task knows an *efficient* way (its gold steps) and a *wasteful* one (a redundant call, serial calls where
one parallel step would do), and both end in the same, good summary: the conflict of SLCA's case study (appendix
D.4). Tasks that need no call have one way only: a row without a tool segment is absent from SLCA's tool group, so
no comparison inside that group could ever tell a needless call from none.
"""

import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.office import ITEMS, LINKS, LOOKUPS, PEOPLE, ROOMS, TODAY, respond, schemas_json

Call = dict[str, Any]
Steps = list[list[Call]]
MIX = {"single": 0.30, "parallel": 0.35, "sequential": 0.25, "none": 0.10}
HELD_OUT = 0.25


@dataclass(frozen=True)
class Task:
    """One templated question of one day, with both ways to answer it."""

    kind: str
    question: str
    gold: Steps
    waste: Steps
    answer: str
    facts: list[str]
    day: int = field(default=TODAY, compare=False)

    def row(self) -> dict[str, Any]:
        """Columns of the dataset: what the trainer, the rewards and the omission guard read."""
        return {
            "prompt": [{"role": "user", "content": self.question}],
            "tools": schemas_json(),
            "gold": json.dumps(self.gold),
            "facts": json.dumps(self.facts),
            "tool_required": bool(self.gold),
            "kind": self.kind,
        }

    def messages(self, wasteful: bool = False) -> list[dict[str, Any]]:
        """The whole conversation, tools answered: gold steps, or the wasteful ones, then the same summary."""
        messages = list(self.row()["prompt"])
        for step in self.waste if wasteful else self.gold:
            calls = [{"type": "function", "function": call} for call in step]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            for call in step:
                content = respond(call["name"], call["arguments"], self.day)
                messages.append({"role": "tool", "name": call["name"], "content": content})
        return [*messages, {"role": "assistant", "content": self.answer}]


def _call(name: str, **arguments: Any) -> Call:
    return {"name": name, "arguments": arguments}


def _lookup(rng: random.Random, tool: str | None = None, key: str | None = None) -> tuple[Call, str, str]:
    """A random lookup: its call, its key, and "phone of Ada"."""
    tool = tool or rng.choice(list(LOOKUPS))
    argument, noun, keys = LOOKUPS[tool]
    key = key or rng.choice(keys)
    return _call(tool, **{argument: key}), key, f"{noun} of {key}"


def _said(call: Call, phrase: str, day: int) -> tuple[str, str]:
    """The sentence that states a lookup's result, and the result."""
    value = respond(call["name"], call["arguments"], day)
    return f"The {phrase} is {value}.", value


def _single(rng: random.Random, day: int) -> Task:
    form = rng.random()
    if form < 0.6:
        call, key, phrase = _lookup(rng)
        answer, fact = _said(call, phrase, day)
        waste = [[_call("find", query=key), call]]
        return Task("single", f"What is the {phrase}?", [[call]], waste, answer, [fact], day)
    if form < 0.8:
        room, hour = rng.choice(ROOMS), rng.randint(8, 18)
        call = _call("book_room", room=room, hour=hour)
        code = respond("book_room", call["arguments"], day)
        answer, waste = f"The code for {room} is {code}.", [[_call("find", query=room), call]]
        return Task("single", f"Book {room} at {hour}.", [[call]], waste, answer, [code], day)
    a, b = rng.randint(10, 49), rng.randint(10, 49)
    call = _call("add", a=a, b=b)
    return Task("single", f"What is {a} plus {b}?", [[call]], [[call, call]], f"It is {a + b}.", [str(a + b)], day)


def _parallel(rng: random.Random, day: int) -> Task:
    (one, key, first), (two, _, second) = _lookup(rng), _lookup(rng)
    while two == one:
        two, _, second = _lookup(rng)
    said = [_said(one, first, day), _said(two, second, day)]
    question = f"What is the {first} and the {second}?"
    waste = [[_call("find", query=key)], [one], [two]]
    return Task(
        "parallel",
        question,
        [[one, two]],
        waste,
        " ".join(s for s, _ in said),
        [fact for _, fact in said],
        day,
    )


def _sequential(rng: random.Random, day: int) -> Task:
    tool = rng.choice(list(LINKS))
    argument, role, keys = LINKS[tool]
    key = rng.choice(keys)
    link = _call(tool, **{argument: key})
    person = respond(tool, link["arguments"], day)
    call, _, phrase = _lookup(rng, rng.choice(["get_phone", "get_desk"]), person)
    said, fact = _said(call, phrase, day)
    question = f"What is the {LOOKUPS[call['name']][1]} of the {role} of {key}?"
    waste = [[_call("find", query=key), link], [call]]
    return Task("sequential", question, [[link], [call]], waste, said, [person, fact], day)


def _none(rng: random.Random, day: int) -> Task:
    person, item = rng.choice(PEOPLE), rng.choice(ITEMS)
    if rng.random() < 0.5:
        return Task("none", f"Say hello to {person}.", [], [], f"Hello {person}!", [person], day)
    return Task(
        "none",
        f"Thank {person} for the {item}.",
        [],
        [],
        f"Thank you {person} for the {item}!",
        [person, item],
        day,
    )


KINDS: dict[str, Callable[[random.Random, int], Task]] = {
    "single": _single,
    "parallel": _parallel,
    "sequential": _sequential,
    "none": _none,
}


def held_out(question: str) -> bool:
    """Whether a question belongs to the evaluation split: decided by its text, so no run can mix the two."""
    return zlib.crc32(question.encode()) % 1000 < 1000 * HELD_OUT


def make_tasks(count: int, seed: int, *, split: str = "train", days: int = 0) -> list[Task]:
    """`count` random tasks of one split, kinds in the proportions of `MIX`.

    Args:
        count: how many.
        seed: seed of the draw.
        split: "train" or "eval"; no question is in both.
        days: 0 asks about `TODAY`; otherwise each task is of a random later day up to this one.

    Raises:
        ValueError: an unknown split.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split must be 'train' or 'eval', got {split!r}")
    rng = random.Random(seed)
    tasks: list[Task] = []
    while len(tasks) < count:
        kind = rng.choices(list(MIX), list(MIX.values()))[0]
        task = KINDS[kind](rng, rng.randint(1, days) if days else TODAY)
        if held_out(task.question) == (split == "eval"):
            tasks.append(task)
    return tasks
