"""Device meshes: init_mesh, and the Axis values that specs hold instead of a mesh."""

import atexit
import gc
import ipaddress
import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fshard import _compat
from fshard.comm import CollectiveError, Meeting, connect_groups, is_simulated, list_peers, rank_state, wake_waiting
from fshard.comm.links import find_host
from fshard.comm.processes import find_machine
from fshard.comm.sockets import STORE_CLIENTS, allow_sockets, sockets_of_mesh
from fshard.errors import expect
from fshard.tree import Axis
from fshard.tree.checks import SECONDS, check_arguments, describe

Mesh = DeviceMesh

# Seconds that a rank waits for another by default: torch's own half hour is longer than anyone watches.
TIMEOUT = 300.0

# Where torchrun's store has the host and the port of the store that rank 0 serves.
ADDRESS = "fshard/address of rank 0"
# How long a rank tries to connect with it until it looks whether it has moved.
CONNECT_TIME = timedelta(seconds=2)

# glibc's DEFAULT_MMAP_THRESHOLD_MAX, less what a block takes beyond its bytes.
MAPPED_BYTES = 2**25 - 2**16
# Objects that are made until the youngest are collected, from Python 3.13 on; before, 700.
OBJECTS_BEFORE_YOUNGEST = 2_000
# Collections of the middle generation between two of all objects.
COLLECTIONS_BEFORE_FULL = 200


def init_mesh(shape: Mapping[str, int], device: str | None = None, *, timeout: float = TIMEOUT) -> Mesh:
    """Make a device mesh over all ranks, starting torch.distributed if nobody has.

    Under torchrun the ranks are the launcher's; with no launcher at all there is one. A process group that this call
    started is destroyed at interpreter exit. With glibc the process keeps more of the memory that it has freed: up to
    64 MB at the end of its heap. Python collects garbage less often: the first number of `gc.set_threshold` is 2,000 or
    more, unless it is 0, and the third 200 or more.

    A mesh of some ranks lets different models live on different ranks, such as a trainer and a reference model. Make it
    by torch, as `DeviceMesh("cpu", [0, 1], mesh_dim_names=("shard",))`, on every rank of the run and in the same order;
    then each rank works with the meshes that it is a member of, where `mesh.get_coordinate()` is not None. Pass a mesh
    of one axis over these ranks to `fs.checkpoint` by `mesh=`. Values pass from one mesh to another through a
    checkpoint, or by `fs.broadcast` over the axis of a mesh of all ranks beside.

    Args:
        shape: Size of each named axis, outermost first; one of them may be -1 for "the rest of the ranks".
        device: "cpu" or the type of an accelerator, such as "cuda" or "xpu"; by default the one that torch finds,
            where torch.distributed has a backend of its own for it, else "cpu". Leaves are sharded to devices of this
            type. A rank whose program has not chosen another device than the first gets the one of its LOCAL_RANK.
            Where torchrun starts more ranks than a host has devices, ranks share them, with a warning.
        timeout: Seconds that a rank waits for another in every process group of the mesh, longer than ranks may be
            apart. Where torch.distributed runs already with another timeout, the mesh gets groups of its own.

    Returns:
        A torch DeviceMesh of that shape with named axes.

    Raises:
        ValueError: before torch.distributed is started, if the sizes do not multiply to the number of ranks, there is
            no such device, or `timeout` is not positive; before any group is made, and on every rank, if ranks
            ask for different meshes, or if one of them may not open as many files as the mesh has connections.
        CollectiveError: if a rank does not come within the timeout.

    >>> init_mesh({"shard": -1}, device="cpu").size()
    1
    """
    limit = timedelta(seconds=TIMEOUT)
    try:
        device = _choose_device(device)
        check_arguments("init_mesh", SECONDS, timeout=timeout)
        limit = timedelta(seconds=timeout)
        world_size = dist.get_world_size() if dist.is_initialized() else _read_number("WORLD_SIZE", 1, first=1)
        sizes = _resolve_sizes(shape, world_size)
    except ValueError as error:
        if dist.is_initialized():
            # Others may have asked for what they can have, and wait.
            with _meet(limit) as meeting:
                _agree(_Request(str(error)), meeting)
        raise
    if device != "cpu" and torch.accelerator.current_device_index() == 0:
        torch.accelerator.set_device_index(_read_number("LOCAL_RANK", 0) % torch.accelerator.device_count())
    asked = f"{dict(zip(shape, sizes, strict=True))} on {device!r}, timeout {limit.total_seconds():g}"
    ranks = torch.arange(math.prod(sizes), device="cpu").reshape(sizes)
    with _meet(limit) as meeting:
        rows = _find_rows(ranks, meeting.rank)
        # On all axes.
        meeting.peers = sorted(set[int]().union(*[list_peers(meeting.rank, row) for row in rows]))
        agreed = _agree(_make_request(asked, device, rows, limit, meeting), meeting)
        meeting.connect()
        if not dist.is_initialized():
            _start(device, limit, meeting, is_shared=agreed.device != "")
        elif agreed.generation > rank_state().generation:
            # Where one rank has a group that is broken, all make their groups anew.
            rank_state().renew(agreed.generation)
            _compat.withdraw_report()
        meeting.state = rank_state()
        groups = _make_groups(rows, limit, agreed.has_group, meeting)
        names = [group.group_name for group in groups if group.size() > 1]
        connect_groups(rank_state(), names, meeting, of_processors=device == "cpu")
    mesh = DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=tuple(shape))
    _compat.release_groups_at_exit(mesh)
    _keep_freed_memory()
    _collect_garbage_less_often()
    return mesh


