"""assert_step: a train step's mistakes, and what it sends and holds, as a test that needs no ranks."""

import difflib
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import fshard as fs
from fshard.extend import NOT_NEGATIVE, check_flags, check_numbers, describe, expect

API_NAME = "assert_step"
_OPS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
# How much a peak may differ from that of a snapshot: releases of torch differ in what an operator saves or allocates.
_PEAK_TOLERANCE = 0.02
# A difference is shown with so many rows before and behind it: all uses of the memory come right behind the peak.
_CONTEXT = 8
_HEADER = "# What one rank sends and holds in a step. fs.testing.assert_step writes this file with update=True.\n"

# Lines of the contract: the text of each by its name.
Rows = dict[str, str]


def assert_step(
    step: Callable[..., Any],
    state: Any,
    *batch: Any,
    mesh: Mapping[str, int],
    collectives: int | Mapping[str, int | Mapping[str, int]] | None = None,
    bytes_sent: float | Mapping[str, float] | None = None,
    peak_bytes: float | None = None,
    snapshot: str | os.PathLike[str] | None = None,
    update: bool = False,
    **options: Any,
) -> Any:
    """Assert that `fs.check` finds no mistake in a train step, and that the step sends and holds what it should.

    Nothing is run, and no other rank is needed. The test takes seconds for any number of ranks.

    Args:
        step: As for `fs.check`.
        state: Its first argument.
        *batch: Its other arguments, as one rank gets them.
        mesh: Ranks on each axis by its name, outermost first.
        collectives: The exact number of collectives: in all, by axis as {"shard": 12}, or by axis and unit or op as
            {"shard": {"blocks.0": 3, "all_gather": 8}}. What is not named is not compared. What is sent for no unit
            is named by its leaves, or else by the verb that sends it.
        bytes_sent: The most bytes that a rank may send, in all or by axis, in nominal ring terms without scalars.
        peak_bytes: The most bytes that a rank may hold at a time, state and batch included.
        snapshot: A text file with all of these, which must be equal, but for a peak that differs by at most 2%.
        update: Whether to write the snapshot anew instead, unless the step fails by the other arguments.
        **options: Passed to `fs.check`: rank and backend.

    Returns:
        The report of `fs.check`. Its `plan` has all that was counted, for further assertions.

    Raises:
        AssertionError: with the problems of the report, and all that differs from what was expected as a diff.
        FileNotFoundError: if there is no snapshot, and it is not to be written.
        ValueError: if an argument makes no sense, and as by `fs.check`.

    >>> import torch, fshard as fs
    >>> params = fs.shard({"w": torch.ones(4096, 1)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> step = fs.value_and_grad(lambda params, x: (x @ fs.gather(params)["w"]).sum())
    >>> report = assert_step(step, params, torch.ones(8, 4096), mesh={"shard": 4}, collectives=3)
    >>> assert_step(step, params, torch.ones(8, 4096), mesh={"shard": 4}, collectives={"shard": {"['w']": 1}})
    Traceback (most recent call last):
    AssertionError: assert_step: the step is not as expected
    ...
    -sent over shard for ['w']: 1 collective
    +sent over shard for ['w']: 2 collectives, 24576 bytes
     sent over shard for objective: 1 collective, 0 bytes
    """
    check_flags(API_NAME, update=update)
    counts = _name_rows("collectives", collectives, mesh)
    limits = _name_rows("bytes_sent", bytes_sent, mesh)
    if peak_bytes is not None:
        check_numbers(API_NAME, NOT_NEGATIVE, peak_bytes=peak_bytes)
        limits["peak"] = peak_bytes
    path = _check_path(snapshot, update)
    saved = None if path is None or update else _read_snapshot(path)

    report = fs.check(step, state, *batch, mesh=mesh, **options)
    failures = [str(problem) for problem in report.problems]
    rows: Rows = {}
    # A step that fshard refuses while it is traced has no plan.
    if report.plan is not None:
        costs = _list_costs(report.plan)
        rows = {"mesh": ", ".join(f"{axis} {size}" for axis, size in mesh.items())}
        rows |= {row: str(cost) for row, cost in costs.items()}
        expected = rows if saved is None else _allow_peak(saved, rows, report.plan.peak_bytes)
        unmet = _list_unmet(costs, counts, limits)
        failures += difflib.unified_diff(
            _list_lines(expected | unmet), _list_lines(rows), "expected", "got", n=_CONTEXT, lineterm=""
        )
        if expected != rows:
            failures.append(f"To fix: mend the step. If it is meant to change, write {path} anew with update=True.")
    if failures:
        raise AssertionError("\n".join([f"{API_NAME}: the step is not as expected", *failures]))
    if update and path is not None:
        _write_snapshot(path, rows)
    return report


