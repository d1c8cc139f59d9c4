"""The table of faults: what is planted, what a report should say, what it says, and replays without a fault."""

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fshard as fs
from fshard.extend import flatten
from fshard.rounding import tolerance
from fshard.testing import spmd
from tests.ext.replay.inject import Fault, Recorded, watching
from tests.ext.replay.planted_steps import BLOCKS, PLACES, STEPS, Change, Setting, line_of, make
from tests.ext.replay.planted_steps import __file__ as STEPS_FILE

# The tool that each kind of fault is for.
TOOLS = {"nan": "replay", "inf": "replay", "bit": "verify", "changed": "diff"}
# Of a place of torch's operators the forward's line is marked.
MARKS = {"gelu": "gelu", "gelu_backward": "gelu"}
QUESTIONS = ("found", "rank", "unit", "operator", "line", "module", "leaf")
TRIES = 20
SECONDS = 300.0
# The largest part of the largest element by which results of two versions may differ.
BOUND = 1e-6


class Case(NamedTuple):
    """A fault of the table."""

    step: str  # one of STEPS
    world: int  # the number of ranks
    place: str  # one of PLACES, or an operator of torch
    kind: str  # one of TOOLS
    seed: int  # chooses rank, call and element


class Truth(NamedTuple):
    """What a report should say of a fault; texts are empty where there is nothing to ask."""

    rank: int
    operator: str
    line: int  # the number of the line in planted_steps.py
    module: str
    unit: str  # the unit; "-" for the one of all leaves outside of blocks
    leaf: str  # the leaf's name


class Answer(NamedTuple):
    """How a case went."""

    case: Case
    truth: Truth  # what the report should say
    right: dict[str, bool]  # which of QUESTIONS the report answers rightly; those that were not asked are left out
    report: str  # the report's text


