"""While ranks make a mesh, they find out if one of them fails or dies, and all of them end with the same error.

A rank waits for the others in the store before it calls a constructor of torch or gloo, which would wait for them
without looking at signals and notes. It brings what ranks compare there, and the last to come compares it for all.

A rank may also fail or die while others are inside such a constructor. They wait there by a client of the store that
has its own connection. A thread looks meanwhile what became of the other ranks, and ends that connection.
"""

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self, TypeVar

import torch.distributed as dist

from fshard import _compat
from fshard.comm.failure import (
    LINGER_TIME,
    MAX_RANKS_PER_POLL,
    NOTE_GRACE,
    RESTART,
    STORE_IS_GONE,
    TIMEOUT_FRACTION,
    CollectiveError,
    ask_store,
    describe_failure,
    read_first,
    report_at_once,
)
from fshard.comm.groups import RankState, is_simulated
from fshard.comm.links import Listener
from fshard.comm.processes import Process, describe_ended_ranks, has_ended, name_ranks, this_process
from fshard.errors import describe_error

T = TypeVar("T")

# Seconds between two looks at the others while a constructor waits for them: the first time, and later.
FIRST_LOOK = 0.5
NEXT_LOOK = 1.0
# Seconds in which one rank finds out for all others which have not come.
SEARCH_TIME = 5.0
# The key of an `Arrival`.
ENTRY = "entry/{}"
# What follows from what all ranks bring; FAILED if one has given up.
END = "end"
FAILED = "failed"
# In the place of a note: some rank has its first mesh.
MADE = "made"
CALL_INIT_MESH = "Call init_mesh on every rank; if you make several meshes, make them in the same order."


class Arrival(NamedTuple):
    """What a rank brings to a meeting.

    Attributes:
        process: The rank's `Process`.
        address: Where it may be connected to.
        text: What ranks compare; "" from a rank that has given up.
    """

    process: Sequence[Any]
    address: str
    text: str


def wait_for_last(
    board: Any,
    place: str,
    size: int,
    seconds: float,
    look: Callable[[], object],
    conclude: Callable[[], str] = str,
) -> str | None:
    """Wait until all of some ranks have come to a place, of which the last one leaves a text for the others.

    Args:
        board: The part of the store for these ranks.
        place: The key of the text.
        size: How many they are.
        seconds: How long to wait.
        look: Called from time to time while this rank waits.
        conclude: Makes the text on the last rank.

    Returns:
        The text, on the last rank alone.

    Raises:
        RuntimeError: if they do not come, or the store is gone.
    """
    if board.add(f"came to {place}", 1) != size:
        _compat.wait_in_store(board, [place], seconds, look)
        return None
    text = conclude()
    board.set(place, text)
    return text


