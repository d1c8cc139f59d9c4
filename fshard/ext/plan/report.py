"""The values of a plan: rates of a device and its links, bytes by use, moments of a step, and the plan as a table."""

import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from fshard import comm
from fshard.extend import NOT_NEGATIVE, POSITIVE, check_numbers, describe, expect, graph_nodes

aten = torch.ops.aten
# Torch's table of formulas lacks the CPU's kernels, which take the same arguments as these.
_SAME_FORMULA: Mapping[Any, Any] = MappingProxyType(
    {
        aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
    }
)
# Files of a process beside its sockets: its modules, data and logs.
OTHER_FILES = 100
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class Rates(NamedTuple):
    """The speed of a device and its links; the defaults are of the order of an H100 with one 400 Gb/s link each.

    Attributes:
        flops: Floating-point operations a second in matrix products and attention.
        memory: Bytes a second to and from the device's own memory, for all else.
        link: Bytes a second that a rank sends, over one link for all axes, or over a link of each axis by its name.
        latency: Seconds until a collective has begun.
    """

    flops: float = 4e14
    memory: float = 2.5e12
    link: float | Mapping[str, float] = 4e10
    latency: float = 2e-5

    def list_rates(self) -> dict[str, float]:
        """List the rates of memory and links by their names."""
        if not isinstance(self.link, Mapping):
            return {"memory": self.memory, "link": self.link}
        return {"memory": self.memory} | {f"link of {axis}": rate for axis, rate in self.link.items()}

    def find_link(self, axis: str) -> tuple[str, float]:
        """Find the link of an axis: its name, which is empty if all axes share one link, and its rate.

        Raises:
            ValueError: if the axis has no rate.
        """
        if not isinstance(self.link, Mapping):
            return "", self.link
        rate: Any = self.link.get(axis)
        check_numbers("plan", POSITIVE, **{f"link of {axis}": rate})
        return axis, rate

    def __str__(self) -> str:
        """Write them in the units of data sheets.

        >>> print(Rates(link={"replicate": 4e10, "shard": 4e11}))
        400 TFLOP/s, memory 2500 GB/s, link of replicate 40 GB/s, link of shard 400 GB/s, latency 20 us
        """
        rates = ", ".join(f"{name} {rate / 1e9:g} GB/s" for name, rate in self.list_rates().items())
        return f"{self.flops / 1e12:g} TFLOP/s, {rates}, latency {self.latency * 1e6:g} us"


def check_rates(api_name: str, rates: Any) -> None:
    """Refuse rates by which nothing can be divided."""
    expect(isinstance(rates, Rates), api_name, "rates to be a fshard.ext.plan.Rates", describe(rates))
    check_numbers(api_name, POSITIVE, flops=rates.flops, **rates.list_rates())
    check_numbers(api_name, NOT_NEGATIVE, latency=rates.latency)


def count_flops(node: Node) -> int:
    """Count the floating-point operations of a matrix product, convolution or attention; 0 for all else."""
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(_SAME_FORMULA.get(packet, packet))
    if formula is None:
        return 0
    args, kwargs = graph_nodes.find_values(node)
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


