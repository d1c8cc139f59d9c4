"""Device meshes: init_mesh, and the Axis values that specs hold instead of a mesh."""

import atexit
import json
import math
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fshard import _compat
from fshard.comm import CollectiveError, connected, refuse_other
from fshard.comm import world as world_of_ranks
from fshard.errors import Problem, expect, refuse
from fshard.tree import Axis
from fshard.tree.checks import describe

Mesh = DeviceMesh

# Seconds that a rank waits for another by default: torch's own half hour is longer than anyone watches.
TIMEOUT = 300.0


def init_mesh(shape: Mapping[str, int], device: str | None = None, *, timeout: float = TIMEOUT) -> Mesh:
    """Make a device mesh over all ranks, starting torch.distributed if nobody has.

    Under torchrun the ranks are the launcher's; with no launcher at all there is one. A process group that this call
    started is destroyed at interpreter exit.

    A mesh of some ranks lets different models live on different ranks, such as a trainer and a reference model. Make it
    by torch, as `DeviceMesh("cpu", [0, 1], mesh_dim_names=("shard",))`, on every rank of the run and in the same order;
    then each rank works with the meshes that it is a member of, where `mesh.get_coordinate()` is not None. Pass a mesh
    of one axis over these ranks to `fs.checkpoint` by `mesh=`. Values pass from one mesh to another through a
    checkpoint, or by `fs.broadcast` over the axis of a mesh of all ranks beside.

    Args:
        shape: Size of each named axis, outermost first; one of them may be -1 for "the rest of the ranks".
        device: "cpu" or the type of an accelerator, such as "cuda" or "xpu"; by default the one that torch finds,
            where torch.distributed has a backend of its own for it, else "cpu".
        timeout: Seconds that a rank waits for another in every process group of the mesh, longer than ranks may be
            apart. Where torch.distributed runs already with another timeout, the mesh gets groups of its own.

    Returns:
        A torch DeviceMesh of that shape with named axes.

    Raises:
        ValueError: before torch.distributed is started, if the sizes do not multiply to the number of ranks, there is
            no such device, `timeout` is not positive, torch.distributed runs already on a backend that does not serve
            the device, or the environment is half a launcher's; before any group is made, and on every rank, if ranks
            ask for different meshes.
        CollectiveError: if a rank does not come within the timeout.

    >>> init_mesh({"shard": -1}, device="cpu").size()
    1
    """
    limit = timedelta(seconds=TIMEOUT)
    try:
        device = _device(device)
        seconds = type(timeout) in (int, float) and 0 < timeout < float("inf")
        expect(seconds, "init_mesh", "timeout to be a positive number of seconds", f"{timeout!r:.40}")
        limit = timedelta(seconds=timeout)
        sizes = _sizes(shape, dist.get_world_size() if dist.is_initialized() else _launched())
    except ValueError as error:
        # Others may have asked for what they can have, and wait.
        _compare(str(error), limit)
        raise
    if device != "cpu" and not (dist.is_initialized() and torch.get_device_module(device).is_initialized()):
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
    if not dist.is_initialized():
        _start(device, limit)
    _compare(f"{dict(zip(shape, sizes, strict=True))} on {device!r}, timeout {limit.total_seconds():g}", limit)
    ranks, groups = torch.arange(math.prod(sizes), device="cpu").reshape(sizes), []
    for dim, size in enumerate(sizes):
        rows = ranks.movedim(dim, -1).reshape(-1, size).tolist()
        groups.append(_compat.group_of_row(rows, limit))
    mesh = DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=tuple(shape))
    _compat.release_groups_at_exit(mesh)
    for group in groups:
        if group.size() > 1:
            connected(world_of_ranks(), group.group_name)
    return mesh


def axis_of(mesh: Mesh | Axis, name: str | None = None) -> Axis:
    """Read one axis of a mesh.

    Args:
        mesh: A mesh, or an Axis, which is returned as it is.
        name: The axis; may be left out for a mesh of one axis.

    Returns:
        The axis with its size and the name of its process group.

    Raises:
        ValueError: if the mesh has no such axis, or several and none was named, or this rank is not one of its ranks.

    >>> import fshard as fs
    >>> mesh = fs.init_mesh({"shard": -1, "tp": 1}, device="cpu")
    >>> fs.axis_of(mesh, "tp").name, fs.axis_of(mesh["shard"]).name
    ('tp', 'shard')
    >>> fs.axis_of(mesh)
    Traceback (most recent call last):
    ValueError: expected mesh to have one axis, got ('shard', 'tp'); name one, as in mesh['shard']
    """
    return axis_given(mesh, name, "name")


