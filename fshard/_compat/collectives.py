"""Private APIs of torch.distributed, each with the versions it was checked on.

The file has over 500 lines, because making, cutting and replacing groups and sending over them read the same state of
torch, which keeps groups, their names and their backends in one registry.
"""

import ctypes
import math
import os
import socket
import stat
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch

# torch.func imports this module late, and its functions' defaults then hold the process group for good (`group=WORLD`);
# imported before there is a group, they hold none. See `release_groups_at_exit`. Checked on 2.13.
import torch.distributed.nn.functional

# Checked on 2.13.
from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _unregister_process_group
from torch.distributed.device_mesh import DeviceMesh

Tensors = list[torch.Tensor]

# Seconds that a rank waits for others in the store before it looks what they do, and whether a signal has come, such as
# Ctrl-C: the first time, and at most.
FIRST_LOOK, LAST_LOOK = 0.5, 1.0

# The tag of messages that nobody sends; see `find_lost_peers`.
NEVER_SENT = 2**31 - 1

# Of the same ranks: messages to higher ones, and to lower ones.
Pair = tuple[Any, Any]

# Sockets by their file descriptors, with what tells each from a later one of the same number.
Sockets = dict[int, int]


# The process group of a name, on this thread. Checked on 2.13.
resolve_process_group: Callable[[str], ProcessGroup] = torch._C._distributed_c10d._resolve_process_group  # type: ignore[assignment]


def group_size(name: str) -> int | None:
    """The number of ranks in the process group of a name; None where this process has none. Checked on 2.13."""
    try:
        return resolve_process_group(name).size()
    except RuntimeError:
        return None


def group_devices(name: str) -> dict[str, str]:
    """The backends of the process group of a name, by the types of devices that they serve. Checked on 2.13."""
    config = torch.distributed.get_backend_config(resolve_process_group(name))
    return dict(pair.split(":") for pair in config.split(","))


@contextmanager
def fake_process_groups(groups: Mapping[str, tuple[int, int]], backend: str) -> Iterator[None]:
    """Let there be process groups that cannot communicate, for traces. Checked on 2.13.

    Only what finds groups by their names sees them: torch.distributed need not run, and does so undisturbed.

    Args:
        groups: This process's rank in each and its size, by names that no other group has.
        backend: What they say they run on.

    Yields:
        Nothing.
    """
    device = "cuda" if backend == "nccl" else "cpu"
    configs = torch.distributed.distributed_c10d._world.pg_backend_config
    with ExitStack() as registered:
        for name, (rank, size) in groups.items():
            group = ProcessGroup(rank, size)  # type: ignore[call-arg]
            group._set_group_name(name)  # type: ignore[arg-type]
            configs[group] = f"{device}:{backend}"
            # The registry does not keep the group alive.
            registered.callback(configs.pop, group)
            _register_process_group(name, group)  # type: ignore[arg-type]
            registered.callback(_unregister_process_group, name)  # type: ignore[arg-type]
        yield


def _name_of_groups(ranks: Sequence[int]) -> str:
    """Name the groups that fshard makes of some ranks, of any timeout; no other groups are named so.

    Along an axis of a mesh ranks are evenly spaced.
    """
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return f"fshard ranks {ranks[0]} to {ranks[-1]} in steps of {step}, timeout "


def find_group(ranks: Sequence[int], timeout: timedelta) -> ProcessGroup | None:
    """Find the group that fshard has made of some ranks, or the default group where it does as well.

    Checked on 2.13. torch's own way to set the timeout of a group that exists does not hold for messages between two
    ranks.

    Args:
        ranks: All ranks of the group.
        timeout: Of the group.

    Returns:
        The group; None if it has not been made yet.
    """
    default = torch.distributed.group.WORLD
    assert default is not None
    # The default group comes last: it may have another timeout on another rank, where one was made in its place.
    with suppress(RuntimeError):
        return resolve_process_group(f"{_name_of_groups(ranks)}{timeout}")
    is_of_ranks = default.size() == len(ranks) and timeout_of(default.group_name) in (timeout.total_seconds(), math.inf)
    return default if is_of_ranks else None


