"""diff: runs two versions of a step, and names the first operation whose result differs."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

import fshard as fs
from fshard.ext.replay.places import Name, Operations, Place, list_ranks
from fshard.ext.replay.ranks import Ranks
from fshard.ext.replay.repeat import TracedCall, is_empty, read_generators, run_repeatably, trace_call
from fshard.ext.replay.run import find_in_flight
from fshard.extend import POSITIVE, calling, check_numbers, flatten, graph_nodes, unflatten, without_padding

_API_NAME = "diff"
# A report shows so many lines, or leaves, of a kind.
_MAX_SHOWN = 6


class Growth(NamedTuple):
    """The largest difference among the results of a submodule.

    Attributes:
        phase: "forward", "backward", "recomputed" or "update".
        module: The name of the submodule; empty outside of models.
        difference: The difference, relative to the largest value of the result in the first version.
    """

    phase: str
    module: str
    difference: float


class Difference(NamedTuple):
    """How two versions of a step differ, as `diff` returns it; equal on every rank.

    Attributes:
        bound: The bound.
        first: The first operation of the second version whose result differs by more than the bound, and the ranks on
            which it does; None if none does.
        difference: By how much it differs.
        growth: For each phase of each submodule the largest difference, in the order in which they run.
        leaves: The paths of results that differ by more than the bound, and by how much, the largest first.
        only_first: What the first version alone computes: for each line of the program its operators.
        only_second: What the second version alone computes.
        uncompared: How many operations of both versions have results of other shapes in each, or update leaves that
            are split in another way.
    """

    bound: float
    first: Place | None
    difference: float
    growth: list[Growth]
    leaves: list[tuple[str, float]]
    only_first: list[str]
    only_second: list[str]
    uncompared: int

    def __str__(self) -> str:
        """The report."""
        headline = (
            f"diff: no operation that both versions have differs by more than {self.bound:.3g} of its largest value"
        )
        if self.leaves:
            headline += f", but {len(self.leaves)} results do"
        lines = [headline]
        if self.first is not None:
            operator = f"{self.first.operator} is the first operation that differs by more than {self.bound:.3g}"
            lines = [
                f"diff: {operator} of its largest value: by {self.difference:.3g}, on {list_ranks(self.first.ranks)}"
            ]
            lines.append(str(self.first))
        lines.append("The largest difference by module:")
        lines += [f"  {row.phase:10} {row.module or '(none)':20} {row.difference:.3g}" for row in self.growth]
        for title, entries in (
            ("Results that differ", [f"{path} by {difference:.3g}" for path, difference in self.leaves]),
            ("In the first version alone", self.only_first),
            ("In the second version alone", self.only_second),
        ):
            lines += _list_entries(title, entries)
        if self.uncompared:
            lines.append(f"Not compared, because leaves are split in another way: {self.uncompared} operations")
        return "\n".join(lines)


def _list_entries(title: str, entries: Sequence[str]) -> list[str]:
    """Write a list with a title; of a long one the first entries."""
    if not entries:
        return []
    more = [f"  and {len(entries) - _MAX_SHOWN} more"] if len(entries) > _MAX_SHOWN else []
    return [f"{title}:", *(f"  {entry}" for entry in entries[:_MAX_SHOWN]), *more]


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
    gradients of full tensors are compared, and updates and results of other shapes are counted and not compared. The
    leaves that the steps return are compared in full.

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
    >>> difference.first.operator, round(difference.difference, 2), difference.leaves[0][0]
    ('aten.mul', 0.85, '(root)')
    """
    check_numbers(_API_NAME, POSITIVE, bound=bound)
    with calling(_API_NAME, lambda: flatten((args, args_b)).axes):
        first = trace_call(_API_NAME, step_a, args)
        second = trace_call(_API_NAME, step_b, args if args_b is None else args_b)
        return _VersionComparison(first, second, bound).run()


