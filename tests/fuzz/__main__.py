"""Run many programs: `python -m tests.fuzz --seeds 0:5000 --resume`, or one: `--seeds 17`, or print it: `--show 17`."""

import argparse
import json
import sys
import traceback
from pathlib import Path

from tests.fuzz.sampler import check, draw


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:5000", help="a seed, or the first and the one after the last")
    parser.add_argument("--resume", action="store_true", help="go on where the last run with --resume ended")
    parser.add_argument("--show", type=int, help="print the plan of a seed")
    options = parser.parse_args()
    if options.show is not None:
        print(draw(options.show))
        return 0
    first, _, last = options.seeds.partition(":")
    log = Path("runs/fuzz/log.jsonl")
    log.parent.mkdir(parents=True, exist_ok=True)
    # A program that ended the process has begun and has no result.
    done = dict(map(json.loads, log.read_text().splitlines())) if options.resume and log.exists() else {}
    with log.open("a" if options.resume else "w", buffering=1) as file:
        for seed in range(int(first), int(last or int(first) + 1)):
            if seed in done:
                continue
            file.write(json.dumps([seed, "ended the process, or was stopped"]) + "\n")
            done[seed] = ""
            try:
                check(draw(seed))
            except Exception:
                done[seed] = traceback.format_exc()
                print(draw(seed), done[seed], flush=True)
            file.write(json.dumps([seed, done[seed]]) + "\n")
    print(f"{len(done)} programs, {sum(map(bool, done.values()))} failures")
    return int(any(done.values()))


if __name__ == "__main__":
    sys.exit(main())
