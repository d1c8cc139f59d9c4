"""What the ranks of a launch do and when, told to the process that launched them, which may kill any of them."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

# A launcher that is asked to end has this long to end its ranks.
GRACE_SECONDS = 30.0
STATUS_LINES = 60


class Event(NamedTuple):
    """Something that a rank did."""

    rank: int
    pid: int  # its process: another one after each restart
    name: str  # what it did
    time: float  # when, in seconds of a clock that all processes of the machine share
    values: Mapping[str, Any]  # what else the rank says of it


class EventWriter:
    """Tells the launching process what this rank does."""

    def __init__(self, path: str) -> None:
        """Open the pipe."""
        self._pipe = os.open(path, os.O_WRONLY)
        self._rank = int(os.environ["RANK"])

    def write(self, name: str, at: float | None = None, **values: Any) -> None:
        """Write an event, in one call of the system, so that events of ranks do not mix."""
        row = [self._rank, os.getpid(), name, time.monotonic() if at is None else at, values]
        os.write(self._pipe, json.dumps(row).encode() + b"\n")


def process_start() -> float:
    """When this process was created or forked, by the clock of events; the kernel counts hundredths of a second."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


class Launch:
    """A launcher and its ranks, whose events are read as they come.

    Leaving the block ends them all.

    Attributes:
        folder: Where the pipe of events is, and what launchers and ranks print.
        pids: The newest process of each rank.
        hosts: Where the ranks run, for those that say so.
    """

    def __init__(self, commands: Sequence[Sequence[str]], folder: Path, environment: Mapping[str, str]) -> None:
        """Start one launcher for each command; ranks write their events to the pipe `events` of the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._pipe = make_pipe(folder)
        self._rest = b""
        # A descriptor of a process stays with it, while a number may soon be that of another process.
        self._descriptors: dict[int, int] = {}
        self.pids: dict[int, int] = {}
        self.hosts: dict[int, str] = {}
        self._launchers = []
        for number, command in enumerate(commands):
            with open(folder / f"output-{number}", "w") as output:
                launcher = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            self._launchers.append(launcher)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for launcher in self._launchers:
            launcher.terminate()
        for launcher in self._launchers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(GRACE_SECONDS)
            launcher.kill()
            launcher.wait()
        for descriptor in self._descriptors.values():
            _send(descriptor, signal.SIGKILL)
            os.close(descriptor)
        os.close(self._pipe)

    def codes(self) -> list[int | None]:
        """The exit codes of the launchers, None for one that runs."""
        return [launcher.poll() for launcher in self._launchers]

    def output(self) -> str:
        """The last lines that the launchers and ranks have printed."""
        texts = []
        for number in range(len(self._launchers)):
            lines = (self.folder / f"output-{number}").read_text(errors="replace").splitlines()
            texts += lines[-STATUS_LINES:]
        return "\n".join(texts)

    def read(self, until: float) -> list[Event]:
        """Wait for events until a time; return those that have come, none at that time or when all launchers ended."""
        while True:
            is_over = None not in self.codes()
            patience = 0.0 if is_over else min(0.1, max(0.0, until - time.monotonic()))
            ready, _, _ = select.select([self._pipe], [], [], patience)
            if ready:
                self._rest += os.read(self._pipe, 2**16)
            *lines, self._rest = self._rest.split(b"\n")
            events = [Event(*json.loads(line)) for line in lines]
            for event in events:
                self._watch(event)
            if events or is_over or time.monotonic() >= until:
                return events

    def kill(self, ranks: Sequence[int]) -> list[int]:
        """Kill ranks by SIGKILL, all at once; return those that ran."""
        killed = []
        for rank in ranks:
            descriptor = self._descriptors.get(rank)
            if descriptor is not None and _send(descriptor, signal.SIGKILL):
                killed.append(rank)
        return killed

    def _watch(self, event: Event) -> None:
        """Keep a descriptor of the newest process of each rank."""
        if self.pids.get(event.rank) == event.pid or event.name == "lost":
            # A rank that has lost another may write this when its successor is there already.
            return
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(event.pid)
            if event.rank in self._descriptors:
                os.close(self._descriptors[event.rank])
            self._descriptors[event.rank] = descriptor
            self.pids[event.rank] = event.pid
            self.hosts[event.rank] = event.values.get("host", "")


def environment() -> dict[str, str]:
    """The environment of launchers, whose ranks find this package."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def make_pipe(folder: Path) -> int:
    """Make the pipe `events` and open it so that it has no end while launchers start ranks again."""
    path = folder / "events"
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)


def _send(descriptor: int, number: int) -> bool:
    """Send a signal to a process that has not ended; say whether it had not."""
    ended, _, _ = select.select([descriptor], [], [], 0)
    if ended:
        return False
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    return True


def follow(launch: Launch, seconds: float, alarm: Callable[[], float | None]) -> Iterator[Event | None]:
    """Read events to the end of a launch; None each time that an alarm is due.

    Args:
        launch: The launch.
        seconds: How long there may be no event.
        alarm: The time of the next alarm, None for none.

    Raises:
        TimeoutError: if no rank says anything for so long.
    """
    deadline = time.monotonic() + seconds
    while True:
        due = alarm()
        events = launch.read(deadline if due is None else min(deadline, due))
        if events:
            deadline = time.monotonic() + seconds
        yield from events
        if due is not None and time.monotonic() >= due:
            yield None
        elif not events:
            if None not in launch.codes():
                return
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no rank did anything for {seconds:g} s\n{launch.output()}")