class _VersionComparison:
    """Compares two calls, the second while it runs."""

    def __init__(self, first: TracedCall, second: TracedCall, bound: float) -> None:
        self._calls = (first, second)
        self._bound = bound
        self._operations = [Operations(first), Operations(second)]
        self._names = [_select_names(operations) for operations in self._operations]
        self._have_one_layout = _layout_of(first) == _layout_of(second)
        self._shared = set(self._names[0].values()) & set(self._names[1].values())
        self._ranks = Ranks(_API_NAME, flatten([call.flat.leaves for call in self._calls]).axes)
        # Results of the first version.
        self._expected: dict[Name, list[torch.Tensor]] = {}
        # Differences of the second version.
        self._differences: dict[Node, float] = {}
        self._uncompared = 0

    def run(self) -> Difference:
        """Run both calls and compare them."""
        states = read_generators()
        results = [
            run_repeatably(self._calls[0], states, self._keep),
            run_repeatably(self._calls[1], states, self._compare),
        ]
        leaves = self._compare_leaves(results)
        first, difference = self._find_first()
        return Difference(
            bound=self._bound,
            first=first,
            difference=difference,
            growth=self._measure_growth(),
            leaves=leaves,
            only_first=self._list_alone(0),
            only_second=self._list_alone(1),
            uncompared=self._uncompared,
        )

    def _keep(self, node: Node, operands: Mapping[Node, Any], results: Sequence[torch.Tensor]) -> None:
        name = self._names[0].get(node)
        if name in self._shared:
            self._expected[name] = [tensor.clone() for tensor in results if tensor.is_floating_point()]

    def _compare(self, node: Node, operands: Mapping[Node, Any], results: Sequence[torch.Tensor]) -> None:
        name = self._names[1].get(node)
        if name not in self._shared:
            return
        expected = self._expected.pop(name)
        actual = [tensor for tensor in results if tensor.is_floating_point()]
        # Updates compute with shards, which may have one shape and other elements.
        is_comparable = self._have_one_layout or name.phase != "update"
        if not is_comparable or [tensor.shape for tensor in expected] != [tensor.shape for tensor in actual]:
            self._uncompared += 1
        elif actual:
            self._differences[node] = max(map(_difference, expected, actual))

    def _find_first(self) -> tuple[Place | None, float]:
        """Find the first operation that differs on any rank."""
        beyond = (node for node, difference in self._differences.items() if difference > self._bound)
        node = next(beyond, None)
        facts = [] if node is None else [self._differences[node]]
        first = self._ranks.find_first(self._operations[1], node, facts)
        if first is None:
            return None, 0.0
        place, (difference,) = first
        return place, difference

    def _measure_growth(self) -> list[Growth]:
        """Find the largest difference of each phase of each module, on any rank."""
        names = self._names[1]
        rows = [(f"{names[node].phase} {names[node].module}", value) for node, value in self._differences.items()]
        growth = []
        for key, difference in self._find_largest(rows).items():
            phase, _, module = key.partition(" ")
            growth.append(Growth(phase, module, difference))
        return growth

    def _find_largest(self, differences: Sequence[tuple[str, float]]) -> dict[str, float]:
        """Find the largest of the differences of a name, on any rank."""
        largest: dict[str, float] = {}
        for name, difference in itertools.chain.from_iterable(self._ranks.gather(differences)):
            largest[name] = max(largest.get(name, 0.0), difference)
        return largest

    def _compare_leaves(self, results: Sequence[Sequence[Any]]) -> list[tuple[str, float]]:
        """Compare the leaves of the results that both versions return, in full."""
        first, second = map(_name_leaves, self._calls, results)
        differences = []
        # Ranks unshard leaves in one order.
        for path in sorted(first.keys() & second.keys()):
            expected, actual = _make_comparable(first[path], second[path])
            if expected.shape == actual.shape and expected.is_floating_point():
                differences.append((path, _difference(expected, actual)))
        beyond = [entry for entry in self._find_largest(differences).items() if entry[1] > self._bound]
        return sorted(beyond, key=lambda entry: -entry[1])

    def _list_alone(self, version: int) -> list[str]:
        """List what one version alone computes, by the lines of the program."""
        counts = [Counter(map(_without_number, names.values())) for names in self._names]
        by_line: dict[str, Counter[str]] = {}
        for name, count in counts[version].items():
            surplus = count - counts[1 - version][name]
            if surplus > 0:
                by_line.setdefault(name.line or name.phase, Counter())[name.operator] += surplus
        entries = []
        for line, operators in by_line.items():
            texts = [f"{count} {operator}" for operator, count in operators.items()]
            if len(texts) > _MAX_SHOWN:
                texts[_MAX_SHOWN:] = [f"and {len(texts) - _MAX_SHOWN} other operators"]
            entries.append(f"{line}: {', '.join(texts)}")
        return entries


def _layout_of(call: TracedCall) -> list[Any]:
    """Return how the leaves of a call's arguments are split."""
    return [leaf.spec.partition for leaf in call.flat.leaves if isinstance(leaf, fs.Sharded)]


def _select_names(operations: Operations) -> dict[Node, Name]:
    """Name the operations that compute something: no views, collectives, arrivals or empty memory."""
    in_flight = find_in_flight(operations.nodes)
    names = {}
    for node, name in operations.names.items():
        moves = node in in_flight or graph_nodes.is_wait(node) or graph_nodes.is_view(node)
        if node.op == "call_function" and not moves and not is_empty(node):
            names[node] = name
    return names


def _without_number(name: Name) -> Name:
    return name._replace(number=0, total=0, microbatch=0)


def _difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the largest difference of any element, divided by the largest absolute value that is expected."""
    expected, actual = expected.double(), actual.double()
    # Equal infinities, as in masks, do not differ, and neither does NaN from NaN.
    is_equal = (expected == actual) | (expected.isnan() & actual.isnan())
    if is_equal.all():
        return 0.0
    distance = (expected - actual).abs().masked_fill(is_equal, 0.0).max().item()
    scale = expected.masked_fill(~expected.isfinite(), 0.0).abs().max().item()
    return distance / scale if scale and math.isfinite(distance) else math.inf


def _name_leaves(call: TracedCall, values: Sequence[Any]) -> dict[str, Any]:
    """Return the tensors and Sharded leaves of a result by their paths."""
    leaves = []
    for value, spec in zip(values, call.traced.specs, strict=True):
        leaves.append(value if spec is None or value is None else fs.Sharded(value, spec))
    flat = flatten(unflatten(call.traced.treedef, leaves))
    pairs = zip(flat.paths, flat.leaves, strict=True)
    return {path: leaf for path, leaf in pairs if leaf is not None}


def _make_comparable(expected: Any, actual: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the local shards of two leaves if they are laid out alike, and full tensors otherwise."""
    if isinstance(expected, fs.Sharded) and isinstance(actual, fs.Sharded) and expected.spec == actual.spec:
        return without_padding(expected), without_padding(actual)
    first, second = fs.unshard([expected, actual])
    return first, second
