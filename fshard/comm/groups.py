"""fshard's own process groups; their numbers, chains and the error that broke them are the one memory between calls.

They decide whether a call ends, never a value, an order or a size.
"""

import os
import weakref
import zlib
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from fshard import _compat

# The number of a group's last collectives that are kept for messages of failures, and of characters of each.
KEPT_ENTRIES = 16
TEXT_LENGTH = 200


class ChainEntry(NamedTuple):
    """One collective in the chain of its group.

    Attributes:
        number: How many collectives the group had started with it.
        chain_hash: A hash of it and of all before it.
        text: Its name, what it carries, for whom, over which axis.
        place: This rank's place in the group.
        sends: For each rank the rows that it is sent; none if all ranks send the same.
        receives: For each rank the rows that it sends here.
    """

    number: int = 0
    chain_hash: int = 0
    text: str = ""
    place: int = 0
    sends: Sequence[int] = ()
    receives: Sequence[int] = ()

    def __str__(self) -> str:
        return f"{self.text}, sends {self.sends}, awaits {self.receives}" if self.sends else self.text


@dataclass(eq=False)
class Group:
    """The ranks of an axis, and this rank's connections to them.

    Attributes:
        name: The name of the axis's process group, the same on all its ranks.
        ranks: The numbers of its ranks in the whole run.
        local_rank: This rank's place in `ranks`.
        pair: The connections that rows of tensors are sent over; None beside a backend that sends itself, and for
            simulated ranks.
        timeout: Seconds that a rank waits for another one of them.
        chain: The last collectives that have been started. Before the first one it has an entry of number 0, which
            stands for none.
        updates: A hash of all updates that this rank has made of states that live on these ranks.
        unseen: A text of the updates since the last collective, newest first, which the next collective shows to the
            others.
        links: The `Links` over which ranks agree; for simulated ranks the simulation, which has a `swap` as these do.
        receives: What this rank has posted to find out which connections have ended. It must live until they are cut;
            see `_compat.find_lost_peers`.
        device: The device whose memory rows are sent from: an accelerator where its backend sends them.
    """

    name: str
    ranks: list[int]
    local_rank: int
    pair: Any
    timeout: float
    chain: deque[ChainEntry] = field(default_factory=lambda: deque([ChainEntry()], KEPT_ENTRIES))
    updates: int = 0
    unseen: str = ""
    links: Any = None
    receives: Sequence[Any] = ()
    device: Any = "cpu"

    def record_start(self, op: str, hashed: str, text: str, *sizes: Sequence[int]) -> ChainEntry:
        """Record that a collective starts.

        Args:
            op: Its name.
            hashed: All that is the same on every rank.
            text: What it carries, for whom, over which axis.
            *sizes: The rows for each rank and from each, if ranks may send different ones.

        Returns:
            Its entry.
        """
        last = self.chain[-1]
        number = last.number + 1
        chain_hash = zlib.crc32(f"{hashed}{self.updates}".encode(), last.chain_hash)
        text = f"{op} number {number} {text:.{TEXT_LENGTH}}{self.unseen}"
        entry = ChainEntry(number, chain_hash, text, self.local_rank, *sizes)
        self.chain.append(entry)
        self.unseen = ""
        return entry

    def record_update(self, text: str) -> None:
        """Record an update, which sends nothing. Ranks that make others differ in the next collective."""
        self.updates = zlib.crc32(text.encode(), self.updates)
        self.unseen = f", after {text}{self.unseen:.{4 * TEXT_LENGTH}}"


def tag_of(entry: ChainEntry, nbytes: int) -> int:
    """The tag of a message: ranks whose collectives differ, now or before, wait for each other."""
    return (zlib.crc32(b"%d" % nbytes, entry.chain_hash) >> 1) % _compat.NEVER_SENT


@dataclass(slots=True, eq=False)
class PendingCollective:
    """One collective under way.

    Attributes:
        collective: Its entry in a record; None if nobody watched as it started.
        state: What this rank knows of the others.
        group: The ranks that take part.
        entry: Its entry in the group's chain.
        watchers: Those who are told of it.
        op: Its name.
        label: The encoded label of its caller.
        left: Buffers that have not been waited for.
        since: When this rank began to wait for it last.
        awaits: A round and ranks, as one value, because another thread reads both: the round of an exchange over links,
            infinity behind the last one, and -1 for a collective that is none; and the ranks that this one may wait
            for.
    """

    collective: Any
    state: "RankState"
    group: Group
    entry: ChainEntry
    watchers: Sequence[Any] = ()
    op: str = ""
    label: str = ""
    left: int = 0
    since: float = 0.0
    awaits: tuple[float, Sequence[int]] = (-1, ())


