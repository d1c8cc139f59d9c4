"""Connects this rank with the others of an axis: by its links, and by the pair that rows of tensors are sent over."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist

from fshard import _compat
from fshard.comm.failure import FailureWatcher
from fshard.comm.groups import Group, RankState
from fshard.comm.links import connect_links, list_peers
from fshard.comm.meeting import Meeting, wait_for_last


def connect_group(
    state: RankState,
    name: str,
    meeting: Meeting | None = None,
    *,
    of_processors: bool = False,
) -> Group:
    """Find this rank's own group of an axis, or connect with its other ranks, and let the thread watch it.

    Args:
        state: This rank's.
        name: The name of the axis's process group.
        meeting: Of all ranks, which are here; None where they may not be.
        of_processors: Whether rows of tensors of processors travel there, so that a group that is made now has
            connections for them beside a backend that sends itself.

    Returns:
        The group.

    Raises:
        CollectiveError: if one of them does not come.
    """
    group = state.groups.get(name)
    if group is None:
        ranks = dist.get_process_group_ranks(_compat.resolve_process_group(name))
        group = Group(name, ranks, ranks.index(state.rank), None, _compat.timeout_of(name))
        if state.simulation is None:
            has_pair = of_processors or not _compat.serves_accelerator(name)
            with nullcontext(meeting) if meeting else _meet(state, group) as meeting_of_ranks:
                _connect(state, group, meeting_of_ranks, has_pair=has_pair)
        state.groups[name] = group
    if state.watcher is None and group.links is not None:
        state.watcher = FailureWatcher(state)
        state.watcher.start()
        if state.call.name is not None:
            state.watcher.interrupts.listen()
    return group


@contextmanager
def _meet(state: RankState, group: Group) -> Iterator[Meeting]:
    """Let the ranks of a group meet that init_mesh has not made, when they first use it."""
    place = f"a collective of ranks {group.ranks}"
    remedy = "Check that each of them runs and calls the same collective."
    meeting = Meeting(state.store, state.rank, group.ranks, _key_of(state, group), group.timeout, place, remedy)
    with meeting:
        meeting.peers = [group.ranks[peer] for peer in list_peers(group.local_rank, len(group.ranks))]
        meeting.agree("here", lambda _: "", meeting.check_others)
        yield meeting


def _key_of(state: RankState, group: Group) -> str:
    """Name a group, its ranks and the generation, in few letters."""
    return f"{state.generation}/{group.name} of {_compat.digest_of_ranks(group.ranks)}"


def _connect(state: RankState, group: Group, meeting: Meeting, *, has_pair: bool) -> None:
    """Connect with the other ranks of a group, all of which are here; `has_pair` says whether by more than links."""
    key = _key_of(state, group)

    def run(make: Callable[[Any], Any]) -> Any:
        """Run what may wait inside torch, with a client of the store that another thread may end."""
        return meeting.run(lambda client: make(dist.PrefixStore(f"fshard/{key}", client)))  # type: ignore[attr-defined]

    def wait_for_links(board: Any) -> None:
        wait_for_last(board, "connected", len(group.ranks), group.timeout, meeting.check_others)

    peers = list_peers(group.local_rank, len(group.ranks))
    addresses = {peer: meeting.entries[group.ranks[peer]].address for peer in peers}
    group.links = run(lambda _: connect_links(meeting.listener, key, group, addresses, meeting.check_others))
    if has_pair:
        # All ranks are here, so that the constructors of gloo, where Ctrl-C is not heard, do not wait for long.
        group.pair, group.sockets = _compat.make_pair(group.name, run)
    else:
        # A rank that goes on could take those that fail for ranks that ended.
        run(wait_for_links)
    if state.generation > 0:
        run(lambda board: _compat.replace_group(group.name, state.generation, board))
