"""What `benchmarks.gpu_router_gradient` says about its figures, as Markdown."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.gpu_checks import Outcome
from benchmarks.gpu_figure import Timing
from benchmarks.gpu_race import COUNTING, Launches, Race
from benchmarks.speed import Aim, spread
from benchmarks.timing import Spread

AIMS = (
    ("copy", "share of the copy's bandwidth", 0.85),
    ("eager", "eager / kernel", 5),
    ("torch.compile", "torch.compile / kernel", 1.3),
)
RULES = 0.8  # of the copy's bandwidth at the largest size: from here on bandwidth is what a call costs


def report(head: str, race: Race, drawn: str, checked: str) -> str:
    """The whole section."""
    kernels = [row for row in race.launches if row.candidate == "kernel" and row.names]
    named = (
        ", ".join(f"{count}× `{name}`" for name, count in Counter(kernels[0].names or ()).items()) if kernels else ""
    )
    compiled = race.compiled.problem or f"compiled in {sum(race.compiled.seconds):.0f} s, which is not counted"
    return f"""{head}
* Every time is a median with the smallest and largest in brackets. Candidates take turns within a round, each after
  the cache was emptied; ratios are taken within a round. All tokens lie in fields.
* GB/s counts for every candidate the bytes that have to move: all inputs once, the result once and, since rho needs
  the maximum of its field first, the gradient and the field ids twice. *copy* is a copy within the device that reads
  and writes as many. torch.compile: {compiled}.
* {drawn}.
* Left out: {"; ".join(race.budget.left_out) or "nothing"}.
* Failed while timed: {"; ".join(f"**{problem}**" for problem in race.problems) or "nothing"}.

## Aims

{aim_table(race.timings, race.launches) if race.clock.on_gpu else "Not judged without a GPU."}

## Where bandwidth rules

The kernel reaches {RULES:.0%} of the highest rate of the copy:

{where_bandwidth_rules(race.timings)}

Below, launches and the processor rule.{f" The kernel's: {named}." if named else ""}

{launch_table(race.launches)}

## Times

{time_table(race.timings)}

## Checks

{checked}
"""


def check_table(outcomes: Sequence[Outcome]) -> str:
    """Every check with its largest error, in units of the bound."""
    head = ["| check | size | error / bound | tokens changed | |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*head, *(outcome.row() for outcome in outcomes)])


def time_table(timings: Sequence[Timing]) -> str:
    """Every time."""
    names = ["router", "dtype", "tokens", "", "ms", "GB/s", "time / kernel"]
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    for t in sorted(timings, key=lambda t: (t.router, t.dtype, t.tokens)):
        cells = [t.router, t.dtype, str(t.tokens), t.candidate, spread(t.seconds.scaled(1e3)), f"{t.rate:.0f}"]
        lines.append(f"| {' | '.join([*cells, spread(t.versus)])} |")
    return "\n".join(lines)


def launch_table(found: Iterable[Launches]) -> str:
    """Launches of one call."""
    lines = ["| size | | launches | µs of the processor | wait for the GPU |", "| --- | --- | --- | --- | --- |"]
    for row in found:
        count = "not counted" if row.names is None else str(len(row.names))
        lines.append(f"| {row.shape} | {row.candidate} | {count} | {1e6 * row.host:.0f} | {row.wait or 'none'} |")
    return "\n".join(lines)


def aim_table(timings: Sequence[Timing], found: Sequence[Launches]) -> str:
    """The aims, judged at the largest size of each router and dtype."""
    rows = []
    for shape, points in _by_shape(timings).items():
        largest = max(t.tokens for t in points)
        at = {t.candidate: t for t in points if t.tokens == largest}
        for candidate, what, bound in AIMS:
            if candidate in at:
                name = f"{shape}, {largest} tokens: {what}"
                rows.append(Aim(name, at[candidate].versus, bound, at_least=True).row())
            else:
                rows.append(f"| {shape}, {largest} tokens: {what} | ≥ {bound:g} | not measured | |")
    for row in found:
        if row.candidate in ("kernel", COUNTING):
            name = f"{row.shape}, {row.candidate}: launches"
            if row.names is None:
                rows.append(f"| {name} | ≤ 2 | not counted | |")
            else:
                count = float(len(row.names))
                rows.append(Aim(name, Spread(count, count, count), 2, at_least=False).row())
            met = "**missed**" if row.wait else "met"
            rows.append(f"| {row.shape}, {row.candidate}: waits for the GPU | none | {row.wait or 'none'} | {met} |")
    return "\n".join(["| | aim | found | |", "| --- | --- | --- | --- |", *rows])


def where_bandwidth_rules(timings: Sequence[Timing]) -> str:
    """For each router and dtype the smallest size from which on the kernel runs near the copy's best bandwidth."""
    lines = []
    for shape, points in _by_shape(timings).items():
        best = max((t.rate for t in points if t.candidate == "copy"), default=float("inf"))
        kernel = sorted((t for t in points if t.candidate == "kernel"), key=lambda t: t.tokens)
        slow = [t.tokens for t in kernel if t.rate < RULES * best]
        fast = [t.tokens for t in kernel if t.tokens > max(slow, default=0)]
        told = f"from {fast[0]} tokens on" if fast else f"at none of the sizes up to {kernel[-1].tokens}"
        lines.append(f"* {shape}: {told}")
    return "\n".join(lines)


def _by_shape(timings: Sequence[Timing]) -> Mapping[str, list[Timing]]:
    shapes: dict[str, list[Timing]] = {}
    for timing in timings:
        shapes.setdefault(f"{timing.router}, {timing.dtype}", []).append(timing)
    return shapes