def make_group(ranks: Sequence[int], timeout: timedelta, prefix: str, store: Any) -> ProcessGroup:
    """Make a group of some ranks, all of which call this; its name is the same on all of them, and in every run.

    Args:
        ranks: All ranks of the group, in ascending order.
        timeout: Of the group.
        prefix: Of all that is written to the store; another one each time that the group is made.
        store: By which they find each other.

    Returns:
        The group, with the backends of the default group.
    """
    default = torch.distributed.group.WORLD
    board = torch.distributed.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    return _make_like(default, f"{_name_of_groups(ranks)}{timeout}", ranks, timeout, board)


def _make_like(source: Any, name: str, ranks: Sequence[int], timeout: timedelta, store: Any) -> ProcessGroup:
    """Make a process group of a name, with the backends of another one. Checked on 2.13.

    torch's public functions wait for the ranks of all groups that are made at once, by the store of the default group.
    """
    c10d = torch.distributed.distributed_c10d
    backend, _ = c10d._world.pg_map[source]
    made, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(torch.distributed.get_rank()),
        list(ranks),
        torch.distributed.Backend(backend),
        store,
        name,  # type: ignore[arg-type]
        timeout=timeout,
        device_id=source.bound_device_id,
    )
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def stop_torch() -> None:
    """Stop torch.distributed, also where it could not start, so that it starts as for the first time."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # The default group is named by it. Checked on 2.13.
    torch.distributed.distributed_c10d._world.group_count = 0


def group_of_all() -> ProcessGroup:
    """Find the group of all ranks that waits longest, else the default group. Checked on 2.13."""
    default = torch.distributed.group.WORLD
    assert default is not None
    name = _name_of_groups(range(default.size()))
    made = [group for group in torch_groups() if group.group_name.startswith(name)]
    return max(made, key=lambda group: timeout_of(group.group_name), default=default)


def timeout_of(name: str) -> float:
    """Seconds that gloo's part of the process group of a name waits; inf where it has none. Checked on 2.13."""
    if group_devices(name).get("cpu") != "gloo":
        return math.inf
    return resolve_process_group(name)._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def make_pair(name: str, run: Callable[[Callable[[Any], Any]], Any]) -> Pair | None:
    """Connect the ranks of a process group twice, beside the group itself; None where it is not gloo's.

    Checked on 2.13. gloo's messages of one pair of ranks share a connection, on which the small ones that allow a
    transfer in one direction wait for the bulk of the other: lower ranks send to higher ones by the first group, and
    higher to lower ones by the second. No registry holds them: they are gone with the last reference.

    Args:
        name: The process group's name.
        run: Runs what may wait inside gloo, with a store for the ranks of the group alone. They are all here.

    Returns:
        The two groups, with the process group's timeout.

    Raises:
        RuntimeError: if a rank does not come within the timeout.
    """
    seconds = timeout_of(name)
    if seconds == math.inf:
        return None
    group = resolve_process_group(name)
    gloo, timeout = torch.distributed.ProcessGroupGloo, timedelta(seconds=seconds)

    def make_options() -> Any:
        options: Any = gloo._Options()  # type: ignore[attr-defined]
        # As gloo's own, but connected at once: where two ranks connect when they first send, gloo may abort.
        devices = [gloo.create_device(interface=interface, lazy_init=False) for interface in interfaces_of_gloo()]
        options._devices = devices or [gloo.create_default_device(lazy_init=False)]
        options._timeout, options._threads = timeout, 1
        return options

    # A rank that cannot listen, as without files left, fails before the others wait for it inside gloo.
    up, down = make_options(), make_options()

    def connect(store: Any, way: str, options: Any) -> Any:
        return gloo(torch.distributed.PrefixStore(way, store), group.rank(), group.size(), options)  # type: ignore[attr-defined]

    return run(lambda store: (connect(store, "u", up), connect(store, "d", down)))


