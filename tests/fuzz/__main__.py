"""Run many programs: `python -m tests.fuzz --seeds 0:5000 --resume`, or one: `--seeds 17`, or print it: `--show 17`."""

import argparse
import json
import sys
from pathlib import Path

from fshard.testing import Workers
from tests.fuzz.plan import draw
from tests.fuzz.render import render
from tests.fuzz.run import report, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:5000", help="a seed, or the first and the one after the last")
    parser.add_argument("--resume", action="store_true", help="go on where the last run with --resume ended")
    parser.add_argument("--runs", default="runs/fuzz", help="folder of the log and of programs that failed")
    parser.add_argument("--show", type=int, help="print the program of a seed")
    options = parser.parse_args()
    if options.show is not None:
        print(render(draw(options.show)))
        return 0
    first, _, last = options.seeds.partition(":")
    folder = Path(options.runs)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.jsonl"
    if not options.resume:
        log.write_text("")
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    # A program that ended the process has begun and has no result.
    done = dict(lines)
    with Workers(2, warnings_as_errors=False) as pool, log.open("a", buffering=1) as file:
        for seed in range(int(first), int(last or int(first) + 1)):
            if seed in done:
                continue
            file.write(json.dumps([seed, "ended the process, or was stopped"]) + "\n")
            source = render(draw(seed))
            result = run(source, f"program {seed}", pool)
            done[seed] = result.failed
            file.write(json.dumps([seed, result.failed]) + "\n")
            if result.failed:
                (folder / f"program_{seed}.py").write_text(source)
                print(report(seed, source, result), flush=True)
    print(f"{len(done)} programs, {sum(map(bool, done.values()))} failures")
    return 1 if any(done.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
