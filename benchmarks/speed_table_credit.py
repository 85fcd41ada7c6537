"""Rows of `credit` up to the credit per token: segments, group advantages, temporal credit, assignment, rules."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed import peer
from benchmarks.speed_cases import GROUP, trajectories
from benchmarks.speed_table_case import Case, Made, size_of
from credit import (
    GRPO,
    RLTR,
    SLCA,
    SupportControl,
    ToolPO,
    assign_credit,
    group_advantage,
    has_segment,
    omission_guard,
    run_ids,
    spans_to_segments,
    step_advantage,
    tool_summary_segments,
    turn_returns,
)

TOKENS, RUNS, LOOP = 256, 16, "loop"
ROWS = 8192
PASSES = "an int64 index is written and read, which `gather` needs; fused under `torch.compile`"
SORT = "six reductions by group, in float64, and ids far apart are sorted first; 17 bytes a row make a low floor"


@cache
def estimators() -> Any:
    """verl's advantage estimators, or None."""
    return peer("verl.trainer.ppo.core_algos", "its rows are")


def run_ids_case(rows: int) -> Made:
    mask = trajectories(rows, TOKENS)

    def loop() -> list[list[int]]:
        out = []
        for row in mask.tolist():
            ids, run, inside = [], -1, False
            for learnable in row:
                run += learnable and not inside
                inside = learnable
                ids.append(run if learnable else -1)
            out.append(ids)
        return torch.tensor(out)

    return Made(lambda: run_ids(mask), loop, size_of(mask, run_ids(mask)))


def tool_summary_case(rows: int) -> Made:
    mask = trajectories(rows, TOKENS)

    def loop() -> Tensor:
        runs = run_ids(mask).tolist()
        return torch.tensor([[-1 if r < 0 else int(r == max(row)) for r in row] for row in runs])

    segments = tool_summary_segments(mask)
    return Made(lambda: tool_summary_segments(mask), loop, size_of(mask, segments))


