"""The two small pictures of the HTML view, rewards on an axis and a rollout as a ribbon; and their shade."""

import math
from collections import Counter
from html import escape
from itertools import groupby

from credit.view.data import TokenCredit
from credit.view.tables import conflicts, opposed
from credit.view.text import printable, segment_colour

_OFF = "off"
_BROKEN = "#f0f"


def strip(reward: float, peers: list[float]) -> str:
    """A dot for each reward of the group on one axis; this rollout's is the filled one."""
    group = [*peers, reward] if math.isfinite(reward) else peers
    if not group:
        return ""
    low, high = min(group), max(group)
    place = {value: 8 + 104 * ((value - low) / (high - low) if high > low else 0.5) for value in group}
    # Equal rewards share a dot; its area says how many.
    dots = "".join(
        f'<circle cx="{place[p]:.1f}" cy="8" r="{min(7.0, 3 * math.sqrt(n)):.1f}"/>' for p, n in Counter(peers).items()
    )
    own = f'<circle class="own" cx="{place[reward]:.1f}" cy="8" r="4"/>' if math.isfinite(reward) else ""
    values = ", ".join(f"{value:.3g}" for value in sorted(group))
    return (
        f"<small>{low:.3g}</small><svg class='strip' viewBox='0 0 120 16'><title>{values}</title>"
        f"<path d='M8 8H112'/>{dots}{own}</svg><small>{high:.3g}</small>"
    )


def ribbon(view: TokenCredit) -> str:
    """The whole rollout at a glance: a row for segments, for each rule and for conflicts, in token order."""
    if not view.tokens:
        return '<p class="note">no tokens</p>'
    off = [_OFF if reason else "" for reason in view.reasons]
    segments = [o or segment_colour(s) for o, s in zip(off, view.segments)]
    rows = [_ribbon_row("segment", segments)]
    for rule, values in view.advantages.items():
        shades = (fill(v, view.scale) if math.isfinite(v) else _BROKEN for v in values)
        rows.append(_ribbon_row(rule, [o or shade for o, shade in zip(off, shades)]))
    if conflicts(view):
        rows.append(_ribbon_row("⚡", ["var(--clash)" if c else "none" for c in opposed(view)]))
    return f'<div class="ribbon">{"".join(rows)}</div>'


def _ribbon_row(label: str, fills: list[str]) -> str:
    parts, start = [], 0
    for colour, members in groupby(fills):
        width = len(list(members))
        style = "class='o'" if colour == _OFF else f"style='fill:{colour}'"
        parts.append(f"<rect x='{start}' width='{width}' height='1' {style}/>")
        start += width
    return (
        f"<span>{esc(label)}</span><svg viewBox='0 0 {len(fills)} 1' preserveAspectRatio='none'>{''.join(parts)}</svg>"
    )


def fill(value: float, scale: float) -> str:
    """CSS colour of an advantage: blue above 0, red below, stronger towards `scale`."""
    if not math.isfinite(value):
        return "var(--nan)"
    if value == 0 or scale == 0:
        return "transparent"
    strength = 0.1 + 0.5 * min(abs(value) / scale, 1.0)
    return f"rgb(var(--{'pos' if value > 0 else 'neg'})/{strength:.2f})"


def esc(text: str) -> str:
    """One line of text, made printable and then escaped for HTML, attributes included."""
    return escape(printable(text))
