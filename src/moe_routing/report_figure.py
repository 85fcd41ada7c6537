"""The routing report as one PNG, drawn with matplotlib, which is imported only here and only when asked for."""

from pathlib import Path
from typing import Any

from moe_routing.report import CURVES, ReportData


def save_figure(data: ReportData, target: Path) -> None:
    """Draw heat maps, shift histograms and curves into one file.

    Raises:
        ImportError: if matplotlib is absent.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the PNG of a routing report needs matplotlib: pip install matplotlib") from error
    columns = max(len(data.usage), 1)
    rows = 2 + -(-len(data.curves) // columns)
    figure: Any = Figure(figsize=(5.5 * columns + 1.5, 2.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: it would touch the caller's backend and global state
    figure.suptitle(data.title)
    grid = figure.subplots(rows, columns, squeeze=False)
    most = max((share for shares in data.usage.values() for row in shares for share in row), default=0.0) or 1.0
    for column, (name, shares) in enumerate(data.usage.items()):
        axes = grid[0][column]
        image = axes.imshow(shares, aspect="auto", cmap="Blues", vmin=0.0, vmax=most, interpolation="nearest")
        axes.set_yticks(range(len(data.operations)), data.operations)
        axes.set(xlabel="expert", title=_named("expert usage", name, f"layer {data.layer}"))
        figure.colorbar(image, ax=axes, label="share of selections")
        axes = grid[1][column]
        axes.bar(range(len(data.shifts[name])), data.shifts[name], color="tab:blue")
        axes.set_xticks(range(len(data.shifts[name])))
        axes.set(xlabel="experts changed", ylabel="share of pairs", ylim=(0, 1), title=_named("shifts", name))
    spare = list(grid[2:].flat)
    for axes, (key, points) in zip(spare, data.curves.items()):
        axes.plot(*zip(*points), marker=".")
        axes.set_title(CURVES[key], fontsize="small")
        axes.set_xlabel("step")
    for axes in spare[len(data.curves) :]:
        axes.set_axis_off()
    # An escape for names with dollar signs is not needed elsewhere: matplotlib reads them as formulas.
    for text in figure.findobj(lambda artist: hasattr(artist, "set_parse_math")):
        text.set_parse_math(False)
    figure.savefig(target, format="png", dpi=110)


def _named(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
