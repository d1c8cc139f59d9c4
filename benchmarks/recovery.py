"""Seconds from the kill of a rank to the next completed step, by parts, and the cost of a generation for each step.

    python benchmarks/recovery.py
    python benchmarks/recovery.py --ranks 2 --repeats 3 --systems fshard-run-jitted fsdp2-dcp
    python benchmarks/recovery.py --systems --cost-steps 10 --results /tmp      # the cost of a generation alone
    python benchmarks/recovery.py --page                    # write the section of the page "When a rank fails"

Each system trains the same GPT. A rank is killed by SIGKILL in the middle of a step, always after as many steps of the
life before, and the launcher starts all ranks again, as often as there are repeats. Those with generations in memory
keep one for each step. The others write to disk each `--every` steps, and compute the steps since then again: a row
has the time to the next completed step, and to the first step that had not been completed before the kill.

Parts are those of the slowest rank, and add up to the time: until the last new process is there, until it has imported
its modules, made its mesh, built its model, and restored its state, and until all ranks have completed their first
step, which is traced or loaded there if the step is jitted.

The cost is that of a step of a larger model with a generation each beside one without, in turns in the same processes,
and the milliseconds of the main thread to save 40 MB of shards.
"""

import argparse
import importlib.util
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import recovery_page
import report
from launch import Event, Launch, environment, follow

WORKER = Path(__file__).with_name("recovery_worker.py")
# A life is killed in this step of it.
KILLED_STEP = 8
# A rank that says nothing for so long is stuck.
PATIENCE = 180.0
# The events that end the parts of a recovery.
PARTS = {
    "processes": "created",
    "imports": "imported",
    "mesh": "mesh",
    "build": "built",
    "restore": "restored",
    "first step": "step",
}


class System(NamedTuple):
    """A row of the table.

    Attributes:
        launcher: The module that starts ranks.
        program: What the worker trains.
        options: Those of the worker.
        uses_memory: Whether it keeps a generation of each step in memory.
        variables: Those of its environment.
    """

    launcher: str
    program: str
    options: tuple[str, ...] = ()
    uses_memory: bool = False
    variables: tuple[tuple[str, str], ...] = ()


