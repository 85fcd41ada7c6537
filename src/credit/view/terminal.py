"""The token-credit view in a terminal, by `rich`."""

import math
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from credit.view.data import TokenCredit
from credit.view.tables import findings, masked, opposed, runs, segment_name, signed, totals
from credit.view.text import printable, segment_colour, visible

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


@runtime_checkable
class Console(Protocol):
    """Where `print_credit` prints: a `rich.console.Console`."""

    def print(self, *args: Any, **kwargs: Any) -> Any:
        """Print renderables."""


_LOOKS = {
    "error": ("✖ ", "bold white on red"),
    "warning": ("! ", "bold yellow"),
    "conflict": ("⚡ ", "bold red"),
    "note": ("· ", "dim"),
}


def print_credit(view: TokenCredit, console: Console | None = None, *, masked_tokens: int = 40) -> None:
    """Print a view: findings, rewards beside the group's, totals per segment, then the tokens.

    Each stretch of tokens is framed in the colour of its segment and names the mean advantage under every
    rule; each trained token is shaded by its advantage under the first rule, blue above 0 and red below.

    Args:
        view: the rollout.
        console: a `rich.console.Console`; default a new one on standard output.
        masked_tokens: a longer masked stretch shows only its first and last tokens.

    Raises:
        ModuleNotFoundError: without `rich` (`pip install 'credit-routing[view]'`).

    Reference: ours.

    Example:
        >>> from rich.console import Console
        >>> from credit.view.data import token_credit
        >>> print_credit(token_credit(["4", "2"], segments=[0, 1], advantages=[0.5, -1.0]), Console(width=60))
        token credit · 2 tokens...
    """
    try:
        from rich.console import Console as RichConsole
        from rich.text import Text
    except ImportError as error:
        raise ImportError("print_credit needs rich: pip install credit-routing[view]") from error

    out = RichConsole() if console is None else console
    out.print(Text(f"{printable(view.title) or 'token credit'} · {len(view.tokens)} tokens", style="bold"))
    if view.note:
        out.print(Text(printable(view.note), style="dim"))
    for finding in findings(view):
        sign, style = _LOOKS[finding.level]
        out.print(Text(sign + printable(finding.text), style=style))
    if view.rewards or view.component_advantages:
        out.print(_reward_table(view))
    if view.tokens:
        out.print(_total_table(view))
    for panel in _panels(view, masked_tokens):
        out.print(panel)


def _reward_table(view: TokenCredit) -> "Table":
    from rich.table import Table

    table = Table("component", title="rewards", title_justify="left")
    for column in ("reward", "group mean", "advantage"):
        table.add_column(column, justify="right")
    table.add_column("peers")
    for name in dict.fromkeys([*view.rewards, *view.component_advantages]):
        reward = view.rewards.get(name, math.nan)
        peers = sorted(view.peers.get(name, ()))
        present = [r for r in (reward, *peers) if not math.isnan(r)]
        table.add_row(
            printable(name),
            "absent" if math.isnan(reward) else f"{reward:.3g}",
            f"{math.fsum(present) / len(present):.3g}" if present else "",
            signed(view.component_advantages[name]) if name in view.component_advantages else "",
            " ".join("absent" if math.isnan(p) else f"{p:.3g}" for p in peers[:16]) + (" …" if len(peers) > 16 else ""),
        )
    return table


def _total_table(view: TokenCredit) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table("segment", title="credit by segment", title_justify="left")
    table.add_column("tokens", justify="right")
    sums = {rule: {t.segment: t for t in totals(view, rule)} for rule in view.advantages}
    for rule in sums:
        table.add_column(f"{printable(rule)}\nmean · sum · share", justify="right")
    for segment in sorted({s for s, on in zip(view.segments, view.trained) if on}):
        name = Text(printable(segment_name(view, segment)), style=f"bold {segment_colour(segment)}")
        cells = [by_segment[segment] for by_segment in sums.values()]
        tokens = sum(s == segment and on for s, on in zip(view.segments, view.trained))
        table.add_row(name, str(tokens), *(f"{signed(c.mean)} · {signed(c.total)} · {c.share:.0%}" for c in cells))
    for reason, tokens in masked(view):
        table.add_row(Text(f"masked: {printable(reason)}", style="dim"), str(tokens), *("" for _ in sums))
    return table


def _panels(view: TokenCredit, masked_tokens: int) -> "list[Any]":
    from rich.panel import Panel
    from rich.text import Text

    clash, panels = opposed(view), []
    for start, stop, segment, reason in runs(view):
        size = f"{stop - start} token{'' if stop - start == 1 else 's'}"
        if reason:
            head = Text(f"masked · {printable(reason)} · {size}", style="dim")
            panels.append(Panel(_short(view, start, stop, masked_tokens), title=head, title_align="left", style="dim"))
            continue
        head = Text(f"{printable(segment_name(view, segment))} · {size}")
        for rule, values in view.advantages.items():
            head.append(f" · {printable(rule)} {signed(math.fsum(values[start:stop]) / (stop - start))}")
        if any(clash[start:stop]):
            head.append(" ⚡ opposite signs", style="bold red")
        colour = segment_colour(segment)
        panels.append(Panel(_shaded(view, start, stop), title=head, title_align="left", border_style=colour))
    return panels


def _short(view: TokenCredit, start: int, stop: int, limit: int) -> "Text":
    if stop - start <= limit:
        return _shaded(view, start, stop)
    half = limit // 2
    text = _shaded(view, start, start + limit - half)
    text.append(f" … {stop - start - limit} tokens … ", style="italic")
    return text.append_text(_shaded(view, stop - half, stop))


def _shaded(view: TokenCredit, start: int, stop: int) -> "Text":
    from rich.text import Text

    text, scale = Text(), view.scale
    values = next(iter(view.advantages.values()), (0.0,) * len(view.tokens))
    for t in range(start, stop):
        style = "" if view.reasons[t] else _shade(values[t], scale)
        for piece in visible(view.tokens[t]):
            text.append(piece.text, style=style if piece.kind == "text" or not style else f"{style} dim")
    text.rstrip()
    return text


def _shade(value: float, scale: float) -> str:
    if not math.isfinite(value):
        return "bold black on bright_magenta"
    if value == 0 or scale == 0:
        return ""
    # From a grey that light and dark terminals both show to the full colour: white text stays readable.
    full, weight = ((37, 99, 235) if value > 0 else (205, 40, 30)), abs(value) / scale
    red, green, blue = (round(95 + weight * (c - 95)) for c in full)
    return f"white on rgb({red},{green},{blue})"
