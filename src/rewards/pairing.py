"""Which predicted call belongs to which gold call: one to one, with the largest total."""

from collections.abc import Callable, Sequence

from rewards.calls import ToolCall
from rewards.gold import Gold
from rewards.matching import EXACT, Pair, Schema, WantedMember, compare_arguments
from rewards.schema import ToolSet

WantedObject = Sequence[WantedMember]
# Grows with the key and the value share and falls with what was missed, so that nothing scores more than `EXACT`.
Score = Callable[[Pair], float]


def pair_calls(predicted: Sequence[ToolCall], gold: Gold, tools: ToolSet | None, score: Score) -> list[Pair]:
    """The one-to-one pairs of predicted and gold calls of equal names with the largest total score.

    There are as many as the multisets of names share; a call without a pair is in none.
    """
    if len(predicted) == 1 and len(gold.wanted.get(predicted[0].name, ())) == 1:
        (call,) = predicted
        schema = None if tools is None else tools.parameters(call.name)
        return [compare_arguments(call.arguments, gold.wanted[call.name][0], schema)]
    pairs: list[Pair] = []
    calls: dict[str, list[ToolCall]] = {}
    for call in predicted:
        if call.name in calls:
            calls[call.name].append(call)
        else:
            calls[call.name] = [call]
    for name, wanted in gold.wanted.items():
        if name in calls:
            made, schema = calls[name], None if tools is None else tools.parameters(name)
            if len(made) == len(wanted) == 1:
                pairs.append(compare_arguments(made[0].arguments, wanted[0], schema))
            else:
                pairs += best_pairs(made, wanted, schema, score)
    return pairs


def best_pairs(calls: Sequence[ToolCall], gold: Sequence[WantedObject], schema: Schema, score: Score) -> list[Pair]:
    """The pairs of calls of one name, in the order of gold.

    A bound saves most comparisons: no assignment has more than the sum, over the calls of the shorter side, of the
    best that each could get alone. If those bests are in different places they are the assignment; else the solver
    decides.
    """
    count = min(len(calls), len(gold))
    own = [compare_arguments(calls[i].arguments, gold[i], schema) for i in range(count)]
    wrong = [i for i in range(count) if own[i] is not EXACT]
    if not wrong:
        return own
    table = _Table(calls, gold, schema, own)
    alone = list(range(count))
    for i in wrong:
        alone[i] = _best_alone(table, i, score)
    if len(set(alone)) == count:
        chosen = list(enumerate(alone)) if len(gold) <= len(calls) else sorted((j, i) for i, j in enumerate(alone))
    else:
        chosen = _solved([[score(table.pair(i, j)) for j in range(len(calls))] for i in range(len(gold))])
    return [table.pair(i, j) for i, j in chosen]


class _Table:
    """Comparisons of gold calls (rows) with predicted calls (columns), each made when it is first asked for."""

    def __init__(
        self, calls: Sequence[ToolCall], gold: Sequence[WantedObject], schema: Schema, own: Sequence[Pair]
    ) -> None:
        self.calls, self.gold, self.schema = calls, gold, schema
        self.known = {(i, i): pair for i, pair in enumerate(own)}

    def pair(self, i: int, j: int) -> Pair:
        found = self.known.get((i, j))
        if found is None:
            found = self.known[i, j] = compare_arguments(self.calls[j].arguments, self.gold[i], self.schema)
        return found


def _best_alone(table: _Table, index: int, score: Score) -> int:
    """Where the call `index` of the shorter side finds its best partner; its own place wins a tie."""
    own = score(table.pair(index, index))
    if own == score(EXACT):
        return index
    if len(table.gold) <= len(table.calls):
        line = [score(table.pair(index, j)) for j in range(len(table.calls))]
    else:
        line = [score(table.pair(i, index)) for i in range(len(table.gold))]
    best = max(line)
    return index if own == best else line.index(best)


def _solved(scores: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """The assignment of rows to columns with the largest sum."""
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise ImportError("matching calls one to one needs scipy: pip install credit-routing[rewards]") from error
    found = linear_sum_assignment(scores, maximize=True)
    return [(int(i), int(j)) for i, j in zip(*found)]
