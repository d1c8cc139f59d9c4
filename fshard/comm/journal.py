"""Journal: which collectives a thread has started and finished, and who is told of it while it happens."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fshard import _compat
from fshard.comm.failure import explained
from fshard.comm.labels import Label, parts

_KEY = "fshard journal"
_own: ContextVar["Journal | None"] = ContextVar("fshard_journal", default=None)


class Issued:
    """One collective under way.

    Attributes:
        op: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
        axis: Name of the mesh axis.
        size: Ranks on it.
        group: Name of its process group.
        label: Who asked for it, and for what; see `fshard.comm.labels`.
        number: How many this thread had started with it.
        left: Buffers that have not been waited for.
    """

    __slots__ = ("axis", "group", "label", "left", "number", "op", "size")

    def __init__(self, op: str, axis: str, size: int, group: str, label: str, number: int) -> None:
        """Nothing has been sent yet."""
        self.op, self.axis, self.size, self.group, self.label, self.number = op, axis, size, group, label, number
        self.left = 0

    @property
    def about(self) -> Label:
        """The parts of its label."""
        return parts(self.label)

    @property
    def members(self) -> tuple[int, ...]:
        """The global ranks that take part, in their order on the axis."""
        return tuple(_compat.group_ranks(self.group))


class Watcher(Protocol):
    """Who is told what a thread's collectives do, as it happens."""

    def starts(self, issued: Issued, tensors: Sequence[torch.Tensor]) -> None:
        """A collective of these tensors is about to start."""

    def started(self, issued: Issued) -> None:
        """It is under way."""

    def waits(self, issued: Issued) -> None:
        """One of its buffers is about to be waited for."""

    def landed(self, issued: Issued) -> None:
        """That buffer has landed."""


class Journal:
    """What one thread knows of its collectives.

    Attributes:
        started: How many have started.
        finished: The last one of which every buffer has landed.
        failed: How often one has failed, by process group.
        watchers: Who is told.
        reductions: How often a value that varies has been summed into one that agrees.
        chain: What ties the collectives of the running call together, if one runs.
        locates: Whether nodes of collectives in autograd's graph keep the stack that made them.
        orders: The orders of collectives that calls have learned.
    """

    __slots__ = ("chain", "failed", "finished", "locates", "orders", "reductions", "started", "watchers")

    def __init__(self) -> None:
        """Nothing has started."""
        self.started = 0
        self.finished: Issued | None = None
        self.failed: dict[str, int] = {}
        self.watchers: tuple[Watcher, ...] = ()
        self.reductions = 0
        self.chain: Any = None
        self.locates = False
        self.orders: dict[Any, Any] = {}


def own_journal() -> Journal:
    """Find this thread's journal, or while it is watched that of the thread whose backward pass this one runs.

    Returns:
        The journal, which a thread that has none is given.
    """
    found = _compat.thread_object(_KEY) or _own.get()
    if found is None:
        found = Journal()
        _own.set(found)
    return found


def started(
    op: str, kernel: Callable[[], Any], tensors: Sequence[torch.Tensor], about: tuple[str, int, str, str]
) -> Any:
    """Start a collective; its buffers lead to what the journal has of it.

    Args:
        op: Its name.
        kernel: Starts it and returns a buffer in flight, or several.
        tensors: What it sends.
        about: Its axis, size, group and label.

    Returns:
        What the kernel returns.
    """
    book = own_journal()
    book.started += 1
    issued = Issued(op, *about, book.started)
    for watcher in book.watchers:
        watcher.starts(issued, tensors)
    try:
        buffers = kernel()
    except dist.DistError as error:
        raise explained(issued, book, error) from error
    several = buffers if isinstance(buffers, list) else [buffers]
    issued.left = len(several)
    for buffer in several:
        buffer.__dict__["issued"] = issued
    for watcher in book.watchers:
        watcher.started(issued)
    return buffers


def landed(buffer: torch.Tensor) -> torch.Tensor:
    """Wait for a buffer in flight.

    Args:
        buffer: From `started`, or from a trace, which starts nothing.

    Returns:
        The buffer, landed.

    Raises:
        CollectiveError: if the collective fails.
    """
    issued = buffer.__dict__.pop("issued", None)
    if issued is None:
        return _compat.wait_tensor(buffer)
    book = own_journal()
    for watcher in book.watchers:
        watcher.waits(issued)
    try:
        out = _compat.wait_tensor(buffer)
    except RuntimeError as error:
        raise explained(issued, book, error) from error
    issued.left -= 1
    if not issued.left:
        book.finished = issued
    for watcher in book.watchers:
        watcher.landed(issued)
    return out


def chained(chain: Any) -> AbstractContextManager[None]:
    """Tie the collectives that this thread's function calls inside the context.

    Args:
        chain: A fshard.collectives.Chain, or None for none.

    Returns:
        The context.
    """
    return _holding("chain", chain)


def located() -> AbstractContextManager[None]:
    """Let nodes of collectives that this thread's function calls inside the context keep the stack that made them.

    torch's anomaly mode does it for all nodes, but of all threads of a process, of which each may be a rank.

    Returns:
        The context.
    """
    return _holding("locates", True)


@contextmanager
def _holding(name: str, value: Any) -> Iterator[None]:
    """Set an attribute of this thread's journal inside the context."""
    book = own_journal()
    before = getattr(book, name)
    setattr(book, name, value)
    try:
        yield
    finally:
        setattr(book, name, before)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Tell somebody what this thread's collectives do inside the context, those of a backward pass included.

    Args:
        watcher: Who is told.

    Yields:
        Nothing.
    """
    book = own_journal()
    book.watchers += (watcher,)
    try:
        with _compat.keeping_thread_object(_KEY, book):
            yield
    finally:
        book.watchers = tuple(other for other in book.watchers if other is not watcher)