def interfaces_of_gloo() -> list[str]:
    """The network interfaces that gloo is told to use; none where it chooses. Checked on 2.13."""
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def served_accelerators(name: str) -> list[str]:
    """List the types of accelerators whose tensors a backend of the process group of a name sends itself.

    They are those that a backend serves which does not serve the processor.
    """
    backends = group_devices(name)
    return [device for device, backend in backends.items() if backend != backends.get("cpu")]


def abort_backends(name: str) -> None:
    """End for good what backends of accelerators do in the process group of a name, where they can be aborted.

    Checked on 2.13.
    """
    group = resolve_process_group(name)
    for device in served_accelerators(name):
        # What another rank has ended already cannot be ended cleanly.
        with suppress(RuntimeError):
            group._get_backend(torch.device(device)).abort()


def replace_group(name: str, generation: int, store: Any) -> None:
    """Abort a process group with a backend of an accelerator, and let its ranks find a new one under its name.

    Meshes, specs and graphs keep the name, and so do all tensors that were sharded over it. Checked on 2.13.

    Args:
        name: The process group's name.
        generation: How often groups have been made anew.
        store: Where its ranks find each other; no others know its prefix.
    """
    if not served_accelerators(name):
        return
    abort_backends(name)
    old = resolve_process_group(name)
    ranks = torch.distributed.get_process_group_ranks(old)
    seconds = timeout_of(name)
    timeout = torch.distributed.default_pg_timeout if seconds == math.inf else timedelta(seconds=seconds)
    new = _make_like(old, f"{name}, made anew {generation} times", ranks, timeout, store)
    _unregister_process_group(name)  # type: ignore[arg-type]
    new._set_group_name(name)  # type: ignore[arg-type]
    _register_process_group(name, new)  # type: ignore[arg-type]


def _open_sockets() -> Sockets:
    """List the sockets of this process; none where the system does not show them."""
    sockets = {}
    with suppress(OSError):
        for name in os.listdir("/dev/fd"):
            # The descriptor of the listing itself has gone.
            with suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    sockets[int(name)] = status.st_ino
    return sockets


@contextmanager
def collecting_sockets(store: Any = None) -> Iterator[Sockets]:
    """Collect the sockets that are opened in a context, and let no program inherit them that this process starts.

    Args:
        store: A store; connections of its clients with this process are left out.

    Yields:
        Them, once the context is over.
    """
    before = _open_sockets()
    opened: Sockets = {}
    try:
        yield opened
    finally:
        opened.update(_open_sockets().items() - before.items() - _sockets_of_server(store).items())
        for fd in opened:
            # It may have gone meanwhile.
            with suppress(OSError):
                os.set_inheritable(fd, False)


def _still_open(sockets: Sockets) -> list[int]:
    now = _open_sockets()
    return [fd for fd, inode in sockets.items() if now.get(fd) == inode]


def leave_to_parent(sockets: Sockets, store: Any) -> None:
    """Close connections in a forked child, or they would stay open when its parent is killed. Checked on 2.13.

    Their numbers stay taken, by a socket without a connection: whatever gloo and the store do with them in the child
    meets neither a file of the child's nor a connection of the parent's.

    Args:
        sockets: Those of groups.
        store: The store by which ranks found each other; others notice its end if this process holds it.
    """
    with socket.socket() as unconnected:
        for fd in _still_open(sockets | _sockets_of_server(store)):
            os.dup2(unconnected.fileno(), fd, inheritable=False)


def _sockets_of_server(store: Any) -> Sockets:
    """List the sockets by which this process serves a store to other ranks; none if another process does."""
    server = server_of(store)
    return {fd: inode for fd, inode in _open_sockets().items() if server and _ports_of_socket(fd)[0] == server[1]}