def spans_case(spans: int) -> Made:
    rows = max(spans // 4, 1)
    table = [(i % rows, 64 * (i // rows), 64 * (i // rows) + 40, i % 2) for i in range(4 * rows)]

    def loop() -> Tensor:
        out = torch.full((rows, TOKENS), -1)
        for row, start, stop, segment in table:
            out[row, start:stop] = segment
        return out

    return Made(lambda: spans_to_segments(table, TOKENS, rows), loop, 8 * rows * TOKENS)


def has_segment_case(rows: int) -> Made:
    segments = tool_summary_segments(trajectories(rows, TOKENS))
    return Made(lambda: has_segment(segments, 0), lambda: (segments == 0).any(dim=1), size_of(segments))


def by_group(rewards: Tensor, group: Tensor, present: Tensor) -> Tensor:
    """What is written first: one pass over the batch for each group."""
    out = torch.zeros_like(rewards)
    for one in group.unique():
        rows = (group == one) & present
        if rows.sum() >= 2:
            out[rows] = (rewards[rows] - rewards[rows].mean()) / (rewards[rows].std() + 1e-6)
    return out


def group_case(rows: int) -> Made:
    random = torch.Generator().manual_seed(1)
    rewards, group = torch.randn(rows, generator=random), torch.randperm(rows, generator=random) // GROUP
    present = torch.rand(rows, generator=random) < 0.9
    traffic = size_of(rewards, group, present, rewards)
    return Made(lambda: group_advantage(rewards, group, present), lambda: by_group(rewards, group, present), traffic)


def step_case(rows: int) -> Made:
    random = torch.Generator().manual_seed(2)
    returns, group = torch.randn(rows, RUNS, generator=random), torch.arange(rows) // GROUP
    present = torch.arange(RUNS) < torch.randint(1, RUNS + 1, (rows, 1), generator=random)

    def loop() -> Tensor:
        flat = by_group(returns.flatten(), group.repeat_interleave(RUNS), present.flatten())
        return flat.view(returns.shape)

    return Made(lambda: step_advantage(returns, group, present), loop, size_of(returns, group, present, returns))


def returns_case(rows: int) -> Made:
    random = torch.Generator().manual_seed(3)
    rewards = torch.randn(rows, RUNS, generator=random)
    present = torch.arange(RUNS) < torch.randint(1, RUNS + 1, (rows, 1), generator=random)

    def loop() -> Tensor:
        out, ahead = torch.zeros_like(rewards), torch.zeros(rows)
        for run in reversed(range(RUNS)):
            ahead = torch.where(present[:, run], rewards[:, run] + 0.9 * ahead, 0.0)
            out[:, run] = ahead
        return out

    return Made(lambda: turn_returns(rewards, present, discount=0.9), loop, size_of(rewards, present, rewards))


def assign_case(rows: int) -> Made:
    segments = tool_summary_segments(trajectories(rows, TOKENS))
    advantages, weights = torch.randn(rows, 2, generator=torch.Generator().manual_seed(4)), torch.eye(2)

    def composed() -> Tensor:
        tool, summary = advantages[:, :1], advantages[:, 1:]
        return torch.where(segments == 0, tool, torch.where(segments == 1, summary, 0.0))

    traffic = size_of(segments) + 4 * segments.numel()
    return Made(lambda: assign_credit(advantages, segments, weights), composed, traffic)


def assign_runs_case(rows: int) -> Made:
    mask = trajectories(rows, TOKENS)
    runs, segments = run_ids(mask), torch.where(mask, 0, -1)
    count = int(runs.max()) + 1
    advantages = torch.randn(rows, count, 1, generator=torch.Generator().manual_seed(5))
    weights = torch.ones(1, 1)

    def loop() -> Tensor:
        out = torch.zeros(rows, TOKENS)
        for run in range(count):
            out = torch.where(runs == run, advantages[:, run], out)
        return out

    traffic = size_of(segments, runs) + 4 * segments.numel()
    return Made(lambda: assign_credit(advantages, segments, weights, runs=runs), loop, traffic)


def guard_case(rows: int) -> Made:
    random = torch.Generator().manual_seed(6)
    tool, summary = torch.rand(2, rows, generator=random).unbind()
    required, called = (torch.rand(2, rows, generator=random) < 0.5).unbind()

    def composed() -> tuple[Tensor, Tensor]:
        marked, first, second = required & ~called, tool.clone(), summary.clone()
        first[marked], second[marked] = 0.0, -0.5
        return first, second

    traffic = size_of(tool, summary, required, called, tool, summary)
    return Made(lambda: omission_guard(tool, summary, required, called), composed, traffic)


# For each rule: its components, and which segments' presence and weights they have.
Route = dict[str, tuple[tuple[int, ...], tuple[float, float]]]


def rule_case(rule: Any, route: Route, score: str = "") -> Callable[[int], Made]:
    """A rule beside a loop over groups and one ``where`` for each component, and beside verl where it has the rule."""

    def make(rows: int) -> Made:
        segments, group = tool_summary_segments(trajectories(rows, TOKENS)), torch.arange(rows) // GROUP
        random = torch.Generator().manual_seed(7)
        rewards = {name: torch.randn(rows, generator=random) for name in route}

        def loop() -> Tensor:
            out = torch.zeros(rows, TOKENS)
            for name, (kinds, weights) in route.items():
                present = torch.stack([(segments == kind).any(dim=1) for kind in kinds]).any(dim=0)
                credit = by_group(rewards[name], group, present)[:, None]
                for segment, weight in enumerate(weights):
                    out = torch.where(segments == segment, out + weight * credit, out)
            return out

        traffic = size_of(segments) + 4 * segments.numel()
        return Made(lambda: rule(rewards, group, segments), loop, traffic, _verl(rewards, group, segments, score))

    return make


def _verl(rewards: dict[str, Tensor], group: Tensor, segments: Tensor, score: str) -> dict[str, Callable[[], Tensor]]:
    if not score or estimators() is None:
        return {}
    estimate, index = estimators().compute_grpo_vectorized_outcome_advantage, group.numpy()
    pairs = [
        (torch.nn.functional.pad(rewards[name][:, None], (0, TOKENS - 1)), chosen.long())
        for name, chosen in (
            (("tool", segments >= 0),) if score == "one" else (("tool", segments == 0), ("summary", segments == 1))
        )
    ]
    return {"verl, vectorised": lambda: sum(estimate(scores, mask, index)[0] for scores, mask in pairs)}


def _rule(name: str, rule: Any, route: Route, score: str = "") -> Case:
    return Case(
        covers=(f"credit.{name}",), make=rule_case(rule, route, score), largest=ROWS, unit="rollouts of 256 tokens",
        naive="loop over groups", naive_at=256, note="it looks for each segment in each row first; then " + PASSES,
    )  # fmt: skip


def _case(name: str, make: Callable[[int], Made], largest: int, unit: str, naive: str, **more: Any) -> Case:
    return Case(covers=(f"credit.{name}",), make=make, largest=largest, unit=unit, naive=naive, **more)


BATCH = "rollouts of 256 tokens"
CASES: tuple[Case, ...] = (
    _case("run_ids", run_ids_case, ROWS, BATCH, LOOP, naive_at=128, note="a running sum, then widened to int64"),
    _case("tool_summary_segments", tool_summary_case, ROWS, BATCH, LOOP, naive_at=128,
          note="runs first, then the last of each row, then two masks, widened to int64"),
    _case("spans_to_segments", spans_case, 8192, "spans", LOOP, note="the running sum of the edges, in int64"),
    _case("has_segment", has_segment_case, ROWS, BATCH, "`(segments == s).any(1)`",
          note="PyTorch compares to booleans one entry at a time"),
    _case("group_advantage", group_case, 262144, "rollouts", "loop over groups", naive_at=2048, note=SORT),
    _case("step_advantage", step_case, 16384, "rollouts of 16 runs", "loop over groups", naive_at=128, note=SORT),
    _case("turn_returns", returns_case, 131072, "rollouts of 16 runs", "loop over runs",
          note="a product in float64, whatever the dtype given"),
    _case("assign_credit", assign_case, ROWS, BATCH, "two `where`", note=PASSES),
    _case("assign_credit", assign_runs_case, ROWS, BATCH, "`where` for each run", what="one advantage a run",
          note=f"bounds of runs and segments are checked; {PASSES}"),
    _case("omission_guard", guard_case, 1 << 20, "rollouts", "masked assignment",
          note="`where` branches at every entry on a CPU"),
    _rule("GRPO", GRPO(), {"tool": ((0, 1), (1.0, 1.0))}, "one"),
    _rule("SLCA", SLCA(), {"tool": ((0,), (1.0, 0.0)), "summary": ((1,), (0.0, 1.0))}, "two"),
    _rule("ToolPO", ToolPO(), {"global": ((0, 1), (1.0, 1.0)), "local": ((0,), (1.0, 0.0))}),
    _rule("RLTR", RLTR(), {"tool": ((0,), (1.0, 0.0))}),
    _rule("SupportControl", SupportControl(summary_to_tool=True),
          {"tool": ((0,), (1.0, 0.0)), "summary": ((1,), (1.0, 1.0))}),
)  # fmt: skip
