"""diff: runs two versions of a step, and names the first operation whose result differs."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

import fshard as fs
from fshard.ext._compat import origin_of
from fshard.ext.replay.observed_run import is_empty, run_step
from fshard.ext.replay.operations import Name, OperationReport, Operations
from fshard.extend import POSITIVE, calling, check_numbers, flatten, graph_nodes, ranks_of

# A report shows so many leaves, or lines, of a kind.
_MAX_SHOWN = 6
# The phase of what a step returns; its module is the path.
_RESULT = "result"


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
    lines = [f"{title}:", *(f"  {entry}" for entry in entries[:_MAX_SHOWN])]
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
        axes = flatten((args, args_b)).axes
        first = Operations("diff", axes, step_a, args)
        second = Operations("diff", axes, step_b, args if args_b is None else args_b)
        return _compare_versions(first, second, bound)


def _compare_versions(first: Operations, second: Operations, bound: float) -> Difference:
    """Run two versions, and report on all ranks where the second differs from the first."""
    names_first, names_second = _select_names(first, second)
    rows = []
    beyond = []
    for node, phase, place, difference in _find_differences(first, second, names_first, names_second):
        rows.append((phase, place, difference))
        if phase != _RESULT and difference > bound:
            beyond.append((node, f"differs by {difference:.3g} of its largest value"))
    report = second.report_first(*beyond[0]) if beyond else second.report_first(None)
    counts_first = _count_operators(names_first, names_second)
    counts_second = _count_operators(names_second, names_first)
    surplus_first = _list_counts(counts_first - counts_second)
    surplus_second = _list_counts(counts_second - counts_first)
    of_ranks = second.gather([rows, surplus_first, surplus_second])
    largest: dict[tuple[str, str], float] = {}
    for rows_of_rank, *_ in of_ranks:
        for phase, place, difference in rows_of_rank:
            largest[phase, place] = max(difference, largest.get((phase, place), 0.0))
    growth = {}
    leaves = {}
    for key, difference in largest.items():
        if key[0] != _RESULT:
            growth[key] = difference
    for (phase, path), difference in sorted(largest.items(), key=lambda entry: -entry[1]):
        if phase == _RESULT and difference > bound:
            leaves[path] = difference
    _, only_first, only_second = of_ranks[0]
    return Difference(bound, report, growth, leaves, only_first, only_second)


def _find_differences(
    first: Operations,
    second: Operations,
    names_first: Mapping[Node, Name],
    names_second: Mapping[Node, Name],
) -> Iterator[tuple[Node, str, str, float]]:
    """Run two versions, and compare the results of the second with those of the first.

    Yields:
        For each operation of both versions its node, phase and submodule, and the difference; then for what a step
        returns the node, _RESULT, the path and the difference.
    """
    shared = set(names_first.values()) & set(names_second.values())
    have_one_layout = _layout_of(first) == _layout_of(second)
    if not have_one_layout:
        # Updates compute with shards, which may have one shape and other elements.
        shared = {name for name in shared if name.phase != "update"}
    # Results of the first version by the names of operations, or the paths of what it returns.
    expected: dict[Any, Sequence[torch.Tensor]] = {}
    for node, operands, results in run_step(first):
        if names_first.get(node) in shared:
            expected[names_first[node]] = [tensor.clone() for tensor in results]
        results_of_step = operands
    if have_one_layout:
        # The last node is the output.
        for source, value in results_of_step.items():
            expected[first.result_paths[source]] = [value]
    for node, operands, results in run_step(second):
        name: Any = names_second.get(node)
        for difference in _list_differences(expected.pop(name, ()), results):
            yield node, name.phase, name.module, difference
        results_of_step = operands
    for source, value in results_of_step.items():
        path = second.result_paths[source]
        for difference in _list_differences(expected.get(path, ()), [value]):
            yield source, _RESULT, path, difference


def _layout_of(operations: Operations) -> list[Any]:
    """Return how the leaves of a step's arguments are split."""
    layout = []
    for leaf in operations.flat.sharded:
        layout.append((leaf.spec.partition, leaf.local.shape))
    return layout


def _select_names(first: Operations, second: Operations) -> list[dict[Node, Name]]:
    """Name the operations of two versions that compute something: no views, collectives, arrivals or empty memory.

    Where the versions have other numbers of microbatches, names have the numbers in the whole job, and other operations
    than those of the program are left out, because what sums microbatches up differs.
    """
    are_alike = first.microbatches == second.microbatches
    selected = []
    for operations in (first, second):
        numbers: Sequence[int] = range(operations.microbatches)
        if not are_alike:
            count_of_job = operations.microbatches * ranks_of(None).size
            numbers = fs.microbatches(range(count_of_job), like=operations.flat.sharded)
        names = {}
        for node, name in operations.names.items():
            is_compared = are_alike or bool(name.module) or origin_of(node).is_users
            if is_compared and _computes(operations, node):
                names[node] = name._replace(microbatch=numbers[name.microbatch])
        selected.append(names)
    return selected


def _computes(operations: Operations, node: Node) -> bool:
    moves = node in operations.collectives or graph_nodes.is_wait(node) or graph_nodes.is_view(node)
    return node.op == "call_function" and not moves and not is_empty(node)


def _count_operators(names: Mapping[Node, Name], others: Mapping[Node, Name]) -> Counter[tuple[str, str]]:
    """Count operators by the lines of the program, in the microbatches that another version has too."""
    numbers = {name.microbatch for name in others.values()}
    counts: Counter[tuple[str, str]] = Counter()
    for name in names.values():
        if name.microbatch in numbers:
            counts[name.line or name.phase, name.operator] += 1
    return counts


def _list_counts(counts: Mapping[tuple[str, str], int]) -> list[str]:
    """List the operators of each line."""
    lines: dict[str, list[str]] = {}
    for (line, operator), count in counts.items():
        lines.setdefault(line, []).append(f"{count} {operator}")
    return [f"{line}: {', '.join(texts)}" for line, texts in lines.items()]


def _list_differences(expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]) -> list[float]:
    """Find the largest difference of tensors of floating-point numbers that have one shape, if there are any."""
    differences = []
    for one, other in zip(expected, actual, strict=False):
        are_numbers = one.is_floating_point() and other.is_floating_point()
        if are_numbers and one.shape == other.shape:
            differences.append(_compare_tensors(one, other))
    return sorted(differences)[-1:]


def _compare_tensors(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the largest difference of any element, divided by the largest absolute value that is expected."""
    if torch.equal(expected, actual):
        return 0.0
    expected = expected.double()
    actual = actual.double()
    # Equal infinities, as in masks, do not differ, and neither does NaN from NaN.
    is_equal = (expected == actual) | (expected.isnan() & actual.isnan())
    distance = (expected - actual).abs().masked_fill(is_equal, 0.0).max()
    scale = expected.masked_fill(~expected.isfinite(), 0.0).abs().max()
    # Where nothing is finite, or all that is is 0, every difference is infinite.
    return (distance / scale).nan_to_num(math.inf, math.inf).item() if distance else 0.0
