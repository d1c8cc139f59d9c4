"""Plant 200 faults and count what reports say of them, and replay steps without one: `python -m tests.ext.replay`.

Writes benchmarks/results/replay-faults.json, with the text of each report, and prints the table.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.ext.replay.answers import run_cases
from tests.ext.replay.cases import QUESTIONS, TOOLS, Answer, Case, list_cases
from tests.ext.replay.clean import replay_clean
from tests.ext.replay.models import MODELS
from tests.ext.replay.reuse import reusing_traces

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks/results/replay-faults.json"
COLUMNS = ("fault", "tool", *QUESTIONS)


def main() -> None:
    args = parse_args()
    cases = [case for case in list_cases() if not args.steps or case.step in args.steps]
    with reusing_traces():
        answers, alarms = measure(cases, args.clean)
    print(write_table(answers))
    if args.write:
        results = circumstances() | {
            "faults": [describe(answer) for answer in answers],
            "clean": {"replays": args.clean * len(MODELS), "alarms": alarms},
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def measure(cases: Sequence[Case], clean: int) -> tuple[list[Answer], dict[str, list[str]]]:
    """Run the cases, and so many clean replays of each model; print what is not right."""
    answers: list[Answer] = []
    for group in run_cases(cases):
        answers += group
        wrong = [answer for answer in group if not all(answer.right.values())]
        step, world, *_ = group[0].case
        print(f"{step}, {world} ranks: {len(group)} faults, {len(wrong)} not right", flush=True)
        for answer in wrong:
            print(show(answer), flush=True)
    alarms: dict[str, list[str]] = {}
    for name in MODELS if clean else ():
        alarms[name] = replay_clean(name, clean)
        print(f"{name}: {clean} clean replays, {len(alarms[name])} alarms", *alarms[name][:2], sep="\n", flush=True)
    return answers, alarms


def circumstances() -> dict[str, Any]:
    """Versions, date and hardware, as benchmarks write them."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import report

    return report.circumstances("replay-faults")


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
    parser.add_argument("--clean", type=int, default=125, help="clean replays of each model")
    parser.add_argument("--write", action="store_true", help="write the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