def server_of(store: Any) -> tuple[str, int] | None:
    """The host and the port of the server of a store; None where it has none. Checked on 2.13."""
    while isinstance(store, torch.distributed.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    port = getattr(store, "port", None)
    return None if port is None else (store.host, port)


def _ports_of_socket(fd: int) -> tuple[int | None, int | None]:
    """The ports of both ends of a socket; None where an end has none."""
    local_port: int | None = None
    peer_port: int | None = None
    # A thread of the store may have closed it meanwhile. One that listens has no other end.
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as duplicate:
        if duplicate.family in (socket.AF_INET, socket.AF_INET6):
            local_port = duplicate.getsockname()[1]
            peer_port = duplicate.getpeername()[1]
    return local_port, peer_port


class StoreClient:
    """Another client of a store, whose connection another thread may end while a constructor of torch waits on it.

    Such a wait looks at nothing else, and cannot be given up: the wait of a thread that is left alone would abort the
    process at its exit. Where its connection ends, it raises an error at once. Checked on 2.13.

    Args:
        store: The store.
    """

    def __init__(self, store: Any) -> None:
        with collecting_sockets() as opened:
            self.store = clone_of(store)
        server = server_of(self.store)
        # Those of the connection; none where the store is no server's, or the system does not show sockets.
        self.sockets = {fd: inode for fd, inode in opened.items() if server and _ports_of_socket(fd)[1] == server[1]}

    def disconnect(self) -> None:
        """End the connection, for good: what waits on it, or asks by it later, raises an error."""
        for fd in _still_open(self.sockets):
            # It may have gone meanwhile.
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)


def holds_store(store: Any) -> bool:
    """Whether this process serves a store to other ranks."""
    return bool(_sockets_of_server(store))


def keep_for_good(objects: Sequence[object]) -> None:
    """Keep objects from being destroyed, whatever becomes of their references."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def torch_groups() -> list[ProcessGroup]:
    """List torch's process groups in this process, those of users too. Checked on 2.13."""
    return list(torch.distributed.distributed_c10d._world.pg_map)


def start_swap(
    pair: Pair | None,
    name: str,
    send: Mapping[int, torch.Tensor],
    receive: Mapping[int, torch.Tensor],
    tag: Callable[[int], int],
) -> list[torch.distributed.Work]:
    """Start to send each other rank of a group a tensor and to receive one from each.

    Checked on 2.13. Messages need none of gloo's threads, and about half the time of its collectives. What has no
    elements is not sent.

    Args:
        pair: The connections of `make_pair`; None where the process group itself sends.
        name: The process group's name.
        send: What each other rank gets, as bytes.
        receive: Where to write what each other rank sends, as bytes.
        tag: Maps the bytes of a message to a number; gloo pairs no messages of different ones.

    Returns:
        Transfers to wait for.

    Raises:
        DistBackendError: if a connection has ended.
    """
    group = resolve_process_group(name)
    if pair is None:
        # Simulated ranks know collectives alone, and so do backends of accelerators.
        nothing = next(iter(send.values())).new_empty(0)
        buffers = [receive.get(rank, nothing) for rank in range(group.size())]
        rows = [send.get(rank, nothing) for rank in range(group.size())]
        return [torch.distributed.all_to_all(buffers, rows, group=group, async_op=True)]
    works = []
    try:
        for other in send:
            outward, inward = pair if other > group.rank() else pair[::-1]
            if nbytes := len(receive[other]):
                works.append(inward.recv([receive[other]], other, tag(nbytes)))
            if nbytes := len(send[other]):
                works.append(outward.send([send[other]], other, tag(nbytes)))
    except RuntimeError as error:
        raise torch.distributed.DistBackendError(str(error)) from error
    return works


def find_lost_peers(pair: Pair) -> tuple[list[int], list[Any]]:
    """Find the connections of a pair of groups that have ended, and end none. Checked on 2.13.

    Args:
        pair: The connections of `make_pair`.

    Returns:
        The ranks whose connections have ended, and receives from the others, which nothing fulfils. Waiting for such a
        receive in vain ends its connection.
    """
    posted, gone = [], []
    for other in range(pair[0].size()):
        for group in pair if other != pair[0].rank() else ():
            try:
                posted.append(group.recv([torch.empty(1)], other, NEVER_SENT))
            except RuntimeError:
                gone.append(other)
    return gone, posted


