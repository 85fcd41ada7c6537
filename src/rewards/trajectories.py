"""The row that everything else reads: what was asked, with which tools, what was said, what was right."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rewards.gold import Gold, as_gold

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Trajectory:
    """A task, or a task and what a model made of it.

    Attributes:
        messages: chat messages; a task ends with the user's.
        tools: OpenAI-style tool schemas.
        gold: gold calls by step; None = unknown, an empty `Gold` = no call is right.
        id: the row's name in its source.
        source: where it came from ("BFCL_v4_parallel.json:12").
        token_ids: the tokens, if it was sampled.
        mask: 1 where the model wrote the token, as long as `token_ids`.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    gold: Gold | None = None
    id: str = ""
    source: str = ""
    token_ids: tuple[int, ...] | None = None
    mask: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.mask is not None and len(self.mask) != len(self.token_ids or ()):
            raise ValueError(f"mask: {len(self.mask)} entries for {len(self.token_ids or ())} token_ids")

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the model's first."""
        first = next((i for i, m in enumerate(self.messages) if m.get("role") == "assistant"), len(self.messages))
        return self.messages[:first]

    def to_row(self) -> dict[str, Any]:
        """A row for a data set: `prompt`, and `tools` and `gold` as JSON texts.

        As nested columns, a table would give every row the keys of all rows and fill them with nulls.

        Example:
            >>> Trajectory(({"role": "user", "content": "Hi"},), gold=Gold(), id="r1").to_row()
            {'id': 'r1', 'source': '', 'prompt': [{'role': 'user', 'content': 'Hi'}], 'tools': '[]', 'gold': '[]'}
        """
        return {
            "id": self.id,
            "source": self.source,
            "prompt": [dict(message) for message in self.prompt],
            "tools": json.dumps(self.tools, ensure_ascii=False),
            "gold": None if self.gold is None else self.gold.to_json(),
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Trajectory":
        """The inverse of `to_row`, for a trajectory without answers.

        Raises:
            ValueError: `prompt` or `tools` is not what `to_row` writes; `GoldError`: nor is `gold`.
        """
        name = str(row.get("id", ""))
        prompt = row.get("prompt")
        if not isinstance(prompt, (list, tuple)) or not all(isinstance(message, Mapping) for message in prompt):
            raise ValueError(f"{name}: prompt: expected a list of messages, got {prompt!r:.80}")
        tools = row.get("tools") or ()
        try:
            tools = json.loads(tools) if isinstance(tools, str) else tools
        except ValueError as error:
            raise ValueError(f"{name}: tools: not JSON: {error}") from error
        if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
            raise ValueError(f"{name}: tools: expected a list of schemas, got {tools!r:.80}")
        gold = None if row.get("gold") is None else as_gold(row["gold"], name)
        return cls(tuple(prompt), tuple(tools), gold, name, str(row.get("source", "")))
