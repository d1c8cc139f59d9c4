"""Kill ranks at random moments of a launch, and count what is lost.

    python benchmarks/kills.py --kills 100 --ranks 2 4 --write
    python benchmarks/kills.py --kills 20 --ranks 4 --forms eager --hosts 2 --seed 10 --write
    python benchmarks/kills.py --kills 20 --ranks 4 2 --forms eager --resize --seed 20 --write

Half of the kills hit a rank while it trains: in a step, in `save`, or in what is written and copied behind it. The
other half hit one while it recovers: while it imports, meets the others, builds its program, restores, or takes its
first step. A kill is of one rank, of half of them, or of all. Each state that a rank has, restored or computed, is
compared bit for bit with that of a run without kills. `--write` adds each row to
`benchmarks/results/recovery-kills.json` as soon as it is complete, in the place of one of its name and seed, so that
many kills can be made in parts.

`--hosts` spreads the ranks over network namespaces with a memory each, and half of the kills take a whole host with its
memory. `--resize` launches the job anew after each kill, with the next of the numbers of ranks, and sums in a tree.
Each launch imports torch anew, so that a kill takes ten seconds and more. All runs together make so many --kills, and
keep their files in --directory.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import kills_worker
import report
import torch.distributed as dist
from launch import Event, Launch, environment, follow

from fshard.testing import spmd

# Of hosts that are network namespaces, as benchmarks/hosts.py makes them, and of the launchers' rendezvous there.
ADDRESS, PORT = "10.77.0.{}", 29411
# As docs/how_to/when_a_rank_fails.md says. Launchers count restarts apart. Where they share torchrun's store, ranks may
# read what an earlier start has left there, and each start fails by the error of the one before.
VARIABLES = ("GLOO_SOCKET_IFNAME=eth0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
# The moments of kills: after an event, before what usually follows it. Halves are of recovery and of training.
RECOVERY = ("imports", "mesh begins", "build begins", "restore begins", "restored")
TRAINING = ("step begins", "step", "saved")
# What is written in the background is written while the next step runs.
AS_LONG_AS = {"saved": "step begins"}
# A window that was not seen yet.
SECONDS = 0.1
# Ranks that say nothing for so long are stuck.
PATIENCE = 120.0
# A life has at most so many steps before it is killed.
MOST_STEPS = 4


class Setting(NamedTuple):
    """What is launched."""

    launcher: str  # a module that is run as torchrun is
    ranks: int  # the number of ranks
    form: str  # whether the step is eager or jitted
    # Whether the manager has generations in memory; without, each step is saved to the folder.
    uses_memory: bool = True
    every: int = 25  # steps from one checkpoint on disk to the next, with generations in memory
    # The network namespaces that the ranks are spread over, each with a launcher and a memory of its own.
    hosts: tuple[str, ...] = ()
    has_tree_sums: bool = False  # whether sums are in a tree, whose bits are those of any number of ranks
    # The name that several launches have together; the launcher gives each one of its own if this is empty.
    job: str = ""


class Kill(NamedTuple):
    """The moment of a kill: a part of the time from an event of a life to what follows."""

    event: str
    count: int  # which of those of one name
    part: float  # a part of the time, from 0 to 1
    ranks: tuple[int, ...] = ()  # those that are killed, the first of which has the event
    # The hosts that are lost, in the place of ranks: all ranks that run there, and their memory.
    hosts: tuple[str, ...] = ()


def draw_kill(draw: random.Random, setting: Setting) -> Kill:
    """Draw a moment, and one rank, or half of them, or all; or one rank or one host."""
    event = draw.choice(draw.choice((RECOVERY, TRAINING)))
    count = draw.randint(1, MOST_STEPS) if event in TRAINING else 1
    kind, ranks = draw.random(), setting.ranks
    if setting.hosts and kind < 0.5:
        return Kill(event, count, draw.random(), hosts=(draw.choice(setting.hosts),))
    victims = range(ranks)
    if kind < 0.7 or setting.hosts:
        victims = [draw.randrange(ranks)]
    elif kind < 0.85:
        half = max(ranks // 2, 1)
        first = draw.choice((0, ranks - half))
        victims = range(first, first + half)
    return Kill(event, count, draw.random(), tuple(victims))


def draw_kills(draw: random.Random, setting: Setting, count: int) -> list[Kill]:
    """Draw some kills; a host is not lost before there are copies of it, since the one that had them was lost."""
    kills = []
    without_copies: tuple[str, ...] = ()
    for _ in range(count):
        kill = draw_kill(draw, setting)
        if kill.count > 1:
            # A step has been saved since, and copied while the next one ran.
            without_copies = ()
        if kill.hosts:
            # Only the host that was lost itself may be lost again.
            without_copies = without_copies or kill.hosts
            kill = kill._replace(hosts=without_copies)
        kills.append(kill)
    return kills


class Ledger:
    """What the ranks of a launch did: their steps, their bits, and what each kill cost.

    Attributes:
        digests: Of each rank and step.
        whole: The digest of all parameters at the end, of each rank.
        kills: Those that hit a rank, each with its time.
        repeated: For each restart, how many steps that all ranks had completed it repeats.
        seconds: For each kill after which a step was completed, from the one to the other.
        problems: Differences from the expected digests, and restarts that disagree.
        completed: The last step that all ranks have completed.
    """

    def __init__(self, ranks: int, expected: Mapping[tuple[int, int], str], completed: int = 0) -> None:
        """Begin with the steps of earlier launches; without expected digests an undisturbed run is recorded."""
        self.ranks = ranks
        self.expected = expected
        self.completed = completed
        self.digests: dict[tuple[int, int], str] = {}
        self.whole: dict[int, str] = {}
        self.kills: list[tuple[float, Kill]] = []
        self.repeated: dict[int, int] = {}
        self.seconds: dict[int, float] = {}
        self.problems: list[str] = []
        self.windows: dict[str, float] = {}
        self.lives: dict[int, int] = {}
        self.counts: Counter[tuple[int, str]] = Counter()
        self._restored: dict[int, int] = {}
        self._last: dict[int, Event] = {}
        self._saved: defaultdict[tuple[int, int], set[int]] = defaultdict(set)

    @property
    def life(self) -> int:
        """The number of kills before now."""
        return len(self.kills)

    def add(self, event: Event) -> None:
        """Take an event into account."""
        life = self.lives.setdefault(event.pid, self.life)
        self.counts[event.pid, event.name] += 1
        before = self._last.get(event.pid)
        if before is not None:
            self.windows[before.name] = event.time - before.time
        self._last[event.pid] = event
        if "digest" in event.values:
            self._compare(event)
        if event.name == "restored":
            self._restart(life, event)
        elif event.name == "saved":
            self._complete(life, event)
        elif event.name == "end":
            self.whole[event.rank] = event.values["whole"]

    def _compare(self, event: Event) -> None:
        place = event.rank, event.values["step"]
        expected = self.expected.get(place)
        if expected not in (None, event.values["digest"]):
            self.problems.append(f"{event.name} of step {place[1]} on rank {place[0]} has other bits, life {self.life}")
        self.digests[place] = event.values["digest"]

    def _restart(self, life: int, event: Event) -> None:
        step = event.values["step"]
        if self._restored.setdefault(life, step) != step:
            self.problems.append(f"ranks restore steps {self._restored[life]} and {step}, life {life}")
        self.repeated[life] = max(self.repeated.get(life, 0), self.completed - step)

    def _complete(self, life: int, event: Event) -> None:
        step = event.values["step"]
        ranks = self._saved[life, step]
        ranks.add(event.rank)
        if len(ranks) == self.ranks:
            self.completed = max(self.completed, step)
            if life and life not in self.seconds:
                self.seconds[life] = event.time - self.kills[life - 1][0]


class Killer:
    """Kills ranks of a launch, one moment after another."""

    def __init__(self, launch: Launch, ledger: Ledger, kills: Sequence[Kill]) -> None:
        """Begin with the first kill."""
        self._launch = launch
        self._memory = launch.folder / "memory"
        self._ledger = ledger
        self._kills = list(reversed(kills))
        self.due: float | None = None

    def look(self, event: Event) -> None:
        """Set the time of the next kill, if this is the event that it follows."""
        if not self._kills or self.due is not None:
            return
        kill, ledger = self._kills[-1], self._ledger
        is_victim = event.rank in kill.ranks[:1] or self._launch.hosts.get(event.rank) in kill.hosts[:1]
        is_now = is_victim and ledger.lives[event.pid] == ledger.life
        if is_now and event.name == kill.event and ledger.counts[event.pid, event.name] == kill.count:
            window = AS_LONG_AS.get(kill.event, kill.event)
            self.due = event.time + kill.part * ledger.windows.get(window, SECONDS)

    def strike(self) -> None:
        """Kill ranks now."""
        self.due = None
        kill = self._kills.pop()
        there = [rank for rank, host in self._launch.hosts.items() if host in kill.hosts]
        if self._launch.kill([*kill.ranks, *there]):
            self._ledger.kills.append((time.monotonic(), kill))
        for host in kill.hosts:
            shutil.rmtree(self._memory / host, ignore_errors=True)


def options_of(setting: Setting) -> list[str]:
    """What the program computes."""
    options = ["--form", setting.form]
    if setting.has_tree_sums:
        options += ["--reduction-order", "tree"]
    return options


def commands(setting: Setting, folder: Path, steps: int, restarts: int) -> list[list[str]]:
    """The command lines of a launch, one for each host, whose checkpoints are in the folder."""
    program = [kills_worker.__file__, str(folder / "events"), str(folder / "checkpoints")]
    program += ["--steps", str(steps), *options_of(setting)]
    if setting.uses_memory:
        program += ["--memory", str(folder / "memory/{host}"), "--every", str(setting.every)]
    launcher = [sys.executable, "-m", setting.launcher, "--monitor-interval", "0.02"]
    launcher += ["--max-restarts", str(restarts), "--nproc-per-node", str(setting.ranks // max(len(setting.hosts), 1))]
    if not setting.hosts:
        return [[*launcher, "--standalone", *program]]
    lines = []
    for number, host in enumerate(setting.hosts):
        on_host = ["ip", "netns", "exec", host, "env", f"{kills_worker.HOST}={host}", *VARIABLES]
        rendezvous = ["--nnodes", str(len(setting.hosts)), "--rdzv-backend", "c10d", "--rdzv-id", folder.name]
        rendezvous += ["--rdzv-endpoint", f"{ADDRESS.format(1)}:{PORT}", "--local-addr", ADDRESS.format(number + 1)]
        rendezvous += ["--rdzv-conf", f"is_host={number == 0}"]
        lines.append([*on_host, *launcher, *rendezvous, *program])
    return lines


class Recorder:
    """Takes the events of simulated ranks."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()

    def write(self, name: str, **values: Any) -> None:
        rank = dist.get_rank()
        with self._lock:
            self._ledger.add(Event(rank, rank, name, time.monotonic(), values))