def _keep_freed_memory() -> None:
    """Keep glibc from giving the memory of a step back to the system, which is slow to hand it out again in the next.

    It keeps twice the largest block that it has given back, up to this size; a model of small tensors has none such.
    This one is never touched, and so takes no memory.
    """
    torch.empty(MAPPED_BYTES, dtype=torch.uint8, device="cpu")


def _collect_garbage_less_often() -> None:
    """Let Python look for garbage less often, among the youngest objects and among all.

    A collection among all objects looks at 300,000 of torch, 0.2 s in which other ranks wait. By default thousands of
    leaves, made anew in each step, start one every 15 steps, and 8 of the youngest in each, 3% of its time, which find
    nothing. A program that has put 0 there wants none.
    """
    youngest, middle, oldest = gc.get_threshold()
    youngest = youngest and max(youngest, OBJECTS_BEFORE_YOUNGEST)
    gc.set_threshold(youngest, middle, max(oldest, COLLECTIONS_BEFORE_FULL))


def read_environment() -> dict[str, str]:
    """Return the variables of the environment."""
    return dict(os.environ)


def _read_number(
    name: str,
    otherwise: int | str = "",
    first: int = 0,
    last: int = 65535,
) -> int:
    """Read a variable of the launcher."""
    text = os.environ.get(name, f"{otherwise}").strip()
    expected = f"the variable {name} to be a whole number from {first} to {last}"
    remedy = "start the program by torchrun, which sets it, or unset RANK and WORLD_SIZE for one rank"
    expect(text.isdecimal() and first <= int(text) <= last, "init_mesh", expected, repr(text), remedy)
    return int(text)


def ranks_on_host(ranks: int) -> int:
    """Return how many ranks a launcher has started on each host; all ranks if it does not say."""
    return _read_number("LOCAL_WORLD_SIZE", ranks, first=1)


def process_rank() -> int:
    """The number of this process in the run, also before torch.distributed runs.

    Returns:
        torch.distributed's, else the launcher's, else 0.

    >>> process_rank()
    0
    """
    return dist.get_rank() if dist.is_initialized() else _read_number("RANK", 0)


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
    ValueError: mesh: expected one axis, got ('shard', 'tp'); name one, as in mesh['shard']
    """
    if isinstance(mesh, Axis):
        return mesh
    expect(isinstance(mesh, Mesh), "mesh", "a DeviceMesh or an Axis", describe(mesh), "make one by fs.init_mesh")
    names = tuple(mesh.mesh_dim_names or ())
    expect(name is not None or len(names) == 1, "mesh", "one axis", f"{names}", "name one, as in mesh['shard']")
    name = names[0] if name is None else name
    expect(name in names, "mesh", f"axis to be one of {names}", f"{name!r:.40}", "name it in init_mesh or pass another")
    if mesh.get_coordinate() is None:
        needed = f"one of the mesh's ranks {mesh.mesh.flatten().tolist()}"
        expect(False, "mesh", needed, f"rank {dist.get_rank()}", "call it on these alone")
    _compat.release_groups_at_exit(mesh)
    gone = "one that destroy_process_group has ended"
    expect(dist.is_initialized(), "mesh", "process groups that exist", gone, "call fs.init_mesh again")
    return Axis(name, mesh.size(names.index(name)), mesh.get_group(name).group_name, mesh.device_type)


def all_ranks_axis() -> Axis:
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
        return all_ranks_axis()
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if isinstance(mesh, Axis) or len(names) < 2:
        return axis_of(mesh)
    all_ranks = all_ranks_axis()
    expected = f"one axis or all {all_ranks.size} ranks"
    remedy = "pass one of its axes, as mesh['shard'], or a DeviceMesh of one axis over its ranks"
    expect(mesh.size() == all_ranks.size, "mesh", expected, f"axes {names} of {mesh.size()} ranks", remedy)
    return Axis("+".join(names), all_ranks.size, all_ranks.group_name)


def _choose_device(device: str | None) -> str:
    """Check the type of a device, or choose one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    if device is None:
        # gloo serves devices that have no backend of their own, such as "mps", through the processor.
        backend = dist.Backend.default_device_backend_map.get(types[-1], "gloo")
        device = "cpu" if backend == "gloo" else types[-1]
    expect(device in types, "init_mesh", f"device to be one of {types}, which torch finds here", f"{device!r:.100}")
    return device


