"""What the documents say is there: examples, commands, files, the calls of FSDP2, and measured figures."""

import json
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.comm.costs import costs_by_law
from tests.test_benchmarks import benchmark as import_benchmark
from tests.test_benchmarks import check_formulas
from tests.test_processes import ROOT, TORCHRUN, run

README = ROOT / "README.md"
GUIDE = ROOT / "examples/README.md"
PERFORMANCE = ROOT / "docs/performance.md"
SCALE = ROOT / "docs/scale.md"
SAME_BITS = ROOT / "docs/how_to/same_bits.md"
FINE_TUNE = ROOT / "docs/how_to/fine_tune.md"
FROM_FSDP2 = ROOT / "docs/coming_from/fsdp2.md"
FROM_JAX = ROOT / "docs/coming_from/jax.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = (README, ROOT / "CONTRIBUTING.md", GUIDE, ROOT / "fshard/checkpoint/FORMAT.md", *PAGES)
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


# Runs each script up to where it has parsed its arguments; prints what went wrong.
PARSE = """
import argparse, contextlib, io, json, runpy, sys, traceback
parse = argparse.ArgumentParser.parse_args
class Parsed(BaseException): pass
def parse_and_stop(*args, **kwargs):
    parse(*args, **kwargs)
    raise Parsed
argparse.ArgumentParser.parse_args = parse_and_stop
sys.path.insert(0, "examples")
for command in json.load(sys.stdin):
    sys.argv, errors = command, io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            runpy.run_path(command[0], run_name="__main__")
        print(*command, "parses nothing")
    except Parsed:
        pass
    except BaseException:
        print(*command, errors.getvalue(), traceback.format_exc())
"""


def section(document: Path, heading: str) -> str:
    _, text = document.read_text().split(f"\n## {heading}\n")
    return text.split("\n## ")[0]


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table's rows but for the line under its head, without what marks code."""
    blocks = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    rows = [[line.strip().strip("|") for line in block.splitlines() if set(line) - set("|-: ")] for block in blocks]
    return [[[cell.strip() for cell in row.replace("`", "").split("|")] for row in each] for each in rows]


def test_every_example_is_in_the_guide():
    named = set(re.findall(r"`(\w+\.py)`", GUIDE.read_text()))
    assert named >= {path.name for path in EXAMPLES}


@pytest.mark.slow
def test_every_command_parses():
    """Commands in documents that start a script of this repository."""
    texts = [document.read_text() for document in DOCUMENTS]
    texts += [path.read_text().split('"""')[1] for path in EXAMPLES]
    pattern = re.compile(r"^    ((?:\S+=\S+ )?(?:torchrun|python) (?!-m ).*?)(?:  +#.*)?$", flags=re.MULTILINE)
    scripts = []
    for command in dict.fromkeys(command for text in texts for command in pattern.findall(text)):
        words = shlex.split(command)
        number = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
        assert number is not None, f"{command} starts no script"
        assert (ROOT / words[number]).is_file(), f"there is no {words[number]}"
        scripts.append(words[number:])
    programs = {str(path.relative_to(ROOT)) for path in EXAMPLES if "__main__" in path.read_text()}
    assert {script[0] for script in scripts} >= programs
    command = [sys.executable, "-c", PARSE]
    result = subprocess.run(command, cwd=ROOT, input=json.dumps(scripts), capture_output=True, text=True, timeout=250)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr + result.stdout


def test_make_targets_exist():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for document in DOCUMENTS:
        for target in re.findall(r"(?:^    |`)make (\w+)", document.read_text(), flags=re.MULTILINE):
            assert target in targets, f"{document.name}: make {target}"


def dead_links(document: Path) -> Iterator[str]:
    """Files that a document names and that are not there, and headings."""
    text = document.read_text()
    for link in re.findall(r"\]\((?!https?://)([^)]+)\)", text):
        file, _, anchor = link.partition("#")
        target = (document.parent / file).resolve() if file else document
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor and target.exists() else []
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        if not target.exists():
            yield str(target.relative_to(ROOT))
        elif anchor and anchor not in anchors:
            yield f"{link} names no heading"
    for path in re.findall(r"`((?:examples|benchmarks|tests|fshard)/[\w/.-]+\.(?:py|md|json))`", text):
        if not (ROOT / path).exists():
            yield path


BY_NAME = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@BY_NAME
def test_links_lead_somewhere(document):
    """Those into extensions where there are any."""
    assert [link for link in dead_links(document) if not link.startswith(("fshard/ext/", "tests/ext/"))] == []


