"""diff: runs two versions of a step, and names the first operation whose result differs."""

import math
from collections import Counter, defaultdict
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
        sections = {
            "Results that differ": [f"{path} by {difference:.3g}" for path, difference in self.leaves.items()],
            "In the first version alone": self.only_first,
            "In the second version alone": self.only_second,
        }
        for title, entries in sections.items():
            if entries:
                lines.append(f"{title}:")
            lines += [f"  {entry}" for entry in entries[:_MAX_SHOWN]]
            if len(entries) > _MAX_SHOWN:
                lines.append(f"  and {len(entries) - _MAX_SHOWN} more")
        return "\n".join(lines)


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
    names_first = _name_operations(first, second)
    names_second = _name_operations(second, first)
    rows = []
    node_beyond = None
    size_beyond = 0.0
    for node, name, size in _find_differences(first, second, names_first, names_second):
        rows.append((name.phase, name.module, size))
        if node_beyond is None and size > bound and name.phase != _RESULT:
            node_beyond = node
            size_beyond = size
    report = second.report_first(node_beyond, f"differs by {size_beyond:.3g} of its largest value")
    surplus_first = _list_surplus(names_first, names_second)
    surplus_second = _list_surplus(names_second, names_first)
    of_ranks = second.gather([rows, surplus_first, surplus_second])
    largest = defaultdict[tuple[str, str], float](float)
    for rows_of_rank, *_ in of_ranks:
        for phase, place, size in rows_of_rank:
            largest[phase, place] = max(size, largest[phase, place])
    ranked = sorted(largest.items(), key=lambda entry: -entry[1])
    growth = {place: size for place, size in largest.items() if place[0] != _RESULT}
    leaves = {path: size for (phase, path), size in ranked if phase == _RESULT and size > bound}
    _, only_first, only_second = of_ranks[0]
    return Difference(bound, report, growth, leaves, only_first, only_second)


def _find_differences(
    first: Operations,
    second: Operations,
    names_first: Mapping[Node, Name],
    names_second: Mapping[Node, Name],
) -> Iterator[tuple[Node, Name, float]]:
    """Run two versions, and compare the results of the second with those of the first.

    Yields:
        For each tensor of floating-point numbers that both have its node, its name and the difference.
    """
    # Updates compute with shards, which may have one shape and other elements.
    left_out = () if _layout_of(first) == _layout_of(second) else ("update", _RESULT)
    names = set(names_second.values())
    expected = {}
    for _, name, tensors in _list_values(first, names_first):
        if name.phase not in left_out and (name in names or name.phase == _RESULT):
            expected[name] = [tensor.clone() for tensor in tensors]
    for node, name, tensors in _list_values(second, names_second):
        for one, other in zip(expected.pop(name, ()), tensors, strict=False):
            are_numbers = one.is_floating_point() and other.is_floating_point()
            if are_numbers and one.shape == other.shape:
                yield node, name, _compare_tensors(one, other)


def _list_values(
    operations: Operations, names: Mapping[Node, Name]
) -> Iterator[tuple[Node, Name, Sequence[torch.Tensor]]]:
    """Run a version, and list the results of its operations, then what it returns."""
    for node, operands, results in run_step(operations):
        if node in names:
            yield node, names[node], results
        if node.op == "output":
            for source, value in operands.items():
                yield source, Name("", operations.result_paths[source], _RESULT, 0, ""), [value]


def _layout_of(operations: Operations) -> list[Any]:
    """Return how the leaves of a step's arguments are split."""
    return [(leaf.spec.partition, leaf.local.shape) for leaf in operations.flat.sharded]


def _name_operations(operations: Operations, other: Operations) -> dict[Node, Name]:
    """Name the operations of a version that compute something: no views, collectives, arrivals or empty memory.

    Where the other version has another number of microbatches, names have the numbers in the whole job, and other
    operations than those of the program are left out, because what sums microbatches up differs.
    """
    are_alike = operations.microbatches == other.microbatches
    numbers: Sequence[int] = range(operations.microbatches)
    if not are_alike:
        count_of_job = operations.microbatches * ranks_of(None).size
        numbers = fs.microbatches(range(count_of_job), like=operations.flat.sharded)
    names = {}
    for node in operations.nodes:
        moves = node in operations.collectives or graph_nodes.is_wait(node) or graph_nodes.is_view(node)
        if node.op != "call_function" or moves or is_empty(node):
            continue
        name = operations.names[node]
        if are_alike or name.module or origin_of(node).is_users:
            names[node] = name._replace(microbatch=numbers[name.microbatch])
    return names


def _list_surplus(names: Mapping[Node, Name], others: Mapping[Node, Name]) -> list[str]:
    """List the operators of each line that a version has more of, in the microbatches that both have."""
    microbatches = {name.microbatch for name in names.values()} & {name.microbatch for name in others.values()}
    surplus: dict[str, Counter[str]] = defaultdict(Counter)
    for sign, version in ((1, names), (-1, others)):
        for name in version.values():
            if name.microbatch in microbatches:
                surplus[name.line or name.phase][name.operator] += sign
    lines = []
    for line, counts in surplus.items():
        texts = [f"{count} {operator}" for operator, count in counts.items() if count > 0]
        if texts:
            lines.append(f"{line}: {', '.join(texts)}")
    return lines


def _compare_tensors(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the largest difference of any element, divided by the largest absolute value that is expected."""
    if torch.equal(expected, actual):
        return 0.0
    expected = expected.double()
    actual = actual.double()
    # Equal infinities, as in masks, do not differ, and neither does NaN from NaN.
    is_equal = torch.isclose(expected, actual, rtol=0.0, atol=0.0, equal_nan=True)
    distance = (expected - actual).abs().masked_fill(is_equal, 0.0).max()
    scale = expected.nan_to_num(0.0, 0.0, 0.0).abs().max()
    # Where nothing is finite, or all that is is 0, every difference is infinite.
    return (distance / scale).nan_to_num(math.inf, math.inf).item() if distance else 0.0
