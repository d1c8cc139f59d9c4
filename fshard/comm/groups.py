"""fshard's own process groups; their numbers, chains and the error that broke them are the one memory between calls.

They decide whether a call ends, never a value, an order or a size.
"""

import os
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from fshard import _compat

# So many of a group's last collectives are kept for messages of failures, and so many characters of each.
TRAIL, TEXT = 16, 200


class Link(NamedTuple):
    """One collective, a link of its group's chain.

    Attributes:
        number: How many the group had started with it.
        chain: A hash of it and of all before.
        text: Its name, what it carries, for whom, over which axis.
        sends: For each rank the rows that it is sent; none where all send the same.
        receives: For each rank the rows that it sends here.
    """

    number: int
    chain: int
    text: str
    sends: Sequence[int] = ()
    receives: Sequence[int] = ()

    def __str__(self) -> str:
        return f"{self.text}, sends {self.sends}, awaits {self.receives}" if self.sends else self.text


@dataclass(eq=False)
class Group:
    """The ranks of an axis.

    Attributes:
        name: Of the axis's process group, the same on all its ranks.
        ranks: Their numbers in the whole run.
        own: This rank's place in `ranks`.
        pair: The connections that collectives are sent over; None where the backend is not gloo.
        timeout: Seconds that a rank waits there for another.
        sockets: Those of the connections.
        trail: The collectives that have started last.
    """

    name: str
    ranks: list[int]
    own: int
    pair: Any
    timeout: float
    sockets: _compat.Sockets = field(default_factory=dict)
    trail: deque[Link] = field(default_factory=lambda: deque([Link(0, 0, "")], TRAIL))

    def enter(self, op: str, hashed: str, text: str, *sizes: Sequence[int]) -> Link:
        """Note that a collective starts.

        Args:
            op: Its name.
            hashed: All that is the same on every rank.
            text: What it carries, for whom, over which axis.
            *sizes: The rows for each rank and from each, where ranks may send different ones.

        Returns:
            Its link.
        """
        last = self.trail[-1]
        number, chain = last.number + 1, zlib.crc32(hashed.encode(), last.chain)
        self.trail.append(Link(number, chain, f"{op} number {number} {text:.{TEXT}}", *sizes))
        return self.trail[-1]


def tag_of(step: Link, nbytes: int) -> int:
    """The tag of a message: ranks whose collectives differ, now or before, wait for each other."""
    return (zlib.crc32(b"%d" % nbytes, step.chain) >> 1) % _compat.CUT


@dataclass(slots=True, eq=False)
class Issued:
    """One collective under way.

    Attributes:
        collective: The entry of a record; None where nobody was told as it started.
        world: What this rank knows of the others.
        group: The group of fshard's own.
        step: Its place there.
        left: Buffers that have not been waited for.
        since: When this rank began to wait for it last.
    """

    collective: Any
    world: "World"
    group: Group
    step: Link
    left: int = 0
    since: float = 0.0


@dataclass(eq=False)
class World:
    """All that a process, or a simulated rank, knows of the others.

    Attributes:
        rank: Its number.
        store: By which ranks found each other; what is written there begins with the generation.
        wake: Ends the waits of simulated ranks in a group of some generation, with a text; None for a process.
        simulated: What each of the simulated ranks knows, this one too; none for a process.
        generation: How often groups have been made anew.
        broken: The error that broke the groups of this generation, on every rank that heard of it.
        groups: By the name of the axis's process group.
        waiting: The collective that this rank waits for.
        call: The outermost call of fshard that runs.
        begun: Whether the message that begins it has been sent.
        flying: Buffers that have not been waited for.
        failures: How many calls have failed on this rank.
        compared: The structures of the states whose steps ranks have compared in this generation.
        lookout: The thread that watches it.
    """

    rank: int
    store: Any
    wake: Callable[[str, int, str], None] | None = None
    simulated: Sequence["World"] = ()
    generation: int = 0
    broken: str | None = None
    groups: dict[str, Group] = field(default_factory=dict)
    waiting: Issued | None = None
    call: str | None = None
    begun: bool = False
    flying: weakref.WeakValueDictionary[int, Any] = field(default_factory=weakref.WeakValueDictionary)
    failures: int = 0
    compared: set[Any] = field(default_factory=set)
    lookout: Any = None

    def board(self) -> Any:
        """The part of the store for this generation."""
        return dist.PrefixStore(f"fshard/{self.generation}", self.store)  # type: ignore[attr-defined]

    @property
    def others(self) -> list[int]:
        """The ranks that this one has a group with."""
        return sorted({rank for group in self.groups.values() for rank in group.ranks} - {self.rank})

    def renew(self, generation: int) -> None:
        """Forget all groups and the error that broke them; they are made anew when they are asked for."""
        self.generation, self.broken, self.failures = generation, None, 0
        self.groups.clear()
        self.compared.clear()


class _Memory(weakref.WeakKeyDictionary[Any, World]):
    """What is remembered between calls, for as long as torch.distributed runs."""


_MEMORY = _Memory()


def _leave_to_parent() -> None:
    """Leave the connections to the process that this one was forked from.

    Other ranks find out that a rank was killed by the end of its connections, which end when no process has them any
    more. The groups stay, because gloo would wait in their destructors for threads that a forked child does not have.
    """
    for own in list(_MEMORY.values()):
        groups = [group for group in own.groups.values() if group.pair is not None]
        if groups:
            pairs = [group.pair for group in groups]
            _compat.keep_for_good([*pairs, *_compat.torch_groups(), own.store])
            sockets = [item for group in groups for item in group.sockets.items()]
            _compat.leave_to_parent(dict(sockets), own.store)
            own.broken = f"this process was forked from rank {own.rank}, which alone has its connections"


os.register_at_fork(after_in_child=_leave_to_parent)


def rank_state() -> World:
    """Find what this rank knows of the others."""
    default = dist.group.WORLD
    assert default is not None
    found = _MEMORY.get(default)
    if found is None:
        found = _MEMORY[default] = World(dist.get_rank(), _compat.default_store())
    return found


def has_renewed() -> bool:
    """Tell whether groups have been made anew after a failure."""
    return dist.is_initialized() and rank_state().generation > 0
