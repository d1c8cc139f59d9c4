"""Plant 203 faults and count what reports say of them, and replay steps without one: `python -m tests.ext.replay`.

The table has parts: a group of faults for each step, number of ranks and tool, and the clean replays of each model.
--only runs the parts whose names have one of some texts, as in --only "pipeline, 2" llama. With --write each part, as
it ends, goes into benchmarks/results/replay-faults.json with the texts of its reports. Parts that the file has are not
run again if the files that decide their reports (FILES) are the same; what else a commit changes counts for nothing, so
take a part out of the file to run it again. The table that is printed at the end is that of all parts of the file.
A part that does not end within --seconds is kept as an error; if its ranks hang, the program ends.
"""

import argparse
import faulthandler
import hashlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.ext.replay.reuse import reusing_traces
from tests.ext.replay.table import QUESTIONS, SECONDS, TOOLS, Case, group_cases, list_cases, replay_clean, run_group

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks/results/replay-faults.json"
# What decides the reports: the extension, where nodes find their lines, and the faults.
FILES = (
    *("fshard/ext/replay/*.py", "fshard/ext/_compat.py"),
    *(f"tests/ext/replay/{name}.py" for name in ("inject", "planted_steps", "reuse", "table")),
)
# Those of tests/ext/test_architectures.py.
MODELS = ("gptj", "llama, tied", "mixtral", "deepseek", "bert", "t5", "resnet", "llava")
# So long after its time a part whose ranks hang is ended with the program.
GRACE = 60.0


def main() -> None:
    args = parse_args()
    results = json.loads(RESULTS.read_text()) if args.write and RESULTS.exists() else {}
    parts: dict[str, Any] = results.get("parts", {})
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    source = {"commit": commit, "files": hash_files()}
    for name, run in list_parts(args).items():
        is_there = parts.get(name, {}).get("files") == source["files"] and "error" not in parts[name]
        if is_there or not any(text in name for text in args.only):
            continue
        faulthandler.dump_traceback_later(args.seconds + GRACE, exit=True)
        parts[name] = run_part(name, run) | source
        faulthandler.cancel_dump_traceback_later()
        if args.write:
            RESULTS.write_text(json.dumps(circumstances() | {"parts": parts}, indent=1) + "\n")
    print(write_table(parts))


def hash_files() -> str:
    """Hash the files that decide what reports say."""
    digest = hashlib.blake2b(digest_size=8)
    for pattern in FILES:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def list_parts(args: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """List what is to run: groups of faults, and the clean replays of each model."""
    parts: dict[str, Callable[[], dict[str, Any]]] = {}
    if not args.no_faults:
        for name, group in group_cases(list_cases()).items():
            parts[name] = partial(run_faults, group, args.seconds)
    for name in MODELS if args.clean else ():
        parts[f"clean {name}"] = partial(run_clean, name, args.clean, args.seconds)
    return parts


def run_faults(group: Sequence[Case], seconds: float) -> dict[str, Any]:
    faults = []
    for answer in run_group(group, seconds):
        facts = {"truth": answer.truth._asdict(), "right": answer.right, "report": answer.report}
        faults.append(answer.case._asdict() | facts)
    return {"faults": faults}


def run_clean(name: str, count: int, seconds: float) -> dict[str, Any]:
    return {"replays": count, "alarms": replay_clean(name, count, seconds)}


def run_part(name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a part, and print how it went and what is not right; a part that fails has its error."""
    start = time.perf_counter()
    try:
        with reusing_traces():
            result = run()
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    result["seconds"] = round(time.perf_counter() - start, 1)
    wrong = [fault for fault in result.get("faults", ()) if not all(fault["right"].values())]
    wrong += result.get("alarms", [])
    print(f"{name}: {len(wrong)} not right, {result['seconds']} s", result.get("error", ""), flush=True)
    for fault in wrong:
        print(json.dumps(fault, indent=1), flush=True)
    return result


def circumstances() -> dict[str, Any]:
    """Versions, date and hardware, as benchmarks write them."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import report

    return report.circumstances("replay-faults")


def write_table(parts: Mapping[str, Any]) -> str:
    """Write the table, a row for each kind of fault and one for all, and the number of clean replays."""
    lines = ["| " + " | ".join(("fault", "tool", *QUESTIONS)) + " |"]
    faults = [fault for part in parts.values() for fault in part.get("faults", ())]
    for kind, tool in (*TOOLS.items(), ("all", "")):
        asked: Counter[str] = Counter()
        right: Counter[str] = Counter()
        for fault in faults:
            if kind in (fault["kind"], "all"):
                asked.update(fault["right"].keys())
                right.update(question for question, is_right in fault["right"].items() if is_right)
        cells = [f"{right[question]}/{asked[question]}" for question in QUESTIONS]
        lines.append("| " + " | ".join((kind, tool, *cells)) + " |")
    replays = sum(part.get("replays", 0) for part in parts.values())
    alarms = sum(len(part.get("alarms", ())) for part in parts.values())
    errors = [name for name, part in parts.items() if "error" in part]
    return "\n".join([*lines, f"{replays} clean replays, {alarms} alarms; parts that failed: {errors}"])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="parts whose names have one of these texts")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the longest that a part may take")
    parser.add_argument("--no-faults", action="store_true", help="only clean replays")
    parser.add_argument("--clean", type=int, default=0, help="clean replays of each model")
    parser.add_argument("--write", action="store_true", help="write each part as it ends")
    return parser.parse_args()


if __name__ == "__main__":
    main()
