"""Which predicted call belongs to which gold call: one to one, with the largest total."""

from collections.abc import Callable, Sequence
from typing import Any

from rewards._marks import mark_given, mark_wanted
from rewards._table import score_table
from rewards.calls import ToolCall
from rewards.gold import Gold
from rewards.matching import EXACT, Pair, Schema, WantedMember, compare_arguments
from rewards.schema import ToolSet

WantedObject = Sequence[WantedMember]
# Grows with the key and the value share and falls with what was missed, so that nothing scores more than `EXACT`. The
# parts of the pair may be arrays, and then the scores are.
Score = Callable[[Pair], Any]
# So few calls are compared sooner than they are marked.
_FEW = 4
# So many pairs are counted in arrays sooner than they are compared.
_MANY = 4096
_MANY_KEYS = 100_000


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
    decides. An exact partner is a best one, and marks find it without a comparison.
    """
    count = min(len(calls), len(gold))
    own = [compare_arguments(calls[i].arguments, gold[i], schema) for i in range(count)]
    wrong = [i for i in range(count) if own[i] is not EXACT]
    if not wrong:
        return own
    table = _Table(calls, gold, schema, own)
    exact = _exact_partners(table, wrong) if len(wrong) > _FEW else {}
    alone = [exact.get(i, i) for i in range(count)]
    left = [i for i in wrong if i not in exact]
    keys = sum([len(call.arguments) for call in calls])
    if len(left) * max(len(calls), len(gold)) > _MANY or (left and keys * len(gold) > _MANY_KEYS):
        return _pairs_of_many(table, alone, left, score)
    for i in left:
        alone[i] = _best_alone(table, i, score)
    if len(set(alone)) == count:
        chosen = _in_order_of_gold(alone, len(gold) <= len(calls))
    else:
        chosen = _solved([[score(table.pair(i, j)) for j in range(len(calls))] for i in range(len(gold))])
    return [table.pair(i, j) for i, j in chosen]


def _pairs_of_many(table: "_Table", alone: list[int], left: Sequence[int], score: Score) -> list[Pair]:
    """The same by the same bound, from an array that holds every score; `left` have no place in `alone` yet."""
    scores = score_table([call.arguments for call in table.calls], table.gold, table.schema, score)
    fewer_gold = len(table.gold) <= len(table.calls)
    for i in left:
        line = scores[i] if fewer_gold else scores[:, i]
        # Its own place wins a tie.
        alone[i] = i if line[i] == line.max() else int(line.argmax())
    chosen = _in_order_of_gold(alone, fewer_gold) if len(set(alone)) == len(alone) else _solved(scores)
    return [table.pair(i, j) for i, j in chosen]


def _in_order_of_gold(alone: Sequence[int], fewer_gold: bool) -> list[tuple[int, int]]:
    return list(enumerate(alone)) if fewer_gold else sorted((j, i) for i, j in enumerate(alone))


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


def _exact_partners(table: _Table, wrong: Sequence[int]) -> dict[int, int]:
    """Where calls of the shorter side find the first partner that is `EXACT`, for those that have one."""
    given = [mark_given(call.arguments) for call in table.calls]
    wanted = [mark_wanted(gold) for gold in table.gold]
    fewer_gold = len(wanted) <= len(given)
    short, long = (wanted, given) if fewer_gold else (given, wanted)
    unsure = [j for j, mark in enumerate(long) if mark is None]
    if len(unsure) * len(wrong) > _MANY:
        return {}
    # Reversed, so that the first of several stays.
    first = {mark: j for j, mark in reversed([*enumerate(long)])}
    found: dict[int, int] = {}
    for i in wrong:
        mark = short[i]
        if mark is not None:
            marked = [first[mark]] if mark in first else []
            for j in sorted([*unsure, *marked]):
                if (table.pair(i, j) if fewer_gold else table.pair(j, i)) is EXACT:
                    found[i] = j
                    break
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


def _solved(scores: Sequence[Sequence[float]] | Any) -> list[tuple[int, int]]:
    """The assignment of rows to columns with the largest sum."""
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise ImportError("matching calls one to one needs scipy: pip install credit-routing[rewards]") from error
    found = linear_sum_assignment(scores, maximize=True)
    return [(int(i), int(j)) for i, j in zip(*found)]
