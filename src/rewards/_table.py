"""Every gold call beside every predicted call, where they are many: the counts of a comparison as arrays."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rewards._marks import Mark, loosened, mark_value, marks_accepted
from rewards.matching import EXACT, Pair, Schema, WantedMember, compare_arguments


class _Column:
    """What the predicted calls give under one key: equal values are one class, and few classes need a comparison."""

    def __init__(self, key: str, given: Sequence[tuple[int, Any]], calls: int, schema: Schema) -> None:
        np = _numpy()
        self.schema = schema
        self.values: list[Any] = []
        self.known: dict[Mark, int] = {}
        # Classes by what their values match at best; `None` may match anything.
        self.alike: dict[Mark | None, list[int]] = defaultdict(list)
        self.classes = np.full(calls, -1)
        self.classes[[call for call, _ in given]] = [self._class(value) for _, value in given]
        self.present = self.classes >= 0
        self.counts = self.present.copy()
        # Null for a key that may be missing is no key too many.
        if compare_arguments({key: None}, (), schema) is EXACT:
            self.counts[[call for call, value in given if value is None]] = False

    def _class(self, value: Any) -> int:
        mark = mark_value(value)
        found = None if mark is None else self.known.get(mark)
        if found is None:
            found = len(self.values)
            self.values.append(value)
            if mark is not None:
                self.known[mark] = found
            self.alike[None if mark is None else loosened(mark)].append(found)
        return found

    def matches(self, member: WantedMember) -> Any:
        """Which calls give what gold wants here."""
        np = _numpy()
        # The last entry stands for calls without the key, whose class is -1.
        right = np.zeros(len(self.values) + 1, bool)
        marks = marks_accepted(member.wanted)
        for mark in self.alike if marks is None else [None, *marks]:
            for index in self.alike.get(mark, ()):
                pair = compare_arguments({member.key: self.values[index]}, (member,), self.schema)
                right[index] = pair.value == 1.0
        return right[self.classes]


def score_table(
    calls: Sequence[Mapping[str, Any]],
    gold: Sequence[Sequence[WantedMember]],
    schema: Schema,
    score: Callable[[Pair], Any],
) -> Any:
    """The score of each gold call (row) with each predicted call (column).

    The counts are those of `compare_arguments`, for a row at a time; `score` gets arrays in the place of numbers.
    """
    np = _numpy()
    wanted = {member.key for members in gold for member in members}
    given: dict[str, list[tuple[int, Any]]] = {key: [] for key in wanted}
    surplus = [0] * len(calls)
    for index, arguments in enumerate(calls):
        for key, value in arguments.items():
            if key in wanted:
                given[key].append((index, value))
            elif value is not None or compare_arguments({key: None}, (), schema) is not EXACT:
                surplus[index] += 1
    columns = {key: _Column(key, values, len(calls), schema) for key, values in given.items() if values}
    total = np.array(surplus)
    for column in columns.values():
        total += column.counts
    scores = np.empty((len(gold), len(calls)))
    for row, members in enumerate(gold):
        shared, wrong, missed, left_out, known = np.zeros((5, len(calls)), int)
        for member in members:
            must_be = compare_arguments({}, (member,), schema) is not EXACT
            if member.key not in columns:
                left_out += must_be
                continue
            column = columns[member.key]
            mistaken = column.present & ~column.matches(member)
            shared += column.present
            wrong += mistaken
            if not member.optional:
                missed += mistaken
            if must_be:
                left_out += ~column.present
            known += column.counts
        expected, extra = shared + left_out, total - known
        # Without any key there is nothing to divide by, and nothing wrong.
        value = np.where(expected > 0, (shared - wrong) / np.maximum(expected, 1), 1.0)
        keys = np.where(expected + extra > 0, shared / np.maximum(expected + extra, 1), 1.0)
        scores[row] = score(Pair(keys, value, missed + left_out))
    return scores


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise ImportError("matching many calls needs numpy: pip install credit-routing[rewards]") from error
    return numpy
