"""The table of results, in Markdown."""

import json
import re
from collections import Counter, defaultdict
from typing import Any

MARKS = {"pass": "yes", "remedy": "remedy", "update": "update", "refused": "refused", "fail": "fails", "none": "-"}


def as_json(results: dict[str, Any]) -> str:
    """Write results as JSON, one line for each architecture."""
    lists = {key: value for key, value in results.items() if isinstance(value, list)}
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in results.items() if key not in lists]
    for key, rows in lists.items():
        parts.append(f"{json.dumps(key)}: [\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


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
