"""Runs cases of the table of faults, and judges the reports."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fshard as fs
from fshard.testing import spmd
from tests.ext.replay.cases import QUESTIONS, TOOLS, Answer, Case, Truth, is_in_unit, plan_changes, plan_fault
from tests.ext.replay.inject import watching
from tests.ext.replay.planted_steps import Setting, make
from tests.ext.replay.planted_steps import __file__ as STEPS_FILE

FILE = Path(STEPS_FILE).name
SECONDS = 600.0
# The largest part of the largest element by which results of two versions may differ.
BOUND = 1e-6


def group_cases(cases: Iterable[Case]) -> list[list[Case]]:
    """Group cases by step, number of ranks and tool."""
    groups: dict[tuple[str, int, str], list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.step, case.world, TOOLS[case.kind]].append(case)
    return list(groups.values())


def run_group(group: Sequence[Case], seconds: float = SECONDS) -> list[Answer]:
    """Run the cases of one group on simulated ranks, for at most so many seconds."""
    world = group[0].world
    first, *others = spmd(partial(_answer_all, group), world, timeout=seconds)
    for answers in others:
        for mine, other in zip(first, answers, strict=True):
            assert mine.report == other.report, "reports differ between ranks"
    return first


def _answer_all(cases: Sequence[Case]) -> list[Answer]:
    """Answer cases of one kind of step, on every rank."""
    setting = make(cases[0].step)
    return [_answer(setting, case) for case in cases]


def _answer(setting: Setting, case: Case) -> Answer:
    if TOOLS[case.kind] == "diff":
        truth, (before, after) = plan_changes(case)
        report = fs.diff(before.step, after.step, before.state, before.batch, bound=BOUND)
        return Answer(case, truth, judge(report, truth), str(report))
    truth, fault = plan_fault(setting, case)
    tool: Callable[..., Any] = fs.replay if TOOLS[case.kind] == "replay" else fs.verify
    if fault is None:
        report = tool(setting.step, setting.state, setting.batch)
    else:
        with watching(fault) as planted:
            report = tool(setting.step, setting.state, setting.batch)
        assert planted.fired, "the fault was not in the run"
    return Answer(case, truth, judge(report, truth), str(report))


def judge(report: Any, truth: Truth) -> dict[str, bool]:
    """Say which questions a report of one of the tools answers rightly."""
    if hasattr(report, "first"):
        place = report.first
    else:
        place = getattr(report, "place", report)
    if place is None:
        asked = [name for name in QUESTIONS if getattr(truth, name, "found") != ""]
        return dict.fromkeys(asked, False)
    right = {
        "found": True,
        "rank": place.ranks == (truth.rank,),
        "operator": place.operator.rpartition(".")[2] == truth.operator,
        "line": _innermost_line(place) == f"{FILE}:{truth.line}",
    }
    if truth.unit:
        right["unit"] = is_in_unit(place.unit, truth.unit)
    if truth.module:
        right["module"] = place.module == truth.module
    if truth.leaf:
        right["leaf"] = truth.leaf in place.leaf.replace("']['", ".")
    return right


def _innermost_line(place: Any) -> str:
    """The file and the number of the innermost line of a place; of an operation of the backward that of its forward."""
    frames = (*place.frames, *place.forward)
    return f"{Path(frames[0].file).name}:{frames[0].line}" if frames else ""
