"""What fs.check finds of the planted mistakes, as results that are committed: numbers, a table, and reports."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.ext.check.ground_truth import CHANGED, DIFFERENT, REFUSED, run_both
from tests.ext.check.mistakes import KNOWN, NEW, Mistake, Outcome, check, mended, table

ROOT = Path(__file__).resolve().parents[3]
NUMBERS, PAGE = (ROOT / f"benchmarks/results/check-mistakes.{ending}" for ending in ("json", "md"))
GUIDE = ROOT / "docs/how_to/check_a_step.md"
# The part of the guide that has the reports.
REPORTS = re.compile(r"(<!-- reports of planted mistakes -->\n).*?(\n<!-- end of reports -->)", re.DOTALL)
# The rows whose reports the pages show as a user sees them.
SHOWN = (
    *("bias_before_the_sum", "clipping_by_the_norm_of_shards", "rate_divided_by_ranks"),
    *("buffers_that_are_not_synchronized", "dropout_without_the_rank", "mean_over_the_tokens_of_each_rank"),
)

Outcomes = Mapping[str, tuple[Mistake, Outcome]]


def check_table() -> Outcomes:
    """Check the rows of the table."""
    return {row.name: (row, row.judge(check(row.make, row.mesh))) for row in table()}


def as_numbers(outcomes: Outcomes) -> dict[str, Any]:
    """Make of outcomes what the file of results holds."""
    return {name: outcome._asdict() for name, (_, outcome) in outcomes.items()}


def read_numbers() -> dict[str, Any]:
    """Read the committed outcomes by their rows."""
    return json.loads(NUMBERS.read_text())["rows"]


def list_mended() -> dict[str, Mistake]:
    """List the rows without their mistakes."""
    return {row.name: row for module in KNOWN + NEW for row in mended(module)}


def run_effects() -> dict[str, str]:
    """Run the rows on simulated ranks with and without their mistakes, and name what each changes."""
    rows = {row.name: row for row in table()}
    return {name: run_both(rows[name], row.make) for name, row in list_mended().items()}


def read_effects() -> dict[str, str]:
    """Read what each mistake changes in a run, as it is committed."""
    return json.loads(NUMBERS.read_text())["effects"]


def summarize(outcomes: Outcomes) -> dict[str, int]:
    """Count rows, those that an analysis can find, and those that it found and located."""
    pairs = list(outcomes.values())
    findable = [outcome for row, outcome in pairs if not row.only_a_run]
    return {
        "rows": len(pairs),
        "only a run can find": len(pairs) - len(findable),
        "found": sum(outcome.is_found for outcome in findable),
        "found at the right line": sum(outcome.is_found and outcome.is_line_right for outcome in findable),
    }


def write_table(outcomes: Outcomes, effects: Mapping[str, str]) -> str:
    """Write outcomes as a table in Markdown, with what a run without fs.check shows."""
    lines = ["| mistake | mesh | in a run | found as | line |", "|---|---|---|---|---|"]
    for name, (row, outcome) in outcomes.items():
        effect = effects.get(name, "")
        mesh = ", ".join(f"{axis} {size}" for axis, size in row.mesh.items())
        if row.only_a_run:
            lines.append(f"| {name.replace('_', ' ')} | {mesh} | {effect} | only a run can find it | |")
            continue
        kind = outcome.kind if outcome.is_found else f"not found: {row.missed}"
        line = "right" if outcome.is_line_right else "wrong" if outcome.is_found else ""
        lines.append(f"| {name.replace('_', ' ')} | {mesh} | {effect} | {kind} | {line} |")
    counts = [f"| {name} | {count} |" for name, count in summarize(outcomes).items()]
    return "\n".join([*lines, "", "| all | rows |", "|---|---|", *counts, ""])


def write_effects(effects: Mapping[str, str]) -> str:
    """Count what the mistakes do in a run on ranks."""
    lines = ["What they do in a run, beside the same step without the mistake:\n", "| in a run | rows |", "|---|---|"]
    values = list(effects.values())
    lines += [f"| {effect} | {values.count(effect)} |" for effect in (REFUSED, CHANGED, DIFFERENT)]
    return "\n".join([*lines, ""])


def write_report(row: Mistake, report: Any) -> str:
    """Write what a user reads about a row: its step, and the problems without the plan."""
    text = "\n".join(map(str, report.problems))
    return f"### {row.name.replace('_', ' ')}\n\n```text\n{shorten_paths(text)}\n```\n"


def shorten_paths(text: str) -> str:
    """Name files from the root of the checkout, so that results do not depend on where it is."""
    return re.sub(re.escape(f"{ROOT}/"), "", text)


def circumstances() -> dict[str, Any]:
    """Versions, date and hardware, as benchmarks write them."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import report

    return report.circumstances("check-mistakes")


def write_results(outcomes: Outcomes, effects: Mapping[str, str]) -> None:
    """Write the numbers, and the page of the table and of reports."""
    numbers = circumstances() | {"summary": summarize(outcomes), "rows": as_numbers(outcomes), "effects": effects}
    NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n")
    parts = ["# What fs.check finds of planted mistakes\n", "Made by `python -m tests.ext.check --write`.\n"]
    known = {name: pair for name, pair in outcomes.items() if pair[0].module in KNOWN}
    new = {name: pair for name, pair in outcomes.items() if name not in known}
    parts += [write_effects(effects)]
    parts += ["## Of the tests of losses and of assert_matches_ddp\n", write_table(known, effects)]
    parts += ["## New ones\n", write_table(new, effects), "## Six reports\n"]
    rows = [outcomes[name][0] for name in SHOWN]
    reports = [write_report(row, check(row.make, row.mesh)) for row in rows]
    PAGE.write_text("\n".join(parts + reports))
    GUIDE.write_text(REPORTS.sub(lambda match: "\n".join([match[1], *reports]) + match[2], GUIDE.read_text()))
