"""The process score once more, slowly and plainly: no parser tricks, no assignment solver, every pairing tried."""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

Call = dict[str, Any]


def same(a: Any, b: Any) -> bool:
    """Loose match of the plain values that the property tests draw (no null, no NaN, no odd text)."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if isinstance(a, bool) != isinstance(b, bool) or isinstance(a, list) != isinstance(b, list):
        return False
    if isinstance(a, str) and isinstance(b, str):
        return a.lower() == b.lower()
    return type(a) in (int, float) and type(b) in (int, float) and a == b if not isinstance(a, bool) else a is b


def pair(predicted: Call, gold: Call) -> tuple[float, float]:
    """Key and value scores of one pair."""
    p, g = predicted["arguments"], gold["arguments"]
    keys = set(p) | set(g)
    key = len(set(p) & set(g)) / len(keys) if keys else 1.0
    value = sum(same(p[k], g[k]) for k in g if k in p) / len(g) if g else 1.0
    return key, value


def process(steps: Sequence[Sequence[Call]], gold: Sequence[Sequence[Call]]) -> dict[str, float]:
    """The five parts for valid calls only."""
    predicted = [one for step in steps for one in step]
    wanted = [one for step in gold for one in step]
    names = sorted({one["name"] for one in [*predicted, *wanted]})
    p_counts = {n: sum(one["name"] == n for one in predicted) for n in names}
    g_counts = {n: sum(one["name"] == n for one in wanted) for n in names}
    both = sum(min(p_counts[n], g_counts[n]) for n in names)
    result = {
        "format": 1.0 if predicted or not wanted else 0.0,
        "name": 2 * both / (len(predicted) + len(wanted)) if predicted or wanted else 1.0,
        "parallel": float(
            next((len(s) for s in steps if s), 0) == next((len(s) for s in gold if s), 0),
        ),
    }
    if not wanted:
        return {**result, "key": float(not predicted), "value": float(not predicted)}
    best = (0.0, 0.0, 0.0)
    # Every injection of gold calls into predicted calls and "none".
    slots = [*range(len(predicted)), *[-1] * len(wanted)]
    for chosen in set(permutations(slots, len(wanted))):
        key = value = 0.0
        for index, one in zip(chosen, wanted):
            if index >= 0 and predicted[index]["name"] == one["name"]:
                k, v = pair(predicted[index], one)
                key, value = key + k, value + v
        best = max(best, (0.15 * key + 0.2 * value, value, key))
    return {**result, "key": best[2] / len(wanted), "value": best[1] / len(wanted)}