@dataclass(eq=False)
class RankState:
    """All that a process, or a simulated rank, knows of the others.

    Attributes:
        rank: Its number.
        store: The store by which ranks found each other; what is written there begins with the generation.
        simulation: For a simulated rank, what knows all of them (`states`) and ends their waits (`wake`); None for a
            process.
        generation: How often groups have been made anew.
        groups: By the name of the axis's process group.
        sockets: Those of the pairs and the links of all groups, of earlier ones too.
        call: The name of the outermost call that runs; None if none runs, or if all ranks have heard why it ends.
        has_begun: Whether the message that begins that call has been sent.
        awaited: The collective that it waits for now, if it does.
        in_flight: Buffers that have not been waited for, by their ids.
        failure: The text that all ranks raise, once the groups are broken.
        is_cut: Whether this rank has ended its connections.
        failed_calls: How many calls have failed on this rank in this generation.
        compared: The structures of the states whose steps ranks have compared in this generation.
        watcher: The thread that watches it.
    """

    rank: int
    store: Any
    simulation: Any = None
    generation: int = 0
    groups: dict[str, Group] = field(default_factory=dict)
    sockets: _compat.Sockets = field(default_factory=dict)
    call: str | None = None
    has_begun: bool = False
    awaited: PendingCollective | None = None
    in_flight: weakref.WeakValueDictionary[int, Any] = field(default_factory=weakref.WeakValueDictionary)
    failure: str | None = None
    is_cut: bool = False
    failed_calls: int = 0
    compared: set[Any] = field(default_factory=set)
    watcher: Any = None

    @property
    def board(self) -> Any:
        """The part of the store for this generation."""
        return dist.PrefixStore(f"fshard/{self.generation}", self.store)  # type: ignore[attr-defined]

    @property
    def others(self) -> list[int]:
        """The ranks that this one has a group with."""
        return sorted({rank for group in self.groups.values() for rank in group.ranks} - {self.rank})

    def renew(self, generation: int) -> None:
        """Forget all groups and the failure that broke them; groups are made anew when they are asked for."""
        self.generation = generation
        self.failure = None
        self.is_cut = False
        self.failed_calls = 0
        self.groups.clear()
        self.compared.clear()


class _Memory(weakref.WeakKeyDictionary[Any, RankState]):
    """What is remembered between calls, for as long as torch.distributed runs."""


_MEMORY = _Memory()


def _leave_to_parent() -> None:
    """Leave the connections to the process that this one was forked from.

    Other ranks find out that a rank was killed by the end of its connections, which end when no process has them any
    more. The groups stay, because gloo would wait in their destructors for threads that a forked child does not have.
    """
    for state in list(_MEMORY.values()):
        if state.watcher is not None:
            state.watcher.leave_to_parent()
            # Calls of the child would take its signals for those of the parent.
            state.watcher = None
        if not state.groups or state.simulation is not None:
            continue
        _compat.keep_for_good([*state.groups.values(), *_compat.torch_groups(), state.store])
        _compat.leave_to_parent(state.sockets, state.store)
        state.failure = (
            f"This process was forked from rank {state.rank} and cannot use its connections. Start it with spawn, or "
            "communicate in the parent only."
        )


os.register_at_fork(after_in_child=_leave_to_parent)


def rank_state(store: Any = None) -> RankState:
    """Find what this rank knows of the others.

    Args:
        store: Where ranks tell each other, if they begin now; by default a client of their own of torch's store.

    Returns:
        The state, the same at each call. Where torch.distributed does not run, it is that of one rank, and not kept.
    """
    default = dist.group.WORLD
    if default is None:
        return RankState(0, store)
    state = _MEMORY.get(default)
    if state is None:
        state = RankState(dist.get_rank(), store or _compat.default_store())
        _MEMORY[default] = state
    return state


def is_simulated() -> bool:
    """Tell whether this rank is a simulated one."""
    return rank_state().simulation is not None


def aside() -> AbstractContextManager[None]:
    """Let other simulated ranks have their turns while this one waits for them outside of collectives."""
    simulation = rank_state().simulation
    return simulation.aside() if simulation else nullcontext()