class Meeting:
    """One call of init_mesh, on one of the ranks that make a mesh together, or the first use of another group.

    Args:
        store: A client of the store by which ranks find each other, for the calling thread alone.
        rank: This rank.
        ranks: All ranks.
        name: The same on all ranks, and another for each meeting.
        timeout: Seconds that a rank waits for another.
        place: What ranks call, for errors.
        remedy: What to do about ranks that have not called it.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: Sequence[int],
        name: str,
        timeout: float,
        place: str = "init_mesh",
        remedy: str = CALL_INIT_MESH,
    ) -> None:
        self.store = store
        # The client of the store that constructors wait on; made for the first of them.
        self.client: _compat.StoreClient | None = None
        self.rank = rank
        self.ranks = ranks
        self.others = [other for other in ranks if other != rank]
        self.timeout = timeout
        self.place = place
        self.remedy = remedy
        self.board: Any = dist.PrefixStore(f"fshard/meeting {name}", store)  # type: ignore[attr-defined]
        # Set once ranks begin to make groups, which are of no use if one of them fails.
        self.state: RankState | None = None
        # What ranks have brought, as far as this one has read it.
        self.entries: dict[int, Arrival] = {}
        # How many constructors this rank has begun.
        self.stage = 0
        # Whether all ranks raise the error that leaves the meeting.
        self.fails_everywhere = False
        # Whether this rank stops torch.distributed if the meeting has failed.
        self._must_stop = False
        # The ranks that this one connects with, which is set before ranks agree, and where lower ones connect to it.
        self.peers: Sequence[int] = ()
        self.listener: Any = None

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Tell the others of an error, unless they have it too."""
        if self.listener is not None:
            self.listener.close()
        if error is None or not self.others:
            return
        if not self.fails_everywhere:
            self._report(error)
        self._linger()

    def _report(self, error: BaseException) -> None:
        """Give up the meeting."""
        if isinstance(error, CollectiveError):
            text = describe_error(error)
            report_at_once(text)
        else:
            text = self._describe_failure(error)
        reason = self._leave_note(text)
        # The last rank to come sees by its entry that there is a note.
        entry = json.dumps(Arrival(this_process(), "", ""))
        ask_store(lambda: self.board.multi_set([ENTRY.format(self.rank), "noted"], [entry, ""]))
        if self.state is not None:
            self.state.failure.reason = self.state.failure.reason or reason

    def _linger(self) -> None:
        """Show that this rank knows why the meeting ends; wait for those that live if its process has the store."""
        ask_store(lambda: self.board.add("read", 1))
        if _compat.holds_store(self.store):
            ask_store(self._have_all_read, LINGER_TIME)

    def _have_all_read(self) -> bool:
        """Whether all ranks know why the meeting ends, but for a few whose processes have ended."""
        missing: int = len(self.ranks) - self.board.add("read", 0)
        if missing > MAX_RANKS_PER_POLL:
            return False
        self._read_some_entries()
        return missing <= len(self._list_ended_ranks())

    def agree(self, text: str, merge: Callable[[Sequence[str]], str], look: Callable[[], object]) -> str:
        """Wait until all ranks have come; find out once, on the last of them, what follows from all that they bring.

        Each rank asks the store four times, whatever their number; only the last reads what all have brought.

        Args:
            text: What this rank brings.
            merge: Maps the texts of all ranks to what follows from them.
            look: Called from time to time while this rank waits.

        Returns:
            What follows, the same on every rank.

        Raises:
            CollectiveError: if a rank does not come, has failed or is gone.
        """
        if not self.others:
            return merge([text])
        if self.peers and not is_simulated():
            self.listener = Listener(self.store)

        def find_end() -> str:
            """Find out what follows, on the last rank."""
            self._read(self.ranks)
            texts = [self.entries[rank].text for rank in self.ranks]
            return FAILED if "" in texts else merge(texts)

        try:
            entry = Arrival(this_process(), self.listener.address if self.listener else "", text)
            self.board.set(ENTRY.format(self.rank), json.dumps(entry))
            end = wait_for_last(self.board, END, len(self.ranks), self.timeout, look, find_end)
            if end is None:
                end = self._read(self.peers, END)[0].decode()
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise self._explain_absence() from error
        if end == FAILED:
            raise CollectiveError(self._read_note())
        return end

    def _read(self, ranks: Sequence[int], *keys: str) -> list[bytes]:
        """Read some keys, and the entries of ranks, which are there."""
        values: list[bytes] = self.board.multi_get([*keys, *map(ENTRY.format, ranks)])
        for rank, value in zip(ranks, values[len(keys) :], strict=True):
            self.entries[rank] = Arrival(*json.loads(value))
        return values

    def _explain_absence(self) -> CollectiveError:
        """Say who has not come. The first rank to ask finds out, and the others wait for its note."""
        if ask_store(lambda: self.board.add("askers", 1)) != 1:
            with suppress(RuntimeError):
                _compat.wait_in_store(self.board, ["noted"], SEARCH_TIME)
        reason = self.find_reason(processes=False)
        absent = None if reason else ask_store(lambda: [self._find_absent(self.others)], SEARCH_TIME)
        if absent is None:
            return CollectiveError(reason or self._name_ended_ranks() or STORE_IS_GONE)
        [ranks] = absent
        if not ranks:
            text = f"{self.place}: all ranks called it, but one of them stopped there for over {self.timeout:g} s"
            return CollectiveError(f"{text}. Look for a process that is stopped.\nTo fix: {RESTART}.")
        text = f"{self.place}: {name_ranks(ranks)} did not call it within {self.timeout:g} s"
        return CollectiveError(f"{text}. {self.remedy}")

    def _find_absent(self, ranks: Sequence[int]) -> list[int]:
        """Find out by halves which of some ranks have not come."""
        if self.have_come(ranks):
            return []
        if len(ranks) == 1:
            return [*ranks]
        half = len(ranks) // 2
        return self._find_absent(ranks[:half]) + self._find_absent(ranks[half:])

    def have_come(self, ranks: Sequence[int]) -> bool:
        """Whether all of some ranks have come."""
        return bool(self.board.check([ENTRY.format(rank) for rank in ranks]))

    def refuse(self, error: ValueError) -> None:
        """Raise an error that all ranks raise, because it follows from what they have shown each other.

        Raises:
            ValueError: the error, of which this rank does not tell the others.
        """
        self.fails_everywhere = True
        raise error

    def check_others(self) -> None:
        """End this rank's wait if another has failed or is gone.

        Raises:
            CollectiveError: if one has failed or is gone.
        """
        if reason := self.find_reason():
            raise CollectiveError(reason)

    def find_reason(self, *, processes: bool = True) -> str:
        """Find out why no mesh will be made, as far as this rank can tell.

        Args:
            processes: Whether to look for processes that have ended too.

        Returns:
            The reason; "" if nothing is known.
        """
        reason: str | None = ask_store(self._find_reason if processes else self._read_note)
        # The store may have gone with the rank that held it.
        return self._name_ended_ranks() if reason is None else reason

    def run(self, make: Callable[[Any], T]) -> T:
        """Make what waits inside torch for other ranks.

        Args:
            make: Makes it, with a client of the store that nobody else waits on or asks by. It may keep the client.

        Returns:
            What `make` returns.

        Raises:
            CollectiveError: if it cannot be made; on every rank with the same reason.
        """
        if not self.others:
            return make(self.store)
        if self.client is None:
            self.client = _compat.StoreClient(lambda: _compat.clone_of(self.store))
        self.stage += 1
        begin = time.monotonic()
        ender = _WaitEnder(self, self.client)
        with ender:
            try:
                made = make(self.client.store)
            except CollectiveError:
                raise
            except RuntimeError as error:
                # The thread still shows others that this rank is not the one that hangs.
                raise CollectiveError(self._explain_lost_wait(ender, error, time.monotonic() - begin)) from error
        if ender.reason:
            raise CollectiveError(ender.reason)
        return made

    def show_wait(self, looks: int) -> None:
        """Show others in which constructor this rank waits for them, as the number of looks grows."""
        ask_store(lambda: self.board.set(f"waits/{self.rank}", json.dumps([self.stage, looks])))

    def _explain_lost_wait(self, ender: "_WaitEnder", error: RuntimeError, seconds: float) -> str:
        """Say why the wait in a constructor ended after some seconds, in the same words on every rank."""
        reason = ender.reason or ask_store(self._find_reason, NOTE_GRACE)
        if reason is None:
            # The store has gone with the rank that held it.
            return self._name_ended_ranks() or STORE_IS_GONE
        if reason:
            return reason
        if seconds <= TIMEOUT_FRACTION * self.timeout:
            return self._leave_note(self._describe_failure(error))
        first = f"{self.place}: {self._name_hanging_ranks()} did not make process groups within {self.timeout:g} s"
        where = "Look for a hang there, or for a network in between that lets nothing pass."
        return self._leave_note(f"{first}. {where}\nTo fix: {RESTART}.")

    def _name_hanging_ranks(self) -> str:
        """Name the ranks to blame for a wait that was too long, as well as this rank can tell."""
        if len(self.others) == 1:
            return name_ranks(self.others)
        before = ask_store(self._read_waits)
        # Longer than a rank that runs needs to look again.
        time.sleep(1.5 * NEXT_LOOK)
        waits = ask_store(self._read_waits)
        if not before or not waits:
            return f"one of {name_ranks(self.others)}"
        # A rank that is behind this one may wait for another that is further behind.
        lowest_stage = min(self.stage, *(stage for stage, _ in waits.values()))
        last = [rank for rank in self.others if waits[rank][0] == lowest_stage]
        stopped = [rank for rank in last if waits[rank] == before[rank]]
        if stopped:
            return name_ranks(stopped)
        return name_ranks(last) if lowest_stage < self.stage else f"one of {name_ranks(self.others)}"

    def _read_waits(self) -> dict[int, list[int]]:
        """Read in which constructors other ranks wait, and how often they have looked from there."""
        return {rank: json.loads(read_first(self.board, "waits", [rank]) or "[0, 0]") for rank in self.others}

    def _describe_failure(self, error: BaseException) -> str:
        """Say that this rank has failed."""
        return f"{describe_failure(self.rank, self.place, error)}\nTo fix: {RESTART}."

    def _find_reason(self) -> str:
        """Read why no mesh will be made: the note of a rank, or that some process has ended."""
        if note := self._read_note():
            return note
        self._read_some_entries()
        reason = self._name_ended_ranks()
        return self._leave_note(reason) if reason else ""

    def _read_some_entries(self) -> None:
        """Read what a few of the others have brought, of which this rank does not know it."""
        unknown = [rank for rank in self.others if rank not in self.entries]
        for rank in random.sample(unknown, min(MAX_RANKS_PER_POLL, len(unknown))):
            # To read a key that is not there by compare_set would make it.
            if self.have_come([rank]):
                self._read([rank])

    def _list_ended_ranks(self) -> list[int]:
        """List the ranks whose processes have ended, as far as this one can tell."""
        return [rank for rank, entry in sorted(self.entries.items()) if has_ended(Process(*entry.process))]

    def _name_ended_ranks(self) -> str:
        """Say which ranks' processes have ended, as far as this one can tell; "" if none has."""
        ended = self._list_ended_ranks()
        return f"{self.place}: {describe_ended_ranks(ended)}\nTo fix: {RESTART}." if ended else ""

    def _read_note(self) -> str:
        return self._reason_in(self.board.compare_set("note", "", ""))

    def _leave_note(self, reason: str) -> str:
        """Leave a note, and return the reason in the first one that is there."""

        def leave() -> str:
            # The second time only where a rank has its first mesh already.
            for before in ("", MADE):
                note = self.board.compare_set("note", before, json.dumps([reason, not before]))
            return self._reason_in(note)

        return ask_store(leave) or reason

    def _reason_in(self, note: bytes) -> str:
        """Read the reason in a note, and whether to stop torch.distributed; "" if there is none."""
        if note.decode() in ("", MADE):
            return ""
        reason, self._must_stop = json.loads(note)
        return str(reason)