def axis_given(mesh: Mesh | Axis, name: str | None, argument: str) -> Axis:
    """As `axis_of`, for a function that takes the axis's name by an argument of its own.

    Args:
        mesh: As for `axis_of`.
        name: As for `axis_of`.
        argument: What the function calls it.

    Returns:
        As `axis_of`.

    Raises:
        ValueError: as `axis_of` does.
    """
    if isinstance(mesh, Axis):
        return mesh
    if not isinstance(mesh, Mesh):
        raise ValueError(f"expected mesh to be a DeviceMesh or an Axis, got {describe(mesh)}; make one by fs.init_mesh")
    names = mesh.mesh_dim_names or ()
    if name is None and len(names) != 1:
        raise ValueError(f"expected mesh to have one axis, got {names}; name one, as in mesh['shard']")
    name = names[0] if name is None else name
    if name not in names:
        remedy = f"pass {argument}= or name it in init_mesh"
        raise ValueError(f"expected {argument} to be one of {names}, got {name!r:.40}; {remedy}")
    if mesh.get_coordinate() is None:
        ranks, remedy = mesh.mesh.flatten().tolist(), "call it where mesh.get_coordinate() is not None"
        raise ValueError(
            f"expected a call on one of the mesh's ranks {ranks}, got one on rank {dist.get_rank()}; {remedy}"
        )
    _compat.release_groups_at_exit(mesh)
    return Axis(name, mesh.size(names.index(name)), mesh.get_group(name).group_name)


@contextmanager
def fake_axes(what: str, sizes: Mapping[str, int], place: Mapping[str, int], backend: str) -> Iterator[dict[str, Axis]]:
    """Let there be axes to trace with, whose groups cannot communicate, and no others to send over.

    torch.distributed need not run, and does so undisturbed.

    Args:
        what: Who asks, for the error of a collective over another axis.
        sizes: Ranks on each axis by its name.
        place: This process's coordinate on each.
        backend: "nccl" or "gloo": the backend that algorithms of collectives are chosen for.

    Yields:
        The axes by their names.

    >>> import torch, fshard as fs
    >>> from fshard.extend import fake_axes
    >>> with fake_axes("example", {"shard": 4096}, {"shard": 0}, "nccl") as axes:
    ...     fs.make_graph(lambda x: fs.all_gather(x, axes["shard"]))(torch.ones(2)).bytes_sent()
    32760.0
    """
    # Names of their own keep them from being taken for real groups.
    axes = {name: Axis(name, size, f"fake {name} {uuid.uuid4().hex}") for name, size in sizes.items()}
    groups = {axis.group_name: (place[name], axis.size) for name, axis in axes.items()}

    def check(axis: Axis) -> None:
        found = f"{axis.name!r} of {axis.size} ranks, which the step closes over"
        remedy = "pass axes as arguments, or read them from the state's leaves, as leaf.spec.axes"
        expect(axis in axes.values(), what, "axes of the planned mesh", found, remedy)

    token = refuse_other.set(check)
    try:
        with _compat.fake_process_groups(groups, backend):
            yield axes
    finally:
        refuse_other.reset(token)


def world() -> Axis:
    """All ranks of this run as one axis, whatever meshes there are; one rank where torch.distributed does not run."""
    if not dist.is_initialized():
        return Axis("world", 1, "")
    # Calls on a mesh and calls of all ranks are compared where they send over one group.
    group = _compat.group_of_all()
    return Axis("world", group.size(), group.group_name)


def ranks_of(mesh: Mesh | Axis | None) -> Axis:
    """All ranks of a mesh as one axis.

    Args:
        mesh: A mesh of this rank; None for all ranks of this run.

    Returns:
        The axis.

    Raises:
        ValueError: if it is no mesh, this rank is not one of its ranks, or it has several axes and not all ranks.
    """
    if mesh is None:
        return world()
    names = mesh.mesh_dim_names or () if isinstance(mesh, Mesh) else ()
    if isinstance(mesh, Axis) or len(names) < 2:
        return axis_of(mesh)
    everyone, size = world(), mesh.size()
    if size != everyone.size:
        remedy = "pass one of its axes, as mesh['shard'], or a DeviceMesh of one axis over its ranks"
        needed = f"one axis or all {everyone.size} ranks"
        raise ValueError(f"expected mesh to have {needed}, got axes {names} of {size} ranks; {remedy}")
    return Axis("+".join(names), size, everyone.group_name)


