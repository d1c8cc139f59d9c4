"""Connects this rank with the others of an axis: by its links, and by the pair that rows of tensors are sent over."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from fshard import _compat
from fshard.comm.failure import STORE_IS_GONE, CollectiveError, FailureWatcher, ask_store
from fshard.comm.groups import Group, RankState
from fshard.comm.links import Links, Listener, connect_links, list_peers
from fshard.comm.meeting import Meeting
from fshard.comm.processes import name_ranks

# The key by which a rank of a group shows where its peers connect to it.
HERE = "links of {}"


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
        has_pair = of_processors or not _compat.serves_accelerator(name)
        group = _make_group(state, name, meeting, has_pair=has_pair)
        state.groups[name] = group
    if state.watcher is None and group.links is not None:
        state.watcher = FailureWatcher(state)
        state.watcher.start()
        if state.call.name is not None:
            state.watcher.interrupts.listen()
    return group


def _make_group(
    state: RankState,
    name: str,
    meeting: Meeting | None = None,
    *,
    has_pair: bool = True,
) -> Group:
    """Connect with the other ranks of an axis, as for `connect_group`; `has_pair` says whether by more than links."""
    ranks = dist.get_process_group_ranks(_compat.resolve_process_group(name))
    group = Group(name, ranks, ranks.index(state.rank), None, _compat.timeout_of(name))
    if state.simulation is not None:
        return group

    def run(make: Callable[[Any], Any]) -> Any:
        """Run what may wait inside torch, with a client of the store that another thread may end."""
        if meeting is None:
            return make(_board_of(state, group))
        return meeting.run(lambda client: make(_board_of(state, group, client)))

    with _naming_absent_ranks(state, group, meeting):
        group.links = run(lambda _: _connect_links(state, group, meeting))
        if not (meeting and has_pair):
            run(lambda board: _wait_for_links(board, group, meeting))
        if has_pair:
            # All ranks are here, so that the constructors of gloo, where Ctrl-C is not heard, do not wait for long.
            group.pair, group.sockets = _compat.make_pair(name, run)
        if state.generation > 0:
            run(lambda board: _compat.replace_group(name, state.generation, board))
    return group


def _board_of(state: RankState, group: Group, client: Any = None) -> Any:
    """The part of the store for the ranks of a group, by this rank's client of the store, or by another one."""
    return dist.PrefixStore(_key_of(group), state.board(client))  # type: ignore[attr-defined]


def _key_of(group: Group) -> str:
    """Name a group and its ranks, in few letters."""
    return f"{group.name} of {_compat.digest_of_ranks(group.ranks)}"


def _connect_links(state: RankState, group: Group, meeting: Meeting | None) -> Links:
    """Connect with some of the other ranks, whose addresses are known from a meeting, or else from the store."""
    if state.listener is None:
        state.listener = Listener(state.store)
    peers = list_peers(group.local_rank, len(group.ranks))
    if meeting is not None:
        address_of = meeting.read_addresses([group.ranks[peer] for peer in peers])
        addresses = {peer: address_of[group.ranks[peer]] for peer in peers}
        look: Callable[[], object] = meeting.check_others
    else:
        board = _board_of(state, group)
        board.set(HERE.format(group.local_rank), state.listener.address)
        _compat.wait_in_store(board, [HERE.format(peer) for peer in peers], group.timeout)
        addresses = {peer: board.get(HERE.format(peer)).decode() for peer in peers}
        look = bool
    key = f"{state.generation} {_key_of(group)}"
    return connect_links(state.listener, key, group.ranks, group.local_rank, addresses, group.timeout, look)


def _wait_for_links(board: Any, group: Group, meeting: Meeting | None) -> None:
    """Wait until all ranks have their links. A rank that goes on could take those that fail for ranks that ended."""
    if board.add("connected", 1) == len(group.ranks):
        board.set("all connected", "")
    _compat.wait_in_store(board, ["all connected"], group.timeout, bool if meeting is None else meeting.check_others)


@contextmanager
def _naming_absent_ranks(state: RankState, group: Group, meeting: Meeting | None) -> Iterator[None]:
    """Name the ranks that do not come, where a context connects a group.

    Raises:
        CollectiveError: instead of the error of what waits for them.
    """
    ranks = group.ranks
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        board = _board_of(state, group)
        absent = ask_store(lambda: [rank for place, rank in enumerate(ranks) if not board.check([HERE.format(place)])])
        if absent is None:
            raise CollectiveError(STORE_IS_GONE) from error
        if not absent or meeting is not None:
            raise CollectiveError(f"Ranks {ranks} could not connect: {error!s:.300}") from error
        raise CollectiveError(
            f"{name_ranks(absent)} did not connect within {group.timeout:g} s (group of ranks {ranks}). Check that "
            "each of them runs and calls the same collective."
        ) from error