def simulate(setting: Setting, steps: int, folder: Path) -> Ledger:
    """Record what simulated ranks do without kills, whose bits are those of processes."""
    ledger = Ledger(setting.ranks, {})
    options = ["--steps", str(steps), "--every", "1000", *options_of(setting)]
    args = kills_worker.parse_args(["", str(folder / "undisturbed"), *options])
    spmd(lambda: kills_worker.train(args, Recorder(ledger)), setting.ranks, timeout=2 * PATIENCE)
    return ledger


def run(setting: Setting, folder: Path, steps: int, kills: Sequence[Kill], undisturbed: Ledger) -> Ledger:
    """Launch the program and kill its ranks; it must end by itself, leave nothing in memory, and have the same bits."""
    ledger = Ledger(setting.ranks, undisturbed.digests)
    run_to_the_end(setting, folder / "killed", steps, kills, ledger)
    if ledger.whole != undisturbed.whole:
        ledger.problems.append("the parameters at the end have other bits")
    return ledger


def run_to_the_end(setting: Setting, folder: Path, steps: int, kills: Sequence[Kill], ledger: Ledger) -> None:
    """Run the program in a launch that restarts it after each kill, and see that it ends well."""
    # On several hosts a kill may end ranks of the others twice: by its failure, and in the meeting of the next start.
    errors = launch_once(setting, folder, steps, kills, ledger, restarts=len(kills) * (1 + bool(setting.hosts)))
    if errors:
        ledger.problems.append(f"the launcher ended with an error\n{errors}")
    if len(ledger.whole) != setting.ranks:
        ledger.problems.append(f"ranks {sorted(ledger.whole)} of {setting.ranks} came to the end")
    left = [str(path) for path in (folder / "memory").rglob("*") if path.is_file()]
    if left:
        ledger.problems.append(f"files stay in memory: {', '.join(left)}")


