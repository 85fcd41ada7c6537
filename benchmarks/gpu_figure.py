"""CSV and picture of `benchmarks.gpu_router_gradient`."""

import csv
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.timing import Spread

COLOURS = {"kernel": "#0072B2", "copy": "#000000", "eager": "#D55E00", "torch.compile": "#009E73"}
PANEL, MARGIN = (320, 220), 12  # pixels of the plain picture


@dataclass(frozen=True)
class Timing:
    """One candidate at one size."""

    router: str
    experts: int
    k: int
    activation: str
    dtype: str
    tokens: int
    candidate: str
    seconds: Spread
    bytes: int
    versus: Spread  # seconds over those of the kernel, round by round

    @property
    def rate(self) -> float:
        """GB/s, counting for every candidate the bytes that have to move."""
        return self.bytes / self.seconds.median / 1e9


def write_csv(path: Path, timings: Sequence[Timing]) -> None:
    """All figures, one candidate at one size a line."""
    names = "router,experts,k,activation,dtype,tokens,candidate,ms_low,ms_median,ms_high,bytes,gb_per_s"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*names.split(","), "versus_kernel_low", "versus_kernel_median", "versus_kernel_high"])
        for t in timings:
            milliseconds = [f"{1e3 * value:.5f}" for value in (t.seconds.low, t.seconds.median, t.seconds.high)]
            versus = [f"{value:.4f}" for value in (t.versus.low, t.versus.median, t.versus.high)]
            shape = [t.router, t.experts, t.k, t.activation, t.dtype, t.tokens, t.candidate]
            writer.writerow([*shape, *milliseconds, t.bytes, f"{t.rate:.2f}", *versus])


def draw(path: Path, timings: Sequence[Timing], title: str) -> str:
    """GB/s over tokens as a PNG, one panel for each router and dtype; returns what drew it."""
    panels: dict[str, list[Timing]] = {}
    for timing in timings:
        panels.setdefault(f"{timing.router}, {timing.dtype}", []).append(timing)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        key = ", ".join(f"{name} {colour}" for name, colour in COLOURS.items())
        note = f"GB/s over tokens, both logarithmic, a line for each factor of 10; {' | '.join(panels)}; {key}"
        write_png(path, torch.cat([_plain_panel(shown, timings) for shown in panels.values()], 1), note)
        return f"without matplotlib: {note}"
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows + 0.4), layout="constrained")
    figure.suptitle(title, fontsize=10)
    for place, (name, shown) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, columns, place)
        for candidate, points in _curves(shown).items():
            axes.loglog(*zip(*points), marker="o", markersize=3, color=COLOURS[candidate], label=candidate)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("tokens")
        axes.set_ylabel("GB/s")
        axes.grid(True, which="both", alpha=0.2)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=130)
    return "drawn by matplotlib"


def _curves(shown: Sequence[Timing]) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for timing in sorted(shown, key=lambda t: t.tokens):
        curves.setdefault(timing.candidate, []).append((timing.tokens, timing.rate))
    return curves


def _plain_panel(shown: Sequence[Timing], everything: Sequence[Timing]) -> Tensor:
    """The same curves without any text, on axes that all panels share."""
    width, height = PANEL
    image = torch.full((height, width, 3), 255, dtype=torch.uint8)
    low, high = _decades([t.rate for t in everything])
    left, right = (math.log10(bound([t.tokens for t in everything])) for bound in (min, max))

    def place(tokens: float, rate: float) -> tuple[float, float]:
        x = (math.log10(tokens) - left) / max(right - left, 1e-9)
        y = (math.log10(rate) - low) / (high - low)
        return MARGIN + x * (width - 1 - 2 * MARGIN), height - 1 - MARGIN - y * (height - 1 - 2 * MARGIN)

    for decade in range(low, high + 1):
        _line(image, place(10**left, 10.0**decade), place(10**right, 10.0**decade), "#CCCCCC")
    for candidate, points in _curves(shown).items():
        for start, end in zip(points, points[1:] or points):
            _line(image, place(*start), place(*end), COLOURS[candidate])
    return image


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low = math.floor(math.log10(min(values)))
    return low, max(math.ceil(math.log10(max(values))), low + 1)


def _line(image: Tensor, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    steps = int(max(abs(end[0] - start[0]), abs(end[1] - start[1]))) + 2
    x = torch.linspace(start[0], end[0], steps).round().long()
    y = torch.linspace(start[1], end[1], steps).round().long()
    image[y, x] = torch.tensor(list(bytes.fromhex(colour[1:])), dtype=torch.uint8)


def write_png(path: Path, image: Tensor, note: str) -> None:
    """Write rows × columns × RGB bytes, with a note in the file's text."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = image.shape
    lines = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in image)
    parts = [
        chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        chunk(b"tEXt", b"Description\0" + note.encode("latin-1", "replace")),
        chunk(b"IDAT", zlib.compress(lines)),
        chunk(b"IEND", b""),
    ]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
