"""diff: runs two versions of a step, and names the first operation whose result differs."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

import fshard as fs
from fshard.ext._compat import origin_of
from fshard.ext.replay.observed_run import TracedCall, is_empty, run_call, trace_call
from fshard.ext.replay.operations import Name, OperationReport, Operations
from fshard.extend import POSITIVE, calling, check_numbers, flatten, graph_nodes, ranks_of

# A report shows so many leaves, or lines, of a kind.
_MAX_SHOWN = 6


class Difference(NamedTuple):
    """How two versions of a step differ, as `diff` returns it; equal on every rank. Print it.

    Attributes:
        bound: The bound.
        first: The first operation of the second version whose result differs by more than the bound; None if none does.
        growth: For each phase and submodule (empty outside of models) the largest difference of a result, relative to
            the largest value of that result in the first version, in the order in which they run.
        leaves: The paths of results of the step that differ by more than the bound, and by how much, the largest first.
        only_first: What the first version alone computes on the first rank: operators, and lines of the program.
        only_second: What the second version alone computes there.
    """

    bound: float
    first: OperationReport | None
    growth: dict[tuple[str, str], float]
    leaves: dict[str, float]
    only_first: list[str]
    only_second: list[str]

    def __str__(self) -> str:
        """The report."""
        lines = [f"diff: no operation of both versions differs by more than {self.bound:.3g} of its largest value"]
        if self.first is not None:
            lines = [str(self.first)]
        lines.append("The largest difference by module:")
        for (phase, module), difference in self.growth.items():
            lines.append(f"  {phase:10} {module or '(none)':20} {difference:.3g}")
        leaves = [f"{path} by {difference:.3g}" for path, difference in self.leaves.items()]
        lines += _list_entries("Results that differ", leaves)
        lines += _list_entries("In the first version alone", self.only_first)
        lines += _list_entries("In the second version alone", self.only_second)
        return "\n".join(lines)


def _list_entries(title: str, entries: Sequence[str]) -> list[str]:
    """Write a list with a title; of a long one the first entries."""
    if not entries:
        return []
    lines = [f"{title}:"]
    for entry in entries[:_MAX_SHOWN]:
        lines.append(f"  {entry}")
    if len(entries) > _MAX_SHOWN:
        lines.append(f"  and {len(entries) - _MAX_SHOWN} more")
    return lines


def diff(
    step_a: Callable[..., Any],
    step_b: Callable[..., Any],
    *args: Any,
    args_b: Sequence[Any] | None = None,
    bound: float = 1e-5,
) -> Difference:
    """Run two versions of a step, and find the first operation whose result differs by more than a bound.

    The graph of each step runs operator by operator. Operations of both versions are the same if the text of their
    line, their submodule, phase and operator are, and come as often; those of the backward go by the line of their
    forward. A difference is the largest of any element, divided by the largest absolute value of the result in the
    first version. Where leaves are split in another way, as under another strategy, activations, gathered leaves and
    gradients of full tensors are compared, and updates and the leaves that the steps return are not. Where the versions
    have other numbers of microbatches, those of the whole job are compared, as `microbatches` shares them between the
    ranks of each version.

    Args:
        step_a: The first version, such as the one that is right.
        step_b: The second version.
        *args: The arguments of both, such as a state and a batch.
        args_b: Those of the second version, where they differ, as a state under another strategy does.
        bound: The largest difference that is no difference: 1e-5 for other orders of sums in float32, 1e-2 for
            bfloat16.

    Returns:
        What differs. Print it for a report.

    Raises:
        ValueError: if `bound` is not above 0, a step cannot be traced, or ranks make different calls.

    >>> import torch, fshard as fs
    >>> difference = fs.diff(lambda x: 2 * x.sin(), lambda x: 2 * x.tan(), torch.ones(3))
    >>> difference.first.operator, difference.first.verdict, list(difference.leaves)
    ('aten.mul', 'differs by 0.851 of its largest value', ['(root)'])
    """
    check_numbers("diff", POSITIVE, bound=bound)
    with calling("diff", lambda: flatten((args, args_b)).axes):
        first = trace_call("diff", step_a, args)
        second = trace_call("diff", step_b, args if args_b is None else args_b)
        return _VersionComparison(first, second).run(bound)


class _VersionComparison:
    """Compares two calls, the second while it runs."""

    def __init__(self, first: TracedCall, second: TracedCall) -> None:
        axes = flatten((first.flat.leaves, second.flat.leaves)).axes
        self._first = Operations("diff", first, axes)
        self._second = Operations("diff", second, axes)
        self._names_first, self._names_second = _select_names(self._first, self._second)
        self._shared = set(self._names_first.values()) & set(self._names_second.values())
        self._have_one_layout = _layout_of(first) == _layout_of(second)
        # Results of the first version by the names of operations, or the paths of leaves.
        self._expected: dict[Name | str, list[torch.Tensor]] = {}
        # Differences of the second version.
        self._differences: dict[Node, float] = {}
        self._leaves: dict[str, float] = {}

    def run(self, bound: float) -> Difference:
        """Run both calls and compare them."""
        run_call(self._first.call, self._keep)
        run_call(self._second.call, self._compare)
        beyond = [node for node, value in self._differences.items() if value > bound]
        first = beyond[0] if beyond else None
        difference = self._differences[beyond[0]] if beyond else 0.0
        report = self._second.report_first(first, f"differs by {difference:.3g} of its largest value")
        rows = []
        for node, value in self._differences.items():
            name = self._names_second[node]
            rows.append((name.phase, name.module, value))
        growth: dict[tuple[str, str], float] = {}
        largest: dict[str, float] = {}
        surplus_first = _list_surplus(self._names_first, self._names_second)
        surplus_second = _list_surplus(self._names_second, self._names_first)
        of_ranks = self._second.gather([rows, self._leaves, surplus_first, surplus_second])
        for rows_of_rank, leaves_of_rank, *_ in of_ranks:
            for phase, module, value in rows_of_rank:
                key = phase, module
                growth[key] = max(growth.get(key, 0.0), value)
            for path, value in leaves_of_rank.items():
                largest[path] = max(largest.get(path, 0.0), value)
        leaves = {}
        by_size = sorted(largest.items(), key=lambda entry: -entry[1])
        for path, value in by_size:
            if value > bound:
                leaves[path] = value
        return Difference(
            bound=bound,
            first=report,
            growth=growth,
            leaves=leaves,
            only_first=of_ranks[0][2],
            only_second=of_ranks[0][3],
        )

    def _keep(self, node: Node, operands: Mapping[Node, Any], results: Sequence[torch.Tensor]) -> None:
        name = self._names_first.get(node)
        if name is not None and name in self._shared:
            self._expected[name] = [tensor.clone() for tensor in results]
        if node.op == "output":
            for source, value in operands.items():
                self._expected[self._first.result_paths[source]] = [value]

    def _compare(self, node: Node, operands: Mapping[Node, Any], results: Sequence[torch.Tensor]) -> None:
        name = self._names_second.get(node)
        # Updates compute with shards, which may have one shape and other elements.
        if name is not None and (self._have_one_layout or name.phase != "update"):
            differences = _list_differences(self._expected.pop(name, []), results)
            if differences:
                self._differences[node] = max(differences)
        if node.op == "output" and self._have_one_layout:
            for source, value in operands.items():
                path = self._second.result_paths[source]
                differences = _list_differences(self._expected.get(path, []), [value])
                self._leaves[path] = max(differences, default=0.0)


def _layout_of(call: TracedCall) -> list[Any]:
    """Return how the leaves of a call's arguments are split."""
    layout = []
    for leaf in call.flat.sharded:
        layout.append((leaf.spec.partition, leaf.local.shape))
    return layout


