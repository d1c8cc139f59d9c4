"""Kill ranks at random moments of a launch, and count what is lost.

    python -m tests.ext.recovery --kills 100 --ranks 2 4 --write
    python -m tests.ext.recovery --kills 20 --ranks 4 --forms eager --hosts 2 --seed 10 --write
    python -m tests.ext.recovery --kills 20 --ranks 4 2 --forms eager --resize --seed 20 --write

Half of the kills hit a rank while it trains: in a step, in `save`, or in what is written and copied behind it. The
other half hit one while it recovers: while it imports, meets the others, builds its program, restores, or takes its
first step. A kill is of one rank, of half of them, or of all. Each state that a rank has, restored or computed, is
compared bit for bit with that of a run without kills. `--write` adds each row to
`benchmarks/results/recovery-kills.json` as soon as it is complete, in the place of one of its name and seed, so that
many kills can be made in parts.

`--hosts` spreads the ranks over network namespaces with a memory each, and half of the kills take a whole host with its
memory. `--resize` launches the job anew after each kill, with the next of the numbers of ranks, and sums in a tree.
Each launch imports torch anew, so that a kill takes ten seconds and more.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from tests.ext.recovery import kills
from tests.ext.recovery.simulated import simulate

sys.path.append(str(kills.ROOT / "benchmarks"))
import report


def main() -> int:
    args = parse_args()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.directory) as folder, network(args.hosts) as hosts:
        for name, prove in runs(args, hosts):
            rows[name] = prove(Path(folder) / name.replace(" ", "-"))
            for problem in rows[name]["problems"]:
                print(f"{name}: {problem}", file=sys.stderr)
            if args.write:
                add_row(args.results, name, rows[name])
    show(rows)
    return any(row["problems"] or row["lost"] for row in rows.values())


def add_row(path: Path, name: str, row: dict[str, Any]) -> None:
    """Add a row to a file of results, whose circumstances become those of this row."""
    results = report.circumstances("tests.ext.recovery")
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
    setting = kills.Setting(args.launcher, args.ranks[0], "eager", not args.disk, hosts=hosts)
    if args.resize:
        for form in args.forms:
            settings = [
                setting._replace(ranks=ranks, form=form, has_tree_sums=True, job="resized") for ranks in args.ranks
            ]
            name = f"{' and '.join(map(str, args.ranks))} ranks by turns, {form}, seed {args.seed}"
            yield name, partial(prove_resized, settings, args.kills // len(args.forms), args.seed)
        return
    pairs = list(product(args.ranks, args.forms))
    for number, (ranks, form) in enumerate(pairs):
        share = args.kills // len(pairs) + (number < args.kills % len(pairs))
        each = setting._replace(ranks=ranks, form=form)
        seed = args.seed + number
        name = f"{ranks} ranks, {form}" + f", {len(hosts)} hosts" * bool(hosts) + f", seed {seed}"
        yield name, partial(kills.prove, each, kills=share, seed=seed)


def prove_resized(settings: Sequence[kills.Setting], count: int, seed: int, folder: Path) -> dict[str, Any]:
    undisturbed = {}
    for setting in settings:
        place = folder / f"undisturbed-{setting.ranks}"
        options = ("--reduction-order", "tree")
        undisturbed[setting.ranks] = simulate(setting.ranks, setting.form, kills.steps_of(count), place, *options)
    return kills.prove_resized(settings, folder / "killed", count, seed, undisturbed)


def show(rows: dict[str, Any]) -> None:
    columns = ("kills", "while training", "none repeated", "one", "more", "torn", "median s", "maximum s")
    table = {}
    for name, row in rows.items():
        training = sum(row["moments"].get(moment, 0) for moment in kills.TRAINING)
        repeated, seconds = row["repeated_steps"], row["seconds"] or {"median": 0.0, "maximum": 0.0}
        cells = [row["kills"], training, repeated.get("0", 0), repeated.get("1", 0), row["lost"], row["torn"]]
        table[name] = [*map(str, cells), f"{seconds['median']:.2f}", f"{seconds['maximum']:.2f}"]
    report.print_table("Kills", columns, table)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of all runs together")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--forms", nargs="+", choices=("eager", "jitted"), default=["eager", "jitted"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--launcher", default="fshard.run", help="a module, such as torch.distributed.run")
    parser.add_argument("--hosts", type=int, default=1, help="network namespaces, which need root and iproute2")
    parser.add_argument("--resize", action="store_true", help="launch anew after each kill, with other --ranks")
    parser.add_argument("--disk", action="store_true", help="save each step to --directory, without generations")
    parser.add_argument("--directory", default="/dev/shm", help="of all files")
    parser.add_argument("--write", action="store_true", help="add the rows to the file of results")
    parser.add_argument("--results", type=Path, default=report.RESULTS / "recovery-kills.json", help="the file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
