"""Reward functions of the main job, shared by the embedded office and by real rows.

Both rewards are picklable callables with TRL's signature. Columns they read: `gold` (JSON, steps of calls),
`tools` (JSON, OpenAI schemas), `facts` (JSON, list of strings; optional). Where `ToolRollout` forwards
`rollout_messages` (one chat list a rollout), these are scored instead of `completions`.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rewards.conversation import assistant_turns

Message = Mapping[str, Any]


@dataclass(frozen=True)
class RolloutScore:
    """What one rollout earned, without noise: the columns of the closing table."""

    process: float
    success: float
    tool_turns: int
    calls: int
    redundant: int
    summary: float


def final_answer(completion: Sequence[Message] | str) -> str:
    """Text of the last message if it is an assistant's and calls no tool, else "" (there was no summary)."""
    if isinstance(completion, str):
        return completion
    last = completion[-1] if completion else {}
    is_answer = last.get("role") == "assistant" and not last.get("tool_calls")
    text = (last.get("content") or "") if is_answer else ""
    return "" if "<tool_call>" in text else text


def states(answer: str, fact: str) -> bool:
    """True if `answer` holds `fact` as whole words, in any case: "4" is not stated by "42"."""
    return re.search(rf"(?<!\w){re.escape(fact.strip())}(?!\w)", answer, re.IGNORECASE) is not None


def stated_share(answer: str, facts: Sequence[str]) -> float:
    """Share of `facts` that `answer` states. Without facts, 1 for any answer and 0 for none."""
    if not facts:
        return float(bool(answer.strip()))
    return sum(states(answer, fact) for fact in facts) / len(facts)


def _leaves(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [] if value is None or value == "" else [str(value)]


def result_facts(completion: Sequence[Message] | str) -> list[str]:
    """Facts for rows that bring none: the scalars of the rollout's own tool results, each once."""
    facts: dict[str, None] = {}
    for message in completion if not isinstance(completion, str) else ():
        if message.get("role") == "tool":
            try:
                value = json.loads(message.get("content") or "")
            except (ValueError, TypeError):
                value = message.get("content")
            facts.update(dict.fromkeys(_leaves(value)))
    return list(facts)


def summary_score(completion: Sequence[Message] | str, facts: Sequence[str] | None) -> float:
    """Rule judge in [0, 1]: the share of gold facts (or, without them, of tool results) the answer states."""
    return stated_share(final_answer(completion), result_facts(completion) if facts is None else facts)


def score_rollout(
    completion: Sequence[Message] | str,
    gold: list[list[dict[str, Any]]],
    tools: list[dict[str, Any]],
    facts: Sequence[str] | None = None,
) -> RolloutScore:
    """Every metric of one rollout, from its messages alone."""
    from rewards import parse_tool_calls, process_score

    turns = [parse_tool_calls(turn) for turn in assistant_turns(completion)]
    score = process_score(turns, gold, tools)
    return RolloutScore(
        process=score.total,
        success=float(score.success),
        tool_turns=score.tool_turns,
        calls=sum(len(turn.calls) for turn in turns),
        redundant=score.redundant_calls,
        summary=summary_score(completion, facts),
    )


def _decoded(column: Sequence[Any] | None, size: int) -> list[Any]:
    """A dataset column whose cells are JSON text; a missing column or cell is None."""
    return [json.loads(cell) if isinstance(cell, str) else cell for cell in column or [None] * size]


class ProcessReward:
    """`R_tool`: the HierR process score of a rollout (SLCA eq. 22), in [0, 1]."""

    __name__ = "process"

    def __call__(
        self,
        completions: Sequence[Any],
        gold: Sequence[str],
        tools: Sequence[str],
        rollout_messages: Sequence[Any] | None = None,
        **_: Any,
    ) -> list[float]:
        from rewards import process_score

        rows = zip(rollout_messages or completions, _decoded(gold, len(gold)), _decoded(tools, len(tools)), strict=True)
        return [process_score(assistant_turns(row), steps, schemas).total for row, steps, schemas in rows]


class SummaryReward:
    """`R_sum`: the rule judge's score plus `sigma` times a standard normal, drawn once per rollout.

    The generator belongs to the callable: two arms with one seed meet the same noise in the same order.
    """

    __name__ = "summary"

    def __init__(self, sigma: float = 0.0, seed: int = 0) -> None:
        if sigma < 0:
            raise ValueError(f"sigma must be >= 0, got {sigma}")
        self.sigma = sigma
        self.generator = random.Random(seed)

    def __call__(
        self,
        completions: Sequence[Any],
        facts: Sequence[Any] | None = None,
        rollout_messages: Sequence[Any] | None = None,
        **_: Any,
    ) -> list[float]:
        rows = list(rollout_messages or completions)
        scores = [summary_score(*pair) for pair in zip(rows, _decoded(facts, len(rows)), strict=True)]
        return [score + self.sigma * self.generator.gauss(0.0, 1.0) for score in scores]


class ScoreLog:
    """Counts for nothing and watches everything: keeps the clean scores of the last batch and of each one's mean."""

    __name__ = "score_log"

    def __init__(self) -> None:
        self.scores: list[RolloutScore] = []
        self.messages: list[Any] = []
        self.history: list[dict[str, float]] = []

    def __call__(
        self,
        completions: Sequence[Any],
        gold: Sequence[str],
        tools: Sequence[str],
        facts: Sequence[Any] | None = None,
        rollout_messages: Sequence[Any] | None = None,
        **_: Any,
    ) -> list[float]:
        self.messages = list(rollout_messages or completions)
        size = len(self.messages)
        columns = (_decoded(column, size) for column in (gold, tools, facts))
        self.scores = [score_rollout(*row) for row in zip(self.messages, *columns, strict=True)]
        self.history.append(mean_scores(self.scores))
        return [0.0] * size


def mean_scores(scores: Sequence[RolloutScore]) -> dict[str, float]:
    """Mean of every field over the rollouts."""
    return {
        field.name: sum(getattr(score, field.name) for score in scores) / max(len(scores), 1)
        for field in fields(RolloutScore)
    }
