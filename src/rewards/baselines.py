"""The tool rewards of the baselines: ToolPO's action reward and RLTR's planner reward."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rewards._json import canonical
from rewards.calls import ParsedCalls
from rewards.gold import as_gold
from rewards.matching import Pair
from rewards.pairing import pair_calls
from rewards.process import Tools, read_turns, valid_blocks
from rewards.schema import as_toolset
from rewards.simulator import ToolResponse


@dataclass(frozen=True)
class ActionScore:
    """ToolPO's action reward with its counts.

    Attributes:
        correct: gold calls that were made.
        wanted: gold calls.
        score: `correct / wanted`.
    """

    correct: int
    wanted: int
    score: float


def action_score(
    turns: Sequence[str | ParsedCalls],
    gold: object,
    tools: Tools | None,
    *,
    row: str | None = None,
    format: str = "hermes",
) -> ActionScore:
    """ToolPO's action reward: the share of gold calls that were made.

        R_action = Σ_g C(g) / |G|,  C(g) = 1[a call of that name has all keys of g, with loosely equal values]

    Each predicted call counts for one gold call; the pairing is the one with most correct calls. What a call gives
    beyond the gold keys is not checked, nor are further calls, nor schemas. Without gold calls the score is 1 if
    nothing was called and else 0.

    Args:
        turns: assistant texts in order, or their parsed calls.
        gold: gold calls by step, as in `process_score`.
        tools: OpenAI-style tool schemas or a `ToolSet`, which say where null may stand for a missing key.
        row: what to call the row in an error.
        format: the format of calls in texts, as in `parse_tool_calls`.

    Returns:
        The counts and the score in [0, 1]. No model output raises.

    Raises:
        GoldError, ToolSchemaError, TypeError: as in `process_score`.

    Example:
        >>> gold = [[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]]
        >>> action_score(['<tool_call>{"name": "add", "arguments": {"a": "1"}}</tool_call>'], gold, tools=None)
        ActionScore(correct=1, wanted=2, score=0.5)

    Reference: SLCA appendix C.4; the pairing and the empty case are ours.
    """
    toolset = None if tools is None else as_toolset(tools)
    predicted = [call for step in read_turns(turns, format, toolset) for call in step.valid]
    expected = as_gold(gold, row)
    wanted = len(expected.flat)
    if not wanted:
        return ActionScore(0, 0, 0.0 if predicted else 1.0)
    pairs = pair_calls(predicted, expected, toolset, lambda pair: 1.0 * (pair.value == 1.0))
    correct = sum(map(_correct, pairs))
    return ActionScore(correct, wanted, correct / wanted)


def _correct(pair: Pair) -> bool:
    return pair.value == 1.0


@dataclass(frozen=True)
class PlannerScore:
    """RLTR's reward with its parts.

    Attributes:
        completeness: mean of the judge's samples; None where it was not judged.
        repeats: calls that repeat an earlier one.
        errors: tool results that are errors.
        violation: the calls are not well formed.
        total: the reward; None where it needs a completeness that is absent.
    """

    completeness: float | None
    repeats: int
    errors: int
    violation: bool
    total: float | None


def planner_score(
    turns: Sequence[str | ParsedCalls],
    completeness: float | None,
    tool_results: Sequence[ToolResponse | str] = (),
    *,
    repeat_penalty: float = 0.1,
    error_penalty: float = 0.2,
    format: str = "hermes",
) -> PlannerScore:
    """RLTR's reward of a planner.

        R = completeness − 0.1·repeats − 0.2·errors;  −1 where the format is violated

    A repeat has the name and arguments of an earlier call of the rollout. The format is violated where an attempt is
    no call, or opening and closing tags are not as many.

    Args:
        turns: assistant texts in order, or their parsed calls.
        completeness: in [0, 1], the mean of the judge's samples (`CompletenessJudge`); None = absent.
        tool_results: what the tools answered; a text is an error if it is a JSON object with a true "error".
        repeat_penalty: taken off for each repeat.
        error_penalty: taken off for each error.
        format: the format of calls in texts, as in `parse_tool_calls`.

    Returns:
        The parts and the total; a violation is −1 though completeness be absent. No model output raises.

    Raises:
        ValueError: completeness is not in [0, 1]; TypeError: `turns` is one text, or holds something else.

    Example:
        >>> call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        >>> planner_score([call, call], 1.0).total
        0.9
        >>> planner_score(['<tool_call>{"name": "add"'], None).total
        -1.0

    Reference: SLCA appendix C.4, RLTR; what a repeat, an error and a violation are is ours.
    """
    if completeness is not None and not 0 <= completeness <= 1:
        raise ValueError(f"completeness: expected a number in [0, 1] or None, got {completeness}")
    steps = read_turns(turns, format)
    calls = [(call.name, canonical(call.arguments)) for step in steps for call in step.valid]
    repeats = len(calls) - len(set(calls))
    errors = sum(map(is_error, tool_results))
    violation = any(not valid_blocks(step, None) == step.num_open == step.num_close for step in steps)
    total = None if completeness is None else completeness - repeat_penalty * repeats - error_penalty * errors
    return PlannerScore(completeness, repeats, errors, violation, -1.0 if violation else total)


def is_error(result: ToolResponse | str) -> bool:
    """Whether a tool's answer is an error: it says so, or it is a JSON object with a true "error".

    Example:
        >>> is_error('{"error": "unknown_tool", "field": ""}'), is_error('{"error": null}'), is_error("error")
        (True, False, False)
    """
    if isinstance(result, ToolResponse) and result.error is not None:
        return True
    try:
        value = json.loads(result.content if isinstance(result, ToolResponse) else result)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and bool(value.get("error"))
