"""Reward functions for TRL, as callables that pickle: settings only, and a name that reads well in the log.

Each takes what TRL hands to a reward function: `prompts`, `completions` and the columns of the data set, by keyword.
Where a rollout function forwards `rollout_messages`, these are scored instead of `completions`. `format` is that of
calls in texts, as in `parse_tool_calls`; calls that TRL has parsed (`tool_calls`) need none. Columns may be JSON
texts or lists: `gold` (calls by step), `tools` (OpenAI schemas), `facts` (texts and numbers), `answer` (a reference
answer). Prefer texts where rows differ: a table of lists gives every row the keys of all rows, filled with nulls. Those
are taken out of `tools`, as the rollout does; in `gold` nothing tells them from a null that was meant.
A row whose `gold` or `answer` is None is not scored: its reward is None, which is absent and not 0. `tools` None: calls
are valid if they parse. `facts` None: the facts are those of the row's tool results.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

from rewards.answers import verify_answers
from rewards.baselines import action_score, planner_score
from rewards.calls import ParsedCalls
from rewards.conversation import assistant_turns, closing_answer, parsed_turns, question_text, tool_results
from rewards.gold import Gold, as_gold
from rewards.judge import JudgeItem, JudgeResult, SummaryJudge, count_results
from rewards.outcomes import reference_rule
from rewards.process import ProcessWeights, process_score
from rewards.rule_judge import RuleJudge
from rewards.schema import ToolSchemaError, ToolSet
from rewards.verdicts import CompletenessJudge, SolvedJudge

Rewards = list[float | None]


@dataclass(frozen=True)
class ProcessReward:
    """HierR's process score of each rollout, in [0, 1]: the tool component. Columns `gold`, `tools`.

    Example:
        >>> gold = ['[[{"name": "now", "arguments": {}}]]']
        >>> ProcessReward()(completions=['<tool_call>{"name": "now"}</tool_call>'], gold=gold, tools=[None])
        [1.0]

    Reference: SLCA eq. 22.
    """

    weights: ProcessWeights = field(default_factory=ProcessWeights)
    format: str = "hermes"
    __name__: ClassVar[str] = "process"

    def __call__(self, completions: Sequence[Any], gold: Sequence[Any], **columns: Any) -> Rewards:
        def score(turns: list[ParsedCalls], wanted: Gold, tools: ToolSet | None) -> float:
            return process_score(turns, wanted, tools, self.weights).total

        return _by_gold(score, completions, gold, columns, self.format)


@dataclass(frozen=True)
class ReferenceReward:
    """1 where a rollout made exactly the gold calls, else 0: ToolPO's outcome by rule. Columns `gold`, `tools`.

    Reference: SLCA eq. 28.
    """

    format: str = "hermes"
    __name__: ClassVar[str] = "reference_rule"

    def __call__(self, completions: Sequence[Any], gold: Sequence[Any], **columns: Any) -> Rewards:
        return _by_gold(lambda *row: float(reference_rule(*row)), completions, gold, columns, self.format)


@dataclass(frozen=True)
class ActionReward:
    """The share of gold calls that were made: ToolPO's action reward. Columns `gold`, `tools`.

    Reference: SLCA appendix C.4.
    """

    format: str = "hermes"
    __name__: ClassVar[str] = "toolpo_action"

    def __call__(self, completions: Sequence[Any], gold: Sequence[Any], **columns: Any) -> Rewards:
        return _by_gold(lambda *row: action_score(*row).score, completions, gold, columns, self.format)


@dataclass(frozen=True)
class SummaryJudgeReward:
    """A judge's score of each final answer: the summary component. Column `facts` for the rule judge.

    The judge is asked about all rollouts of the batch side by side. Where TRL offers `log_metric`, the shares of
    answers out of form and of rollouts without a verdict are logged as `summary_judge/failed` and `/absent`.

    Args:
        judge: a `SummaryJudge`, or the rule judge.

    Example:
        >>> SummaryJudgeReward()(completions=["It is 4.", "Who knows?"], facts=[["4"], '["4"]'])
        [1.0, 0.0]

    Reference: SLCA appendix A.5.
    """

    judge: SummaryJudge | RuleJudge = field(default_factory=RuleJudge)
    format: str = "hermes"
    __name__: ClassVar[str] = "summary_judge"

    def __call__(self, completions: Sequence[Any], prompts: Sequence[Any] = (), **columns: Any) -> Rewards:
        items = _items(prompts, completions, columns, self.format)
        if isinstance(self.judge, RuleJudge):
            facts = _column("facts", columns.get("facts"), len(items))
            results = [self.judge(*item, facts=row) for item, row in zip(items, facts)]
        else:
            results = self.judge.batch(items)
        return _logged(results, self.__name__, columns)


@dataclass(frozen=True)
class SolvedReward:
    """1 where a judge finds the task solved, else 0: ToolPO's outcome by judge. Logs as `SummaryJudgeReward` does.

    Reference: SLCA appendix C.4.
    """

    judge: SolvedJudge
    format: str = "hermes"
    __name__: ClassVar[str] = "toolpo_solved"

    def __call__(self, completions: Sequence[Any], prompts: Sequence[Any] = (), **columns: Any) -> Rewards:
        return _logged(self.judge.batch(_items(prompts, completions, columns, self.format)), self.__name__, columns)


@dataclass(frozen=True)
class PlannerReward:
    """RLTR's reward: completeness by judge, less repeats and errors; -1 for broken calls, absent without a verdict.

    Reference: SLCA appendix C.4.
    """

    judge: CompletenessJudge
    format: str = "hermes"
    __name__: ClassVar[str] = "rltr_planner"

    def __call__(self, completions: Sequence[Any], prompts: Sequence[Any] = (), **columns: Any) -> Rewards:
        complete = _logged(self.judge.batch(_items(prompts, completions, columns, self.format)), self.__name__, columns)
        rollouts = _rollouts(completions, columns)
        return [
            planner_score(parsed_turns(rollout, self.format), share, tool_results(rollout)).total
            for rollout, share in zip(rollouts, complete)
        ]


@dataclass(frozen=True)
class AnswerReward:
    """RIVET's outcome: +1 where the boxed answer equals the reference, else -1. Column `answer`.

    Reference: RIVET section 3.3.
    """

    timeout: float = 5.0
    __name__: ClassVar[str] = "answer"

    def __call__(self, completions: Sequence[Any], answer: Sequence[str | None], **columns: Any) -> Rewards:
        rollouts = _rollouts(completions, columns)
        if len(answer) != len(rollouts):
            raise ValueError(f"answer: {len(answer)} cells for {len(rollouts)} rollouts")
        known = [index for index, cell in enumerate(answer) if cell is not None]
        texts, references = [_last_turn(rollouts[index]) for index in known], [str(answer[index]) for index in known]
        rows = [f"row {index}: answer" for index in known]
        verdicts: Iterator[bool] = iter(verify_answers(texts, references, self.timeout, rows))
        return [None if cell is None else (1.0 if next(verdicts) else -1.0) for cell in answer]


def _last_turn(rollout: Any) -> str:
    return next(reversed(assistant_turns(rollout)), "")


def _rollouts(completions: Sequence[Any], columns: dict[str, Any]) -> Sequence[Any]:
    messages = columns.get("rollout_messages")
    return completions if messages is None else messages


def _items(prompts: Sequence[Any], completions: Sequence[Any], columns: dict[str, Any], format: str) -> list[JudgeItem]:
    rollouts = _rollouts(completions, columns)
    questions = [question_text(prompt) for prompt in prompts] or [""] * len(rollouts)
    return [
        JudgeItem(question, tuple(tool_results(rollout)), closing_answer(rollout, format))
        for question, rollout in zip(questions, rollouts, strict=True)
    ]


def _by_gold(
    score: Callable[[list[ParsedCalls], Gold, ToolSet | None], float],
    completions: Sequence[Any],
    gold: Sequence[Any],
    columns: dict[str, Any],
    format: str,
) -> Rewards:
    rollouts = _rollouts(completions, columns)
    if len(gold) != len(rollouts):
        raise ValueError(f"gold: {len(gold)} cells for {len(rollouts)} rollouts")
    given = columns.get("tools")
    cells = None if given is None else [cell if isinstance(cell, str) else _without_nulls(cell) for cell in given]
    tools = _column("tools", cells, len(rollouts))
    rewards: Rewards = []
    for index, (rollout, steps, schemas) in enumerate(zip(rollouts, gold, tools)):
        if steps is None:
            rewards.append(None)
            continue
        try:
            toolset = None if schemas is None else _toolset(json.dumps(schemas))
        except (ToolSchemaError, TypeError) as error:
            raise ToolSchemaError(f"row {index}: {error}") from error
        rewards.append(score(parsed_turns(rollout, format), as_gold(steps, f"row {index}"), toolset))
    return rewards


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, (list, tuple)) else value


@lru_cache(maxsize=512)
def _toolset(text: str) -> ToolSet:
    # A group brings the same tools many times over.
    return ToolSet(json.loads(text))


def _column(name: str, cells: Sequence[Any] | None, size: int) -> list[Any]:
    """The cells of a column, decoded; None for each row where there is no such column."""
    if cells is None:
        return [None] * size
    if len(cells) != size:
        raise ValueError(f"{name}: {len(cells)} cells for {size} rollouts")
    decoded = []
    for index, cell in enumerate(cells):
        try:
            decoded.append(json.loads(cell) if isinstance(cell, str) else cell)
        except ValueError as error:
            raise ValueError(f"row {index}: {name}: not JSON: {error}") from error
        if not isinstance(decoded[-1], (list, tuple, type(None))):
            raise ValueError(f"row {index}: {name}: expected a list, got {type(decoded[-1]).__name__}")
    return decoded


def _logged(results: Sequence[JudgeResult], name: str, columns: dict[str, Any]) -> Rewards:
    log = columns.get("log_metric")
    if log is not None and results:
        counts = count_results(results)
        log(f"{name}/failed", counts.failed / counts.asked)
        log(f"{name}/absent", counts.absent / counts.asked)
    return [result.score for result in results]