class _Request(NamedTuple):
    """What a rank brings to init_mesh, which ranks compare.

    Attributes:
        mesh: The mesh that it asks for; the text of its error if it asks for one that cannot be.
        has_group: For each axis of the mesh whether this rank has its process group already.
        generation: How often groups have been made anew after a failure, this time included.
        lacks: What it lacks to open the connections; "" if it has all.
        device: If this process sees fewer devices than its host has ranks, the one that it computes on; of what holds
            on all ranks, one that several of them compute on; "" if there is none.
    """

    mesh: str
    has_group: Sequence[bool] = ()
    generation: int = 0
    lacks: str = ""
    device: str = ""


def _find_rows(ranks: torch.Tensor, rank: int) -> list[list[int]]:
    """List for each axis of a mesh of ranks those that differ from one there alone."""
    place = (ranks == rank).nonzero()[0].tolist()
    return [ranks[(*place[:dim], slice(None), *place[dim + 1 :])].tolist() for dim in range(ranks.dim())]


def _make_groups(
    rows: Sequence[list[int]],
    limit: timedelta,
    has_group: Sequence[bool],
    meeting: Meeting,
) -> list[Any]:
    """Find the process groups of a mesh's axes that all ranks have, and make the others."""
    groups: dict[tuple[int, ...], Any] = {}
    # The first mesh of a run has the default group alone, as all ranks do.
    can_keep_group = has_group or [True] * len(rows)
    for row, can_keep in zip(rows, can_keep_group, strict=True):
        if tuple(row) in groups:
            continue
        group = _compat.find_group(row, limit)
        if group is None or not can_keep:
            # Where some ranks failed as they made groups, only others have them.
            if group not in (None, dist.group.WORLD):
                dist.destroy_process_group(group)
            group = meeting.run(partial(_compat.make_group, row, limit, meeting.prefix))
        groups[tuple(row)] = group
    return [groups[tuple(row)] for row in rows]


@contextmanager
def _meet(limit: timedelta) -> Iterator[Meeting]:
    """Meet the other ranks of this run, by torch's store if torch.distributed runs, else by the launcher's.

    If a first meeting fails, torch.distributed stops again on every rank. Otherwise ranks where it runs would wait in
    the next call for those where it does not run.
    """
    seconds = limit.total_seconds()
    if dist.is_initialized():
        state = rank_state()
        number = state.store.add(f"fshard/meetings of {state.rank}", 1)
        with Meeting(state.store, state.rank, range(dist.get_world_size()), f"{number}", seconds) as meeting:
            yield meeting
        return
    store, rank, size = dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    if os.environ.keys() & {"RANK", "WORLD_SIZE"}:
        store, rank, size = _store_of_launcher(limit)
    try:
        with Meeting(store, rank, range(size), "start", seconds) as meeting:
            yield meeting
    except BaseException:
        _compat.stop_torch()
        # Ranks meet here again, in the store of the next start. torch serves one port of a process by one server, as
        # long as some client in that process lives.
        if _compat.holds_store(store):
            _compat.keep_for_good([store])
        raise


