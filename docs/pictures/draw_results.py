"""Draws the measured step times and peak memory: `python docs/pictures/draw_results.py`.

`results.svg` stands at the top of README.md and has one model in each panel. `performance.svg` stands on the page of
performance and has all of them. `budget.svg` has the steps under memory budgets, of the models that were measured, and
`recovery.svg` has one recovery of each system by ranks: the one whose time is the median.
Every number is from `benchmarks/results/*.json`.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

PICTURES = Path(__file__).parent
RESULTS = PICTURES.parents[1] / "benchmarks/results"

# Systems in the results, and their names in the pictures.
SYSTEMS = {
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "fshard-ddp": "fs.ddp",
    "fshard-zero3": "fs.zero3",
    "fshard-zero3-graph": "fs.zero3, jitted",
}
STEPS = {
    "peers-d128-L4-B8-T128-V256.json": "width 128, 4 layers, batch 8 x 128",
    "peers-d512-L8-B4-T256.json": "width 512, 8 layers, batch 4 x 256",
    "peers-d1024-L8-B1-T128.json": "width 1024, 8 layers, batch 1 x 128",
    "peers-d64-L48-B1-T16.json": "width 64, 48 layers, batch 1 x 16",
}
PEAKS = {
    "memory-d1024-L8-B1-T256.json": "GPT, width 1024, 8 layers",
    "memory-llama.json": "Llama, 200 million parameters",
    "memory-mixtral.json": "Mixtral, 8 experts",
}

BUDGETS = {
    "fit-gpt.json": "GPT, width 1024, 8 layers",
    "fit-llama.json": "Llama, 200 million parameters",
    "fit-mixtral.json": "Mixtral, 8 experts",
}

TORCH, FSHARD, JITTED = "#8a8f98", "#2a9d74", "#0b6e4f"
INK, LINE = "#1f2328", "#d0d7de"
COLORS = dict(zip(SYSTEMS, (TORCH, TORCH, FSHARD, FSHARD, JITTED), strict=True))
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


def text(x: float, y: float, words: str, *, size: int = 14, anchor: str = "start", weight: str = "normal") -> str:
    """Text whose baseline is at `y`."""
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style} fill="{INK}">{words}</text>'


def bar(x: float, y: float, width: float, height: float, color: str) -> str:
    """A filled rectangle."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" fill="{color}"/>'


def line(x1: float, y1: float, x2: float, y2: float, color: str = LINE, width: float = 1) -> str:
    """A straight line."""
    points = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {points} stroke="{color}" stroke-width="{width}"/>'


