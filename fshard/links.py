"""Links: the latency and bandwidth between the ranks of a mesh axis, by which strategies size messages."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from fshard import _compat, comm
from fshard.checks import describe
from fshard.mesh import Mesh, axis_of
from fshard.tree import Axis

# A message is large where its transfer takes so many times its latency.
LARGE = 16

# Of `measure`: gathers of each size, and the bytes of a large one.
ROUNDS, LARGE_BYTES = 7, 16 * 1024 * 1024


class Link(NamedTuple):
    """What a collective over a mesh axis costs.

    Attributes:
        latency: Seconds that it takes whatever its size.
        bandwidth: Bytes that a rank sends in a second.

    >>> import fshard as fs
    >>> link = fs.Link(latency=20e-6, bandwidth=5e9)
    >>> link.merge_bytes
    1600000
    >>> strategy = fs.zero3(fs.init_mesh({"shard": -1}, device="cpu"), links={"shard": link})
    """

    latency: float
    bandwidth: float

    @property
    def merge_bytes(self) -> int:
        """Bytes up to which units are gathered together: from there on latency costs little beside the transfer."""
        return round(LARGE * self.latency * self.bandwidth)


# Processes on one machine by gloo (0.5 ms, 2 GiB/s), and accelerators on one machine.
_HOST, _ACCELERATOR = Link(latency=2**-11, bandwidth=2**31), Link(latency=3e-5, bandwidth=1e11)


def link_of(axis: Axis, links: Mapping[str, Link] | None, what: str) -> Link:
    """Find the link by which a strategy sizes the messages over an axis.

    Args:
        axis: The axis.
        links: The user's links by names of axes; None chooses by the backend of the axis, and measures nothing.
        what: The strategy, for errors.

    Returns:
        The link.

    Raises:
        ValueError: if the user's links have none for the axis, or one that is not positive.
    """
    if links is None:
        known = axis.size > 1 and _compat.group_size(axis.group_name)
        backends = _compat.group_devices(axis.group_name) if known else {}
        return _ACCELERATOR if set(backends.values()) - {backends.get("cpu")} else _HOST
    link = links.get(axis.name) if isinstance(links, Mapping) else None
    if not (isinstance(link, Link) and all(isinstance(n, int | float) and 0 < n < float("inf") for n in link)):
        found = f"{link!r} for {axis.name!r}" if isinstance(links, Mapping) else describe(links)
        raise ValueError(
            f"{what}: expected links to map {axis.name!r} to a Link of positive numbers, got {found}; "
            "pass fs.measure(mesh)"
        )
    return link


def measure(mesh: Mesh) -> dict[str, Link]:
    """Measure the links of a mesh, axis by axis, for a strategy to size its messages by.

    It takes a second or so, and every rank must call it. Ranks agree on the slowest that any of them found. Runs that
    must send the same messages should use the same links: print them once, and pass them to later runs.

    Args:
        mesh: The mesh.

    Returns:
        A Link for each axis name, equal on every rank, such as for `zero3(mesh, links=measure(mesh))`.

    Raises:
        ValueError: if `mesh` is no mesh with named axes.

    >>> import fshard as fs
    >>> mesh = fs.init_mesh({"shard": -1}, device="cpu")
    >>> fs.measure(mesh)  # of one rank nothing is sent, and the link is what the backend's usually is
    {'shard': Link(latency=..., bandwidth=...)}
    >>> strategy = fs.zero3(mesh, links=fs.measure(mesh))
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"measure: expected mesh to be a DeviceMesh, got {describe(mesh)}; make one by fs.init_mesh")
    axes = [axis_of(mesh, name) for name in mesh.mesh_dim_names or (None,)]
    device = torch.device(mesh.device_type)
    found: dict[str, Link] = {}
    for axis in axes:
        if axis.size == 1:
            found[axis.name] = link_of(axis, None, "measure")
            continue
        small, large = (_seconds(axis, torch.zeros(n, dtype=torch.uint8, device=device)) for n in (1, LARGE_BYTES))
        times = torch.tensor([small, large - small], dtype=torch.float64, device=device)
        for other in axes:
            times = comm.all_gather([times], other, "measure")[0].amax(0)
        latency, transfer = times.tolist()
        # Two digits: more are noise.
        found[axis.name] = Link(_rounded(latency), _rounded((axis.size - 1) * LARGE_BYTES / max(transfer, latency)))
    return found


def _seconds(axis: Axis, shard: torch.Tensor) -> float:
    """Time a gather of a shard from each rank."""
    return statistics.median(_timed(lambda: comm.all_gather([shard], axis, "measure")) for _ in range(ROUNDS))


def _timed(gather: Callable[[], list[torch.Tensor]]) -> float:
    start = time.perf_counter()
    for tensor in gather():
        # Reads one number, for which an accelerator has to finish.
        tensor.reshape(-1)[-1].item()
    return time.perf_counter() - start


def _rounded(number: float) -> float:
    return float(f"{number:.1e}")