def _make_request(
    mesh: str,
    device: str,
    rows: Sequence[list[int]],
    limit: timedelta,
    meeting: Meeting,
) -> _Request:
    """What this rank brings; where torch.distributed does not run, there are no groups."""
    has_group: list[bool] = []
    generation = 0
    identity = ""
    if dist.is_initialized():
        state = rank_state()
        generation = state.generation + (state.failure is not None)
        has_group = [_compat.find_group(row, limit) is not None for row in rows]
    elif device != "cpu" and _has_few_devices():
        # A launcher may also let each rank see one device of its own alone.
        identity = f"{find_machine()} {_compat.device_identity(device)}"
    new_sizes = [len(row) for row, is_there in zip_longest(rows, has_group) if not is_there]
    return _Request(mesh, has_group, generation, _find_lack(device, new_sizes, meeting), identity)


def _find_lack(device: str, sizes: Sequence[int], meeting: Meeting) -> str:
    """Let this rank open the sockets of new axes of devices; say what it lacks if it may not."""
    if is_simulated() or math.prod(sizes) == 1:
        return ""
    sockets = sockets_of_mesh(sizes, sends_itself=_sends_itself(device))
    if _compat.holds_store(meeting.store):
        sockets += STORE_CLIENTS * len(meeting.ranks)
    return allow_sockets(sockets)


def _sends_itself(device: str) -> bool:
    """Whether the backend of a new mesh's devices sends their tensors itself, as far as is known before it starts."""
    if device == "cpu":
        return False
    if dist.is_initialized():
        return bool(_compat.served_accelerators(all_ranks_axis().group_name))
    # Ranks that share devices send through the processor. Whether they do is found out later.
    return dist.get_default_backend_for_device(device) != "gloo" and not _has_few_devices()


def _agree(request: _Request, meeting: Meeting) -> _Request:
    """Compare what ranks ask for: refuse different meshes on every rank, whose groups would wait for each other.

    Returns:
        What holds on every rank: the largest counts, and the groups that all have.
    """
    # A rank whose error nobody has heard of may be here while others wait for it in a step.
    look = partial(wake_waiting, rank_state(), meeting.have_come)
    end = meeting.agree(json.dumps(request), _merge_requests, look)
    error, *agreed = json.loads(end)
    if error:
        meeting.fails_everywhere = True
        raise ValueError(error)
    return _Request(*agreed)


def _merge_requests(texts: Sequence[str]) -> str:
    """Find out what follows from the requests of all ranks: an error or "", and the request that holds on all."""
    requests = [_Request(*json.loads(text)) for text in texts]
    first = requests[0]
    for rank, request in enumerate(requests):
        if request.mesh != first.mesh:
            error = (
                f"init_mesh: expected the same mesh on every rank, {first.mesh} as on rank 0, got {request.mesh} on "
                f"rank {rank}; make the same meshes in the same order"
            )
            return json.dumps([error, *first])
        if request.lacks:
            error = (
                f"init_mesh: rank {rank} {request.lacks}. Raise the limit before you start the ranks, for example by "
                "`ulimit -n`, or make meshes of fewer ranks."
            )
            return json.dumps([error, *first])
    has_group = list(map(all, zip(*[request.has_group for request in requests], strict=True)))
    generation = max(request.generation for request in requests)
    devices = [request.device for request in requests if request.device]
    shared = next((device for device in devices if devices.count(device) > 1), "")
    return json.dumps(["", first.mesh, has_group, generation, "", shared])


