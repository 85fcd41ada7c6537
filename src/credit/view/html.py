"""The token-credit view as one HTML file: no script, no external asset, every byte of a rollout escaped."""

import math
from collections.abc import Sequence
from html import escape

from credit.view.data import PADDING, TokenCredit
from credit.view.style import STYLE, rule_style
from credit.view.svg import esc, fill, ribbon, strip
from credit.view.tables import Run, findings, masked, opposed, runs, segment_name, signed, totals
from credit.view.text import segment_colour, visible

# Even if an escape were missed somewhere, this keeps the page from running or loading anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_OPEN_UP_TO = 80


def render_html(views: TokenCredit | Sequence[TokenCredit]) -> str:
    """One self-contained HTML page that shows each view: findings, rewards, totals, a ribbon, and the tokens.

    Tokens are framed by segment, shaded by advantage (blue above 0, red below) under the rule chosen with the
    radio buttons, and underlined with one stripe for each rule when there are several.

    Args:
        views: one view or several.

    Returns:
        The page; it works offline, in light and dark.

    Reference: ours.

    Example:
        >>> from credit.view.data import token_credit
        >>> page = render_html(token_credit(["<script>"], segments=[1], advantages=[0.5]))
        >>> "&lt;script&gt;" in page, "<script>" in page
        (True, False)
    """
    shown = [views] if isinstance(views, TokenCredit) else list(views)
    most = max((len(view.advantages) for view in shown), default=0)
    plural = "" if len(shown) == 1 else "s"
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width,initial-scale=1"><title>Token credit</title>',
            f"<style>{STYLE}{rule_style(most)}</style></head><body>",
            f"<header><h1>Token credit</h1><p>{len(shown)} rollout{plural}</p>{_legend()}</header>",
            _index(shown),
            *(_article(view, at) for at, view in enumerate(shown)),
            "</body></html>",
        ]
    )


def _legend() -> str:
    return (
        '<p class="legend"><span class="bar"></span><span>advantage: <b class="neg">lowered</b> − 0 + '
        '<b class="pos">raised</b></span><span><i class="no"></i> masked, no signal</span>'
        '<span><i class="nan"></i> NaN or infinite</span></p>'
    )


def _index(views: list[TokenCredit]) -> str:
    if len(views) < 2:
        return ""
    items = []
    for at, view in enumerate(views):
        levels = {finding.level for finding in findings(view)}
        marks = "".join(
            f'<b class="{level}">{mark}</b>' for level, mark in _MARKS.items() if level in levels and level != "note"
        )
        items.append(f'<li><a href="#view-{at}">{esc(view.title) or f"rollout {at}"}</a> {marks}</li>')
    return f"<nav><ol>{''.join(items)}</ol></nav>"


_MARKS = {"error": "✖", "warning": "!", "conflict": "⚡", "note": "·"}


def _article(view: TokenCredit, at: int) -> str:
    lines = "".join(f'<li class="{f.level}"><b>{_MARKS[f.level]}</b> {esc(f.text)}</li>' for f in findings(view))
    note = f'<p class="note">{esc(view.note)}</p>' if view.note else ""
    clash = opposed(view)
    return "".join(
        [
            f'<article id="view-{at}" class="n{len(view.advantages)}">',
            f"<h2>{esc(view.title) or f'rollout {at}'} <small>{len(view.tokens):,} tokens</small></h2>{note}",
            f'<ul class="findings">{lines}</ul>' if lines else "",
            f'<div class="tables">{_rewards(view)}{_totals(view)}</div>',
            ribbon(view),
            _picker(view, at),
            *(_run(view, run, clash) for run in runs(view)),
            "</article>",
        ]
    )