RUN, TORCHRUN = "fshard.run", "torch.distributed.run"
JITTED, CACHED = ("--form", "jitted"), ("--form", "jitted", "--cache")
SYSTEMS = {
    "fshard-run-eager": System(RUN, "fshard", uses_memory=True),
    "fshard-run-jitted": System(RUN, "fshard", CACHED, uses_memory=True),
    "fshard-torchrun-eager": System(TORCHRUN, "fshard", uses_memory=True),
    "fshard-torchrun-jitted": System(TORCHRUN, "fshard", CACHED, uses_memory=True),
    "fshard-disk-jitted": System(TORCHRUN, "fshard", JITTED),
    # torch's ranks of a restart would find gloo's addresses of the life before in torchrun's store, and wait for them.
    "fsdp2-dcp": System(TORCHRUN, "fsdp2", variables=(("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),)),
}
# The checkpoints on disk beside generations in memory are so far apart that none is written meanwhile.
SELDOM = 10**6


def main() -> None:
    args = parse_args()
    if args.page:
        recovery_page.write_section(args.results)
        return
    results = report.circumstances("recovery")
    results |= {"configuration": args.configuration, "every": args.every, "repeats": args.repeats}
    results |= {"killed_step": KILLED_STEP, "ranks": {}}
    for ranks in args.ranks:
        rows = results["ranks"][str(ranks)] = {}
        for name in args.systems:
            rows[name] = summarize(measure(SYSTEMS[name], ranks, args))
            print(f"{ranks} ranks, {name}: {rows[name]['seconds']['median']:.2f} s", flush=True)
    if args.cost_steps:
        results["cost"] = cost_of_saves(args)
    recovery_page.print_tables(results)
    report.write_json(args.results / "recovery.json", results)


class Recovery:
    """The events of one recovery, by ranks."""

    def __init__(self, killed_at: float, victim: int, before: Sequence[Event], completed: int) -> None:
        """Begin with a kill, the events of the ranks before it, and the last step that all of them had completed."""
        self.killed_at = killed_at
        self.victim = victim
        self.completed = completed
        self.before = before
        self.after: list[Event] = []

    def seconds_to(self, name: str, ranks: int, step: int | None = None) -> float | None:
        """Seconds until the last rank had its first event of a name, or completed a step; None before that."""
        times: dict[int, float] = {}
        for event in self.after:
            if event.name == name and (step is None or event.values["step"] >= step):
                times.setdefault(event.rank, event.time - self.killed_at)
        return max(times.values()) if len(times) == ranks else None

    def is_over(self, ranks: int) -> bool:
        """Whether all ranks have completed a step that they had not completed before."""
        return self.seconds_to("step", ranks, self.completed + 1) is not None

    def row(self, ranks: int) -> dict[str, Any]:
        """What is written of it."""
        parts, last = {}, 0.0
        for part, name in PARTS.items():
            now = self.seconds_to(name, ranks)
            assert now is not None
            parts[part] = now - last
            last = now
        restored = min(event.values["step"] for event in self.after if event.name == "restored")
        events = [
            {"rank": event.rank, "name": event.name, "seconds": event.time - self.killed_at}
            for event in (*self.before, *self.after)
        ]
        return {
            "seconds": last,
            "caught_up_seconds": self.seconds_to("step", ranks, self.completed + 1),
            "repeated_steps": self.completed - restored,
            "parts": parts,
            "victim": self.victim,
            "events": events,
        }


class Watch:
    """Kills a rank of each life, and collects the recoveries."""

    def __init__(self, launch: Launch, ranks: int, seed: int) -> None:
        """Begin with the first life."""
        self.launch = launch
        self.ranks = ranks
        self.recoveries: list[Recovery] = []
        self.due: float | None = None
        self._draw = random.Random(seed)
        self._victim = self._draw.randrange(ranks)
        self._begin_life()

    def _begin_life(self) -> None:
        self._events: list[Event] = []
        self._steps = [0] * self.ranks
        self._completed: list[int] = []

    def add(self, event: Event) -> None:
        """Take an event into account."""
        if event.name == "lost":
            # A rank of the life before, which its launcher has not ended yet.
            if self.recoveries:
                self.recoveries[-1].after.append(event)
            return
        self._events.append(event)
        if self.recoveries:
            self.recoveries[-1].after.append(event)
        if event.name == "step":
            self._completed.append(event.values["step"])
        if event.name == "step begins" and event.rank == self._victim:
            self._steps[event.rank] += 1
            if self._steps[event.rank] == KILLED_STEP:
                self.due = event.time + self._length_of_step() / 2

    def _length_of_step(self) -> float:
        """The seconds from the begin to the end of the victim's last step."""
        own = [event for event in self._events if event.rank == self._victim]
        (end,) = [event for event in own if event.name == "step"][-1:]
        begin = [event for event in own if event.name == "step begins"][-2]
        return end.time - begin.time

    def kill(self) -> None:
        """Kill the victim now, and begin the next life."""
        self.due = None
        killed_at = time.monotonic()
        self.launch.kill([self._victim])
        completed = max(step for step in self._completed if self._completed.count(step) == self.ranks)
        before = [event for event in self._events if event.time > killed_at - 1.0]
        self.recoveries.append(Recovery(killed_at, self._victim, before, completed))
        self._victim = self._draw.randrange(self.ranks)
        self._begin_life()


@contextmanager
def launched(system: System, ranks: int, args: argparse.Namespace) -> Iterator[Launch]:
    """Launch a system, whose files are removed at the end: on a disk, and in shared memory."""
    with (
        tempfile.TemporaryDirectory(dir=args.directory) as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        launcher = [sys.executable, "-m", system.launcher, "--standalone", "--nproc-per-node", str(ranks)]
        launcher += ["--max-restarts", str(args.repeats + 1)]
        program = [str(WORKER), system.program, str(Path(folder) / "events"), folder]
        options = ["--configuration", args.configuration, *system.options]
        options += ["--memory", memory, "--every", str(SELDOM)] if system.uses_memory else ["--every", str(args.every)]
        variables = environment() | dict(system.variables)
        with Launch([[*launcher, *program, *options]], Path(folder), variables) as launch:
            yield launch


def measure(system: System, ranks: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Launch a system, and kill one rank after another; return the recoveries."""
    with launched(system, ranks, args) as launch:
        watch = Watch(launch, ranks, seed=ranks)
        for event in follow(launch, PATIENCE, lambda: watch.due):
            if event is None:
                watch.kill()
            else:
                watch.add(event)
            done = [recovery for recovery in watch.recoveries if recovery.is_over(ranks)]
            if len(done) == args.repeats:
                return [recovery.row(ranks) for recovery in done]
        raise SystemExit(f"recovery.py: {system} ended by itself\n{launch.output()}")


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians and maxima over the recoveries, and the events of the one in the middle."""
    middle = sorted(rows, key=lambda row: row["seconds"])[len(rows) // 2]
    found: dict[str, Any] = {"repeated_steps": [row["repeated_steps"] for row in rows]}
    for key in ("seconds", "caught_up_seconds"):
        values = [row[key] for row in rows]
        found[key] = {"median": statistics.median(values), "maximum": max(values), "values": values}
    found["parts"] = {part: statistics.median(row["parts"][part] for row in rows) for part in PARTS}
    return found | {"victim": middle["victim"], "events": middle["events"]}


def cost_of_saves(args: argparse.Namespace) -> dict[str, Any]:
    """The times of steps with a generation and without, of the slowest rank."""
    ranks = 2
    system = System(TORCHRUN, "cost", (*JITTED, "--steps", str(args.cost_steps)), uses_memory=True)
    larger = argparse.Namespace(**vars(args) | {"configuration": args.cost_configuration, "repeats": 0})
    with launched(system, ranks, larger) as launch:
        # The ranks say nothing until all turns are done.
        events = follow(launch, PATIENCE * (1 + args.cost_steps), lambda: None)
        found = [event.values for event in events if event is not None and event.name == "cost"]
        if len(found) != ranks:
            raise SystemExit(f"recovery.py: the cost was not measured\n{launch.output()}")
    medians = {name: [statistics.median(values["seconds"][name]) for values in found] for name in ("saving", "plain")}
    saving, plain = (max(values) for values in medians.values())
    return {
        "configuration": args.cost_configuration,
        "ranks": ranks,
        "saving_seconds": saving,
        "plain_seconds": plain,
        "percent": 100 * (saving / plain - 1),
        "main_thread_ms_of_40_mb": max(statistics.median(values["main_thread_ms"]) for values in found),
        "seconds": [values["seconds"] for values in found],
    }


def available() -> list[str]:
    """The systems whose launcher is there."""
    return [name for name, system in SYSTEMS.items() if importlib.util.find_spec(system.launcher)]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=5, help="kills of each system")
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=available(), help="none for the cost alone")
    parser.add_argument("--configuration", default="d256-L4-B6-T64-V256")
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint on disk to the next")
    parser.add_argument("--cost-configuration", default="d512-L8-B4-T256")
    parser.add_argument("--cost-steps", type=int, default=5, help="turns of six steps; 0 leaves the cost out")
    parser.add_argument("--directory", type=Path, help="of checkpoints; the system's for temporary files by default")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    parser.add_argument("--page", action="store_true", help="write the page from the results, and measure nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
