"""Plant each fault in a copy of the checkout and see which tests find it: `python -m tests.mutants`.

For one fault: `--only NAME`, and `--tests` for a new one that other tests than those of its room are to find; to run
again what has a result: `--again`; to write the table: `--save`.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.mutants.faults import FAULTS, RESULTS, ROOT, Fault
from tests.mutants.report import judged, table

RUNS = ROOT / "runs/mutants"


def tracked() -> list[str]:
    """List the tracked files of the checkout that are there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def digest(fault: Fault, names: Sequence[str]) -> str:
    """Hash what decides a result: the package, the tests, and the fault."""
    found = hashlib.sha256(repr(fault).encode())
    for name in sorted(names):
        if name.endswith(".py") and name.startswith(("fshard/", "tests/")) and not name.startswith("tests/mutants/"):
            found.update(name.encode() + (ROOT / name).read_bytes())
    return found.hexdigest()[:16]


def run(fault: Fault, names: Sequence[str], first: Sequence[str], limit: float) -> dict[str, Any]:
    """Run some tests, those of a fault and the laws, on a copy with the fault."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "copy"
        for name in names:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
        text = (ROOT / fault.file).read_text()
        (copy / fault.file).write_text(fault.planted(text))
        laws = [name for name in sorted(names) if re.fullmatch(r"tests/test_law_\w+\.py", name)]
        begin = time.time()
        outcome, by = pytest(copy, list(dict.fromkeys([*first, *fault.tests, *laws])), limit)
        seconds = round(time.time() - begin, 1)
        if outcome == "found":
            # A test that fails without the fault has not found it.
            (copy / fault.file).write_text(text)
            without = pytest(copy, [by], limit)
            outcome, by = (outcome, by) if without[0] == "missed" else ("broken", f"without the fault: {without}")
    return {"outcome": outcome, "by": by, "seconds": seconds, "limit": limit}


def pytest(copy: Path, tests: Sequence[str], limit: float) -> tuple[str, str]:
    """Run tests of a copy, and judge how that ended."""
    log = copy.parent / "log.txt"
    # A test that hangs is to fail by itself, and long before the limit.
    options = ["-x", "-q", f"--timeout={limit / 3:.0f}", "-p", "no:cacheprovider", *(["-n", "2"] * (len(tests) > 1))]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    settings = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=copy, env=settings, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(limit)
        # Ranks of a test may outlive it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return judged(code, log.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[fault.name for fault in FAULTS], help="names of faults"
    )
    parser.add_argument("--tests", nargs="+", default=[], metavar="FILE", help="tests that run before others")
    parser.add_argument("--again", action="store_true", help="run those that have a result, too")
    parser.add_argument("--seconds", type=float, default=60.0, help="the limit for one fault")
    parser.add_argument("--save", action="store_true", help="write the table to tests/mutants/RESULTS.md")
    options = parser.parse_args()
    names, results = tracked(), {}
    RUNS.mkdir(parents=True, exist_ok=True)
    for fault in FAULTS:
        file, text = RUNS / f"{fault.name}.json", digest(fault, names)
        known = json.loads(file.read_text()) if file.exists() else {}
        # A run that broke, such as without an environment, is no result.
        done = known.get("text") == text and known["outcome"] != "broken" and not options.again
        if fault.name in (options.only or [fault.name]) and not done:
            known = {**run(fault, names, options.tests, options.seconds), "text": text}
            file.write_text(json.dumps(known, indent=1) + "\n")
            print(f"{fault.name}: {known['outcome']} in {known['seconds']} s, {known['by']}", flush=True)
        if known.get("text") == text:
            results[fault.name] = known
    print(table(results))
    if options.save:
        RESULTS.write_text(table(results))
    return int(any(result["outcome"] == "broken" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
