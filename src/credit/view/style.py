"""The style sheet of the HTML view."""

STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--ink:#1c1e21;--soft:#6b7280;--line:#e3e4e8;
--pos:37 99 235;--neg:220 60 20;--clash:#c026d3;
--nan:repeating-linear-gradient(45deg,#f0f 0 4px,#fff 4px 8px);--off:#eceef1;--err:#b91c1c;--warn:#92600a}
@media(prefers-color-scheme:dark){:root{--bg:#131416;--card:#1c1e22;--ink:#e8e9eb;--soft:#9aa1ad;
--line:#30343b;--pos:96 155 255;--neg:255 112 72;--clash:#e879f9;
--nan:repeating-linear-gradient(45deg,#f0f 0 4px,#222 4px 8px);--off:#2a2d33;--err:#f87171;--warn:#fbbf24}
}*{box-sizing:border-box}body{margin:0 auto;padding:24px 20px 60px;max-width:1200px;background:var(--bg);
color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}h1{font-size:20px;
margin:0}h2{font-size:18px;margin:0 0 2px}small{color:var(--soft);font-weight:400;font-size:12.5px}
header{display:flex;flex-wrap:wrap;align-items:baseline;gap:4px 16px;margin-bottom:14px}header p{margin:0;
color:var(--soft)}.legend{display:flex;flex-wrap:wrap;align-items:center;gap:4px 14px;font-size:13px;
margin-left:auto}.legend .bar{width:110px;height:10px;border-radius:5px;
background:linear-gradient(90deg,rgb(var(--neg)/.6),transparent,rgb(var(--pos)/.6));
border:1px solid var(--line)}.legend i,td i,th i{display:inline-block;width:11px;height:11px;
border-radius:3px;margin-right:6px;vertical-align:-1px}.no{background:var(--off);
border:1px solid var(--soft)}.legend .nan{background:var(--nan)}b.pos{color:rgb(var(--pos))}
b.neg{color:rgb(var(--neg))}nav{border:1px solid var(--line);border-radius:10px;background:var(--card);
padding:8px 14px;margin-bottom:18px}nav ol{margin:0;padding-left:22px;columns:2 20em}nav a{color:inherit}
article{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px 20px;
margin-bottom:26px}.note{color:var(--soft);margin:0 0 8px}.findings{list-style:none;margin:10px 0;
padding:0;display:grid;gap:5px}.findings li{padding:5px 11px;border-radius:7px;
border-left:4px solid var(--line);background:var(--bg)}.findings b{display:inline-block;min-width:1.2em}
.findings .error{border-color:var(--err);color:#fff;background:#b91c1c;font-weight:600}
.findings .warning{border-color:#d97706;color:var(--warn)}.findings .conflict{border-color:var(--clash)}
.findings .note{margin:0;color:var(--soft)}b.error{color:var(--err)}b.warning{color:var(--warn)}
b.conflict,.conflict>b{color:var(--clash)}
.tables{display:flex;flex-wrap:wrap;align-items:flex-start;gap:14px 36px;margin:14px 0;
overflow-x:auto}table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding-bottom:4px}td,th{padding:3px 10px;text-align:right;
font-weight:400;white-space:nowrap;border-bottom:1px solid var(--line)}
td:first-child,th:first-child,.group{text-align:left}td:first-child,th:first-child{padding-left:0}
tbody th{font-weight:600}thead th{color:var(--soft);font-size:12.5px}.rule{text-align:center;
font-weight:600;color:var(--ink)}.off th,.off td{color:var(--soft);font-weight:400}.strip{width:120px;
height:16px;vertical-align:-3px;margin:0 5px}.strip path{stroke:var(--line)}
.strip circle{fill:var(--card);stroke:var(--soft);fill-opacity:.7}.strip .own{fill:var(--ink);
stroke:var(--card);fill-opacity:1}.chip{font-weight:600}.chip.pos{color:rgb(var(--pos))}
.chip.neg{color:rgb(var(--neg))}.chip.zero{color:var(--soft)}.chip.nan{background:#f0f;color:#000;
padding:0 5px;border-radius:4px}.ribbon{display:grid;grid-template-columns:max-content 1fr;gap:3px 12px;
align-items:center;margin:16px 0;font-size:13px}.ribbon span{max-width:14em;overflow:hidden;
text-overflow:ellipsis;white-space:nowrap;text-align:right;color:var(--soft)}.ribbon svg{width:100%;
height:20px;border-radius:4px;background:var(--card);box-shadow:inset 0 0 0 1px var(--line)}
.ribbon .o{fill:var(--off)}.picker{margin:0 0 12px;font-size:13.5px}
.picker label{margin:0 8px 0 4px;font-weight:600}.run{border-left:5px solid var(--seg,var(--line));
padding:2px 0 2px 12px;margin:9px 0}.run h3,.run summary{font-size:13px;font-weight:400;margin:0 0 3px;
display:flex;flex-wrap:wrap;gap:2px 12px;align-items:baseline}.run summary{cursor:pointer;
color:var(--soft)}.run summary::before{content:"▸"}.run[open] summary::before{content:"▾"}
.run .seg{color:var(--seg)}.run h3 .conflict{border:1px solid;border-radius:9px;padding:0 7px;
font-size:12px}.text{white-space:pre-wrap;overflow-wrap:anywhere;
font:13.5px/1.7 ui-monospace,SFMono-Regular,Menlo,Consolas, "DejaVu Sans Mono",monospace;overflow:hidden}
.t{unicode-bidi:isolate;border-radius:2px;padding:2px 0;box-shadow:-1px 0 0 -.5px var(--line);
-webkit-box-decoration-break:clone;box-decoration-break:clone;color:var(--ink)}
.t:hover{outline:1px solid var(--ink)}.t i{font-style:normal;opacity:.42}.off .t{color:var(--soft)}
@media print{details{display:block}.run{break-inside:auto}}
"""


def rule_style(rules: int) -> str:
    """Rules that shade tokens: the chosen row fills the token, and every row is a stripe below it.

    Args:
        rules: the largest number of rules in one view.

    Returns:
        CSS; `--r0`, `--r1`, … are set on runs and tokens.

    Example:
        >>> ".n1 section .t{" in rule_style(1), ".n2 section .t{" in rule_style(1)
        (True, False)
    """
    parts = []
    for count in range(1, rules + 1):
        stripes = [
            f"linear-gradient(var(--r{i}),var(--r{i})) 0 calc(100% - {5 * (count - 1 - i)}px)/100% 4px no-repeat"
            for i in range(count)
        ]
        below = 5 * count + 1 if count > 1 else 0
        text = f"linear-gradient(var(--fill),var(--fill)) 0 0/100% calc(100% - {below}px) no-repeat"
        layers = ",".join([*(stripes if count > 1 else []), text])
        parts.append(
            f".n{count} section .t{{--fill:var(--r0);background:{layers};padding-bottom:{below + 2}px}}"
            f".n{count} section .text{{line-height:{26 + below}px}}"
        )
    parts += [f"article:has(.pick{i}:checked) section .t{{--fill:var(--r{i})}}" for i in range(1, rules)]
    return "".join(parts)
