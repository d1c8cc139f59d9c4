"""The tables of `fit.py`, on the terminal and on the page of performance."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import report

PAGE = Path(__file__).parents[1] / "docs/performance.md"
HEADING, NEXT_HEADING = "## A memory budget\n", "## Two hosts with a slow link\n"
MIB = 2**20
# What the rows of a model are called.
NAMES = {
    "whole": "no budget",
    "checkpointed": "no budget, checkpoints of all blocks",
    "fsdp2": "FSDP2",
    "fsdp2-checkpointed": "FSDP2, checkpoints of all blocks",
    "fsdp2-compiled-0.5": "FSDP2, compiled, `activation_memory_budget=0.5`",
    "fsdp2-compiled-0.2": "FSDP2, compiled, `activation_memory_budget=0.2`",
}
TITLES = {"gpt": "GPT, width 1024, 8 layers", "llama": "Llama, 200 million parameters", "mixtral": "Mixtral, 8 experts"}
SECTION = """{heading}
`fs.fit` keeps a step within a budget: it computes and gathers again what does not fit. Each row is a step of the same
model. Ten have budgets, from the peak of the step without one down to the least that `fs.fit` can keep. A time is
relative to the step without a budget:

![Time of a step and its peak, for ten budgets, checkpoints by hand and FSDP2](pictures/budget.svg)

{tables}

- **Where.** Two ranks under `zero3` with fused AdamW, jitted and donated; {cpu}, two cores, one thread for each rank,
  torch {torch}, {date} ({files}
  in `benchmarks/results`, by `benchmarks/fit.py`).
- **Peaks** are the arguments of a step and what the process allocates beyond them, on the rank that takes most. A
  budget counts the same.
- **Times** are medians over {rounds} rounds of the ratio to the step without a budget in the same round. FSDP2 has
  processes of its own, which alternate with that step.
- **Bits** are those of the loss, the parameters and the optimizer's state after the first step.
- **Checkpoints** are `torch.utils.checkpoint` around each block. Compiled FSDP2 compiles each block, and its budget is
  the part of the activations that torch's partitioner may save.
"""
PASS = """- **The pass** takes {short:.1f} s for a step of 8 layers ({short_operators} operators), and {long:.1f} s
  for one of 96 ({long_operators} operators), to keep 0.7 of the peak beyond the arguments.
"""
COLUMNS = ("predicted MiB", "peak MiB", "peak / budget", "time", "copies", "gathers again", "s of the pass", "bits")


def cells_of(row: Mapping[str, Any]) -> list[str]:
    """The cells of one step; empty where something does not apply."""
    budget, mine = row.get("budget"), "predicted" in row
    return [
        f"{row['predicted'] / MIB:.1f}" if mine else "",
        f"{row['peak'] / MIB:.1f}",
        f"{row['peak'] / budget:.3f}" if budget else "",
        f"{row['ratio']:.2f}",
        str(row["copies"]) if budget else "",
        str(row["gathers"]) if budget else "",
        f"{row['search_seconds']:.1f}" if budget else "",
        ("equal" if row["has_equal_bits"] else "differ") if mine else "",
    ]


def name_of(name: str, row: Mapping[str, Any]) -> str:
    """What a row is called: its budget, where it has one."""
    budget = row.get("budget")
    return f"budget {budget / MIB:.1f}" if budget else NAMES[name]


def print_tables(results: Mapping[str, Any]) -> None:
    """Print what was measured of a model, or of the pass."""
    if "steps" in results:
        rows = {
            name: [str(notes["operators"]), str(notes["copies"]), f"{notes['search_seconds']:.2f}"]
            for name, notes in results["steps"].items()
        }
        report.print_table("Time of the pass", ("operators", "copies", "seconds"), rows)
        return
    # Small models have budgets that are written alike.
    rows = {f"{name}: {name_of(name, row)}": cells_of(row) for name, row in results["rows"].items()}
    title = f"{results['configuration']['name']}, {results['ranks']} ranks; {results['measure']}; budgets in MiB"
    report.print_table(title, COLUMNS, rows)
    for line in list_goals(results):
        print(f"  {line}")


def list_goals(results: Mapping[str, Any]) -> Iterator[str]:
    """Say how far the budgets bind and what they cost, beside checkpoints by hand."""
    rows = results["rows"]
    whole, by_hand = rows["whole"], rows["checkpointed"]
    budgets = [row for row in rows.values() if row.get("budget")]
    least = min(budgets, key=lambda row: row["budget"])
    yield f"peak / budget: at most {max(row['peak'] / row['budget'] for row in budgets):.4f}"
    yield f"the step in a budget of its own peak: {budgets[0]['ratio']:.3f} of its time"
    seventy = whole["arguments"] + 0.7 * (whole["predicted"] - whole["arguments"])
    below = [row for row in budgets if row["budget"] <= seventy]
    if below:
        first = max(below, key=lambda row: row["budget"])
        part = (first["budget"] - whole["arguments"]) / (whole["predicted"] - whole["arguments"])
        yield f"{part:.2f} of the peak beyond the arguments: {first['ratio']:.3f} of the time"
    yield f"least / checkpoints by hand: {least['peak'] / by_hand['peak']:.3f} of the peak"
    fitting = [row for row in budgets if row["peak"] <= by_hand["peak"]]
    if fitting:
        fastest = min(row["ratio"] for row in fitting)
        yield f"within the peak of checkpoints by hand: {fastest:.3f} of the time, by hand {by_hand['ratio']:.3f}"
    yield f"least / bound: {least['peak'] / results['bound']['bound']:.3f}"


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """The results that are there, by the names of models."""
    files = {name: folder / f"fit-{name}.json" for name in (*TITLES, "pass")}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def describe(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Write the section of the page of performance."""
    models = [name for name in TITLES if name in results]
    tables = "\n\n".join("\n".join(table_of(name, results[name])) for name in models)
    first = results[models[0]]
    section = SECTION.format(
        heading=HEADING,
        tables=tables,
        cpu=first["hardware"]["cpu"],
        torch=first["versions"]["torch"].partition("+")[0],
        date=first["date"][:10],
        files=", ".join(f"`fit-{name}.json`" for name in results),
        rounds=first["rounds"],
    )
    if "pass" in results:
        short, long = results["pass"]["steps"].values()
        section += PASS.format(
            short=short["search_seconds"],
            short_operators=short["operators"],
            long=long["search_seconds"],
            long_operators=long["operators"],
        )
    return section + "\n"


def table_of(name: str, results: Mapping[str, Any]) -> Iterator[str]:
    """The table of a model."""
    configuration = results["configuration"]
    title = f"{TITLES[name]}, batch {configuration['batch']} x {configuration['time']}"
    yield f"| {title} | " + " | ".join(COLUMNS) + " |"
    yield "|---" * (1 + len(COLUMNS)) + "|"
    for key, row in results["rows"].items():
        yield f"| {name_of(key, row)} | " + " | ".join(cells_of(row)) + " |"


def write_section(folder: Path, page: Path = PAGE) -> None:
    """Write the section, in the place of the one that is there."""
    results = load(folder)
    if not any(name in results for name in TITLES):
        raise SystemExit(f"fit.py: there are no results in {folder}; run fit.py first")
    before, heading, after = page.read_text().partition(HEADING)
    if heading:
        after = NEXT_HEADING + after.partition(NEXT_HEADING)[2]
    else:
        before, heading, after = before.partition(NEXT_HEADING)
        after = heading + after
    page.write_text(before + describe(results) + after)
    print(f"Page: {page}")
