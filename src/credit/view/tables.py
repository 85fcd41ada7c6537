"""What to read off a token-credit view: runs, totals per segment, rules that disagree, what looks wrong."""

import math
from collections import Counter
from itertools import combinations, groupby
from typing import Literal, NamedTuple

from credit.view.data import NO_SEGMENT, PADDING, TokenCredit


class Run(NamedTuple):
    """Neighbouring tokens `[start, stop)` of one segment, all trained or all masked for one reason."""

    start: int
    stop: int
    segment: int
    reason: str


class SegmentTotal(NamedTuple):
    """Credit of one segment under one rule; `share` is its part of the whole `Σ|advantage|`."""

    segment: int
    tokens: int
    total: float
    absolute: float
    share: float
    broken: int

    @property
    def mean(self) -> float:
        """`total / (tokens − broken)`, NaN when every token is broken."""
        return self.total / (self.tokens - self.broken) if self.tokens > self.broken else math.nan


class Conflict(NamedTuple):
    """Tokens of one segment that two rules push in opposite directions."""

    segment: int
    first: str
    second: str
    tokens: int
    first_mean: float
    second_mean: float


class Finding(NamedTuple):
    """One line that the reader should see before the tokens."""

    level: Literal["error", "warning", "conflict", "note"]
    text: str


def runs(view: TokenCredit) -> list[Run]:
    """Maximal stretches of equal segment and reason, in order.

    Example:
        >>> from credit.view.data import token_credit
        >>> [tuple(r) for r in runs(token_credit(["a", "b", "c"], segments=[0, 0, 1], advantages=[1, 1, 2]))]
        [(0, 2, 0, ''), (2, 3, 1, '')]
    """
    keys = [(s if not r else -1, r) for s, r in zip(view.segments, view.reasons)]
    found, start = [], 0
    for (segment, reason), members in groupby(keys):
        stop = start + len(list(members))
        found.append(Run(start, stop, segment, reason))
        start = stop
    return found


def segment_name(view: TokenCredit, segment: int) -> str:
    """The segment's name, or `segment 7` for one the view's enum does not know."""
    return view.segment_names.get(segment, f"segment {segment}")


def totals(view: TokenCredit, rule: str) -> list[SegmentTotal]:
    """Tokens, sum, `Σ|A|` and share of credit of each segment; sums first, one division at the end.

    Only trained tokens count, and only finite advantages are summed: the others are counted as broken.

    Example:
        >>> from credit.view.data import token_credit
        >>> view = token_credit(["a", "b", "c"], segments=[0, 0, 1], advantages=[1.0, 1.0, -2.0])
        >>> [(t.segment, t.tokens, t.mean, t.total, t.share) for t in totals(view, "advantage")]
        [(0, 2, 1.0, 2.0, 0.5), (1, 1, -2.0, -2.0, 0.5)]
    """
    by_segment: dict[int, list[float]] = {}
    for segment, on, value in zip(view.segments, view.trained, view.advantages[rule]):
        if on:
            by_segment.setdefault(segment, []).append(value)
    finite = {segment: [v for v in values if math.isfinite(v)] for segment, values in by_segment.items()}
    absolute = {segment: math.fsum(map(abs, values)) for segment, values in finite.items()}
    whole = math.fsum(absolute.values())
    return [
        SegmentTotal(
            segment=segment,
            tokens=len(by_segment[segment]),
            total=math.fsum(finite[segment]),
            absolute=absolute[segment],
            share=absolute[segment] / whole if whole else 0.0,
            broken=len(by_segment[segment]) - len(finite[segment]),
        )
        for segment in sorted(by_segment)
    ]


def masked(view: TokenCredit) -> list[tuple[str, int]]:
    """Masked tokens by reason, most frequent first."""
    return Counter(reason for reason in view.reasons if reason).most_common()


def opposed(view: TokenCredit) -> tuple[bool, ...]:
    """True on trained tokens that one rule raises and another lowers.

    Example:
        >>> from credit.view.data import token_credit
        >>> opposed(token_credit(["a", "b"], segments=[0, 1], advantages={"GRPO": [1, 1], "SLCA": [-1, 0]}))
        (True, False)
    """
    rows = zip(view.trained, *view.advantages.values())
    return tuple(bool(on) and any(v > 0 for v in values) and any(v < 0 for v in values) for on, *values in rows)


