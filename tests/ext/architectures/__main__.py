"""Check architectures of transformers, drawn by a seed: python -m tests.ext.architectures --seed 0 --count 48."""

import argparse
import json
import re
from collections import Counter, defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.ext.architectures.checks import CHECKS, CONTEXT, examine
from tests.ext.architectures.configs import architectures

MARKS = {"pass": "yes", "remedy": "remedy", "update": "update", "refused": "refused", "fail": "fails", "none": "-"}

HEAD = """# Architectures of transformers

`python -m tests.ext.architectures --seed {seed} --count {count} --timeout 250
--json tests/ext/architectures/results.json --table examples/ARCHITECTURES.md` made this page on {date}, with torch
{torch} and transformers {transformers}. It draws architectures from the library's own mappings, makes their
configurations small, and runs each check on two simulated ranks under `fs.zero3`, with the layers that the library does
not split as units:

- **train**: three steps of AdamW next to one process on both batches, in float64 where the model takes it.
- **jit**: the same steps by `fs.jit`, with the eager bits.
- **meta**: `init(seed=0)` of a model on the meta device has the bits of the library's own initialiser;
  refused by name where that leaves values out.
- **load, save**: `load_huggingface` of what `save_pretrained` wrote, and `from_pretrained` of what `save_huggingface`
  wrote.
- **generate**: the tokens of `generate`, with its cache, on gathered and on sharded parameters.
- **checkpointing**: training after `activation_checkpointing_enable()`.

"remedy": it works after a call that is named below. "update": the loss reads values, so that the update alone is
jitted, with the bits of the eager step. "-": transformers itself has no such thing for it. Of {drawn}
architectures drawn, {unfit} have no small model that this program can make or feed; they are listed at the end.
"""


def status_of(check: dict[str, str]) -> str:
    """The status, in which those that need a remedy are apart."""
    starts = {"after ": "remedy", "update alone": "update"}
    found = (status for start, status in starts.items() if check["text"].startswith(start))
    return next(found, check["status"]) if check["status"] == "pass" else check["status"]


def table(results: dict[str, Any]) -> str:
    """Write results as Markdown."""
    rows, names = results["architectures"], list(results["architectures"][0]["checks"])
    lines = [
        HEAD.format(
            **results["versions"],
            seed=results["seed"],
            date=results["date"],
            count=len(rows),
            drawn=len(rows) + len(results["unfit"]),
            unfit=len(results["unfit"]),
        )
    ]
    counts = {name: Counter(status_of(row["checks"][name]) for row in rows) for name in names}
    lines.append("| |" + "|".join(f" {name} " for name in names) + "|")
    lines.append("|---" * (len(names) + 1) + "|")
    for status, mark in MARKS.items():
        lines.append(f"| {mark} |" + "|".join(f" {counts[name][status]} " for name in names) + "|")
    lines += ["", "| architecture | task |" + "|".join(f" {name} " for name in names) + "|"]
    lines.append("|---" * (len(names) + 2) + "|")
    for row in sorted(rows, key=lambda row: row["name"]):
        marks = "|".join(f" {MARKS[status_of(row['checks'][name])]} " for name in names)
        lines.append(f"| {row['name']} | {row['task'].lower().replace('_', ' ')} |{marks}|")
    lines += ["", "## Causes", ""]
    causes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["name"]):
        for name in names:
            if status_of(row["checks"][name]) != "pass":
                causes[name, _short(row["checks"][name]["text"])].append(row["name"])
    lines += [f"- {name}, {', '.join(models)}: {text}" for (name, text), models in sorted(causes.items())]
    lines += ["", "## Drawn, without a small model", ""]
    lines += [f"- {row['name']} ({row['model']}): {_short(row['unfit'])}" for row in results["unfit"]]
    return "\n".join(lines) + "\n"


def _short(text: str) -> str:
    text = re.sub(r"/\S*site-packages/", "", text)
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return text if len(text) <= 420 else text[:420] + " ..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=48, help="architectures that a small model can be made of")
    parser.add_argument("--only", nargs="*", help="names of architectures, instead of those drawn")
    parser.add_argument("--checks", nargs="*", default=list(CHECKS), choices=list(CHECKS))
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for one check")
    parser.add_argument("--json", type=Path, help="where results go")
    parser.add_argument("--table", type=Path, help="where the table goes, such as examples/ARCHITECTURES.md")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    CONTEXT.set_forkserver_preload(["torch", "transformers.modeling_utils", "fshard", "tests.ext.architectures.checks"])
    drawn = [one for one in architectures(options.seed) if one.name in (options.only or [one.name])]
    rows: list[dict[str, Any]] = []
    unfit: list[dict[str, Any]] = []
    for architecture in drawn:
        if len(rows) == options.count:
            break
        row = examine(architecture, options.checks, options.timeout, options.verbose)
        (unfit if "unfit" in row else rows).append(row)
        marks = " ".join(f"{name}={found['status']}" for name, found in row["checks"].items())
        print(f"{row['name']} ({row['task']}): {row.get('unfit') or marks}", flush=True)
        for name, found in row["checks"].items():
            if found["status"] in ("fail", "refused"):
                print(f"    {name}: {found['text'][: 1000 if options.only else 300]}", flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    results = {"date": date.today().isoformat(), "versions": versions, "seed": options.seed}
    results |= {"architectures": rows, "unfit": unfit}
    print(f"{len(rows)} architectures; {len(unfit)} others have no small model here")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.table:
        options.table.write_text(table(results))


if __name__ == "__main__":
    main()
