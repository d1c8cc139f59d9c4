"""Draw: a report as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fshard.trace.blame import BETWEEN, Meeting, Span
from fshard.trace.events import Timeline
from fshard.trace.perfetto import memory

# What the main thread does, in the words of the picture, with a colour.
KINDS = (
    ("compute", "computing", "0.8"),
    (BETWEEN, BETWEEN, "0.92"),
    ("start", "starting a collective", "C0"),
    ("wait", "waiting", "C1"),
)
LATE = "waiting for a late rank", "C3"

# Lanes that a picture has room for: of more ranks those that are waited for longest are drawn.
LANES = 24


def draw(
    path: str | Path,
    title: str,
    timelines: Sequence[Timeline],
    spans: Mapping[int, Sequence[Span]],
    met: Sequence[Meeting],
) -> None:
    """Draw the picture.

    Args:
        path: Where to.
        title: Its title.
        timelines: By rank, by one clock.
        spans: What each rank's main thread did.
        met: The collectives that ranks met in.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    held_up = dict.fromkeys(spans, 0)
    late: dict[int, list[tuple[float, float]]] = {rank: [] for rank in spans}
    start = min(timeline.begin for timeline in timelines)

    def bar(begin: int, end: int) -> tuple[float, float]:
        return (begin - start) / 1e6, (end - begin) / 1e6

    for meeting in met:
        for rank, event in meeting.events.items():
            for begin, end in event.waits if rank != meeting.last else ():
                if begin < meeting.began:
                    late[rank].append(bar(begin, min(end, meeting.began)))
                    held_up[meeting.last] += min(end, meeting.began) - begin
    shown = sorted(sorted(timelines, key=lambda line: -held_up[line.rank])[:LANES], key=lambda line: line.rank)
    figure, (lanes, held) = plt.subplots(
        2,
        1,
        sharex=True,
        figsize=(12, 3.5 + 0.45 * len(shown)),
        height_ratios=[len(shown) + 1, 3],
        layout="constrained",
    )
    for place, timeline in enumerate(shown):
        for kind, _, color in KINDS:
            bars = [bar(span.begin, span.end) for span in spans[timeline.rank] if _kind(span) == kind]
            lanes.broken_barh(bars, (place - 0.35, 0.7), color=color, linewidth=0)
        lanes.broken_barh(late[timeline.rank], (place - 0.35, 0.7), color=LATE[1], linewidth=0)
        times, numbers = zip(*memory(timeline), strict=True)
        x = [bar(when, when)[0] for when in times]
        held.plot(x, [n / 2**20 for n in numbers], drawstyle="steps-post", linewidth=1, label=f"rank {timeline.rank}")
    lanes.set_yticks(range(len(shown)), [f"rank {timeline.rank}" for timeline in shown])
    lanes.invert_yaxis()
    lanes.set_title(title, fontsize="medium")
    named = [*((name, color) for _, name, color in KINDS), LATE]
    handles = [Patch(color=color) for _, color in named]
    place_below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "ncols": len(named), "frameon": False}
    lanes.legend(handles, [name for name, _ in named], **place_below)
    meters = ", ".join(dict.fromkeys(timeline.meter for timeline in shown))
    held.set(xlabel="ms", ylabel=f"MiB, {meters}")
    held.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _kind(span: Span) -> str:
    return BETWEEN if span.name == BETWEEN else span.kind
