"""HierR's process score: how well a rollout's tool calls match the gold ones, in five parts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from rewards._frozen import frozen
from rewards.calls import ParsedCalls, ToolCall, format_parser
from rewards.formats.qwen_xml import type_arguments
from rewards.gold import as_gold
from rewards.matching import Pair
from rewards.pairing import pair_calls
from rewards.schema import ToolSet, as_toolset

Tools = Iterable[Mapping[str, Any]] | ToolSet
# The threshold is a round number and the score a sum of floats.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class ProcessWeights:
    """Weights of the five parts; not negative, and they sum to 1 (SLCA eq. 22).

    Example:
        >>> ProcessWeights(format=0.5)
        Traceback (most recent call last):
        ValueError: ProcessWeights: the weights must sum to 1, got 1.4
    """

    format: float = 0.10
    name: float = 0.25
    key: float = 0.15
    value: float = 0.20
    parallel: float = 0.30

    def __post_init__(self) -> None:
        for part in fields(self):
            if not getattr(self, part.name) >= 0:
                raise ValueError(f"ProcessWeights.{part.name}: expected >= 0, got {getattr(self, part.name)}")
        total = math.fsum(getattr(self, part.name) for part in fields(self))
        if not abs(total - 1.0) <= _ROUNDING:
            raise ValueError(f"ProcessWeights: the weights must sum to 1, got {total:.12g}")

    def of_pair(self, pair: Pair) -> float | Any:
        """What pairing adds up: key and value weighted, ties told apart by value, so that order changes nothing."""
        key, value = (self.key, self.value) if self.key + self.value else (1.0, 1.0)
        return key * pair.key + (value + _ROUNDING) * pair.value


@dataclass(frozen=True)
class ProcessScore:
    """The process score with its parts, all in [0, 1].

    Attributes:
        format: valid blocks over tags (eq. 23).
        name: multiset F1 of tool names (eq. 24).
        key: mean Jaccard index of argument keys over gold calls (eq. 25).
        value: mean share of matching argument values over gold calls (eq. 26).
        parallel: 1 if the first call step has as many calls as gold's, else 0 (eq. 27).
        total: the weighted sum (eq. 22).
        success: total >= 0.9.
        redundant_calls: predicted calls that no gold call took.
        tool_turns: turns with at least one attempt at a call.
    """

    format: float
    name: float
    key: float
    value: float
    parallel: float
    total: float
    success: bool
    redundant_calls: int = 0
    tool_turns: int = 0

    @property
    def arg_match(self) -> float:
        """Mean of `key` and `value`."""
        return (self.key + self.value) / 2


def process_score(
    turns: Sequence[str | ParsedCalls],
    gold: object,
    tools: Tools | None,
    weights: ProcessWeights = ProcessWeights(),  # frozen
    *,
    row: str | None = None,
    format: str = "hermes",
) -> ProcessScore:
    """Score the tool calls of one rollout against the gold calls.

        S = 0.10·S_fmt + 0.25·S_name + 0.15·S_key + 0.20·S_val + 0.30·S_par

    A gold call is paired with a predicted call of its name, one to one, so that the weighted sum of key and value
    scores over all pairs is largest; an unpaired one scores 0. Without gold calls, key and value are 1 if nothing was
    called and else 0. Without any tag, format is 1 if no call was expected and else 0. A block of several calls is
    valid if all of them are.

    Args:
        turns: assistant texts in order, or their parsed calls; one text may hold several calls of one step.
        gold: `[[{"name": …, "arguments": {…}}, …], …]` by step, its JSON text or a `Gold`.
        tools: OpenAI-style tool schemas or a `ToolSet`; None: calls are valid if they parse.
        weights: weights of the parts.
        row: what to call the row in an error.
        format: the format of calls in texts, as in `parse_tool_calls`.

    Returns:
        The parts and the total. No model output raises.

    Raises:
        GoldError, ToolSchemaError: the caller's gold or tools are malformed; the message names the field.
        TypeError: `turns` is one text, or holds something else.

    Example:
        >>> gold = [[{"name": "add", "arguments": {"a": 1, "b": 2}}]]
        >>> turn = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 3}}</tool_call>'
        >>> score = process_score([turn, "It is 4."], gold, tools=None)
        >>> score.value, round(score.total, 3), score.success
        (0.5, 0.9, True)

    Reference: SLCA eq. 22-27; the one-to-one pairing by the largest sum, the empty cases and block validity are ours.
    """
    toolset = None if tools is None else as_toolset(tools)
    steps = read_turns(turns, format, toolset)
    expected = as_gold(gold, row)
    made = tally(steps, toolset)
    pairs = pair_calls(made.calls, expected, toolset, weights.of_pair)
    predicted, wanted = len(made.calls), len(expected.flat)
    form = _format(made, bool(wanted))
    name = 2 * len(pairs) / (predicted + wanted) if predicted or wanted else 1.0
    key, value = _arguments(pairs, predicted, wanted)
    parallel = 1.0 if made.first == expected.first else 0.0
    w = weights
    total = math.fsum((w.format * form, w.name * name, w.key * key, w.value * value, w.parallel * parallel))
    return frozen(
        ProcessScore,
        {
            "format": form, "name": name, "key": key, "value": value, "parallel": parallel, "total": total,
            "success": total >= 0.9 - _ROUNDING, "redundant_calls": predicted - len(pairs), "tool_turns": made.turns,
        },
    )  # fmt: skip


def read_turns(
    turns: Sequence[str | ParsedCalls], format: str = "hermes", tools: ToolSet | None = None
) -> list[ParsedCalls]:
    """Parse what is not parsed yet, and give every value its type."""
    if isinstance(turns, (str, bytes)):
        raise TypeError("turns: expected a sequence of assistant texts, got one text")
    parse = format_parser(format)
    steps = []
    for turn in turns:
        if isinstance(turn, str):
            turn = parse(turn, "reasoning")
        elif not isinstance(turn, ParsedCalls):
            raise TypeError(f"turns[{len(steps)}]: expected a text or ParsedCalls, got {type(turn).__name__}")
        steps.append(type_arguments(turn, tools) if turn.calls else turn)
    return steps


def valid_blocks(step: ParsedCalls, tools: ToolSet | None) -> int:
    """Number of blocks all of whose calls parse and fit their schemas."""
    if tools is not None and len(step.calls) == 1:
        return int(tools.is_valid(step.calls[0]))
    blocks: dict[int, bool] = {}
    for call in step.calls:
        valid = call.status == "ok" if tools is None else tools.is_valid(call)
        blocks[call.block] = valid and blocks.get(call.block, True)
    return sum(blocks.values())


class Tally(NamedTuple):
    """The calls of a rollout, and what its turns hold.

    Attributes:
        calls: the predicted calls of all turns.
        opened: opening tags.
        closed: closing tags.
        valid: blocks all of whose calls parse and fit their schemas.
        first: calls of the first turn that has any.
        turns: turns with an attempt at a call.
    """

    calls: list[ToolCall]
    opened: int
    closed: int
    valid: int
    first: int
    turns: int


def tally(steps: Sequence[ParsedCalls], tools: ToolSet | None) -> Tally:
    """Count what the turns of a rollout hold."""
    calls: list[ToolCall] = []
    opened = closed = valid = first = turns = 0
    for step in steps:
        opened += step.num_open
        closed += step.num_close
        if step.calls:
            turns += 1
            valid += valid_blocks(step, tools)
            calls += step.valid
            first = first or len(step.valid)
    return Tally(calls, opened, closed, valid, first, turns)


def _format(made: Tally, expects_calls: bool) -> float:
    if not made.opened and not made.closed:
        return 0.0 if expects_calls else 1.0
    return made.valid / max(made.opened, made.closed)


def _arguments(pairs: Sequence[Pair], predicted: int, gold: int) -> tuple[float, float]:
    """The key and the value score."""
    if not gold:
        return (0.0, 0.0) if predicted else (1.0, 1.0)
    key = value = 0.0
    for pair in pairs:
        key, value = key + pair.key, value + pair.value
    return key / gold, value / gold
