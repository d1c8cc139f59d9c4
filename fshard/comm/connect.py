"""Connects this rank with the others of an axis: by its links, and by the pair that rows of tensors are sent over."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from fshard import _compat
from fshard.comm.failure import FailureWatcher, ask_store, notify_peers, read_note
from fshard.comm.groups import ChainEntry, Group, PendingCollective, RankState
from fshard.comm.links import list_peers, swap_in_rounds
from fshard.comm.meeting import Meeting
from fshard.errors import expect


def connect_groups(
    state: RankState,
    names: Sequence[str],
    meeting: Meeting | None = None,
    *,
    of_processors: bool = False,
) -> None:
    """Connect with the other ranks of axes, as far as this rank is not yet, and let the thread watch it.

    All axes of a meeting get its links, so that none of them ends while others are still there.

    Args:
        state: This rank's.
        names: The names of the axes' process groups.
        meeting: Of all ranks, which are here; None where the ranks of the one group may not be.
        of_processors: Whether rows of tensors of processors travel there, so that a group that is made now has
            connections for them beside a backend that sends itself.

    Raises:
        CollectiveError: if one of them does not come.
    """
    groups = [state.groups.get(name) or _describe_group(state, name) for name in names]
    new = [group for group in groups if group.name not in state.groups]
    if state.simulation is None and (new or meeting):
        with nullcontext(meeting) if meeting else _meet(state, new[0]) as meeting_of_ranks:
            state.sockets |= meeting_of_ranks.sockets
            for group in groups:
                group.links = meeting_of_ranks.links
            for group in new:
                _connect(state, group, meeting_of_ranks, of_processors=of_processors)
            meeting_of_ranks.run(lambda _: _wait_for_all(state, groups))
    for group in new:
        state.groups[group.name] = group
    if state.groups and not (state.watcher or state.simulation):
        state.watcher = FailureWatcher(state)
        state.watcher.start()


def _describe_group(state: RankState, name: str) -> Group:
    """Describe a group that is not connected yet."""
    expect(
        _compat.group_size(name) is not None,
        "mesh",
        "process groups that exist",
        "one that destroy_process_group has ended",
        "call that after the last save is complete, or fs.init_mesh again",
    )
    ranks = dist.get_process_group_ranks(_compat.resolve_process_group(name))
    return Group(name, ranks, ranks.index(state.rank), None, _compat.timeout_of(name), links=state.simulation)


@contextmanager
def _meet(state: RankState, group: Group) -> Iterator[Meeting]:
    """Let the ranks of a group meet that init_mesh has not made, when they first use it."""
    place = f"a collective of ranks {group.ranks}"
    remedy = "Check that each of them runs and calls the same collective."
    meeting = Meeting(state.store, state.rank, group.ranks, _key_of(state, group), group.timeout, place, remedy)

    def look() -> None:
        """End with the others if one of them has failed elsewhere: it does not come here any more."""
        if note := ask_store(lambda: read_note(state.board)):
            raise notify_peers(state, note)

    with meeting:
        meeting.peers = list_peers(state.rank, group.ranks)
        meeting.agree("here", lambda _: "", look)
        meeting.connect()
        yield meeting


def _key_of(state: RankState, group: Group) -> str:
    """Name a group, its ranks and the generation, in few letters: torch's store refuses keys of over 8,192."""
    text = f"{group.ranks}".encode()
    ranks = hashlib.blake2b(text, digest_size=16).hexdigest()
    return f"{state.generation}/{group.name} of {ranks}"


def _connect(state: RankState, group: Group, meeting: Meeting, *, of_processors: bool) -> None:
    """Connect with the other ranks of a group, all of which are here."""
    prefix = f"fshard/{_key_of(state, group)}"

    def run(make: Callable[[Any], Any]) -> Any:
        """Run what may wait inside torch, with a client of the store that another thread may end."""
        return meeting.run(lambda client: make(dist.PrefixStore(prefix, client)))  # type: ignore[attr-defined]

    with _compat.collecting_sockets(state.store) as sockets:
        if of_processors or not _compat.served_accelerators(group.name):
            # All ranks are here, so that the constructors of gloo, where Ctrl-C is not heard, do not wait for long.
            group.pair = _compat.make_pair(group.name, run)
        if group.pair is None:
            group.device = torch.accelerator.current_accelerator() or "cpu"
        if state.generation > 0:
            run(lambda board: _compat.replace_group(group.name, state.generation, board))
    state.sockets |= sockets


def _wait_for_all(state: RankState, groups: Sequence[Group]) -> None:
    """Wait until all ranks of groups are connected: one that goes on takes those that fail for ranks that ended."""
    for group in groups:
        swap_in_rounds(PendingCollective(None, state, group, ChainEntry()), b"", max)