def _rewards(view: TokenCredit) -> str:
    names = list(dict.fromkeys([*view.rewards, *view.component_advantages]))
    if not names:
        return ""
    rows = []
    for name in names:
        reward = view.rewards.get(name, math.nan)
        peers = [p for p in view.peers.get(name, ()) if math.isfinite(p)]
        missing = len(view.peers.get(name, ())) - len(peers)
        away = f" <small>+{missing} absent</small>" if missing else ""
        group = [*peers, *([reward] if math.isfinite(reward) else [])]
        mean = f"{math.fsum(group) / len(group):.3g}" if group else ""
        advantage = view.component_advantages.get(name)
        rows.append(
            f"<tr><th>{esc(name)}</th><td>{'absent' if math.isnan(reward) else f'{reward:.3g}'}</td>"
            f'<td class="group">{strip(reward, peers)}{away}</td><td>{mean}</td>'
            f"<td>{'' if advantage is None else _chip(advantage)}</td></tr>"
        )
    head = '<th>component<th>reward<th class="group">in its group<th>mean<th>advantage'
    return f"<table><caption>Rewards</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _totals(view: TokenCredit) -> str:
    sums = {rule: {t.segment: t for t in totals(view, rule)} for rule in view.advantages}
    top = "".join(f'<th colspan="3" class="rule">{esc(rule)}</th>' for rule in sums)
    head = "<th>mean<th>sum<th>share" * len(sums)
    rows = []
    for segment in sorted({s for s, on in zip(view.segments, view.trained) if on}):
        cells = [by_segment[segment] for by_segment in sums.values()]
        tokens = sum(s == segment and on for s, on in zip(view.segments, view.trained))
        numbers = "".join(f"<td>{_chip(c.mean)}</td><td>{signed(c.total)}</td><td>{c.share:.0%}</td>" for c in cells)
        name = f'<i style="background:{segment_colour(segment)}"></i>{esc(segment_name(view, segment))}'
        rows.append(f"<tr><th>{name}</th><td>{tokens:,}</td>{numbers}</tr>")
    for reason, tokens in masked(view):
        blank = f'<td colspan="{3 * len(sums)}"></td>' if sums else ""
        name = f'<i class="no"></i>{esc(reason)}'
        rows.append(f'<tr class="off"><th>{name}</th><td>{tokens:,}</td>{blank}</tr>')
    return (
        f"<table><caption>Credit by segment</caption><thead><tr><th><th>{top}</tr>"
        f"<tr><th>segment<th>tokens{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _picker(view: TokenCredit, at: int) -> str:
    if len(view.advantages) < 2:
        return ""
    options = "".join(
        f'<label><input type="radio" name="rule-{at}" class="pick{i}"{" checked" * (i == 0)}> {esc(rule)}</label>'
        for i, rule in enumerate(view.advantages)
    )
    order = ", ".join(esc(rule) for rule in view.advantages)
    hint = f"<small>stripes under each token, top to bottom: {order}</small>"
    return f'<p class="picker">Shade by {options} {hint}</p>'


def _run(view: TokenCredit, run: Run, clash: tuple[bool, ...]) -> str:
    start, stop, segment, reason = run
    size = f"{stop - start:,} token{'' if stop - start == 1 else 's'}"
    span = f"{start}–{stop - 1}"
    if reason:
        is_open = " open" * (stop - start <= _OPEN_UP_TO and reason != PADDING)
        body = "".join(_token(view, t, {}) for t in range(start, stop))
        head = f"<b>masked: {esc(reason)}</b> <small>{size} · {span}</small>"
        return f'<details class="run off"{is_open}><summary>{head}</summary><div class="text">{body}</div></details>'
    # The shade of a whole run is written once; only tokens that differ from it carry their own.
    common = {i: values[start] for i, values in enumerate(view.advantages.values())}
    body = "".join(_token(view, t, common) for t in range(start, stop))
    chips = "".join(_run_chip(rule, values[start:stop]) for rule, values in view.advantages.items())
    badge = '<b class="conflict">⚡ opposite signs</b>' if any(clash[start:stop]) else ""
    style = ";".join(f"--r{i}:{fill(value, view.scale)}" for i, value in common.items())
    name = esc(segment_name(view, segment))
    return (
        f'<section class="run" style="--seg:{segment_colour(segment)};{style}">'
        f'<h3><b class="seg">{name}</b> <small>{size} · {span}</small>{chips}{badge}</h3>'
        f'<div class="text">{body}</div></section>'
    )


def _run_chip(rule: str, values: Sequence[float]) -> str:
    finite = [v for v in values if math.isfinite(v)]
    mean = math.fsum(finite) / len(finite) if len(finite) == len(values) else math.nan
    low, high = (min(finite), max(finite)) if finite else (math.nan, math.nan)
    spread = f" <small>{signed(low)} … {signed(high)}</small>" if finite and high > low else ""
    return f'<span class="by">{esc(rule)} {_chip(mean)}{spread}</span>'


def _token(view: TokenCredit, t: int, common: dict[int, float]) -> str:
    values = {rule: row[t] for rule, row in view.advantages.items()}
    style = "".join(
        f"--r{i}:{fill(value, view.scale)};"
        for i, value in enumerate(values.values())
        if common and fill(value, view.scale) != fill(common[i], view.scale)
    )
    what = esc(view.reasons[t]) or " · ".join(f"{esc(rule)} {signed(v, 3)}" for rule, v in values.items())
    pieces = visible(view.tokens[t])
    inner = "".join(f"<i>{escape(p.text)}</i>" if p.kind == "mark" else escape(p.text) for p in pieces)
    attribute = f' style="{style}"' if style else ""
    return f'<span class="t" title="{t} · {what}"{attribute}>{inner}</span>'


def _chip(value: float) -> str:
    kind = "nan" if not math.isfinite(value) else "pos" if value > 0 else "neg" if value < 0 else "zero"
    return f'<b class="chip {kind}">{signed(value)}</b>'