def _device(device: str | None) -> str:
    """Check the type of a device, or choose one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    known = ["cpu", *([found.type] if found else [])]
    if device is None:
        # gloo serves devices that have no backend of their own, such as "mps", through the processor.
        own = dist.Backend.default_device_backend_map.get(known[-1], "gloo") != "gloo"
        device = known[-1] if own else "cpu"
    expect(device in known, "init_mesh", f"device to be one of {known}, which torch finds here", f"{device!r:.100}")
    if dist.is_initialized():
        # Pairs such as "cpu:gloo,cuda:nccl".
        serves = [pair.split(":")[0] for pair in dist.get_backend_config().split(",")]
        got = f"one that runs on {dist.get_backend()!r} already and serves {serves}"
        remedy = "call torch.distributed.destroy_process_group() first or pass another device"
        expect(device in serves, "init_mesh", f"a torch.distributed that serves {device!r}", got, remedy)
    return device


def _compare(asked: str, limit: timedelta) -> None:
    """Refuse on every rank where ranks ask for different meshes, whose groups would wait for each other."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    own = world_of_ranks()
    text = json.dumps([asked, own.generation + (own.broken is not None)])
    said = _compat.texts_in_store("fshard/init_mesh", dist.get_rank(), text, dist.get_world_size(), limit)
    absent = [rank for rank, text in enumerate(said) if text is None]
    remedy = "every rank must call init_mesh, and several in the same order"
    got = f"nothing from ranks {absent}"
    expect(not absent, "init_mesh", f"all {len(said)} ranks", got, remedy, CollectiveError)
    found, generations = zip(*(json.loads(text) for text in said if text is not None), strict=True)
    if max(generations) > own.generation:
        # Where one rank has a group that is broken, all make their groups anew.
        own.renew(max(generations))
    others = [(rank, text) for rank, text in enumerate(found) if text != found[0]][:1]
    problems = [Problem("mesh", f"{text} on rank {rank}", f"{found[0]} as on rank 0") for rank, text in others]
    remedy = "make the same meshes on every rank, in the same order"
    refuse("init_mesh: ranks ask for different meshes", problems, remedy)


def _sizes(shape: Mapping[str, int], ranks: int) -> tuple[int, ...]:
    named = isinstance(shape, Mapping) and all(isinstance(name, str) and name for name in shape)
    needed = "shape to be a mapping from names of axes to their sizes"
    expect(named, "init_mesh", needed, f"{shape!r:.100}")
    sizes = list(shape.values())
    whole = all(type(size) is int and (size > 0 or size == -1) for size in sizes)
    needed = "shape to be positive whole sizes, one of which may be -1"
    expect(sizes and whole and sizes.count(-1) <= 1, "init_mesh", needed, f"{dict(shape)}")
    known = math.prod(size for size in sizes if size != -1)
    count = f"a multiple of {known}" if -1 in sizes else str(known)
    needed = f"the number of ranks to be {count} for {dict(shape)}"
    remedy = "choose sizes whose product is the number of ranks, or -1 for one of them"
    expect(not ranks % known and (-1 in sizes or known == ranks), "init_mesh", needed, f"{ranks}", remedy)
    return tuple(ranks // known if size == -1 else size for size in sizes)


def _launched() -> int:
    """The number of ranks that a launcher started, 1 without one."""
    given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    remedy = "run under torchrun, which sets both, or unset it"
    expect(len(given) != 1, "init_mesh", "RANK and WORLD_SIZE in the environment", f"{''.join(given)} alone", remedy)
    return int(os.environ.get("WORLD_SIZE", 1))


def _start(device: str, limit: timedelta) -> None:
    backend = dist.get_default_backend_for_device(device)
    if device != "cpu":
        # Ranks compare what they do by messages between processors, for which no host waits for its accelerator.
        backend = f"cpu:gloo,{device}:{backend}"
    found: tuple[Any, int, int] = dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    if "RANK" in os.environ:
        try:
            found = next(iter(dist.rendezvous("env://", timeout=limit)))  # type: ignore[attr-defined]
        except dist.DistError as error:
            raise CollectiveError(f"init_mesh: expected all {_launched()} ranks to start, got: {error}") from error
    # Where torchrun restarts the ranks of its one node, its store has the addresses of ranks that were killed, and a
    # rank that reads one before it is written anew cannot connect (pytorch#135712). Several nodes count differently.
    one_node = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("GROUP_WORLD_SIZE") == "1"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_node else "0"
    store, rank, ranks = found
    store = dist.PrefixStore(f"restart {restarts}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    atexit.register(_stop)


def _stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
