"""A dialogue cut into pairs of context and action, and splits that keep a conversation on one side."""

import hashlib
import json
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from rewards.conversation import content_text
from rewards.formats.chat import parse_message
from rewards.gold import Gold, as_gold
from rewards.lenient import written_calls
from rewards.trajectories import Message, Trajectory


@dataclass(frozen=True)
class ContextAction:
    """One decision of a dialogue: what had been said, and the calls that were right then.

    Attributes:
        context: the messages before the action, earlier calls and their results included.
        action: the assistant's message.
        tools: OpenAI-style tool schemas.
        gold: the action's calls, one step.
        id: the conversation's id, "#" and the number of the tool turn, from 1.
        conversation: the conversation's id.
        source: where the conversation came from.
    """

    context: tuple[Message, ...]
    action: Message
    tools: tuple[Message, ...]
    gold: Gold
    id: str = ""
    conversation: str = ""
    source: str = ""

    def to_row(self) -> dict[str, Any]:
        """A row with the columns of `Trajectory.to_row`, its prompt the whole context, and `conversation`."""
        return {
            "id": self.id,
            "source": self.source,
            "prompt": [dict(message) for message in self.context],
            "tools": json.dumps(self.tools, ensure_ascii=False),
            "gold": self.gold.to_json(),
            "conversation": self.conversation,
        }


def decompose(trajectory: Trajectory, first: int = 2) -> list[ContextAction]:
    """Cut a dialogue into pairs of context and action, from the second tool turn on.

    A tool turn is an assistant message that calls tools. The first is left out: as a task it is the whole dialogue.

    Args:
        trajectory: a dialogue; calls are `tool_calls` or Hermes text.
        first: number of the first tool turn taken, at least 1.

    Returns:
        One pair for each tool turn from `first` on, in order.

    Raises:
        ValueError: `first` is smaller than 1, or a call of a taken turn cannot be read.

    Example:
        >>> def turn(name):
        ...     return {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": {}}}]}
        >>> messages = ({"role": "user", "content": "?"}, turn("f"), {"role": "tool", "content": "1"}, turn("g"))
        >>> [(pair.id, len(pair.context), pair.gold.flat[0].name) for pair in decompose(Trajectory(messages, id="c"))]
        [('c#2', 3, 'g')]

    Reference: SLCA appendix C.1, phase 3.
    """
    if first < 1:
        raise ValueError(f"first: expected at least 1, got {first}")
    pairs, turn = [], 0
    for index, message in enumerate(trajectory.messages):
        if message.get("role") != "assistant" or not parse_message(message).calls:
            continue
        turn += 1
        if turn < first:
            continue
        name = trajectory.id or trajectory.source
        pair = ContextAction(
            trajectory.messages[:index], message, trajectory.tools, _gold(message, f"{name}: messages[{index}]"),
            f"{name}#{turn}", name, trajectory.source,
        )  # fmt: skip
        pairs.append(pair)
    return pairs


def _gold(message: Message, where: str) -> Gold:
    calls = written_calls(message)
    for call in calls:
        if call.status != "ok":
            raise ValueError(f"{where}: {call.reason}")
    return as_gold([[{"name": call.name, "arguments": call.arguments} for call in calls]])


Row = TypeVar("Row", Trajectory, ContextAction)


def opening(row: Trajectory | ContextAction) -> str:
    """What tells one conversation from another: its first user message, without case and spacing.

    Rows cut from one dialogue share it, and so do copies of a dialogue under other ids, or in another Unicode form; a
    row without a user message has its id, or else its source.

    Example:
        >>> opening(Trajectory(({"role": "user", "content": "What  is\\nUP?"},), id="7"))
        'what is up?'

    Reference: ours.
    """
    messages = row.messages if isinstance(row, Trajectory) else row.context
    first = next((message for message in messages if message.get("role") == "user"), {})
    content = first.get("content")
    # Parts that are no text tell conversations apart too.
    text = content_text(first) or (json.dumps(content, sort_keys=True) if content else "")
    if not text:
        return row.id or row.source if isinstance(row, Trajectory) else row.conversation
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def split_by_conversation(
    rows: Iterable[Row], eval_share: float, seed: int = 0, key: Callable[[Row], str] = opening
) -> tuple[list[Row], list[Row]]:
    """Split rows into train and eval so that no conversation is on both sides.

        eval if hash(seed, key(row)) / 2⁶⁴ < eval_share

    The side of a row depends on its conversation and the seed alone: rows added later, or another order, move nothing.

    Args:
        rows: trajectories, or pairs of `decompose`, or both mixed.
        eval_share: expected share of conversations in eval, in [0, 1].
        seed: another seed gives another split.
        key: names the conversation of a row.

    Returns:
        The rows of train and of eval, each in the given order.

    Raises:
        ValueError: `eval_share` is outside [0, 1].

    Example:
        >>> rows = [Trajectory(({"role": "user", "content": text},)) for text in ("a", "A ", "b", "c", "d")]
        >>> train, held = split_by_conversation(rows, 0.5)
        >>> set(map(opening, train)) & set(map(opening, held)), len(train) + len(held)
        (set(), 5)

    Reference: ours; SLCA appendix C.1 isolates its evaluation set before the split.
    """
    if not 0 <= eval_share <= 1:
        raise ValueError(f"eval_share: expected a share in [0, 1], got {eval_share}")
    train: list[Row] = []
    held: list[Row] = []
    for row in rows:
        digest = hashlib.blake2b(json.dumps([seed, key(row)]).encode(), digest_size=8).digest()
        (held if int.from_bytes(digest, "big") < eval_share * 2**64 else train).append(row)
    return train, held
