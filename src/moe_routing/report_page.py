"""The routing report as one HTML file: no script, no external asset, every name escaped."""

from collections.abc import Sequence
from html import escape

from moe_routing.report import CURVES, ReportData

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--ink:#1c1e21;--soft:#6b7280;--line:#e3e4e8;--hot:37 99 235}
@media(prefers-color-scheme:dark){:root{--bg:#131416;--card:#1c1e22;--ink:#e8e9eb;--soft:#9aa1ad;--line:#30343b;
--hot:96 155 255}}
*{box-sizing:border-box}body{margin:0 auto;padding:24px 20px 60px;max-width:1200px;background:var(--bg);
color:var(--ink);font:15px/1.5 system-ui,sans-serif}h1{font-size:20px;margin:0 0 14px}h2{font-size:16px;margin:0 0 8px}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:16px 20px;margin:0 0 18px;
overflow-x:auto}small,text{color:var(--soft);fill:var(--soft);font-size:12px}.grid{display:flex;flex-wrap:wrap;
gap:14px 30px}figure{margin:0}figcaption{font-size:13px}svg{display:block}rect{fill:rgb(var(--hot))}
.cell{stroke:var(--line);stroke-width:.5}.axis{stroke:var(--line);fill:none}.curve{stroke:rgb(var(--hot));
stroke-width:1.6;fill:none}circle{fill:rgb(var(--hot))}table{border-collapse:collapse;font-size:13px;
font-variant-numeric:tabular-nums}td,th{padding:2px 10px;text-align:right;border-bottom:1px solid var(--line)}
th:first-child{text-align:left;font-weight:400;padding-left:0}
"""


def render_page(data: ReportData) -> str:
    """The page; it works offline, in light and dark.

    >>> from moe_routing.report import ReportData
    >>> page = render_page(ReportData("<b>", 0, ("read",), {"": [[1.0]]}, {"": [1.0]}, {}, {"routing/gate": 1.0}))
    >>> "&lt;b&gt;" in page, "<b>" in page
    (True, False)
    """
    usage = "".join(_figure(name, _heat_map(data.operations, rows)) for name, rows in data.usage.items())
    shifts = "".join(_figure(name, _bars(shares)) for name, shares in data.shifts.items())
    curves = "".join(_figure(CURVES[key], _line(points)) for key, points in data.curves.items())
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{escape(data.title)}</title><style>{_STYLE}</style></head><body><h1>{escape(data.title)}</h1>",
            _section(f"Expert usage by operation, layer {data.layer}", usage),
            _section("Experts changed from one token to the next", shifts),
            _section("Over training", curves) if curves else "",
            _section("Numbers", _table(data.numbers)),
            "</body></html>",
        ]
    )


def _section(title: str, body: str) -> str:
    return f'<section><h2>{escape(title)}</h2><div class="grid">{body}</div></section>'


def _figure(caption: str, body: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{body}</figure>"


def _heat_map(operations: Sequence[str], rows: Sequence[Sequence[float]]) -> str:
    left, width, height = 130, max(3, min(22, 900 // max(len(rows[0]) if rows else 1, 1))), 20
    most = max((share for row in rows for share in row), default=0.0) or 1.0
    cells = "".join(
        f'<rect class="cell" x="{left + width * e}" y="{height * o}" width="{width}" height="{height}" '
        f'fill-opacity="{share / most:.3f}"><title>{escape(name)}, expert {e}: {share:.2%}</title></rect>'
        for o, (name, row) in enumerate(zip(operations, rows))
        for e, share in enumerate(row)
    )
    names = "".join(
        f'<text x="{left - 8}" y="{height * o + 14}" text-anchor="end">{escape(name)}</text>'
        for o, name in enumerate(operations)
    )
    experts = len(rows[0]) if rows else 0
    foot = height * len(rows) + 16
    axis = f'<text x="{left}" y="{foot}">experts 0 to {experts - 1}; darkest: {most:.1%} of the selections</text>'
    return _svg(max(left + width * experts, left + 330), foot + 4, names + cells + axis)


def _bars(shares: Sequence[float]) -> str:
    width, height = 34, 110
    bars = "".join(
        f'<rect x="{width * c + 4}" y="{height * (1 - share) + 16:.1f}" width="{width - 8}" '
        f'height="{height * share:.1f}"><title>{c} changed: {share:.2%}</title></rect>'
        f'<text x="{width * (c + 0.5)}" y="{height * (1 - share) + 12:.1f}" text-anchor="middle">{share:.0%}</text>'
        f'<text x="{width * (c + 0.5)}" y="{height + 32}" text-anchor="middle">{c}</text>'
        for c, share in enumerate(shares)
    )
    return _svg(width * len(shares), height + 38, bars)


def _line(points: Sequence[tuple[float, float]]) -> str:
    width, height, left = 320, 110, 58
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high, first, last = min(values), max(values), min(steps), max(steps)
    across, up = (last - first) or 1.0, (high - low) or 1.0
    at = [(left + width * (step - first) / across, 8 + height * (high - value) / up) for step, value in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"><title>step {s:g}: {v:.4g}</title></circle>'
                   for (x, y), (s, v) in zip(at, points))  # fmt: skip
    return _svg(
        left + width + 8,
        height + 30,
        f'<path class="axis" d="M{left} 8V{height + 8}H{left + width}"/><polyline class="curve" points="{path}"/>{dots}'
        f'<text x="{left - 6}" y="16" text-anchor="end">{high:.3g}</text>'
        f'<text x="{left - 6}" y="{height + 8}" text-anchor="end">{low:.3g}</text>'
        f'<text x="{left}" y="{height + 24}">step {first:g} to {last:g}</text>',
    )


def _table(numbers: dict[str, float]) -> str:
    rows = "".join(
        f"<tr><th>{escape(key)}</th><td>{value:.4g}</td></tr>" for key, value in numbers.items() if "/usage/" not in key
    )
    return f"<table>{rows}</table>"


def _svg(width: float | int, height: float | int, body: str) -> str:
    return f'<svg width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">{body}</svg>'
