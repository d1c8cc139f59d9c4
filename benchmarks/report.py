"""What the benchmarks share: a table on the terminal, a JSON file with the circumstances, and a PNG of bars."""

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

import fshard as fs

RESULTS = Path(__file__).parent / "results"


def circumstances(benchmark: str) -> dict[str, Any]:
    """What a reader needs to compare results: versions, date and hardware."""
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"torch": torch.__version__, "fshard": fs.__version__, "python": platform.python_version()},
        "hardware": {"cpu": cpu_model(), "cores": os.cpu_count(), "machine": platform.machine()},
    }


def cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def print_table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> None:
    """Print rows under their names, numbers flush right."""
    names = max(map(len, rows))
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows.values())]
    print(f"\n{title}")
    for name, cells in {"": columns, **rows}.items():
        print(f"  {name:<{names}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths)))


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Classes stand by their names.
    path.write_text(json.dumps(results, indent=1, default=attrgetter("__name__")) + "\n")
    print(f"Results: {path}")


Bars = Mapping[str, float]


class Mark(NamedTuple):
    """A vertical line across bars, with what it says in the legend."""

    value: float
    label: str


def write_bars(
    path: Path, title: str, unit: str, bars: Bars, marks: Sequence[Mark] = (), bounds: Bars = MappingProxyType({})
) -> None:
    """Draw a horizontal bar for each name, fshard's in colour, its bound below it, and lines to compare with."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.35 * (len(bars) + len(bounds))), constrained_layout=True)
    colors = {name: "C0" if name.startswith("fshard") else "0.7" for name in bars}
    align = {"align": "edge", "height": -0.4} if bounds else {}
    drawn = axes.barh(list(bars), list(bars.values()), color=list(colors.values()), **align)
    axes.bar_label(drawn, fmt="%.0f" if bounds else "%.2f", padding=3)
    outlines = {"align": "edge", "height": 0.4, "color": "none", "hatch": "////", "linewidth": 1}
    drawn = axes.barh(list(bounds), list(bounds.values()), edgecolor=[colors[name] for name in bounds], **outlines)
    axes.bar_label(drawn, fmt="%.0f", padding=3)
    for i, mark in enumerate(marks):
        axes.axvline(mark.value, color=f"C{i + 1}", linestyle="--", linewidth=1, label=mark.label)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(title=title, xlabel=unit)
    if marks:
        figure.legend(loc="outside lower center", ncols=len(marks), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"Bars: {path}")
