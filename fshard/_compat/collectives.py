"""Private APIs of torch.distributed, each with the versions it was checked on."""

import threading
import time
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

# torch.func imports this module late, and its functions' defaults then hold the process group for good (`group=WORLD`);
# imported before there is a group, they hold none. See `release_groups_at_exit`. Checked on 2.13.
import torch.distributed.nn.functional

# Checked on 2.13.
from torch._C._distributed_c10d import (
    ProcessGroup,
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Tensors = list[torch.Tensor]

# How the description of a group begins that cannot communicate.
_FAKE = "fake "

# The description of groups of all ranks beside the default group.
_ALL = "all ranks"

# Seconds between two looks at what others have left in a store.
POLL = 0.02


def resolve_process_group(name: str) -> torch.distributed.ProcessGroup:
    """The process group of a name, on this thread. Checked on 2.13."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def group_size(name: str) -> int | None:
    """The number of ranks in the process group of a name; None where this process has none. Checked on 2.13."""
    try:
        return resolve_process_group(name).size()
    except RuntimeError:
        return None


def group_rank(name: str) -> int:
    """This rank's number in the process group of a name. Checked on 2.13."""
    return resolve_process_group(name).rank()


def group_ranks(name: str) -> list[int]:
    """The global ranks in the process group of a name, in its order. Checked on 2.13."""
    return torch.distributed.get_process_group_ranks(resolve_process_group(name))


def group_devices(name: str) -> dict[str, str]:
    """The backends of the process group of a name, by the types of devices that they serve. Checked on 2.13."""
    group = resolve_process_group(name)
    if group.group_desc.startswith(_FAKE):
        backend = group.group_desc.removeprefix(_FAKE)
        return {"cuda" if backend == "nccl" else "cpu": backend}
    return dict(pair.split(":") for pair in torch.distributed.get_backend_config(group).split(","))


def group_coalesces(name: str, device: str) -> bool:
    """Whether a process group runs collectives of many tensors of a device as one. Checked on 2.13."""
    group = resolve_process_group(name)
    if group.group_desc.startswith(_FAKE):
        return group.group_desc == _FAKE + "nccl"
    return group._get_backend(torch.device(device)).supports_coalescing


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
    # The registry does not keep them alive.
    registered = {}
    try:
        for name, (rank, size) in groups.items():
            group = ProcessGroup(rank, size)  # type: ignore[call-arg]
            group._set_group_name(name)  # type: ignore[arg-type]
            group._set_group_desc(_FAKE + backend)
            _register_process_group(name, group)  # type: ignore[arg-type]
            registered[name] = group
        yield
    finally:
        for name in registered:
            _unregister_process_group(name)  # type: ignore[arg-type]


def group_of_all(timeout: timedelta | None = None) -> ProcessGroup:
    """Find or make the group of all ranks of a timeout, the default group where it has that. Checked on 2.13.

    torch's own way to set the timeout of a group that exists does not hold for messages between two ranks.

    Args:
        timeout: The timeout; None finds the group that waits longest of those made, else the default group.

    Returns:
        The group.
    """
    default, c10d = torch.distributed.group.WORLD, torch.distributed.distributed_c10d
    assert default is not None
    made = {_timeout_of(group) or timedelta(): group for group in c10d._world.pg_map if group.group_desc == _ALL}
    if timeout is None:
        return made[max(made)] if made else default
    if _timeout_of(default) in (timeout, None):
        return default
    return made.get(timeout) or torch.distributed.new_group(timeout=timeout, group_desc=_ALL)


def _timeout_of(group: ProcessGroup) -> timedelta | None:
    """The timeout of gloo's part of a process group; None where it has none. Checked on 2.13."""
    if group_devices(group.group_name).get("cpu") != "gloo":
        return None
    return group._get_backend(torch.device("cpu")).options._timeout


def start_swap(op: str, send: Tensors, receive: Tensors, name: str) -> list[torch.distributed.Work]:
    """Start to send each rank of a group a tensor and to receive one from each; what this rank has for itself stays.

    Checked on 2.13. gloo's messages of one pair of ranks share a connection, on which the small ones that allow a
    transfer in one direction wait for the bulk of the other: lower ranks send to higher ones in the group itself, and
    higher to lower ones in another. Messages need none of gloo's threads, and about half the time of its collectives.
    What has no elements is not sent.

    Args:
        op: Messages of another operator, or of another size, are not taken for these: ranks that differ wait for each
            other until the group's timeout.
        send: What each rank gets, as bytes.
        receive: Where to write what each rank sends, as bytes.
        name: The process group's name.

    Returns:
        Transfers to wait for.

    Raises:
        DistBackendError: if a connection has ended.
    """
    group = resolve_process_group(name)
    own = group.rank()
    others = [rank for rank in range(len(send)) if rank != own]
    if group_devices(name).get("cpu") != "gloo":
        # Simulated ranks know collectives alone.
        empty = send[own].new_empty(0)
        into, sent = ([tensors[i] if i in others else empty for i in range(len(send))] for tensors in (receive, send))
        return [torch.distributed.all_to_all(into, sent, group=group, async_op=True)]
    works = []
    try:
        downward = _downward(group)
        for other in others:
            outward, inward = (group, downward) if other > own else (downward, group)
            if len(receive[other]):
                works.append(inward.recv([receive[other]], other, _tag(op, receive[other])))
            if len(send[other]):
                works.append(outward.send([send[other]], other, _tag(op, send[other])))
    except RuntimeError as error:
        raise torch.distributed.DistBackendError(str(error)) from error
    return works


def _tag(op: str, message: torch.Tensor) -> int:
    return zlib.crc32(f"{op} of {len(message)} bytes".encode()) >> 1


def _downward(group: ProcessGroup) -> ProcessGroup:
    """Find the group of the same ranks for messages to lower ones; all ranks make it at their first swap.

    Checked on 2.13, whose `new_group` for some ranks alone names groups by how many a rank has, which ranks differ in.
    """
    c10d, name = torch.distributed.distributed_c10d, f"{group.group_name} downward"
    for other in c10d._world.pg_map:
        if other.group_name == name:
            return other
    ranks = torch.distributed.get_process_group_ranks(group)
    store, gloo = c10d._get_default_store(), torch.distributed.Backend("gloo")
    made, _ = c10d._new_process_group_helper(
        group.size(),
        group.rank(),
        ranks,
        gloo,
        store,
        name,  # type: ignore[arg-type]
        timeout=_timeout_of(group),
        group_desc=name,
    )
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the collectives registered on `tensor`'s storage and return it. Checked on 2.13."""
    return torch.ops._c10d_functional.wait_tensor(tensor)


def start_all_gather(tensors: Tensors, size: int, group: str, fused: bool) -> Tensors:
    """Start the backend's all-gather of each tensor along dim 0, or one for all; results in flight. Checked on 2.13."""
    if fused:
        return torch.ops._c10d_functional.all_gather_into_tensor_coalesced(tensors, size, group)
    return [torch.ops._c10d_functional.all_gather_into_tensor(tensor, size, group) for tensor in tensors]


def start_reduce_scatter(tensors: Tensors, size: int, group: str, fused: bool) -> Tensors:
    """Start the backend's summing reduce-scatter along dim 0; results in flight. Checked on 2.13."""
    if fused:
        return torch.ops._c10d_functional.reduce_scatter_tensor_coalesced(tensors, "sum", size, group)
    return [torch.ops._c10d_functional.reduce_scatter_tensor(tensor, "sum", size, group) for tensor in tensors]


def start_all_reduce(tensors: Tensors, group: str, fused: bool) -> Tensors:
    """Start the backend's summing all-reduce; results in flight. Checked on 2.13."""
    if fused:
        return torch.ops._c10d_functional.all_reduce_coalesced(tensors, "sum", group)
    return [torch.ops._c10d_functional.all_reduce(tensor, "sum", group) for tensor in tensors]


def release_groups_at_exit(mesh: "DeviceMesh") -> None:
    """Let a mesh that lives to the end of the process give up its process groups before the interpreter goes.

    A gloo group joins its threads when its last reference goes. A thread that is still letting go of a tensor asks for
    the interpreter, and where that is gone the process aborts: "terminate called without an active exception".
    Checked on 2.13, where meshes keep their groups; older ones do not.
    """
    registry = getattr(mesh, "_pg_registry", None)
    if registry is not None:
        weakref.finalize(mesh, registry.clear)


def texts_in_store(key: str, own: int, text: str, size: int, timeout: timedelta) -> list[str | None]:
    """Show all ranks a text by the store by which they found each other, without a collective. Checked on 2.13.

    Args:
        key: What the texts are about; the n-th call of a rank with it reads the n-th texts of the others.
        own: This rank.
        text: Its text.
        size: How many ranks there are.
        timeout: How long to wait for them.

    Returns:
        Every rank's text; None for one that did not come.
    """
    store = torch.distributed.distributed_c10d._get_default_store()
    number = store.add(f"{key}/calls of {own}", 1)
    store.set(f"{key}/{number}/{own}", text)
    keys = [f"{key}/{number}/{rank}" for rank in range(size)]
    try:
        store.wait(keys, timeout)
    except RuntimeError:
        # A store that is a file raises no DistError.
        return [store.get(key).decode() if store.check([key]) else None for key in keys]
    found = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]  # type: ignore[attr-defined]
    if number > 2:
        # All have come to this call, and so have read what the last but one was for.
        store.delete_key(f"{key}/{number - 2}/{own}")
    return [value.decode() for value in found]


def exchange_notes(key: str, own: int, note: str, ranks: Sequence[int], seconds: float) -> dict[int, str]:
    """Leave a note in the store by which ranks found each other, and read those of others. Checked on 2.13.

    The store may be gone, or with a rank that hangs: it is asked on a thread that nobody waits for much longer.

    Args:
        key: What the notes are about.
        own: This rank.
        note: Its note.
        ranks: Whose notes to read.
        seconds: How long to wait for them.

    Returns:
        The notes that there are, by rank.
    """
    found: dict[int, str] = {}

    def exchange() -> None:
        deadline = time.monotonic() + seconds
        with suppress(Exception):
            store = torch.distributed.distributed_c10d._get_default_store()
            store.set(f"{key}/{own}", note)
            missing = [rank for rank in ranks if rank != own]
            while missing and time.monotonic() < deadline:
                for rank in missing:
                    if store.check([f"{key}/{rank}"]):
                        found[rank] = store.get(f"{key}/{rank}").decode()
                missing = [rank for rank in missing if rank not in found]
                time.sleep(POLL if missing else 0)

    thread = threading.Thread(target=exchange, daemon=True)
    thread.start()
    thread.join(2 * seconds)
    # A copy, because the thread may still run.
    return dict(found)
