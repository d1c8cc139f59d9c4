"""Judge the run of tests on a fault, and write the table of results."""

import re
from typing import Any

from tests.mutants.faults import FAULTS


def judged(code: int | None, log: str) -> tuple[str, str]:
    """Say how a run of pytest ended, and by which test; over the limit (None) it has missed the fault."""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - |$)", log, re.MULTILINE)
    # With -x a run by xdist ends as an interrupted one.
    if failed and (code == 1 or (code == 2 and "stopping after" in log)):
        return "found", failed[1]
    if code == 0 or code is None:
        return "missed", "out of time" if code is None else "all tests passed"
    return "broken", f"pytest ended with {code}: {log.strip()[-200:]}"


def table(results: dict[str, dict[str, Any]]) -> str:
    """Write the results as a page."""
    found = sum(results.get(fault.name, {}).get("outcome") == "found" for fault in FAULTS)
    lines = [
        "# Faults that the tests find",
        "",
        f"Found: {found} of {len(FAULTS)}. `make mutants` runs them.",
        "",
        "| fault | file | law | outcome | by | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for fault in FAULTS:
        result = results.get(fault.name, {"outcome": "not run", "by": "", "seconds": 0, "limit": 0})
        took = f"{result['seconds']} of {result['limit']:g}"
        cells = (fault.name, fault.file, fault.law, result["outcome"], result["by"], took)
        lines.append(f"| {' | '.join(' '.join(str(cell).replace('|', '/').split()) for cell in cells)} |")
    return "\n".join(lines) + "\n"
