"""Private APIs by which ranks are threads of one process, each with the versions it was checked on."""

import ctypes
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

# Whether torch takes no reference to an object of a thread, and lets go of one. Checked on 2.11.
_TAKES_NO_REFERENCE = torch.torch_version.__version__ < "2.12"


class ThreadedCollective(NamedTuple):
    """One rank's call of a collective.

    Attributes:
        group: Name of the process group.
        ranks: Global ranks of its members, in group order.
        kind: What is called; the same text on every member of a legal collective.
        data: This rank's input and output tensors.
        run: Moves the data, given every member's in group order.
    """

    group: str
    ranks: list[int]
    kind: str
    data: Any
    run: Callable[[list[Any]], None]


@contextmanager
def hide_trace_from_pytest() -> Iterator[None]:
    """Keep torch's structured trace out of the reports of pytest inside a block. Checked on 2.13 with pytest 9.2.

    The logger of the trace is always at level DEBUG, and switched on by any handler. pytest 9 adds its own to all
    loggers that do not propagate, so a test that fails would report each tensor that was traced as an empty line.
    Handlers of others stay, also those that a program adds or removes in the block.
    """
    logger = logging.getLogger("torch.__trace")
    with ExitStack() as hidden:
        for handler in list(logger.handlers):
            if type(handler).__module__.startswith("_pytest."):
                logger.removeHandler(handler)
                hidden.callback(logger.addHandler, handler)
        yield


def thread_object(key: str) -> Any:
    """Return the object of this thread under a key, or of the thread whose backward pass it runs. Checked on 2.13."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


@contextmanager
def keeping_thread_object(key: str, value: object) -> Iterator[None]:
    """Keep something for this thread and those that run its backward passes, in a context. Checked on 2.13.

    A thread that ended with it would let go of it without Python's lock, and abort a process that ends at that time.
    """
    before = thread_object(key)
    _stash(key, value)
    try:
        yield
    finally:
        if before is None and hasattr(torch._C, "_remove_obj_from_tls"):
            torch._C._remove_obj_from_tls(key)
        else:
            _stash(key, before)


def _stash(key: str, value: object) -> None:
    """Put an object under a key of this thread."""
    torch._C._stash_obj_in_tls(key, value)
    if _TAKES_NO_REFERENCE:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@contextmanager
def threaded_process_groups(join: Callable[[ThreadedCollective], None]) -> Iterator[None]:
    """Give each thread process groups of its own (backend "threaded"), as a process has. Checked on 2.13 and 2.14.1.

    Args:
        join: Called on the thread of each rank that calls a collective; returns when the data is in place.

    Raises:
        RuntimeError: Threaded process groups are already in use.
    """
    # Imported here because the import registers a backend.
    from torch._C._distributed_c10d import _set_thread_isolation_mode  # type: ignore[attr-defined]
    from torch.testing._internal.distributed import multi_threaded_pg

    if isinstance(dist.distributed_c10d._world, multi_threaded_pg.ThreadLocalWorld):
        raise RuntimeError("simulated ranks are already running in this process; they cannot simulate ranks themselves")

    def start(operation: Any, group: Any) -> SimpleNamespace:
        def wait(_: int, data: Any) -> Any:
            ranks = list(group._world().pg_group_ranks[group])
            join(ThreadedCollective(group.pg_name, ranks, _kind(operation, data), data, operation.work))
            return multi_threaded_pg.ret_work(data)

        return SimpleNamespace(join=wait)

    world = multi_threaded_pg.ThreadLocalWorld()
    if not hasattr(world, "comms"):
        world.comms = []  # type: ignore[misc]  # which torch 2.11 clears in the end, though its threaded world lacks it
    # `init_process_group` sets all of these.
    own_world = patch.multiple(
        dist.distributed_c10d,
        _world=world,
        _backend=dist.distributed_c10d._backend,
        _default_pg_init_method=dist.distributed_c10d._default_pg_init_method,
    )
    own_hook = patch.object(sys, "excepthook", sys.excepthook)
    own_join = patch.multiple(
        multi_threaded_pg.ProcessLocalGroup, _start_coll=staticmethod(start), _end_coll=staticmethod(lambda *_: None)
    )
    # Ranks meet in collectives alone: torch's threaded groups wait for all members to be made because their collectives
    # share state of the class, which those of `join` do not.
    no_barrier = patch.object(multi_threaded_pg, "_store_based_barrier", lambda *_: None)
    with own_world, own_hook, own_join, no_barrier, _device_guard_set_once():
        _set_thread_isolation_mode(True)
        try:
            yield
        finally:
            _set_thread_isolation_mode(False)


def _device_guard_set_once() -> AbstractContextManager[object]:
    """Let threads make tensors without values side by side.

    In torch 2.11 each of them replaces and frees the guard of CUDA devices that another may be using, and the process
    ends with a segmentation fault. Newer versions set it once. Checked on 2.11, 2.13 and 2.14.1.
    """
    if torch.torch_version.__version__ >= "2.13":
        return nullcontext()
    torch._C._ensureCUDADeviceGuardSet()
    return patch.object(torch._C, "_ensureCUDADeviceGuardSet", lambda: None)


def _kind(operation: Any, data: Any) -> str:
    """Name an operation, its arguments, and the tensors whose shapes must be the same on every rank."""
    from torch.testing._internal.distributed import multi_threaded_pg

    # torch 2.15 gives every reduction a factor, which is None but for one kind of sum.
    given = {name: getattr(value, "op", value) for name, value in vars(operation).items() if value is not None}
    arguments = ", ".join(f"{name}={value}" for name, value in given.items())
    same = ()
    if isinstance(operation, multi_threaded_pg.AllReduce | multi_threaded_pg.Broadcast):
        same = data
    elif isinstance(operation, multi_threaded_pg.ReduceScatter):
        same = data[1]
    shapes = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in torch.utils._pytree.tree_leaves(same))
    return f"{type(operation).__name__}({arguments})" + (f" of {shapes}" if shapes else "")
