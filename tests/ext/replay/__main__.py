"""Plant 200 faults and count what reports say of them, and replay steps without one: `python -m tests.ext.replay`.

With --write each group of faults, as it ends, goes into benchmarks/results/replay-faults.json with the text of its
reports, so that a run that is cut off keeps what it has. Prints the table.
"""

import argparse
import faulthandler
import fcntl
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.ext.replay.answers import SECONDS, group_cases, run_group
from tests.ext.replay.cases import QUESTIONS, TOOLS, Answer, Case, list_cases
from tests.ext.replay.clean import replay_clean
from tests.ext.replay.models import MODELS
from tests.ext.replay.reuse import reusing_traces

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks/results/replay-faults.json"
LOCK = Path(tempfile.gettempdir()) / "fshard-replay-faults.lock"
# The commit at the start, of which the code is that runs.
COMMIT = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
COLUMNS = ("fault", "tool", *QUESTIONS)


def main() -> None:
    args = parse_args()
    table = list_cases()
    cases = [
        case
        for case in table
        if (not args.steps or case.step in args.steps)
        and (not args.tools or TOOLS[case.kind] in args.tools)
        and (not args.worlds or case.world in args.worlds)
    ]
    keep = write if args.write else print_alone
    answers: list[Answer] = []
    with reusing_traces():
        for group in () if args.no_faults else group_cases(cases):
            answers += answer_group(group, args.seconds, keep)
        for name in MODELS if args.clean else ():
            count_clean(name, args.clean, keep)
    print(write_table(answers))


def answer_group(group: Sequence[Case], seconds: float, keep: Callable[..., None]) -> list[Answer]:
    """Run a group, keep what it says, and print what is not right; a group that ends without an answer is kept so."""
    step, world, _, kind, _ = group[0]
    name = f"{step}, {world} ranks, {TOOLS[kind]}"
    start = time.perf_counter()
    # Where ranks stand when a group takes too long.
    faulthandler.dump_traceback_later(max(seconds - 5, 1))
    try:
        answers, error = run_group(group, seconds), ""
    except Exception as raised:
        answers, error = [], f"{type(raised).__name__}: {raised}"
    finally:
        faulthandler.cancel_dump_traceback_later()
    took = round(time.perf_counter() - start, 1)
    wrong = [answer for answer in answers if not all(answer.right.values())]
    print(f"{name}: {len(answers)} of {len(group)} faults, {len(wrong)} not right, {took} s", error, flush=True)
    for answer in wrong:
        print(show(answer), flush=True)
    keep(
        "groups",
        name,
        {
            "cases": len(group),
            "seconds": took,
            "error": error,
            "faults": [describe(answer) for answer in answers],
        },
    )
    return answers


def count_clean(name: str, count: int, keep: Callable[..., None]) -> None:
    """Replay steps of a model that have no fault, and keep the alarms."""
    alarms = replay_clean(name, count)
    print(f"{name}: {count} clean replays, {len(alarms)} alarms", *alarms[:2], sep="\n", flush=True)
    keep("clean", name, {"replays": count, "alarms": alarms})


def print_alone(part: str, name: str, result: dict[str, Any]) -> None:
    """Keep nothing: the result is printed already."""


def write(part: str, name: str, result: dict[str, Any]) -> None:
    """Put the result of a group or of a model into the file, in place of that of an earlier run."""
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"groups": {}, "clean": {}}
        results |= circumstances()
        results[part][name] = circumstances() | result
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def circumstances() -> dict[str, Any]:
    """Versions, date, commit and hardware, as benchmarks write them."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import report

    return report.circumstances("replay-faults") | {"commit": COMMIT}


def show(answer: Answer) -> str:
    wrong = [question for question, is_right in answer.right.items() if not is_right]
    return f"--- {tuple(answer.case)}: wrong {', '.join(wrong)}\n{answer.truth}\n{answer.report}"


def describe(answer: Answer) -> dict[str, Any]:
    return {
        **answer.case._asdict(),
        "truth": answer.truth._asdict(),
        "right": answer.right,
        "report": answer.report,
    }


def count_right(answers: Sequence[Answer]) -> dict[str, tuple[int, int]]:
    """Count for each question how many reports are right, of how many that were asked."""
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for answer in answers:
        for question, is_right in answer.right.items():
            asked[question] += 1
            right[question] += is_right
    return {question: (right[question], asked[question]) for question in QUESTIONS}


def write_table(answers: Sequence[Answer]) -> str:
    """Write the table, a row for each kind of fault and one for all."""
    rows = [COLUMNS]
    for kind, tool in (*TOOLS.items(), ("all", "")):
        chosen = [answer for answer in answers if kind in (answer.case.kind, "all")]
        cells = [f"{right}/{asked}" for right, asked in count_right(chosen).values()]
        rows.append((kind, tool, *cells))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", nargs="*", help="only these kinds of step")
    parser.add_argument("--tools", nargs="*", help="only the faults for these tools")
    parser.add_argument("--worlds", nargs="*", type=int, help="only these numbers of ranks")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the longest that a group may take")
    parser.add_argument("--no-faults", action="store_true", help="only clean replays")
    parser.add_argument("--clean", type=int, default=125, help="clean replays of each model")
    parser.add_argument("--write", action="store_true", help="write each result as it comes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
