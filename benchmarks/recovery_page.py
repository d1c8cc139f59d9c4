"""The tables of `recovery.py`, on the terminal and on the page "When a rank fails"."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import report

PAGE = Path(__file__).parents[1] / "docs/how_to/when_a_rank_fails.md"
HEADING, NEXT_HEADING = "## How long it takes\n", "## Stay in the same processes\n"
# What the rows are called.
NAMES = {
    "fshard-run-eager": "`fshard.run`, memory, eager",
    "fshard-run-jitted": "`fshard.run`, memory, jitted, graph from a file",
    "fshard-torchrun-eager": "torchrun, memory, eager",
    "fshard-torchrun-jitted": "torchrun, memory, jitted, graph from a file",
    "fshard-disk-jitted": "torchrun, disk, jitted, traced again",
    "fsdp2-dcp": "torchrun, FSDP2, torch.distributed.checkpoint",
}
COLUMNS = ("median s", "maximum s", "steps repeated", "caught up s")
SECTION = """{heading}
A rank is killed by SIGKILL in the middle of a step, and its launcher starts all ranks again. The table has the seconds
from the kill to the next completed step. Systems with generations in memory lose at most the step that was under way.
The others write a checkpoint to disk each {every} steps, compute the steps since then again, and have caught up later:

{times}

The parts of the medians, each of the slowest rank. The first step includes the trace, or loads the graph:

{parts}

![One recovery of each system by ranks](../pictures/recovery.svg)

- **Where.** {cpu}, two cores, one thread for each rank, gloo, torch {torch}, {date}; `recovery.json` in
  `benchmarks/results`, by `benchmarks/recovery.py`.
- **What.** A GPT ({configuration}) with fused AdamW under `zero3`, and under FSDP2 with asynchronous checkpoints. Each
  row has {repeats} kills of a random rank, and the first step of a restart counts.
"""
COST = """- **The cost.** A step of {configuration} on {ranks} ranks takes {plain:.2f} s without a save and
  {saving:.2f} s with a generation for each step ({percent:+.1f}%). To save shards of 40 MB takes {milliseconds:.1f} ms
  of the main thread.
"""
KILLS = """- **Kills at any moment.** Of {kills} kills at random moments, of one rank, of half of them or of all,
  {training} hit steps and saves, and {recovery} a recovery. {hosts} took a whole host with its memory, and after
  {launches} the job was launched anew with another number of ranks. No state was lost: {repeated} of {restarts}
  restarts repeated one completed step, and none repeated more. None was torn, and each state had the bits of a run
  without kills (`recovery-kills.json`, by `benchmarks/kills.py`).
"""


def rows_of(results: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The number of ranks, the name and the results of each row."""
    for ranks, systems in results["ranks"].items():
        for name, row in systems.items():
            yield ranks, name, row


def times_of(row: Mapping[str, Any]) -> list[str]:
    """The cells of the table of times."""
    seconds, repeated = row["seconds"], row["repeated_steps"]
    steps = f"{min(repeated)}" if len(set(repeated)) == 1 else f"{min(repeated)} to {max(repeated)}"
    return [
        f"{seconds['median']:.2f}",
        f"{seconds['maximum']:.2f}",
        steps,
        f"{row['caught_up_seconds']['median']:.2f}",
    ]


def print_tables(results: Mapping[str, Any]) -> None:
    """Print what was measured."""
    rows = {f"{ranks} ranks, {name}": row for ranks, name, row in rows_of(results)}
    if rows:
        report.print_table("Seconds from a kill", COLUMNS, {name: times_of(row) for name, row in rows.items()})
        parts = {name: [f"{part:.2f}" for part in row["parts"].values()] for name, row in rows.items()}
        columns = tuple(next(iter(rows.values()))["parts"])
        report.print_table("Medians of the parts, seconds", columns, parts)
    if "cost" in results:
        cost = results["cost"]
        cells = [
            f"{cost['plain_seconds']:.3f}",
            f"{cost['saving_seconds']:.3f}",
            f"{cost['percent']:+.1f}",
            f"{cost['main_thread_ms_of_40_mb']:.1f}",
        ]
        columns = ("step s", "with generation", "%", "ms for 40 MB")
        report.print_table("Cost of a generation", columns, {cost["configuration"]: cells})


def table(columns: tuple[str, ...], rows: Iterator[tuple[str, list[str]]]) -> str:
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for name, cells in rows:
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def describe(results: Mapping[str, Any], kills: Mapping[str, Any] | None) -> str:
    """Write the section of the page."""
    rows = list(rows_of(results))
    first = rows[0][2]
    text = SECTION.format(
        heading=HEADING,
        times=table(COLUMNS, ((f"{ranks} ranks, {NAMES[name]}", times_of(row)) for ranks, name, row in rows)),
        parts=table(
            tuple(first["parts"]),
            (
                (f"{ranks} ranks, {NAMES[name]}", [f"{part:.2f}" for part in row["parts"].values()])
                for ranks, name, row in rows
            ),
        ),
        every=results["every"],
        cpu=results["hardware"]["cpu"],
        torch=results["versions"]["torch"].partition("+")[0],
        date=results["date"][:10],
        configuration=results["configuration"],
        repeats=results["repeats"],
    )
    if "cost" in results:
        cost = results["cost"]
        text += COST.format(
            configuration=cost["configuration"],
            ranks=cost["ranks"],
            plain=cost["plain_seconds"],
            saving=cost["saving_seconds"],
            percent=cost["percent"],
            milliseconds=cost["main_thread_ms_of_40_mb"],
        )
    return text + (describe_kills(kills) if kills else "") + "\n"


def describe_kills(results: Mapping[str, Any]) -> str:
    """Write what many kills came to; only a proof without problems may be told."""
    runs = results["runs"].values()
    if any(run["problems"] or run["lost"] or run["torn"] for run in runs):
        raise SystemExit("recovery.py: recovery-kills.json has problems; mend them before the page is written")
    kills = sum(run["kills"] for run in runs)
    training = sum(run["moments"].get(name, 0) for run in runs for name in ("step begins", "step", "saved"))
    return KILLS.format(
        kills=kills,
        training=training,
        recovery=kills - training,
        hosts=sum(run["ranks_killed"].get("a host", 0) for run in runs),
        launches=sum(run["kills"] for run in runs if run["setting"]["job"]),
        repeated=sum(run["repeated_steps"].get("1", 0) for run in runs),
        restarts=sum(run["restarts"] for run in runs),
    )


def write_section(folder: Path, page: Path = PAGE) -> None:
    """Write the section, in the place of the one that is there."""
    files = {name: folder / f"{name}.json" for name in ("recovery", "recovery-kills")}
    found = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    if "recovery" not in found:
        raise SystemExit(f"recovery.py: there are no results in {folder}; run recovery.py first")
    before, heading, after = page.read_text().partition(HEADING)
    if heading:
        after = NEXT_HEADING + after.partition(NEXT_HEADING)[2]
    else:
        before, heading, after = before.partition(NEXT_HEADING)
        after = heading + after
    page.write_text(before + describe(found["recovery"], found.get("recovery-kills")) + after)
    print(f"Page: {page}")
