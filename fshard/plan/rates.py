"""rates: the speed of a device and its links, and the floating-point operations of an operator."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from fshard.checks import NOT_NEGATIVE, POSITIVE, check_numbers, check_types

aten = torch.ops.aten
_ATTENTION = "_scaled_dot_product_flash_attention"
# The processor's kernels, which torch's table lacks, take the same arguments as those of these.
_SAME_FORMULA: Mapping[Any, Any] = MappingProxyType(
    {getattr(aten, f"{_ATTENTION}_for_cpu{end}"): getattr(aten, f"{_ATTENTION}{end}") for end in ("", "_backward")}
)


class Rates(NamedTuple):
    """The speed of a device and its links; the defaults are of the order of an H100 with one 400 Gb/s link each.

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

    def links(self) -> Mapping[str, float]:
        """Name each link with its rate; one for all axes has no axis."""
        of_axes = self.link if isinstance(self.link, Mapping) else {"": self.link}
        return {f"link of {axis}" if axis else "link": rate for axis, rate in of_axes.items()}

    def __str__(self) -> str:
        """Write them in the units of data sheets.

        >>> print(Rates(link={"replicate": 4e10, "shard": 4e11}))
        400 TFLOP/s, memory 2500 GB/s, link of replicate 40 GB/s, link of shard 400 GB/s, latency 20 us
        """
        rates = ", ".join(
            f"{name} {rate / 1e9:g} GB/s" for name, rate in {"memory": self.memory, **self.links()}.items()
        )
        return f"{self.flops / 1e12:g} TFLOP/s, {rates}, latency {self.latency * 1e6:g} us"


def check_rates(rates: Any, axes: Iterable[str]) -> None:
    """Refuse rates by which nothing can be divided, or that lack an axis."""
    check_types("plan", Rates, "a fshard.plan.Rates", rates=rates)
    missing = {f"link of {axis}": None for axis in axes} if isinstance(rates.link, Mapping) else {}
    check_numbers("plan", POSITIVE, flops=rates.flops, memory=rates.memory, **{**missing, **rates.links()})
    check_numbers("plan", NOT_NEGATIVE, latency=rates.latency)


def flops_of(node: Node) -> int:
    """Count the floating-point operations of a matrix product, convolution or attention; 0 for all else."""
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(_SAME_FORMULA.get(packet, packet))
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda given: given.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))
