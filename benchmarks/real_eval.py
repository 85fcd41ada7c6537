"""Greedy rollouts on held-out rows, scored by `process_score` and by BFCL's own checker, with intervals."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.bfcl import BfclRow
from benchmarks.bfcl_checker import bfcl_valid
from benchmarks.real_ledger import Clock
from benchmarks.real_training import Sizes, make_trainer
from benchmarks.scoring import score_rollout
from rewards.conversation import assistant_turns

Record = dict[str, Any]


def evaluate(
    model: Any,
    tokenizer: Any,
    rows: Sequence[BfclRow],
    clock: Clock,
    report: Callable[[float, str], None],
    folder: Path,
    sizes: Sizes,
    *,
    batch: int = 16,
    done: Sequence[Record] = (),
    keep: Callable[[list[Record]], None] = lambda records: None,
) -> list[Record]:
    """Roll out `rows` in order until they or the clock end; a batch is begun only if it fits.

    The rollouts are the trainer's own (same template, same tool loop, same limits), decoded greedily. `done` are
    records of an earlier, interrupted call; `keep` is told all records after each batch.
    """
    from credit import SLCA

    trainer = make_trainer(model, tokenizer, rows, SLCA(), folder, sizes, top_k=1)
    trainer.model.eval()
    records, slowest = list(done), 0.0
    # One batch is answered even when the time is up: the job would end without its table.
    while len(records) < len(rows) and (not records or clock.fits(1.1 * slowest)):
        began, some = clock.used, rows[len(records) : len(records) + batch]
        records += _roll_out(trainer, some)
        slowest = max(slowest, clock.used - began)
        keep(records)
        report(max(clock.share, len(records) / len(rows)), f"{len(records)} rows")
    return records


def _roll_out(trainer: Any, rows: Sequence[BfclRow]) -> list[Record]:
    columns = [row.columns() for row in rows]
    trainer.rollout_rows = columns
    output = trainer.rollout_func([row["prompt"] for row in columns], trainer)
    answers = zip(rows, output["rollout_messages"], output["rollout_stop"], output["env_mask"], strict=True)
    return [record(row, messages) | {"stop": stop, "tokens": sum(own)} for row, messages, stop, own in answers]


def record(row: BfclRow, messages: list[dict[str, Any]]) -> Record:
    """Scores of one rollout, with its text.

    `process_score` sees every turn, so a call made again after the answer lowers it; BFCL's checker sees the first
    turn only, as in BFCL's own protocol.
    """
    from rewards import parse_tool_calls

    turns = assistant_turns(messages)
    first = parse_tool_calls(turns[0] if turns else "")
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in first.valid]
    whole = bool(calls) and len(calls) == len(first.calls)
    scores = asdict(score_rollout(messages, row.gold, row.tools))
    if first.num_open == 0:
        # Every row needs a call, and an answer without one has no result to state.
        scores["summary"] = 0.0
    return {
        "id": row.id,
        "category": row.category,
        "called": float(first.num_open > 0),
        "bfcl": float(whole and bfcl_valid(row.functions, calls, row.ground_truth, row.category)),
        **scores,
        "messages": messages,
    }


def wilson(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95% interval of a binomial share; (0, 1) without a trial."""
    if trials == 0:
        return 0.0, 1.0
    share, spread = successes / trials, z * z / trials
    centre = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def sign_test(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """Rows on which only the first, and only the second, succeeded; exact two-sided p of such a split by chance."""
    pairs = [(bool(a), bool(b)) for a, b in zip(first, second, strict=True)]
    only_first = sum(a and not b for a, b in pairs)
    only_second = sum(b and not a for a, b in pairs)
    differ = only_first + only_second
    tail = sum(math.comb(differ, k) for k in range(min(only_first, only_second) + 1)) / 2**differ
    return {"only_first": only_first, "only_second": only_second, "p": min(1.0, 2 * tail)}


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """Means with 95% intervals: Wilson for shares, normal for the process score."""
    count = len(records)
    summary: dict[str, Any] = {"rows": count}
    for key in ("process", "summary", "redundant", "tool_turns"):
        values = [row[key] for row in records]
        mean = sum(values) / max(1, count)
        half = 1.96 * math.sqrt(sum((v - mean) ** 2 for v in values) / max(1, count - 1) / max(1, count))
        summary[key] = {"mean": mean, "low": mean - half, "high": mean + half}
    for key in ("called", "success", "bfcl"):
        hits = sum(bool(row[key]) for row in records)
        low, high = wilson(hits, count)
        summary[key] = {"mean": hits / max(1, count), "low": low, "high": high}
    return summary