def list_cases() -> list[Case]:
    """List the cases of the table: each kind of fault at each place of each kind of step, and of torch's operators."""
    rows = [(*row, 0) for row in product(STEPS, PLACES, TOOLS)]
    rows += [(*row, 1) for row in product(STEPS, PLACES, ("bit",))]
    rows += [(*row, 2) for row in product(STEPS, MARKS, ("nan", "bit"))]
    cases = []
    for number, (step, place, kind, _) in enumerate(rows):
        # Neighbours differ in the number of ranks, and so do the kinds of one place.
        world = (2, 4)[(number + number // 4) % 2]
        cases.append(Case(step, world, place, kind, number))
    return cases


def choose(records: Sequence[Recorded], case: Case, draw: random.Random) -> tuple[Recorded, int]:
    """Choose a call of a place, and say in which block it is."""
    calls = [record for record in records if record.call.place == case.place]
    first = [record for record in calls if not record.call.occurrence]
    record = draw.choice(calls if _may_recur(case) else first)
    if case.place not in MARKS:
        return record, record.call.index
    order = [each.call.digest for each in first]
    # Blocks run in order in the forward and back in the backward, for one microbatch after another.
    position = order.index(record.call.digest) % BLOCKS
    return record, position if case.place == "gelu" else BLOCKS - 1 - position


def _may_recur(case: Case) -> bool:
    """Whether a fault may be in the second computation of a value alone."""
    return case.step == "recomputed" and case.place in ("activation", "gelu") and case.kind != "changed"


def find_truth(setting: Setting, case: Case, record: Recorded, rank: int, block: int) -> Truth:
    """Say what a report should say of a call, from what a run without a fault recorded."""
    in_blocks = case.place not in ("gathered", "reduced", "optimizer") and case.step != "pipeline"
    operator = case.place if case.place in MARKS else "plant"
    line = line_of(MARKS.get(case.place, case.place), case.step)
    module = f"blocks.{block}" if in_blocks else ""
    leaf = ""
    if case.place == "optimizer":
        leaf = _name_state_leaf(setting, record.call.index)
    if case.place == "reduced":
        leaf = _name_gradient(setting, block, record.result)
    return Truth(rank, operator, line, module, _name_unit(case, block, leaf), leaf)


def _name_unit(case: Case, block: int, leaf: str) -> str:
    if case.step == "pipeline":
        return ""
    if case.place == "optimizer":
        named = re.match(r"blocks\.\d+", leaf)
        return named[0] if named else "-"
    return f"blocks.{block}" if block < BLOCKS else "-"


def _name_state_leaf(setting: Setting, index: int) -> str:
    return _last_key(_planted_paths(setting)[index])


def _planted_paths(setting: Setting) -> list[str]:
    """The paths of the leaves of the optimizer's state that have dims, in the order of their places."""
    flat = flatten(setting.state.opt_state)
    return [path for path, leaf in zip(flat.paths, flat.leaves, strict=True) if getattr(leaf, "local", leaf).dim()]


def _name_gradient(setting: Setting, index: int, reduced: torch.Tensor) -> str:
    """Name the gradient of a unit that is a multiple of a reduced tensor; "" if none is, or if several are."""
    flat = flatten(setting.gradients(setting.state.params, setting.batch)[1])
    names = []
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        name = _last_key(path)
        is_of_unit = next(number for number, unit in enumerate(setting.units) if fnmatch(name, unit)) == index
        if is_of_unit and leaf.local.shape == reduced.shape:
            cosine = torch.cosine_similarity(leaf.local.flatten(), reduced.flatten(), dim=0)
            if abs(float(cosine) - 1) <= tolerance(torch.float32, reduced.numel()):
                names.append(name)
    return names[0] if len(names) == 1 else ""


def _last_key(path: str) -> str:
    return ".".join(re.findall(r"'([^']+)'", path))


def plan_changes(case: Case) -> tuple[Truth, tuple[Setting, Setting]]:
    """Make two versions of a step, of which the second computes something else on one rank."""
    draw = random.Random(case.seed)
    rank = draw.randrange(case.world)
    before = make(case.step, Change(case.place, -1))
    index = draw.randrange(BLOCKS if case.place != "optimizer" else len(_planted_paths(before)))
    after = make(case.step, Change(case.place, index if dist.get_rank() == rank else -1))
    mark, operator = ("gelu", "gelu") if case.place == "activation" else (f"changed {case.place}", "mul")
    in_blocks = case.place in ("activation", "gradient") and case.step != "pipeline"
    leaf = _name_state_leaf(before, index) if case.place == "optimizer" else ""
    truth = Truth(
        rank,
        operator,
        line_of(mark, case.step),
        f"blocks.{index}" if in_blocks else "",
        _name_unit(case, index, leaf),
        leaf,
    )
    return _tell(truth, rank), (before, after)


def is_finite(tree: Any) -> bool:
    leaves = [leaf for leaf in fs.tree_leaves(tree) if leaf.is_floating_point()]
    return all(bool(leaf.isfinite().all()) for leaf in leaves)


def plan_fault(setting: Setting, records: Sequence[Recorded], case: Case) -> tuple[Truth, Fault | None]:
    """Choose the rank, the call and the element of a fault that shows in the results of a step.

    Returns:
        What a report should say, on every rank, and the fault on its rank.
    """
    rank = random.Random(case.seed).randrange(case.world)
    for attempt in range(TRIES):
        draw = random.Random(1000 * attempt + case.seed)
        record, block = choose(records, case, draw)
        per_step = 1
        if _may_recur(case):
            per_step = sum(each.call[:3] == record.call[:3] for each in records)
        fault = Fault(record.call, case.kind, draw.randrange(2**20), per_step)
        mine = fault if dist.get_rank() == rank else None
        if case.kind == "bit" or _shows(setting, mine):
            return _tell(find_truth(setting, case, record, rank, block), rank), mine
    raise AssertionError(f"{case} changes no result")


def _shows(setting: Setting, fault: Fault | None) -> bool:
    """Whether some rank's results are not finite."""
    if fault is None:
        results = setting.plain(setting.state, setting.batch)
    else:
        with watching(fault) as planted:
            results = setting.plain(setting.state, setting.batch)
        assert planted.fired, fault
    return not all(_gather(is_finite(results)))


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _tell(truth: Truth, rank: int) -> Truth:
    """The truth of the fault's rank, on every rank."""
    return _gather(truth)[rank]


def group_cases(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """Group cases by step, number of ranks and tool."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        groups[f"{case.step}, {case.world} ranks, {TOOLS[case.kind]}"].append(case)
    return groups


def run_group(group: Sequence[Case], seconds: float = SECONDS) -> list[Answer]:
    """Run the cases of one group on simulated ranks, for at most so many seconds."""
    first, *others = spmd(partial(_answer_all, group), group[0].world, timeout=seconds)
    for answers in others:
        assert [answer.report for answer in answers] == [answer.report for answer in first], "reports differ"
    return first


def _answer_all(cases: Sequence[Case]) -> list[Answer]:
    """Answer cases of one kind of step, on every rank."""
    if TOOLS[cases[0].kind] == "diff":
        return [_answer_change(case) for case in cases]
    setting = make(cases[0].step)
    with watching() as recording:
        setting.plain(setting.state, setting.batch)
    return [_answer_fault(setting, recording.records, case) for case in cases]


def _answer_change(case: Case) -> Answer:
    truth, (before, after) = plan_changes(case)
    difference = fs.diff(before.step, after.step, before.state, before.batch, bound=BOUND)
    return Answer(case, truth, judge(difference.first, truth), str(difference))


def _answer_fault(setting: Setting, records: Sequence[Recorded], case: Case) -> Answer:
    truth, fault = plan_fault(setting, records, case)
    tool: Callable[..., Any] = getattr(fs, TOOLS[case.kind])
    if fault is None:
        report = tool(setting.step, setting.state, setting.batch)
    else:
        with watching(fault) as planted:
            report = tool(setting.step, setting.state, setting.batch)
        assert planted.fired, "the fault was not in the run"
    return Answer(case, truth, judge(report, truth), str(report))


def judge(report: Any, truth: Truth) -> dict[str, bool]:
    """Say which questions a report answers rightly; those that have no answer are left out."""
    if report is None:
        return {name: False for name in QUESTIONS if getattr(truth, name, "found") != ""}
    # The innermost line; of an operation of the backward that of its forward.
    lines = [*report.at, *report.backward_of, ""]
    right = {
        "found": True,
        "rank": report.ranks == (truth.rank,),
        "operator": report.operator.rpartition(".")[2] == truth.operator,
        "line": lines[0].startswith(f"{Path(STEPS_FILE).name}:{truth.line} "),
    }
    if truth.unit:
        # "-" is the unit of all leaves outside of blocks.
        right["unit"] = "blocks." not in report.unit if truth.unit == "-" else report.unit == truth.unit
    if truth.module:
        right["module"] = report.module == truth.module
    if truth.leaf:
        right["leaf"] = truth.leaf in report.leaf.replace("']['", ".")
    return right


def replay_clean(name: str, count: int, seconds: float = SECONDS) -> list[str]:
    """Replay so many steps of a model of transformers, each from the state that the last one led to.

    Returns:
        The reports, each of which is a false alarm.
    """
    # transformers may be missing, and takes seconds to import.
    from tests.ext import test_architectures as architectures

    case = architectures.CASES[name]
    module = case.build(torch.float64)
    batches = case.batches()

    def replay_all() -> list[str]:
        state, step = architectures.begun(module)
        reports = []
        for number in range(count):
            batch = batches[number % len(batches)][dist.get_rank()]
            reports.append(fs.replay(step, state, batch))
            state = step(state, batch)[0]
        return [str(report) for report in reports if report is not None]

    return spmd(replay_all, architectures.RANKS, timeout=seconds)[0]
