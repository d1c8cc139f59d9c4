"""Kill ranks at random moments of a launch, and count what is lost.

    python -m tests.ext.recovery --kills 200 --ranks 2 4 --write

Half of the kills hit a rank while it trains: in a step, in `save`, or in what is written and copied behind it. The
other half hit one while it recovers: while it imports, meets the others, builds its program, restores, or takes its
first step. A kill is of one rank, of half of them, or of all. Each state that a rank has, restored or computed, is
compared bit for bit with that of a run without kills. `--write` writes `benchmarks/results/recovery-kills.json`.
"""

import argparse
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from tests.ext.recovery import kills

sys.path.append(str(kills.ROOT / "benchmarks"))
import report


def main() -> int:
    args = parse_args()
    settings = list(product(args.ranks, args.forms))
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        for number, (ranks, form) in enumerate(settings):
            share = args.kills // len(settings) + (number < args.kills % len(settings))
            setting = kills.Setting(args.launcher, ranks, form, uses_memory=not args.disk)
            name = f"{ranks} ranks, {form}"
            rows[name] = kills.prove(setting, Path(folder) / name.replace(" ", "-"), share, args.seed + number)
            for problem in rows[name]["problems"]:
                print(f"{name}: {problem}", file=sys.stderr)
    show(rows)
    if args.write:
        results = report.circumstances("tests.ext.recovery") | {
            "seed": args.seed,
            "launcher": args.launcher,
            "runs": rows,
        }
        report.write_json(report.RESULTS / "recovery-kills.json", results)
    return any(row["problems"] or row["lost"] for row in rows.values())


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
    parser.add_argument("--disk", action="store_true", help="save each step to --directory, without generations")
    parser.add_argument("--directory", default="/dev/shm", help="of all files")
    parser.add_argument("--write", action="store_true", help="write the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