class Bytes(NamedTuple):
    """Bytes that one rank holds, by their use.

    Attributes:
        parameters: This rank's shards.
        gradients: Gradients, full or reduced, from where they are sent or were received.
        optimizer_state: The optimizer's state, and that of transforms.
        gathered: Full parameters, and their casts and other layouts.
        activations: Other results of operators: kept for the backward, under way, or returned.
        in_flight: Tensors of collectives between their start and the wait for them.
        inputs: Batch, buffers, keys, and tensors that the step closes over.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    gathered: int = 0
    activations: int = 0
    in_flight: int = 0
    inputs: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)

    def write_lines(self) -> Iterator[str]:
        """Write a line for each use."""
        yield "  held at the peak; what is not held then is 0"
        for name, nbytes in self._asdict().items():
            yield f"    {name.replace('_', ' '):<16}{format_bytes(nbytes):>12}"


class Moment(NamedTuple):
    """One operator of a step, when it runs.

    Attributes:
        name: Its name in the graph.
        operator: The operator.
        bytes: Bytes that are held while it runs, beyond the arguments.
        collective: The collective that it starts, if any.
    """

    name: str
    operator: str
    bytes: int
    collective: comm.Collective | None


class Traffic(NamedTuple):
    """Collectives that one rank takes part in.

    Attributes:
        collectives: How many.
        bytes: Nominal ring bytes, scalars left out.
    """

    collectives: int
    bytes: float


@dataclass(frozen=True, repr=False, eq=False)
class StepPlan:
    """The memory, traffic and time of one step of one rank, which `fs.plan` predicts without running anything.

    Attributes:
        mesh: Ranks on each axis.
        rank: This rank's coordinate on each.
        arguments: Bytes that are held all the time: state and batch.
        peak: The bytes held when most are, state and batch included.
        timeline: The step's operators in their order.
        flops: Floating-point operations of a rank in matrix products, convolutions and attention.
        seconds: An estimate of the time, from `rates`.
        waiting: Seconds among these in which the device waits for a link.
        rates: Rates of the device and its links: stated, not measured.
        agreement: Seconds of the host in which each call compares with other ranks; an estimate.
        sockets: Sockets that a rank opens to the others; each is one of the files that its process may open.
    """

    mesh: dict[str, int]
    rank: dict[str, int]
    arguments: Bytes
    peak: Bytes
    timeline: Sequence[Moment]
    flops: int
    seconds: float
    waiting: float
    rates: Rates
    agreement: float
    sockets: int

    @property
    def at_peak(self) -> Moment:
        """The operator that runs at the peak, the first of several."""
        return max(self.timeline, key=lambda moment: moment.bytes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a rank holds at a time, state and batch included."""
        return self.peak.total

    def collectives(self) -> comm.Record:
        """List the collectives in the order of their start, as `fs.comm.record` does."""
        return comm.Record(moment.collective for moment in self.timeline if moment.collective is not None)

    def bytes_sent(self) -> float:
        """Count the bytes each rank sends, in nominal ring terms, scalars left out."""
        return self.collectives().bytes_sent()

    def by_axis(self) -> dict[str, Traffic]:
        """Sum up the traffic over each axis of the mesh."""
        return self._sum_traffic(lambda entry: entry.axis, self.mesh)

    def by_unit(self) -> dict[str, Traffic]:
        """Sum up the traffic for each unit's leaves, in the order in which they are first sent; for others by label."""
        return self._sum_traffic(lambda entry: entry.unit or entry.label)

    def _sum_traffic(self, key: Callable[[comm.Collective], str], names: Iterable[str] = ()) -> dict[str, Traffic]:
        groups = {name: comm.Record() for name in names}
        for entry in self.collectives():
            groups.setdefault(key(entry), comm.Record()).append(entry)
        return {name: Traffic(len(entries), entries.bytes_sent()) for name, entries in groups.items()}

    def __str__(self) -> str:
        return "\n".join(self._write_lines())

    __repr__ = __str__

    def _write_lines(self) -> Iterator[str]:
        mesh = ", ".join(f"{name} {size}" for name, size in self.mesh.items())
        yield f"mesh {mesh}: {format_bytes(self.peak_bytes)} per rank, {format_bytes(self.bytes_sent())} sent"
        if self.timeline:
            yield f"  peak of {self.peak_bytes} bytes at {self.at_peak.operator} ({self.at_peak.name})"
        yield from self.peak.write_lines()
        for title, groups in (("axis", self.by_axis()), ("unit", self.by_unit())):
            yield f"  {f'sent by {title}':<34}{'collectives':>12}{'bytes':>12}"
            for name, traffic in groups.items():
                label = name if len(name) <= 32 else f"{name[:14]}...{name[-15:]}"
                yield f"    {label:<32}{traffic.collectives:>12}{format_bytes(traffic.bytes):>12}"
        yield f"  {self.flops:.3g} floating-point operations"
        yield f"  {self.seconds:.3g} s a step, {self.waiting:.3g} s of it waiting: an estimate from these rates:"
        yield f"    {self.rates}"
        yield f"  {1e3 * self.agreement:.2g} ms of the host in each call to agree with other ranks"
        yield f"  {self.sockets} sockets"
        yield from warn_of_sockets(self.sockets)


def warn_of_sockets(sockets: int) -> Iterator[str]:
    """Write a line if a process of this system may not open so many sockets, even if it raises its limit."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = sockets + OTHER_FILES
    if files > limit:
        yield f"    too many for `ulimit -Hn`, which is {limit} here: let each rank open {files} files"


def format_bytes(nbytes: float) -> str:
    """Write bytes for people, in powers of 1000.

    >>> format_bytes(12_900_000_000), format_bytes(12)
    ('12.90 GB', '12 B')
    """
    for size, unit in _UNITS:
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"