def _name_rows(argument: str, given: Any, mesh: Any) -> dict[str, float]:
    """Name the row of the contract that each number of an argument is for."""
    if given is None:
        return {}
    numbers: dict[str, Any] = {}
    if not isinstance(given, Mapping):
        numbers["sent"] = given
        given = {}
    for axis, value in given.items():
        is_axis = isinstance(mesh, Mapping) and axis in mesh
        expect(is_axis, API_NAME, f"{argument} by names of the axes of the mesh", f"{axis!r:.40}")
        if not isinstance(value, Mapping):
            numbers[f"sent over {axis}"] = value
            continue
        for part, number in value.items():
            numbers[f"sent over {axis} {'by' if part in _OPS else 'for'} {part}"] = number
    expect(numbers, API_NAME, f"{argument} to have a number", "none", "pass 0 for none, or None to compare nothing")
    for number in numbers.values():
        check_numbers(API_NAME, NOT_NEGATIVE, **{argument: number})
    return numbers


def _check_path(snapshot: Any, update: bool) -> Path | None:
    """Check where the snapshot is, or is to be; None where there is none."""
    if snapshot is None:
        expect(not update, API_NAME, "snapshot to be the path of the file to update", "None")
        return None
    expect(isinstance(snapshot, str | os.PathLike), API_NAME, "snapshot to be a path or None", describe(snapshot))
    path = Path(snapshot)
    expect(not path.is_dir(), API_NAME, "snapshot to be a file", f"the directory {path}")
    return path


class _Cost(NamedTuple):
    """What a row of the contract stands for.

    Attributes:
        bytes: Bytes sent or held.
        collectives: How many collectives send them; None for bytes that are held.
    """

    bytes: float
    collectives: int | None = None

    def __str__(self) -> str:
        nbytes = f"{self.bytes:.0f} bytes"
        return nbytes if self.collectives is None else f"{_write_count(self.collectives)}, {nbytes}"


def _write_count(collectives: float) -> str:
    return "1 collective" if collectives == 1 else f"{collectives} collectives"


def _list_costs(plan: Any) -> dict[str, _Cost]:
    """List what is held at the peak by use, and what is sent by axis, by op, and by unit."""
    costs = {"peak": _Cost(plan.peak_bytes)}
    for use, nbytes in plan.peak._asdict().items():
        costs[f"peak of {use.replace('_', ' ')}"] = _Cost(nbytes)
    groups = {"sent": fs.comm.Record()}
    for axis in plan.mesh:
        groups[f"sent over {axis}"] = fs.comm.Record()
    for entry in plan.collectives():
        over = f"sent over {entry.axis}"
        for row in ("sent", over, f"{over} by {entry.op}", f"{over} for {entry.unit or entry.label}"):
            groups.setdefault(row, fs.comm.Record()).append(entry)
    for row, entries in groups.items():
        costs[row] = _Cost(entries.bytes_sent(), len(entries))
    return costs


def _list_unmet(costs: Mapping[str, _Cost], counts: dict[str, float], limits: dict[str, float]) -> Rows:
    """Write what was expected of each row that breaks a count or a limit."""
    unmet: Rows = {}
    for row in counts | limits:
        # A unit that sends nothing has no row: its name may be misspelled.
        cost = costs.get(row, _Cost(math.inf, 0))
        texts = []
        if counts.get(row, cost.collectives) != cost.collectives:
            texts.append(_write_count(counts[row]))
        if cost.bytes > limits.get(row, math.inf):
            texts.append(f"at most {limits[row]:.0f} bytes")
        if texts:
            unmet[row] = ", ".join(texts)
    return unmet


def _list_lines(rows: Rows) -> list[str]:
    return [f"{name}: {rows[name]}" for name in sorted(rows)]


def _read_snapshot(path: Path) -> Rows:
    """Read the rows of a snapshot; lines of other texts become rows that no step has."""
    if not path.exists():
        remedy = "Pass update=True once to write it, read it, and commit it with the test."
        raise FileNotFoundError(f"{API_NAME}: there is no snapshot {path}. {remedy}")
    rows: Rows = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, text = line.rpartition(": ")
            rows[name] = text
    return rows


def _allow_peak(saved: Rows, rows: Rows, peak: int) -> Rows:
    """Return the rows of a snapshot, with those of this peak instead of its own if the two hardly differ."""
    number, _, _ = saved.get("peak", "").partition(" ")
    if not number.isdecimal() or abs(peak - int(number)) > _PEAK_TOLERANCE * int(number):
        return saved
    return saved | {name: text for name, text in rows.items() if name.startswith("peak")}


def _write_snapshot(path: Path, rows: Rows) -> None:
    """Write a snapshot, and its folder if there is none; the old one stays whole until the new one is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{uuid4().hex}")
    draft.write_text(_HEADER + "\n".join(_list_lines(rows)) + "\n", encoding="utf-8")
    draft.replace(path)