MISTAKES = {
    "mean": r"step 0 .*\n +\['loss'\]",
    "rate": r"step 2 .*\n +\['params'\]",
    "psum": r"doubled sum over shard: .*\n +.*/ddp_parity.py:\d+ in loss_fn: return fs.objective",
    "frozen": r"step 0 .*\n +\['params'\]\['blocks.0.up.weight'\].*\n +To fix",
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_tools_find_the_mistake(mistake):
    """What the guide says of `ddp_parity.py --break`."""
    sizes = {"width": 32, "layers": 2, "heads": 2, "context": 16, "batch": 2}
    out = run(*TORCHRUN, 2, ROOT / "examples/ddp_parity.py", "--break", mistake, **sizes)
    right, wrong = out.strip().split("\n\n")
    assert right.endswith("\n  assert_matches_ddp: nothing wrong\n  assert_step: nothing wrong")
    assert re.search(MISTAKES[mistake], wrong)


# Names of columns of the table, and of systems in the results.
SYSTEMS = {
    **{"FSDP2": "fsdp2", "DDP": "ddp"},
    **{"fs.ddp": "fshard-ddp", "fs.zero2": "fshard-zero2", "fs.zero3": "fshard-zero3"},
}


def figures() -> Iterator[tuple[str, str, str, dict[str, int]]]:
    """Every cell of the table of speed and memory: benchmark, system, number and configuration."""
    ((head, *rows),) = tables(section(PERFORMANCE, "Speed and memory"))
    suffix, systems = "", []
    for column in head[1:]:
        # From the column that says so on, steps are jitted.
        suffix = "-graph" if column.startswith("jitted: ") else suffix
        systems.append(SYSTEMS[column.removeprefix("jitted: ")] + suffix)
    for name, *cells in rows:
        kind, *sizes = re.fullmatch(r"(step|peak MiB), width (\d+), (\d+) layers, batch (\d+) x (\d+)", name).groups()
        benchmark = {"step": "peers", "peak MiB": "memory"}[kind]
        for system, cell in zip(systems, cells, strict=True):
            # Peaks are those of eager steps.
            if cell or benchmark == "peers":
                yield benchmark, system, cell, dict(zip(("width", "layers", "batch", "time"), map(int, sizes)))


def test_the_readme_has_figures_of_the_table():
    """Some rows, without the column of DDP, whose time is 1."""
    (_, *all_rows), *_ = tables(section(PERFORMANCE, "Speed and memory"))
    (head, *rows), *_ = tables(section(README, "Why"))
    assert head == ["step time, DDP = 1.00", "FSDP2", "fs.ddp", "fs.zero3", "jitted fs.ddp", "jitted fs.zero3"]
    for name, *cells in rows:
        (measured_cells,) = [row[2:] for row in all_rows if row[0].startswith(f"step, {name}, ")]
        assert cells == measured_cells, name


def measured(benchmark: str, system: str, results: dict[str, Any]) -> set[float]:
    if benchmark == "memory":
        return {max(rank["peak"] for rank in results["systems"][system]) / 2**20}
    return {group[system]["ratio"] for group in results["step"] if system in group}


def test_figures_were_measured():
    all_results = [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks/results").glob("*.json"))]
    for benchmark, system, printed, sizes in figures():
        run = [each for each in all_results if (each["benchmark"], each.get("ranks")) == (benchmark, 2)]
        (results,) = (each for each in run if sizes.items() <= each["configuration"].items())
        decimals = len(printed.partition(".")[2])
        values = {f"{value:.{decimals}f}" for value in measured(benchmark, system, results)}
        assert values == {printed}, (benchmark, system, sizes)


# Rows of the table of peaks beside a bound, and the configurations of their results.
BOUNDED = {
    "GPT, width 1024, 8 layers": "d1024-L8-B1-T256",
    "Llama, 200 million parameters": "llama",
    "Mixtral, 8 experts": "mixtral",
}


def test_peaks_and_their_ratios_to_bounds_were_measured():
    ((head, *rows),) = tables(section(PERFORMANCE, "Peak memory beside a bound"))
    assert [name for name, *_ in rows] == list(BOUNDED)
    for name, *cells in rows:
        results = json.loads((ROOT / f"benchmarks/results/memory-{BOUNDED[name]}.json").read_text())
        for column, cell in zip(head[1:], cells, strict=True):
            kind = SYSTEMS[column.removeprefix("jitted ")]
            system = f"{kind}-graph" if column.startswith("jitted ") else kind
            (peak,) = measured("memory", system, results)
            ratio = peak * 2**20 / results["bounds"][system]["bound"]
            assert cell == f"{peak:.0f} ({ratio:.2f})", (name, column)
            assert ratio >= 1, (name, column)


def test_the_section_of_budgets_was_measured(tmp_path, capsys):
    """The page has what the benchmark writes of the results that are there: in its place, and over what is there."""
    page, folder, text = tmp_path / "performance.md", ROOT / "benchmarks/results", PERFORMANCE.read_text()
    with import_benchmark("fit_page") as fit_page:
        section = text[text.index(fit_page.HEADING) : text.index(fit_page.NEXT_HEADING)]
        for before in (text.replace(section, ""), text.replace(section, f"{fit_page.HEADING}\nolder\n")):
            page.write_text(before)
            fit_page.write_section(folder, page)
            assert page.read_text() == text
        with pytest.raises(SystemExit, match="no results"):
            fit_page.write_section(tmp_path, page)
        results = fit_page.load(folder)
        for model in results.values():
            fit_page.print_tables(model)
    assert "within the peak of checkpoints by hand: 0." in capsys.readouterr().out
    for name, model in results.items():
        for step, row in model.get("rows", {}).items():
            assert row.get("has_equal_bits", True), (name, step)
            assert row["peak"] >= model["bound"]["bound"], (name, step)


# A row of the table of one H200, and the system that it tells of.
ON_ONE_H200 = {
    "plain PyTorch, autocast": "plain",
    "FSDP2": "fsdp2",
    "zero3": "fshard-zero3",
    "zero3, jitted": "fshard-zero3-graph",
    "plain PyTorch, compiled": "plain-compiled",
    "zero3, jitted by Inductor": "fshard-zero3-inductor",
}


def test_figures_of_one_h200_were_measured():
    results = json.loads((ROOT / "benchmarks/results/quarter_hour-h200.json").read_text())
    systems = {row["name"]: row for row in results["rows"] if row["stage"] in ("model", "capture")}
    (table,) = [rows for rows in tables(PERFORMANCE.read_text()) if rows[0][0] == "one H200"]
    assert {name for name, *_ in table[1:]} == set(ON_ONE_H200)
    for name, ms, mfu, host, peak in table[1:]:
        row = systems[ON_ONE_H200[name]]
        measured = f"{row['ms']:.1f}", f"{row['MFU']:.3f}", f"{row['host ms']:.0f}", f"{row['peak GiB']:.1f}"
        assert (ms, mfu, host, peak) == measured, name


# Rows of the tables of a slow link, and the systems that they tell of.
OVER_A_SLOW_LINK = {
    "hsdp, four microbatches": {
        'communicate="each"': "fshard-each",
        'communicate="outer_once"': "fshard-outer_once",
        'communicate="once"': "fshard-once",
        "FSDP2": "fsdp2-each",
        "FSDP2, set_requires_all_reduce": "fsdp2-outer_once",
    },
    "parameters split over four ranks": {
        'zero3(mesh, ("local", "node"))': "fshard-zero3-axes",
        "zero3(mesh) of one axis": "fshard-zero3",
        'regather_axis="local"': "fshard-regather-axis",
        "regather=False for half of the blocks": "fshard-policies",
        "FSDP2": "fsdp2",
        "FSDP2, reshard_after_forward=2": "fsdp2-reshard-2",
    },
    "a batch that is 0.25 s late": {
        'zero3(mesh, ("local", "node"))': "fshard-waiting",
        "the same with fs.start_gather": "fshard-started",
        "FSDP2": "fsdp2-waiting",
        "FSDP2, unshard(async_op=True)": "fsdp2-started",
    },
}


# What messages of a few bytes, which a record leaves out, add to the bytes over the link.
LINK_ERROR = 0.02


def cells_of_slow_link(values: dict[str, Any]) -> list[str]:
    """The cells of a system: seconds, ratio, MB over the link and by formula, peak and bits."""
    formula = f"{values['formula_bytes'] / 1e6:.1f}" if values["formula_bytes"] else ""
    if formula and not values["formula_is_exact"]:
        formula = f"at most {formula}"
    return [
        f"{values['median_seconds']:.2f}",
        f"{values['ratio']:.2f}",
        f"{statistics.median(values['payload_bytes']) / 1e6:.1f}",
        formula,
        f"{values['peak_bytes'] / 2**20:.0f}",
        "equal" if values["has_equal_bits"] else f"{values['part_of_bound']:.2g} of the bound",
    ]


def test_figures_of_a_slow_link_were_measured():
    results = json.loads((ROOT / "benchmarks/results/slow_link.json").read_text())
    systems = {name: values for group in results["groups"].values() for name, values in group.items()}
    by_title = {rows[0][0]: rows[1:] for rows in tables(section(PERFORMANCE, "Two hosts with a slow link"))}
    assert set(by_title) == set(OVER_A_SLOW_LINK)
    for title, names in OVER_A_SLOW_LINK.items():
        assert [row[0] for row in by_title[title]] == list(names)
        for name, *cells in by_title[title]:
            assert cells == cells_of_slow_link(systems[names[name]]), name


def test_bytes_and_memory_of_a_slow_link_were_those_of_formulas():
    """What the link carried beside what a record counts: the rest is messages of a few bytes."""
    results = json.loads((ROOT / "benchmarks/results/slow_link.json").read_text())
    systems = {name: values for group in results["groups"].values() for name, values in group.items()}
    check_formulas(systems)
    for name, values in systems.items():
        if values["formula_bytes"]:
            assert abs(statistics.median(values["payload_bytes"]) / values["recorded_bytes"] - 1) < LINK_ERROR, name
    # The pieces that a rank keeps for the backward; meters round by some pages.
    added = systems["fshard-regather-axis"]["peak_bytes"] - systems["fshard-zero3-axes"]["peak_bytes"]
    assert 0 < added <= 1.01 * results["parameter_bytes"] / 2


def write_figure(value: Any) -> str:
    """Write a count, or the median of a time to three digits."""
    if isinstance(value, dict):
        return f"{value['median']:.3g}" if value["median"] < 1000 else f"{value['median']:,.0f}"
    return f"{round(value):,}"


def test_figures_of_many_ranks_were_measured_or_follow_from_laws():
    """Those of an earlier version beside those of today; the laws of today are those that processes are held to."""
    names = ("agreement-full-mesh", "agreement")
    before, now = (json.loads((ROOT / f"benchmarks/results/{name}.json").read_text()) for name in names)
    for ranks, law in now["laws"].items():
        assert law == costs_by_law(int(ranks))
    by_title = {rows[0][0]: rows for rows in tables(SCALE.read_text())}
    for title, kind in (("measured", "measured"), ("by law", "laws")):
        (head, *rows) = by_title[f"of a rank, {title}: full mesh / links"]
        assert len(rows) >= 5
        for name, *cells in rows:
            for ranks, cell in zip(head[1:], cells, strict=True):
                assert cell == " / ".join(write_figure(found[kind][ranks][name]) for found in (before, now)), name


# How far plans may be from the peak that they predict.
PLAN_ERROR = 0.05


def test_figures_of_the_rehearsal_were_counted():
    systems = json.loads((ROOT / "benchmarks/results/rehearsal.json").read_text())["systems"]
    (table,) = [rows for rows in tables(PERFORMANCE.read_text()) if rows[0][0] == "one step, rank 0 of 8"]
    assert len(table) == 7
    for name, kernels, _, waits, peak, plan, _ in table[1:]:
        pair = [systems["plain"]] if "plain" in name else [systems[name], systems[f"{name}, jitted"]]
        peaks = [f"{system['peak_bytes'] / 1e6:.2f}" for system in pair]
        assert kernels.split(" / ") == [str(system["kernels"]) for system in pair], name
        assert int(waits) == sum(count for system in pair for count in system["waits"].values()), name
        assert peak.split(" / ") == peaks, name
        for system in pair if plan else ():
            assert plan == f"{system['plan']['peak_bytes'] / 1e6:.2f}", name
            assert abs(system["plan"]["peak_bytes"] / system["peak_bytes"] - 1) < PLAN_ERROR, name
            assert system["plan"]["bytes_sent"] == sum(system["bytes_sent"].values()), name


def test_losses_drifted_as_the_text_says():
    text = " ".join(SAME_BITS.read_text().split())
    stated = re.search(r"plot, (\d+) of (\d+) losses on 4 ranks .* by up to ([\d.e-]+)\.", text).groups()
    results = json.loads((ROOT / "benchmarks/results/bits.json").read_text())
    in_turn, tree = results["drift"]["in turn"]["4"], results["drift"]["tree"]
    steps = results["configuration"]["steps"]
    assert stated[:2] == (str(in_turn["differ"]), str(steps))
    assert f"{float(stated[2]):.0e}" == f"{in_turn['largest']:.0e}"
    assert {name: each["differ"] for name, each in tree.items()} == {"1": 0, "2": 0, "4": 0, "moved": 0}