def cut(pair: Pair) -> None:
    """End all connections of a pair of groups, which wakes the ranks that wait there. Checked on 2.13.

    gloo has no abort, but a receive that is waited for in vain ends its connection.

    Args:
        pair: The connections of `make_pair`.
    """
    _, posted = find_lost_peers(pair)
    for work in posted:
        with suppress(RuntimeError):
            work.wait(timedelta(milliseconds=1))


def start_by_backend(op: str, tensors: Tensors, size: int, group: str, *sizes: Sequence[int]) -> Tensors:
    """Start the backend's own collective of several tensors; results in flight. Checked on 2.13."""
    operators = torch.ops._c10d_functional
    match op:
        case "all_gather":
            return operators.all_gather_into_tensor_coalesced(tensors, size, group)
        case "reduce_scatter":
            return operators.reduce_scatter_tensor_coalesced(tensors, "sum", size, group)
        case "all_reduce":
            # The operator that is not in place would copy the tensors one by one.
            sums = list(map(torch.empty_like, tensors))
            torch._foreach_copy_(sums, tensors)
            return operators.all_reduce_coalesced_(sums, "sum", group)
    return [operators.all_to_all_single(tensor, *sizes[::-1], group) for tensor in tensors]


def release_groups_at_exit(mesh: DeviceMesh) -> None:
    """Let a mesh that lives to the end of the process give up its process groups before the interpreter goes.

    A gloo group joins its threads when its last reference goes. A thread that is still letting go of a tensor asks for
    the interpreter, and where that is gone the process aborts: "terminate called without an active exception".
    Checked on 2.13, where meshes keep their groups; older ones do not.
    """
    registry = getattr(mesh, "_pg_registry", None)
    if registry is None:
        return
    for reference in weakref.getweakrefs(mesh):
        finalizer = reference.__callback__
        entry = finalizer.peek() if isinstance(finalizer, weakref.finalize) else None
        # One is enough: it stays as long as the mesh, whose axes a program may read in each of millions of steps.
        if entry is not None and entry[1] == registry.clear:
            return
    weakref.finalize(mesh, registry.clear)


def wait_in_store(store: Any, keys: Sequence[str], seconds: float, meanwhile: Callable[[], object] = bool) -> None:
    """Wait until a store has some keys. Torch waits without looking at signals, so wait in slices. Checked on 2.13.

    Args:
        store: The store.
        keys: The keys.
        seconds: How long to wait.
        meanwhile: Called from time to time while this rank waits; the default does nothing.

    Raises:
        RuntimeError: if they do not come, or the store is gone.
    """
    start = time.monotonic()
    deadline = start + seconds
    while True:
        begin = time.monotonic()
        until_look = max(FIRST_LOOK, min(begin - start, LAST_LOOK))
        slice_of_wait = max(min(deadline - begin, until_look), 0.001)
        try:
            store.wait(keys, timedelta(seconds=slice_of_wait))
            return
        except RuntimeError:
            now = time.monotonic()
            # A store that is gone does not let this wait.
            if now - begin < slice_of_wait / 2 or now >= deadline:
                raise
        meanwhile()


def device_identity(device: str) -> str:
    """Name the device that this process computes on, as other processes of this host name it. Checked on 2.13."""
    index = torch.accelerator.current_device_index()
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    # Two processes may give one index to different devices, as with CUDA_VISIBLE_DEVICES.
    uuid = getattr(properties(index), "uuid", None) if properties else None
    return str(uuid or index)


def default_store() -> Any:
    """Another client of the store by which ranks found each other, for a thread of its own. Checked on 2.13."""
    return clone_of(torch.distributed.distributed_c10d._get_default_store())


def clone_of(store: Any) -> Any:
    """Another client of a store: while one waits, its other calls wait too. Checked on 2.13."""
    # torch's fake store, of ranks that are not there, cannot be cloned.
    with suppress(RuntimeError):
        return store.clone()
    return store