def picture(width: int, height: int, title: str, shapes: list[str]) -> str:
    """An SVG file with a white ground, which is readable on a dark page too."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    ground = f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>'
    lines = [f'{head} font-family="{FONT}" role="img">', f"<title>{title}</title>", ground, *shapes, "</svg>"]
    return "\n".join(lines) + "\n"


def load(name: str) -> Any:
    """The results of one benchmark."""
    return json.loads((RESULTS / name).read_text())


def step_times(name: str) -> dict[str, dict[str, Any]]:
    """For each system the time of a step relative to DDP: the median `ratio`, and `ratio_quartiles`."""
    measured = {}
    for group in load(name)["step"]:
        # Each group of systems that ran together has a DDP of its own, with ratio 1.
        for system, times in group.items():
            measured[system] = times
    return measured


def peaks(name: str) -> dict[str, float]:
    """For each system the largest peak of a rank, in MiB."""
    systems = load(name)["systems"]
    return {system: max(rank["peak"] for rank in ranks) / 2**20 for system, ranks in systems.items()}


def bars(x: float, width: float, values: dict[str, float], decimals: int) -> list[str]:
    """A bar for each system in rows of 40 px, with its value behind it."""
    largest = max(values.values())
    shapes = [line(x, 96, x, 296)]
    for row, system in enumerate(SYSTEMS):
        y = 104 + 40 * row
        length = width * values[system] / largest
        shapes.append(bar(x, y, length, 24, COLORS[system]))
        shapes.append(text(x + length + 8, y + 17, f"{values[system]:.{decimals}f}"))
    return shapes


def results() -> str:
    """One model in each panel: the largest batch of the step times, and the GPT of the peaks."""
    steps, memory = "peers-d512-L8-B4-T256.json", "memory-d1024-L8-B1-T256.json"
    ratios = {system: times["ratio"] for system, times in step_times(steps).items()}
    mebibytes = peaks(memory)
    shapes = [
        text(24, 38, "Training a GPT on two ranks (CPU, gloo; lower is better)", size=18, weight="bold"),
        text(160, 76, "Time of a step, DDP = 1", size=15, weight="bold"),
        text(550, 76, "Peak memory of a rank, MiB", size=15, weight="bold"),
    ]
    for row, name in enumerate(SYSTEMS.values()):
        shapes.append(text(148, 121 + 40 * row, name, anchor="end"))
    shapes += bars(160, 280, {system: ratios[system] for system in SYSTEMS}, 2)
    shapes += bars(550, 280, {system: mebibytes[system] for system in SYSTEMS}, 0)
    shapes += [
        text(160, 326, STEPS[steps]),
        text(550, 326, "width 1024, 8 layers, batch 1 x 256"),
        text(24, 358, "Times are medians of paired rounds, with one core for each rank. torch 2.13."),
    ]
    return picture(900, 380, "Time of a step and peak memory of DDP, FSDP2 and fshard", shapes)


def log_position(ratio: float, x: float, width: float) -> float:
    """Where a ratio is on a logarithmic axis from 0.9 to 6."""
    return x + width * math.log(ratio / 0.9) / math.log(6 / 0.9)


def quartiles_of_steps(x: float, y: float, width: float) -> list[str]:
    """For each size and system the median of the ratios as a dot, on a line between their quartiles."""
    shapes = []
    for size, (name, words) in enumerate(STEPS.items()):
        top = y + 134 * size
        times = step_times(name)
        shapes.append(text(x, top, words, weight="bold"))
        for tick in (1, 2, 3, 4, 5):
            at = log_position(tick, x, width)
            shapes.append(line(at, top + 8, at, top + 110))
        for row, (system, label) in enumerate(SYSTEMS.items()):
            middle = top + 20 + 20 * row
            low, high = (log_position(quartile, x, width) for quartile in times[system]["ratio_quartiles"])
            at = log_position(times[system]["ratio"], x, width)
            shapes.append(text(x - 12, middle + 5, label, anchor="end"))
            shapes.append(line(low, middle, high, middle, COLORS[system], 4))
            shapes.append(f'<circle cx="{at:.1f}" cy="{middle}" r="6" fill="{COLORS[system]}"/>')
            shapes.append(text(max(high, at + 6) + 8, middle + 5, f"{times[system]['ratio']:.2f}"))
    for tick in (1, 2, 3, 4, 5):
        shapes.append(text(log_position(tick, x, width), y + 134 * 3 + 130, str(tick), anchor="middle"))
    return shapes


def parts_of_peaks(x: float, y: float, width: float) -> list[str]:
    """For each model and system the peak as a bar, with a mark at its lower bound."""
    shapes = []
    for size, (name, words) in enumerate(PEAKS.items()):
        top = y + 178 * size
        mebibytes, bounds = peaks(name), load(name)["bounds"]
        shapes.append(text(x, top, words, weight="bold"))
        for row, (system, label) in enumerate(SYSTEMS.items()):
            middle = top + 24 + 28 * row
            scale = width / 3600
            bound = bounds[system]["bound"] / 2**20 * scale
            end = max(mebibytes[system] * scale, bound)
            shapes.append(text(x - 12, middle + 5, label, anchor="end"))
            shapes.append(bar(x, middle - 9, mebibytes[system] * scale, 18, COLORS[system]))
            shapes.append(line(x + bound, middle - 12, x + bound, middle + 12, INK, 2))
            shapes.append(text(x + end + 8, middle + 5, f"{mebibytes[system]:.0f}"))
    return shapes


def performance() -> str:
    """All sizes and models, with the spread of the step times and the bounds of the peaks."""
    shapes = [
        text(144, 38, "Time of a step, DDP = 1", size=18, weight="bold"),
        text(144, 60, "median, and a line between the quartiles"),
        text(680, 38, "Peak memory of a rank, MiB", size=18, weight="bold"),
        text(680, 60, "bar: measured; mark: no step can run in less"),
    ]
    shapes += quartiles_of_steps(144, 94, 330)
    shapes += parts_of_peaks(680, 94, 330)
    return picture(1080, 650, "Time of a step and peak memory of DDP, FSDP2 and fshard at all sizes", shapes)


# Steps beside those with budgets, and their marks in the picture.
OTHERS = {
    "whole": ("fs.zero3, jitted", JITTED, "circle"),
    "checkpointed": ("fs.zero3, checkpoints", FSHARD, "square"),
    "fsdp2": ("FSDP2", TORCH, "circle"),
    "fsdp2-checkpointed": ("FSDP2, checkpoints", TORCH, "square"),
    "fsdp2-compiled-0.5": ("FSDP2 compiled, budget 0.5", TORCH, "diamond"),
    "fsdp2-compiled-0.2": ("FSDP2 compiled, budget 0.2", TORCH, "triangle"),
}


def mark(x: float, y: float, color: str, shape: str) -> str:
    """A point of a plot."""
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="{color}"/>'
    corners = {
        "square": [(-6, -6), (6, -6), (6, 6), (-6, 6)],
        "diamond": [(0, -8), (8, 0), (0, 8), (-8, 0)],
        "triangle": [(0, -8), (8, 6), (-8, 6)],
    }
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners[shape])
    return f'<polygon points="{points}" fill="{color}"/>'


def time_against_peak(x: float, y: float, title: str, rows: dict[str, dict[str, Any]]) -> list[str]:
    """The steps of one model: peaks to the right, and times up, on axes that start at the least of them."""
    width, height = 290, 250
    mebibytes = {name: row["peak"] / 2**20 for name, row in rows.items()}
    lowest, highest = min(mebibytes.values()), max(mebibytes.values())
    slowest = math.ceil(4 * max(row["ratio"] for row in rows.values())) / 4
    fastest = math.floor(4 * min(row["ratio"] for row in rows.values())) / 4

    def place(name: str) -> tuple[float, float]:
        right = (mebibytes[name] - lowest) / max(highest - lowest, 1)
        up = (rows[name]["ratio"] - fastest) / max(slowest - fastest, 0.25)
        return x + width * right, y + height * (1 - up)

    shapes = [text(x, y - 24, title, weight="bold")]
    ticks = 4
    for number in range(ticks + 1):
        part = number / ticks
        at, over = x + width * part, y + height * (1 - part)
        shapes.append(line(x, over, x + width, over))
        shapes.append(text(x - 14, over + 5, f"{fastest + part * (slowest - fastest):.2f}", anchor="end"))
        shapes.append(text(at, y + height + 26, f"{lowest + part * (highest - lowest):.0f}", anchor="middle"))
    budgets = [place(name) for name, row in rows.items() if row.get("budget")]
    for (x1, y1), (x2, y2) in pairwise(budgets):
        shapes.append(line(x1, y1, x2, y2, JITTED, 2))
    shapes += [f'<circle cx="{at:.1f}" cy="{over:.1f}" r="4" fill="{JITTED}"/>' for at, over in budgets]
    for name, (_, color, shape) in OTHERS.items():
        if name in rows:
            shapes.append(mark(*place(name), color, shape))
    return shapes


def budgets(measured: dict[str, dict[str, Any]]) -> str:
    """Time against peak for each model, with the steps of fs.fit on a line."""
    left, panel = 84, 372
    shapes = [
        text(
            24,
            38,
            "Time of a step against its peak: ten budgets, and other ways to save memory",
            size=18,
            weight="bold",
        )
    ]
    for number, (title, rows) in enumerate(measured.items()):
        shapes += time_against_peak(left + panel * number, 104, title, rows)
    shapes.append(
        text(24, 416, "Time relative to the jitted step without a budget (up), peak of a rank in MiB (right).")
    )
    at = 34.0
    shown = [other for system, other in OTHERS.items() if any(system in rows for rows in measured.values())]
    for name, color, shape in [("fs.fit, ten budgets", JITTED, ""), *shown]:
        shapes.append(mark(at, 445, color, shape) if shape else line(at - 10, 445, at + 10, 445, JITTED, 4))
        shapes.append(text(at + 16, 450, name))
        at += 46 + 7.2 * len(name)
    width = max(left + panel * len(measured), int(at), 840)
    return picture(width, 476, "Time of a step against its peak memory under budgets", shapes)


# The systems that are shown, and their names in the picture.
RECOVERIES = {
    "fshard-run-jitted": "fshard.run, generations in memory, graph from a file",
    "fshard-torchrun-jitted": "torchrun, generations in memory, graph from a file",
    "fshard-disk-jitted": "torchrun, checkpoint on disk, traced again",
    "fsdp2-dcp": "torchrun, FSDP2, torch.distributed.checkpoint",
}
RECOVERY_RANKS = "2"
# For the event that ends a part: the name of the part and its color.
RECOVERY_PARTS = {
    "created": ("no process", "#f3d0cd"),
    "imported": ("imports", "#c9cdd3"),
    "mesh": ("mesh", "#7aa6d8"),
    "built": ("build", "#e3b35a"),
    "restored": ("restore", "#a678c4"),
    "step": ("steps", FSHARD),
}
RECOVERY_LEFT, RECOVERY_WIDTH, RECOVERY_ROW = 100, 760, 26
SECONDS_BEFORE = 0.5


class Part(NamedTuple):
    """A stretch of the time of a rank."""

    begin: float
    end: float
    name: str


def parts_of(events: Sequence[Mapping[str, Any]], end: float, is_victim: bool) -> Iterator[Part]:
    """What a rank does from shortly before the kill to the end."""
    created = next(event["seconds"] for event in events if event["name"] == "created" and event["seconds"] > 0)
    lost = [event["seconds"] for event in events if event["name"] == "lost"]
    last = 0.0 if is_victim else min([*lost, created])
    yield Part(-SECONDS_BEFORE, last, "step")
    for event in events:
        if event["name"] in RECOVERY_PARTS and event["seconds"] > last and event["seconds"] >= created:
            yield Part(last, min(event["seconds"], end), event["name"])
            last = event["seconds"]
        if last >= end:
            return
    yield Part(last, end, "step")


def rows_of(y: float, title: str, row: Mapping[str, Any], longest: float) -> list[str]:
    """The ranks of one system below its title."""
    scale = RECOVERY_WIDTH / (longest + SECONDS_BEFORE)
    shapes = [text(RECOVERY_LEFT, y, f"{title}: {row['seconds']['median']:.2f} s", weight="bold")]
    for rank in range(int(RECOVERY_RANKS)):
        events = sorted((event for event in row["events"] if event["rank"] == rank), key=lambda event: event["seconds"])
        top = y + 10 + RECOVERY_ROW * rank
        shapes.append(text(RECOVERY_LEFT - 12, top + 15, f"rank {rank}", anchor="end"))
        for part in parts_of(events, longest, is_victim=rank == row["victim"]):
            x = RECOVERY_LEFT + scale * (part.begin + SECONDS_BEFORE)
            shapes.append(
                bar(
                    x,
                    top,
                    max(scale * (part.end - part.begin) - 0.5, 0.5),
                    RECOVERY_ROW - 6,
                    RECOVERY_PARTS[part.name][1],
                )
            )
        ends = [event["seconds"] for event in events if event["name"] == "step"]
        for end in ends:
            if -SECONDS_BEFORE < end < longest:
                x = RECOVERY_LEFT + scale * (end + SECONDS_BEFORE)
                shapes.append(line(x, top, x, top + RECOVERY_ROW - 6, "#ffffff", 1))
    return shapes


def recovery(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The systems below each other, on one axis of seconds from the kill."""
    longest = math.ceil(2 * max(row["seconds"]["values"][0] for row in rows.values()) + 1) / 2
    longest = max(longest, *(row["seconds"]["median"] + 0.5 for row in rows.values()))
    scale = RECOVERY_WIDTH / (longest + SECONDS_BEFORE)
    height = 30 + int(RECOVERY_RANKS) * RECOVERY_ROW
    bottom = 84 + height * len(rows)
    shapes = [text(24, 38, "From the kill of a rank to the next completed step", size=18, weight="bold")]
    for tick in range(math.floor(longest) + 1):
        x = RECOVERY_LEFT + scale * (tick + SECONDS_BEFORE)
        shapes += [line(x, 58, x, bottom), text(x, bottom + 20, f"{tick} s", anchor="middle")]
    for number, (name, row) in enumerate(rows.items()):
        shapes += rows_of(78 + height * number, RECOVERIES[name], row, longest)
    killed = RECOVERY_LEFT + scale * SECONDS_BEFORE
    shapes += [line(killed, 58, killed, bottom, INK, 2), text(killed, 54, "SIGKILL", anchor="middle", size=12)]
    x = RECOVERY_LEFT
    for name, color in RECOVERY_PARTS.values():
        shapes += [bar(x, bottom + 36, 16, 16, color), text(x + 22, bottom + 49, name)]
        x += 52 + 8 * len(name)
    return picture(RECOVERY_LEFT + RECOVERY_WIDTH + 30, bottom + 70, "One recovery of each system by ranks", shapes)


def main() -> None:
    """Write the pictures."""
    (PICTURES / "results.svg").write_text(results())
    (PICTURES / "performance.svg").write_text(performance())
    measured = {title: load(name)["rows"] for name, title in BUDGETS.items() if (RESULTS / name).exists()}
    if measured:
        (PICTURES / "budget.svg").write_text(budgets(measured))
    if (RESULTS / "recovery.json").exists():
        measured = load("recovery.json")["ranks"].get(RECOVERY_RANKS, {})
        rows = {name: measured[name] for name in RECOVERIES if name in measured}
        if rows:
            (PICTURES / "recovery.svg").write_text(recovery(rows))


if __name__ == "__main__":
    main()