def _resolve_sizes(shape: Mapping[str, int], ranks: int) -> tuple[int, ...]:
    """Check the shape of a mesh, and put a number in the place of -1, so that the sizes multiply to that of ranks."""
    has_names = isinstance(shape, Mapping) and all(isinstance(name, str) and name for name in shape)
    sizes = list(shape.values()) if has_names else []
    are_sizes = all(type(size) is int and (size > 0 or size == -1) for size in sizes)
    expected = "shape to be a mapping from names of axes to positive whole sizes, one of which may be -1"
    expect(sizes and are_sizes and sizes.count(-1) <= 1, "init_mesh", expected, f"{shape!r:.100}")
    product = math.prod(size for size in sizes if size != -1)
    fits = ranks % product == 0 if -1 in sizes else product == ranks
    expect(fits, "init_mesh", f"shape to have sizes whose product is {ranks}, the number of ranks", f"{dict(shape)}")
    return tuple(ranks // product if size == -1 else size for size in sizes)


def _start(device: str, limit: timedelta, meeting: Meeting, *, is_shared: bool) -> None:
    """Start torch.distributed on all ranks of a meeting, of which several may compute on one device."""
    size = len(meeting.ranks)
    backend = dist.get_default_backend_for_device(device)
    if device != "cpu":
        if backend != "gloo" and is_shared:
            # Backends of accelerators refuse that.
            warnings.warn(
                f"init_mesh: ranks of this host share {device} devices. {backend} does not support that, so messages "
                "go through the processor, which is slow. Start one rank for each device.",
                stacklevel=3,
            )
            backend = "gloo"
        # Ranks compare what they do by messages between processors, for which no host waits for its accelerator.
        backend = f"cpu:gloo,{device}:{backend}"

    def begin(store: Any) -> None:
        dist.init_process_group(backend, store=store, rank=meeting.rank, world_size=size, timeout=limit)

    # Made while the store is there, as in `Meeting.agree`. torch keeps the one before.
    next_client = _compat.StoreClient(meeting.store)
    meeting.run(begin)
    meeting.client = next_client
    rank_state(meeting.store)
    atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def _store_of_launcher(limit: timedelta) -> tuple[Any, int, int]:
    """Connect with the store that the launcher, or rank 0, holds, this rank's number, and how many ranks there are.

    What is written by the client that this returns is of this start alone.
    """
    ranks = _read_number("WORLD_SIZE", first=1)
    # A rank beyond them would wait for a store that others may not have, or take part in the start of other ranks.
    rank = _read_number("RANK", last=ranks - 1)
    _read_number("MASTER_PORT")
    # Torch would let rank 0 wait for as many ranks as it is told of, without saying which have not come.
    meets = dist.rendezvous("env://", world_size=1, timeout=limit)  # type: ignore[attr-defined]
    is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    has_one_node = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    try:
        store = next(iter(meets))[0]
        if is_launchers and not has_one_node:
            store = _find_store_of_start(store, rank, limit)
    except dist.DistError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} within {limit.total_seconds():g} s"
        text = f"init_mesh: expected the store of rank 0 or of the launcher at {place}, got: {error!s:.300}"
        raise CollectiveError(text) from error
    # Where torchrun restarts ranks, its store has the addresses of ranks that were killed, and a rank that reads one
    # before it is written anew cannot connect (pytorch#135712). Several nodes count restarts apart.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_launchers and has_one_node else "0"
    prefixed = dist.PrefixStore(f"restart {restarts}", store)  # type: ignore[attr-defined]
    # The same is true of a start that has failed, after which ranks call init_mesh again.
    start = prefixed.add(f"starts of {rank}", 1)
    return dist.PrefixStore(f"start {start}", prefixed), rank, ranks  # type: ignore[attr-defined]


def _find_store_of_start(launcher_store: Any, rank: int, limit: timedelta) -> Any:
    """Connect with a store that rank 0 serves until its process ends, on whatever host the launcher has put it."""
    if rank == 0:
        return _serve_start(launcher_store, limit)
    deadline = time.monotonic() + limit.total_seconds()
    while True:
        _compat.wait_in_store(launcher_store, [ADDRESS], limit.total_seconds())
        host, port = json.loads(launcher_store.get(ADDRESS))
        try:
            store = _make_store(host, port, min(limit, CONNECT_TIME))
        except dist.DistError:
            # Rank 0 of an earlier start listened there, and the one of this start has not come yet.
            if time.monotonic() > deadline:
                raise
            continue
        store.set_timeout(limit)
        return store


def _serve_start(launcher_store: Any, limit: timedelta) -> Any:
    """Serve a store, and write where into the launcher's; if possible where an earlier start of this host did."""
    host = find_host(launcher_store)
    if ipaddress.ip_address(host).is_loopback:
        # The launcher's store is on this host, whose address others know.
        host = os.environ["MASTER_ADDR"]
    last_port = 0
    if launcher_store.check([ADDRESS]):
        last_host, port = json.loads(launcher_store.get(ADDRESS))
        last_port = port if last_host == host else 0
    try:
        store = _make_store(host, last_port, limit, serves=True)
    except dist.DistError:
        # Another process listens there.
        store = _make_store(host, 0, limit, serves=True)
    launcher_store.set(ADDRESS, json.dumps([host, store.port]))
    return store


def _make_store(host: str, port: int, limit: timedelta, *, serves: bool = False) -> Any:
    store = dist.TCPStore  # type: ignore[attr-defined]
    return store(host, port, is_master=serves, multi_tenant=serves, timeout=limit, wait_for_workers=False)


def _has_few_devices() -> bool:
    """Whether this process sees fewer devices than its host has ranks."""
    return ranks_on_host(1) > torch.accelerator.device_count()
