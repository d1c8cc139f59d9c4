"""Judge the run of tests on a fault, and write the table of results."""

import re
from collections import Counter
from typing import Any

from tests.mutants.faults import FAULTS, TOPICS

FOUND = ("found", "timed out")


def judged(code: int | None, log: str, running: dict[str, float], limit: float) -> tuple[str, str]:
    """Say how a run of pytest ended, and by which test.

    Args:
        code: Its exit status; None where it was over the limit. A run that only took long has missed the fault.
        log: What it printed.
        running: The tests that ran then, and for how many seconds.
        limit: The limit in seconds.
    """
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - |$)", log, re.MULTILINE)
    # With -x a run by xdist ends as an interrupted one.
    if failed and (code == 1 or (code == 2 and "stopping after" in log)):
        return "found", failed[1]
    if code == 0:
        return "missed", "all tests passed"
    if code is None:
        test, seconds = max(running.items(), key=lambda item: item[1], default=("", 0.0))
        if seconds > limit / 3:
            return "timed out", f"{test} after {seconds:.0f} s"
        return "missed", f"out of time, in {test or 'the collection'}"
    return "broken", f"pytest ended with {code}: {log.strip()[-200:]}"


def table(results: dict[str, dict[str, Any]]) -> str:
    """Write the results as a page."""
    counts = Counter(fault.topic for fault in FAULTS if results.get(fault.name, {}).get("outcome") in FOUND)
    topics = ", ".join(f"{topic} {counts[topic]} of {number}" for topic, number in TOPICS.items())
    lines = [
        "# Faults that the tests find",
        "",
        f"Found: {counts.total()} of {len(FAULTS)}; {topics}. `make mutants` runs them.",
        "",
        "| topic | fault | file | law | outcome | by | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for fault in FAULTS:
        result = results.get(fault.name, {"outcome": "not run", "by": "", "seconds": 0, "limit": 0})
        took = f"{result['seconds']} of {result['limit']:g}"
        cells = (fault.topic, fault.name, fault.file, fault.law, result["outcome"], result["by"], took)
        lines.append(f"| {' | '.join(' '.join(str(cell).replace('|', '/').split()) for cell in cells)} |")
    return "\n".join(lines) + "\n"