def launch_once(
    setting: Setting, folder: Path, steps: int, kills: Sequence[Kill], ledger: Ledger, restarts: int
) -> str:
    """Launch the program, kill its ranks, and return what launchers that ended with an error have printed last."""
    variables = environment() | ({"FSHARD_JOB_ID": setting.job} if setting.job else {})
    with Launch(commands(setting, folder, steps, restarts), folder, variables) as launch:
        killer = Killer(launch, ledger, kills)
        for event in follow(launch, PATIENCE, lambda: killer.due):
            if event is None:
                killer.strike()
            else:
                ledger.add(event)
                killer.look(event)
        return launch.output() if any(launch.codes()) else ""


def prove_resized(settings: Sequence[Setting], folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill a launch, and launch the same job anew with another number of ranks, again and again.

    Args:
        settings: What is launched by turns, with sums in a tree.
        folder: For all files.
        kills: How many.
        seed: Decides when, and of which ranks.

    Returns:
        As `prove`.
    """
    draw = random.Random(seed)
    steps = steps_of(kills)
    undisturbed = {setting.ranks: simulate(setting, steps, folder / str(setting.ranks)) for setting in settings}
    total = Ledger(0, {})
    for number in range(kills + 1):
        setting = settings[number % len(settings)]
        ledger = Ledger(setting.ranks, undisturbed[setting.ranks].digests, total.completed)
        if number < kills:
            launch_once(setting, folder / "killed", steps, [draw_kill(draw, setting)], ledger, restarts=0)
        else:
            run_to_the_end(setting, folder / "killed", steps, (), ledger)
        total.completed = ledger.completed
        total.kills += ledger.kills
        total.problems += ledger.problems
        if ledger.repeated:
            total.repeated[number] = max(ledger.repeated.values())
    if len({*ledger.whole.values()}.union(*(other.whole.values() for other in undisturbed.values()))) != 1:
        total.problems.append("the parameters at the end have other bits")
    return summarize(settings[0], total)


def steps_of(kills: int) -> int:
    """How many steps a run takes in which so many kills have room."""
    return MOST_STEPS * kills + 5


def prove(setting: Setting, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Compare a run that is killed many times with one that is not.

    Args:
        setting: What is launched.
        folder: For all files.
        kills: How many.
        seed: Decides when, and of which ranks.

    Returns:
        The numbers of kills, of steps that were repeated and of states that were lost or torn, and times.
    """
    steps = steps_of(kills)
    drawn = draw_kills(random.Random(seed), setting, kills)
    ledger = run(setting, folder, steps, drawn, simulate(setting, steps, folder))
    return summarize(setting, ledger)


def summarize(setting: Setting, ledger: Ledger) -> dict[str, Any]:
    """What is written of a launch."""
    moments = Counter(kill.event for _, kill in ledger.kills)
    victims = Counter("a host" if kill.hosts else str(len(kill.ranks)) for _, kill in ledger.kills)
    repeated = [ledger.repeated[life] for life in ledger.repeated if life]
    seconds = list(ledger.seconds.values())
    return {
        "setting": setting._asdict(),
        "kills": len(ledger.kills),
        "moments": dict(moments),
        "ranks_killed": dict(sorted(victims.items())),
        "restarts": len(repeated),
        "repeated_steps": {str(number): count for number, count in sorted(Counter(repeated).items())},
        "lost": sum(number > 1 for number in repeated),
        "torn": sum("other bits" in problem for problem in ledger.problems),
        "problems": ledger.problems,
        "seconds": {"median": statistics.median(seconds), "maximum": max(seconds)} if seconds else None,
    }


def main() -> int:
    args = parse_args()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.directory) as folder, network(args.hosts) as hosts:
        for name, prove in runs(args, hosts):
            rows[name] = prove(Path(folder) / name)
            for problem in rows[name]["problems"]:
                print(f"{name}: {problem}", file=sys.stderr)
            if args.write:
                add_row(args.results, name, rows[name])
    show(rows)
    return any(row["problems"] or row["lost"] for row in rows.values())


