"""Items a second of BFCL's checker and of the scores, timed in turn, and what stands between them."""

import json
from collections.abc import Callable, Iterable, Sequence

from benchmarks.bfcl_checker import json_texts
from benchmarks.bfcl_items import Item
from benchmarks.timing import interleave
from rewards import ToolSet, as_gold

GROUP = 8
SCORERS = ("BFCL checker", "process score", "reference rule")


def rollouts(items: Iterable[Item]) -> list[Item]:
    """A group of answers to each row, each a text of its own, so that nobody can know a text from the one before."""
    return [
        item._replace(turns=[f"Rollout {number}.\n{turn}" for turn in item.turns])
        for item in items
        for number in range(GROUP)
    ]


def speed(items: Sequence[Item], rounds: int) -> dict[str, float]:
    """Median items a second, all timed in turn on the same items."""

    def over(method: Callable[[Item], object]) -> Callable[[], object]:
        return lambda: [method(item) for item in items]

    methods = dict(zip(SCORERS, (Item.checked, Item.total, Item.ruled))) | {
        "checker and decoding": Item.checked_from_text
    }
    candidates = {name: over(method) for name, method in methods.items()}
    texts = [json_texts(item.turns) for item in items]
    candidates["json.loads alone"] = lambda: [[json.loads(text) for text in several] for several in texts]
    timed = interleave(candidates, rounds, warmup=1)
    return {name: len(items) / timed.time(name).median for name in candidates}


def preparation(items: Sequence[Item], rounds: int) -> float:
    """Median microseconds to read one row's gold and schemas, whose validators are compiled already."""

    def prepare() -> None:
        for item in items:
            _ = as_gold(item.row.gold).wanted, ToolSet(item.row.tools)

    return 1e6 * interleave({"rows": prepare}, rounds, warmup=1).time("rows").median / len(items)
