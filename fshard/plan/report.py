"""report: what a plan tells, as values, a table and a picture."""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fshard import comm
from fshard.plan.kinds import Bytes
from fshard.plan.rates import Rates

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class Moment(NamedTuple):
    """One operator of a step, when it runs.

    Attributes:
        name: Its name in the graph.
        operator: What it runs.
        held: What is held while it runs.
        units: Units of which something gathered or in flight is held then.
        collective: What it sends, if anything.
        flops: Its floating-point operations.
    """

    name: str
    operator: str
    held: Bytes
    units: tuple[str, ...]
    collective: comm.Collective | None
    flops: int

    @property
    def unit(self) -> str:
        """The unit whose leaves it sends, or else who asked for that."""
        return self.collective.unit or self.collective.label if self.collective else ""


class Traffic(NamedTuple):
    """What one rank sends.

    Attributes:
        collectives: How many.
        bytes: Nominal ring bytes, scalars left out.
    """

    collectives: int
    bytes: float


class Plan:
    """What one step of one rank takes, as `fs.plan` found it without running anything.

    Attributes:
        mesh: Ranks on each axis.
        rank: This rank's coordinate on each.
        arguments: What is held all the time: state and batch.
        timeline: The step's operators in their order.
        seconds: An estimate of the time, from `rates`.
        waiting: Seconds among these in which the device waits for the link.
        rates: What the device and its links achieve: stated, not measured.
    """

    def __init__(
        self,
        mesh: dict[str, int],
        rank: dict[str, int],
        arguments: Bytes,
        timeline: Sequence[Moment],
        seconds: float,
        waiting: float,
        rates: Rates,
    ) -> None:
        """Keep what was found."""
        self.mesh, self.rank, self.arguments, self.timeline = mesh, rank, arguments, list(timeline)
        self.seconds, self.waiting, self.rates = seconds, waiting, rates

    @property
    def peak(self) -> Bytes:
        """What is held when most is, state and batch included."""
        return self.at_peak.held if self.timeline else self.arguments

    @property
    def at_peak(self) -> Moment:
        """The operator that runs then, the first of several."""
        return max(self.timeline, key=lambda moment: moment.held.total)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a rank holds at a time, state and batch included."""
        return self.peak.total

    @property
    def flops(self) -> int:
        """Floating-point operations of a rank in matrix products, convolutions and attention."""
        return sum(moment.flops for moment in self.timeline)

    def collectives(self) -> comm.Record:
        """What the step sends, in the order of its start, as `fs.comm.record` lists it."""
        return comm.Record(moment.collective for moment in self.timeline if moment.collective is not None)

    def bytes_sent(self) -> float:
        """Bytes each rank sends, in nominal ring terms, scalars left out."""
        return self.collectives().bytes_sent()

    def by_axis(self) -> dict[str, Traffic]:
        """What is sent over each axis of the mesh."""
        return {name: self._traffic([m for m in self._sending() if _of(m).axis == name]) for name in self.mesh}

    def by_unit(self) -> dict[str, Traffic]:
        """What is sent for each unit's leaves, in the order in which they are first sent; for others by label."""
        names = dict.fromkeys(moment.unit for moment in self._sending())
        return {name: self._traffic([m for m in self._sending() if m.unit == name]) for name in names}

    def plot(self, path: str | Path) -> None:
        """Draw the memory that is held over the operators, by what for, and where collectives start.

        Args:
            path: Where to write the picture, such as "plan.png". Needs matplotlib.
        """
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(11, 4.5), constrained_layout=True)
        kinds = [name for name in Bytes._fields if any(getattr(m.held, name) for m in self.timeline)]
        layers = [[getattr(moment.held, name) / 1e9 for moment in self.timeline] for name in kinds]
        axes.stackplot(
            range(len(self.timeline)), layers, labels=[name.replace("_", " ") for name in kinds], step="post"
        )
        starts = [n for n, moment in enumerate(self.timeline) if moment.collective is not None]
        totals = [self.timeline[n].held.total / 1e9 for n in starts]
        axes.scatter(starts, totals, 6, color="black", label="starts of collectives", zorder=3)
        axes.set(xlabel="operators, in their order", ylabel="GB held by one rank", title=self._headline())
        axes.set_xlim(0, max(len(self.timeline) - 1, 1))
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        figure.savefig(path, dpi=110)
        plt.close(figure)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _sending(self) -> list[Moment]:
        return [moment for moment in self.timeline if moment.collective is not None]

    def _traffic(self, moments: Sequence[Moment]) -> Traffic:
        return Traffic(len(moments), sum(_of(m).sent for m in moments if not _of(m).scalar))

    def _headline(self) -> str:
        mesh = ", ".join(f"{name} {size}" for name, size in self.mesh.items())
        return f"mesh {mesh}: {readable(self.peak_bytes)} per rank, {readable(self.bytes_sent())} sent"

    def _lines(self) -> Iterator[str]:
        yield self._headline()
        if self.timeline:
            yield f"  peak of {self.peak_bytes} bytes at {self.at_peak.operator} ({self.at_peak.name})"
        yield from parts_of(self.peak)
        for title, groups in (("axis", self.by_axis()), ("unit", self.by_unit())):
            yield f"  {f'sent by {title}':<34}{'collectives':>12}{'bytes':>12}"
            for name, traffic in groups.items():
                yield f"    {shortened(name):<32}{traffic.collectives:>12}{readable(traffic.bytes):>12}"
        yield f"  {self.flops:.3g} floating-point operations"
        yield f"  {self.seconds:.3g} s a step, {self.waiting:.3g} s of it waiting: an estimate from these rates:"
        yield f"    {self.rates}"


def _of(moment: Moment) -> comm.Collective:
    assert moment.collective is not None
    return moment.collective


def parts_of(peak: Bytes) -> Iterator[str]:
    """Lines of what a rank holds when it holds most."""
    yield "  held at the peak; what is not held then is 0"
    for name, nbytes in zip(Bytes._fields, peak, strict=True):
        yield f"    {name.replace('_', ' '):<16}{readable(nbytes):>12}"


def readable(nbytes: float) -> str:
    """Bytes for people, in powers of 1000.

    >>> readable(12_900_000_000), readable(12)
    ('12.90 GB', '12 B')
    """
    return next((f"{nbytes / size:.2f} {unit}" for size, unit in _UNITS if nbytes >= size), f"{nbytes:.0f} B")


def bytes_from(verb: str, what: str, size: Any) -> int:
    """A number of bytes, or a text such as 80GB.

    Args:
        verb: The verb that asks, for errors.
        what: The argument, for errors.
        size: The number or the text, in powers of 1000 or, as GiB, of 1024.

    Raises:
        ValueError: if it is neither.

    >>> [bytes_from("plan", "memory", size) for size in ("80GB", "1.5 KiB", 12)]
    [80000000000, 1536, 12]
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B", size.strip()) if isinstance(size, str) else None
    if match is not None:
        return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))
    if isinstance(size, str) or not isinstance(size, int | float) or isinstance(size, bool) or not 0 <= size < math.inf:
        raise ValueError(
            f"{verb}: expected {what} to be a number of bytes, 0 or more, or a text such as 80GB or 500 MiB, got "
            f"{size!r}"
        )
    return int(size)


def shortened(name: str) -> str:
    """A name that fits into a column."""
    return name if len(name) <= 32 else f"{name[:14]}...{name[-15:]}"