def add_row(path: Path, name: str, row: dict[str, Any]) -> None:
    """Add a row to a file of results, whose circumstances become those of this row."""
    results = report.circumstances("kills")
    results["runs"] = json.loads(path.read_text())["runs"] if path.exists() else {}
    results["runs"][name] = row
    report.write_json(path, results)


@contextmanager
def network(count: int) -> Iterator[tuple[str, ...]]:
    """Make namespaces for some hosts; none for one."""
    if count == 1:
        yield ()
        return
    import hosts

    with hosts.hosts(count, rate=1.0) as names:
        yield tuple(names)


def runs(args: argparse.Namespace, hosts: tuple[str, ...]) -> Iterator[tuple[str, Callable[[Path], dict[str, Any]]]]:
    """The name of each row, and what makes it in a folder."""
    setting = Setting(args.launcher, args.ranks[0], "eager", not args.disk, hosts=hosts)
    if args.resize:
        for form in args.forms:
            each = setting._replace(form=form, has_tree_sums=True, job="resized")
            settings = [each._replace(ranks=ranks) for ranks in args.ranks]
            name = f"{' and '.join(map(str, args.ranks))} ranks by turns, {form}, seed {args.seed}"
            yield name, partial(prove_resized, settings, kills=args.kills // len(args.forms), seed=args.seed)
        return
    pairs = list(product(args.ranks, args.forms))
    for number, (ranks, form) in enumerate(pairs):
        share = args.kills // len(pairs) + (number < args.kills % len(pairs))
        each = setting._replace(ranks=ranks, form=form)
        seed = args.seed + number
        name = f"{ranks} ranks, {form}" + f", {len(hosts)} hosts" * bool(hosts) + f", seed {seed}"
        yield name, partial(prove, each, kills=share, seed=seed)


def show(rows: dict[str, Any]) -> None:
    columns = ("kills", "restarts", "lost", "torn")
    report.print_table("Kills", columns, {name: [f"{row[key]}" for key in columns] for name, row in rows.items()})


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--forms", nargs="+", choices=("eager", "jitted"), default=["eager", "jitted"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--launcher", default="fshard.run", help="a module, such as torch.distributed.run")
    parser.add_argument("--hosts", type=int, default=1, help="network namespaces, which need root and iproute2")
    parser.add_argument("--resize", action="store_true", help="launch anew after each kill, with other --ranks")
    parser.add_argument("--disk", action="store_true", help="save each step to --directory, without generations")
    parser.add_argument("--directory", default="/dev/shm")
    parser.add_argument("--write", action="store_true", help="add the rows to the file of results")
    parser.add_argument("--results", type=Path, default=report.RESULTS / "recovery-kills.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
