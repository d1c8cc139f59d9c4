"""Run many programs: `python -m tests.fuzz --seeds 0:5000 --resume`, or one: `--seeds 17`, or print it: `--show 17`."""

import argparse
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from fshard.testing import Workers
from tests.fuzz.plan import draw
from tests.fuzz.render import render
from tests.fuzz.run import Process, Result, report, run, shrink


def serve() -> None:
    """Run the programs that come as lines, and answer each by a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what programs print must not stand among the answers
    pool: list[Workers] = []

    def workers() -> Workers:
        if not pool:
            pool.append(Workers(2, warnings_as_errors=False))
        return pool[0]

    for line in sys.stdin:
        answers.write(json.dumps(run(*json.loads(line), workers)) + "\n")
        answers.flush()
    for each in pool:
        each.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:5000", help="a seed, or the first and the one after the last")
    parser.add_argument("--resume", action="store_true", help="go on where the last run with --resume ended")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--runs", default="runs/fuzz", help="folder of the log and of programs that failed")
    parser.add_argument("--show", type=int, help="print the program of a seed")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return 0
    if options.show is not None:
        print(render(draw(options.show)))
        return 0
    first, _, last = options.seeds.partition(":")
    seeds = list(range(int(first), int(last or int(first) + 1)))
    folder = Path(options.runs)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.jsonl"
    if not options.resume:
        log.write_text("")
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done = {line["seed"]: line for line in lines}
    waiting = iter([seed for seed in seeds if seed not in done])
    lock = threading.Lock()

    def work() -> None:
        process = Process(messages=folder / "messages.txt")
        while True:
            with lock:
                seed = next(waiting, None)
            if seed is None:
                return process.close()
            plan, started = draw(seed), time.monotonic()
            result: Result = process.run(render(plan), f"program {seed}")
            line = {"seed": seed, "seconds": round(time.monotonic() - started, 1), **result._asdict()}
            line["features"] = sorted(plan.features())
            if result.failed:
                least, found = shrink(plan, result, process.run, seconds=120)
                (folder / f"program_{seed}.py").write_text(render(least))
            with lock, log.open("a") as file:
                done[seed] = line
                file.write(json.dumps(line) + "\n")
                if result.failed:
                    print(report(least, found), flush=True)
                elif len(done) % 100 == 0:
                    print(f"{len(done)} programs, {summary(done.values())}", flush=True)

    threads = [threading.Thread(target=work) for _ in range(options.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{len(done)} programs, {summary(done.values())}")
    return 1 if any(line["failed"] for line in done.values()) else 0


def summary(lines) -> str:
    counts = Counter()
    for line in lines:
        counts["runs"] += line["runs"]
        counts["refused runs"] += len(line["refused"])
        counts["failures"] += bool(line["failed"])
    return ", ".join(f"{counts[name]} {name}" for name in ("runs", "refused runs", "failures"))


if __name__ == "__main__":
    sys.exit(main())