class FirstMeeting(Meeting):
    """The call of init_mesh that starts torch.distributed, which all ranks stop again if one of them cannot start it.

    Otherwise ranks where it runs would wait in the next call for those where it does not run. A rank may have started
    it and gone on when another one fails to. So the first rank that fails decides for all of them, and its note says
    what it has decided.

    Args:
        client: The client of the launcher's store for this start.
        rank: This rank.
        size: How many ranks there are.
        timeout: Seconds that a rank waits for another.
    """

    def __init__(self, client: _compat.StoreClient, rank: int, size: int, timeout: float) -> None:
        store = client.store if size == 1 else _compat.clone_of(client.store)
        super().__init__(store, rank, range(size), "start", timeout)
        # torch keeps the first. The second is made while the store is there, as a client waits for one that is gone.
        self.client = client
        self.next_client = _compat.StoreClient(lambda: _compat.clone_of(store))
        # This process may serve the store by it.
        self._launcher_store = client.store

    def confirm_mesh(self) -> None:
        """Show others that this rank has its mesh, unless one of them has failed.

        All ranks are then past the start of torch.distributed: on every axis, one after another, each has begun to
        connect with all others of its row.

        Raises:
            CollectiveError: if one has failed.
        """
        reason = self._reason_in(self.board.compare_set("note", "", MADE))
        if reason:
            raise CollectiveError(reason)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Tell the others of an error, and stop torch.distributed unless it runs on all ranks."""
        super().__exit__(kind, error, traceback)
        if error is not None and (self._must_stop or self.fails_everywhere):
            _compat.stop_torch()
            # Ranks meet here again, in the store of the next start.
            _compat.keep_server(self._launcher_store)


class _WaitEnder(threading.Thread):
    """Ends the waits inside a constructor, in a context, where another rank has failed or is gone.

    Args:
        meeting: Of the ranks that make something together.
        client: The client of the store that the constructor waits on.
    """

    def __init__(self, meeting: Meeting, client: _compat.StoreClient) -> None:
        super().__init__(name="fshard init_mesh", daemon=True)
        self._meeting = meeting
        self._client = client
        self._over = threading.Event()
        # Why the waits were ended; "" if they were not.
        self.reason = ""

    def __enter__(self) -> None:
        """Begin to look."""
        if self._client.is_connected():
            self.start()

    def __exit__(self, *_: object) -> None:
        """End before what was made is used."""
        self._over.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        """Look at the other ranks until the constructor returns, or one of them has failed."""
        seconds = FIRST_LOOK
        looks = 0
        while not self._over.wait(seconds):
            looks += 1
            self._meeting.show_wait(looks)
            self.reason = self._meeting.find_reason()
            if self.reason:
                self._client.disconnect()
                return
            seconds = NEXT_LOOK