def _select_names(first: Operations, second: Operations) -> list[dict[Node, Name]]:
    """Name the operations of two versions that compute something: no views, collectives, arrivals or empty memory.

    Where the versions have other numbers of microbatches, names have the numbers in the whole job, and other operations
    than those of the program are left out, because what sums microbatches up differs.
    """
    versions = (first, second)
    are_alike = first.microbatches == second.microbatches
    numbers = []
    for operations in versions:
        numbers.append(_number_microbatches(operations, of_job=not are_alike))
    shared = set(numbers[0]) & set(numbers[1])
    selected: list[dict[Node, Name]] = []
    for operations, numbers_of_version in zip(versions, numbers, strict=True):
        names = {}
        for node, name in operations.names.items():
            number = numbers_of_version[name.microbatch]
            is_compared = are_alike or bool(name.module) or origin_of(node).is_users
            if number in shared and is_compared and _computes(operations, node):
                names[node] = name._replace(microbatch=number)
        selected.append(names)
    return selected


def _number_microbatches(operations: Operations, *, of_job: bool) -> Sequence[int]:
    """Return the numbers of this rank's microbatches, in the whole job or on this rank."""
    count = operations.microbatches
    if not of_job:
        return range(count)
    count_of_job = count * ranks_of(None).size
    return fs.microbatches(range(count_of_job), like=operations.call.flat.sharded)


def _computes(operations: Operations, node: Node) -> bool:
    moves = node in operations.collectives or graph_nodes.is_wait(node) or graph_nodes.is_view(node)
    return node.op == "call_function" and not moves and not is_empty(node)


def _list_surplus(names: Mapping[Node, Name], others: Mapping[Node, Name]) -> list[str]:
    """List the operators that come more often among some names than among others, with the lines of the program."""
    counts, other_counts = map(_count_operators, (names, others))
    lines: dict[str, list[str]] = {}
    for (line, operator), count in (counts - other_counts).items():
        lines.setdefault(line, []).append(f"{count} {operator}")
    return [f"{line}: {', '.join(texts)}" for line, texts in lines.items()]


def _count_operators(names: Mapping[Node, Name]) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for name in names.values():
        counts[name.line or name.phase, name.operator] += 1
    return counts


def _list_differences(expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]) -> list[float]:
    """List the differences of tensors of floating-point numbers that have one shape."""
    differences = []
    for one, other in zip(expected, actual, strict=False):
        are_numbers = one.is_floating_point() and other.is_floating_point()
        if are_numbers and one.shape == other.shape:
            differences.append(_compare_tensors(one, other))
    return differences


def _compare_tensors(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the largest difference of any element, divided by the largest absolute value that is expected."""
    if torch.equal(expected, actual):
        return 0.0
    expected = expected.double()
    actual = actual.double()
    # Equal infinities, as in masks, do not differ, and neither does NaN from NaN.
    is_equal = (expected == actual) | (expected.isnan() & actual.isnan())
    if is_equal.all():
        return 0.0
    distances = (expected - actual).abs()
    distance = distances.masked_fill(is_equal, 0.0).max().item()
    finite = expected.masked_fill(~expected.isfinite(), 0.0)
    scale = finite.abs().max().item()
    if not scale or not math.isfinite(distance):
        return math.inf
    return distance / scale
