"""rates: floating-point operations of a graph, and an estimate of its time."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fshard import comm
from fshard.jit.memory import Lifetimes
from fshard.jit.passes import looks

aten = torch.ops.aten
# The processor's kernels, which torch's own table leaves out.
_FORWARD = "aten._scaled_dot_product_flash_attention_for_cpu.default"
_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


class Rates(NamedTuple):
    """What a device and its links achieve; the defaults are of the order of an H100 with one 400 Gb/s link each.

    Attributes:
        flops: Floating-point operations a second in matrix products and attention.
        memory: Bytes a second to and from the device's own memory, for all else.
        link: Bytes a second that a rank sends, or those over each axis by its name.
        latency: Seconds until a collective has begun.
    """

    flops: float = 4e14
    memory: float = 2.5e12
    link: float | Mapping[str, float] = 4e10
    latency: float = 2e-5

    def link_of(self, axis: str) -> float:
        """Bytes a second over an axis."""
        return self.link[axis] if isinstance(self.link, Mapping) else self.link

    def __str__(self) -> str:
        """In the units of data sheets.

        >>> print(Rates(link={"replicate": 4e10, "shard": 4e11}))
        400 TFLOP/s, memory 2500 GB/s, link of replicate 40 GB/s, link of shard 400 GB/s, latency 20 us
        """
        links = (
            [f"link of {axis} {rate / 1e9:g} GB/s" for axis, rate in self.link.items()]
            if isinstance(self.link, Mapping)
            else [f"link {self.link / 1e9:g} GB/s"]
        )
        memory, latency = f"memory {self.memory / 1e9:g} GB/s", f"latency {self.latency * 1e6:g} us"
        return ", ".join([f"{self.flops / 1e12:g} TFLOP/s", memory, *links, latency])


def check_rates(rates: Any, axes: Iterable[str]) -> None:
    """Refuse rates by which nothing can be divided, or that lack an axis."""
    if not isinstance(rates, Rates):
        raise ValueError(
            f"plan: expected rates to be fshard.plan.Rates(flops=..., memory=..., link=...), got {rates!r}"
        )
    links = (
        {f"link of {axis!r}": rates.link.get(axis) for axis in axes}
        if isinstance(rates.link, Mapping)
        else {"link": rates.link}
    )
    for name, rate in {"flops": rates.flops, "memory": rates.memory, **links}.items():
        if not isinstance(rate, int | float) or isinstance(rate, bool) or not rate > 0:
            raise ValueError(f"plan: expected the rate {name} to be a number above 0, in units a second, got {rate!r}")
    if not isinstance(rates.latency, int | float) or isinstance(rates.latency, bool) or rates.latency < 0:
        raise ValueError(f"plan: expected latency to be seconds, 0 or more, got {rates.latency!r}")


def flops_of(node: Node) -> int:
    """Floating-point operations of a matrix product, convolution or attention; 0 for all else."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in flop_registry:
        args, kwargs = map_arg((node.args, node.kwargs), _value)
        return int(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))
    if str(node.target) not in (_FORWARD, _BACKWARD):
        return 0
    shapes = [value.shape for value in map(_value, node.args) if isinstance(value, torch.Tensor)]
    return int(sdpa_flop_count(*shapes[:3]) if str(node.target) == _FORWARD else sdpa_backward_flop_count(*shapes[:4]))


def seconds_of(node: Node, flops: int, rates: Rates) -> float:
    """How long an operator keeps the device busy."""
    if looks(node) or not hasattr(node.target, "namespace"):
        return 0.0
    moved = sum(map(_nbytes, (*node.all_input_nodes, node)))
    return max(flops / rates.flops, moved / rates.memory)


def step_seconds(
    order: Iterable[tuple[Node, int, comm.Collective | None]], life: Lifetimes, rates: Rates
) -> tuple[float, float]:
    """Play a graph on one device and one link, on which collectives follow each other beside what is computed.

    Args:
        order: Each operator with its floating-point operations and what it sends.
        life: Where collectives are waited for.
        rates: The rates.

    Returns:
        Seconds in all, and those among them in which the device waits for the link.
    """
    ends: dict[Node, float] = {}
    now = link = idle = 0.0
    waits: dict[Node, list[Node]] = {}
    for flight in life.flights:
        waits.setdefault(flight.wait, []).append(flight.start)
    for node, flops, sent in order:
        for start in waits.get(node, ()):
            if start in ends:
                idle += max(0.0, ends[start] - now)
                now = max(now, ends[start])
        if sent is not None:
            link = max(now, link) + rates.latency + sent.sent / rates.link_of(sent.axis)
            ends[node] = link
        elif node not in waits:
            now += seconds_of(node, flops, rates)
    return max(now, link), idle + max(0.0, link - now)


def _value(node: Any) -> Any:
    return node.meta["val"] if isinstance(node, Node) else node


def _nbytes(node: Node) -> int:
    value = node.meta.get("val")
    return sum(v.nbytes for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, torch.Tensor))