def conflicts(view: TokenCredit) -> list[Conflict]:
    """For each segment and pair of rules, the tokens on which their advantages have opposite signs."""
    found = []
    for first, second in combinations(view.advantages, 2):
        pairs: dict[int, list[tuple[float, float]]] = {}
        columns = zip(view.segments, view.trained, view.advantages[first], view.advantages[second])
        for segment, on, a, b in columns:
            if on and (a > 0 > b or a < 0 < b):
                pairs.setdefault(segment, []).append((a, b))
        for segment, both in sorted(pairs.items()):
            means = (math.fsum(values) / len(both) for values in zip(*both))
            found.append(Conflict(segment, first, second, len(both), *means))
    return found


def findings(view: TokenCredit) -> list[Finding]:
    """What a reader should know first: broken numbers, leaks, rules that disagree, rows that teach nothing.

    Example:
        >>> from credit.view.data import token_credit
        >>> findings(token_credit(["a"], segments=[0], advantages=[float("nan")]))[0]
        Finding(level='error', text='advantage: NaN or infinity on 1 trained token (first: token 0)')
    """
    found = [*_broken(view), *_leaks(view)]
    found += [
        Finding(
            "conflict",
            f"{c.first} and {c.second} push {_count(c.tokens, segment_name(view, c.segment) + ' token')} "
            f"in opposite directions ({c.first} {signed(c.first_mean)}, {c.second} {signed(c.second_mean)})",
        )
        for c in conflicts(view)
    ]
    return found + _silent(view)


def signed(value: float, digits: int = 2) -> str:
    """A number with its sign, a true minus, and 0 without one.

    Example:
        >>> signed(0.5), signed(-0.25), signed(0.0), signed(float("nan"))
        ('+0.50', '−0.25', '0', 'NaN')
    """
    if math.isnan(value):
        return "NaN"
    if value == 0:
        return "0"
    if 0 < abs(value) < 10**-digits / 2:
        return f"{value:+.0e}".replace("-", "−")
    return f"{value:+.{digits}f}".replace("-", "−").replace("inf", "∞")


def _broken(view: TokenCredit) -> list[Finding]:
    found = []
    for rule, values in view.advantages.items():
        bad = [t for t, (on, v) in enumerate(zip(view.trained, values)) if on and not math.isfinite(v)]
        if bad:
            number = _count(len(bad), "trained token")
            found.append(Finding("error", f"{rule}: NaN or infinity on {number} (first: token {bad[0]})"))
    return found


def _leaks(view: TokenCredit) -> list[Finding]:
    found = []
    for rule, values in view.advantages.items():
        # NaN under a mask is ordinary; a number there is harmless only to a loss that selects by the mask.
        leaks = sum(bool(why) and math.isfinite(v) and v != 0 for why, v in zip(view.reasons, values))
        if leaks:
            text = f"{rule}: {_count(leaks, 'masked token')} with an advantage other than 0"
            found.append(Finding("note", f"{text}; the loss must not see it"))
    loose = view.reasons.count(NO_SEGMENT)
    if loose:
        found.append(Finding("warning", f"{_count(loose, 'policy token')} in no segment: no rule reaches them"))
    return found


def _silent(view: TokenCredit) -> list[Finding]:
    found = []
    if not any(view.trained):
        why = ", ".join(f"{n} {reason}" for reason, n in masked(view) if reason != PADDING)
        found.append(Finding("note", f"no token of this row is trained{': ' + why if why else ''}"))
    for rule, values in view.advantages.items():
        if any(view.trained) and not any(v != 0 for on, v in zip(view.trained, values) if on):
            found.append(Finding("warning", f"{rule}: every trained token has advantage 0; this row teaches nothing"))
    for name, reward in view.rewards.items():
        present = [p for p in view.peers.get(name, ()) if not math.isnan(p)]
        if math.isnan(reward):
            found.append(Finding("note", f"reward {name} is absent: this row stays out of its group"))
        elif name in view.peers and not present:
            found.append(Finding("note", f"reward {name}: no present peer, so its advantage is 0"))
        elif present and all(p == reward for p in present):
            found.append(Finding("note", f"reward {name} is the same in the whole group, so its advantage is 0"))
    return found


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
