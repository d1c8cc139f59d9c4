"""Check architectures of transformers, drawn by a seed: python -m tests.ext.architectures --seed 0 --count 48."""

import argparse
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

from tests.ext.architectures.configs import architectures
from tests.ext.architectures.runner import CONTEXT, PRELOAD, examine

RESULTS = Path(__file__).with_name("results.json")


def main() -> None:
    from tests.ext.architectures.checks import CHECKS
    from tests.ext.architectures.report import as_json, table

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=48, help="architectures that a small model can be made of")
    parser.add_argument("--only", nargs="*", help="names of architectures, instead of those drawn")
    parser.add_argument("--checks", nargs="*", default=list(CHECKS), choices=list(CHECKS))
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for one check")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None, help=f"where results go, such as {RESULTS.name}")
    parser.add_argument(
        "--table", type=Path, default=None, help="where the table goes, such as examples/ARCHITECTURES.md"
    )
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()

    CONTEXT.set_forkserver_preload(list(PRELOAD))
    drawn = architectures(options.seed)
    if options.only:
        drawn = [architecture for architecture in drawn if architecture.name in options.only]
        options.count = len(drawn)
    rows: list[dict[str, Any]] = []
    unfit: list[dict[str, Any]] = []
    waiting = iter(drawn)
    with ThreadPoolExecutor(options.jobs) as pool:
        while len(rows) < options.count:
            # One batch at a time, so that the draw does not depend on which ends first.
            batch = [a for a, _ in zip(waiting, range(options.count - len(rows)))]
            if not batch:
                break
            for row in pool.map(lambda a: examine(a, options.checks, options.timeout, options.verbose), batch):
                (unfit if "unfit" in row else rows).append(row)
                marks = " ".join(f"{name}={found['status']}" for name, found in row["checks"].items())
                print(f"{row['name']} ({row['task']}): {row.get('unfit') or marks}", flush=True)
                for name, found in row["checks"].items():
                    if found["status"] in ("fail", "refused"):
                        print(f"    {name}: {found['text'][: 1000 if options.only else 300]}", flush=True)
    import torch
    import transformers

    results = {
        "date": date.today().isoformat(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "seed": options.seed,
        "architectures": rows,
        "unfit": unfit,
    }
    for name in options.checks:
        counted = Counter(row["checks"][name]["status"] for row in rows)
        print(f"{name}: {dict(sorted(counted.items()))}")
    print(f"{len(rows)} architectures; {len(unfit)} others have no small model here")
    if options.json:
        options.json.write_text(as_json(results))
    if options.table:
        options.table.write_text(table(results))


if __name__ == "__main__":
    main()
