"""Sightings: the values of a graph that are refused, and the operations that they come from."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from fshard import Sharded
from fshard.ext._compat import origin_of
from fshard.ext.replay.places import Operations, name_operator
from fshard.ext.replay.repeat import TracedCall
from fshard.ext.replay.run import tensors_in
from fshard.extend import graph_nodes

# Measures how bad a value is; 0 if it is accepted. Is called with a tensor and the node that made it.
Measure = Callable[[torch.Tensor, Node], int]
INFINITE = 1
NAN = 2
# An exit: where refused values leave the graph with its results and gradients. All other exits are collectives.
RESULTS = "results"


def measure_nonfinite(tensor: torch.Tensor, _: Node) -> int:
    """Return 2 if a tensor has NaN, 1 if it has infinities, else 0."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    bounds = torch.stack(torch.aminmax(_as_real_numbers(tensor))).tolist()
    if math.isnan(bounds[0]):
        return NAN
    return INFINITE if math.inf in map(abs, bounds) else 0


def _as_real_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor in a dtype that torch can compare."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def _describe_range(tensor: torch.Tensor) -> str:
    tensor = _as_real_numbers(tensor)
    finite = tensor[tensor.isfinite()]
    text = f", {finite.min().item():.3g} to {finite.max().item():.3g}" if finite.numel() else ""
    for word, count in (("NaN", tensor.isnan().sum()), ("infinite", tensor.isinf().sum())):
        text += f", {count} {word}" if count else ""
    return text


class Sightings:
    """The refused values of one run of a graph.

    Each refused value has a trace: the makers that it comes from, which made a refused value out of accepted ones, and
    the waits for collectives that brought some.

    Attributes:
        seen: For the makers and waits of all traces the problem, what was read and what was made.
        masks: Makers that are infinite inputs other than Sharded leaves, such as a mask of attention. They are to blame
            only if nothing else is.
    """

    def __init__(self, call: TracedCall, operations: Operations, measure: Measure, allow: Collection[str]) -> None:
        """Begin before the run.

        Args:
            call: The call.
            operations: The nodes of its graph.
            measure: Measures values.
            allow: Operators, and lines as "file.py:12", that may make refused values.
        """
        self.seen: dict[Node, tuple[str, list[str], list[str]]] = {}
        self.masks: set[Node] = set()
        self._call = call
        self._operations = operations
        self._measure = measure
        self._allow = allow
        self._storages = graph_nodes.find_storages(operations.nodes)
        starts = [node for node in operations.nodes if graph_nodes.find_collective(node) is not None]
        self._exits = {start: f"{number} {start.args[-2]}" for number, start in enumerate(starts)}
        # For each storage the trace of the last refused value in it.
        self._traces: dict[Hashable, set[Node]] = {}
        # For each exit that refused values left by their traces.
        self._left: dict[str, set[Node]] = defaultdict(set)

    def watch(self, node: Node, operands: Mapping[Node, Any], results: Sequence[torch.Tensor]) -> None:
        """Look at what a node read and made; called by `run_repeatably`."""
        level = self._measure_all(node, results)
        exits = list(self._find_exits(node))
        if not level and not exits:
            return
        levels = {source: self._measure_all(source, tensors_in(value)) for source, value in operands.items()}
        for place, source in exits:
            if levels[source]:
                self._left[place] |= self._join_traces([source])
        if not level:
            return
        trace = self._join_traces(source for source in levels if levels[source])
        if graph_nodes.is_wait(node):
            trace = {node}
            self._describe(node, level, {}, results)
        elif level > max(levels.values(), default=0) and not self._is_legal(node, level):
            trace.add(node)
            self._describe(node, level, operands, results)
        for written in (node, *graph_nodes.find_write_targets(node)):
            self._traces |= dict.fromkeys(self._storages[written], trace)
        if self._measure is not measure_nonfinite:
            self._left[RESULTS] |= trace

    def _find_exits(self, node: Node) -> Iterator[tuple[str, Node]]:
        """List by which exits operands of a node leave: as messages, results, and gradients that an update reads."""
        is_update = origin_of(node).phase == "update"
        for source in node.all_input_nodes:
            if node in self._exits:
                yield self._exits[node], source
            is_gradient = is_update and source.op == "call_function" and origin_of(source).phase != "update"
            if is_gradient or (node.op == "output" and source.op != "placeholder"):
                yield RESULTS, source

    def _join_traces(self, nodes: Iterable[Node]) -> set[Node]:
        trace: set[Node] = set()
        for node in nodes:
            for storage in self._storages[node]:
                trace |= self._traces.get(storage, set())
        return trace

    def _describe(self, node: Node, level: int, operands: Mapping[Node, Any], results: Sequence[torch.Tensor]) -> None:
        problem = "NaN" if level == NAN else "infinities"
        if self._measure is not measure_nonfinite:
            problem = "values that watch refuses"
        self.seen[node] = problem, self._list_ranges(operands), self._list_ranges({node: results})
        if node.op == "placeholder" and level == INFINITE and not isinstance(self._call.leaf_of(node), Sharded):
            self.masks.add(node)

    def _list_ranges(self, values: Mapping[Node, Any]) -> list[str]:
        lines = []
        for node, value in values.items():
            for tensor in tensors_in(value):
                dtype = str(tensor.dtype).removeprefix("torch.")
                lines.append(f"{self._operations.name(node)}: {dtype}{list(tensor.shape)}{_describe_range(tensor)}")
        return lines

    def _measure_all(self, node: Node, tensors: Sequence[torch.Tensor]) -> int:
        return max((self._measure(tensor, node) for tensor in tensors), default=0)

    def _is_legal(self, node: Node, level: int) -> bool:
        """Whether the program means to make such a value: it wrote an infinity down, or the caller allows it."""
        origin = origin_of(node)
        lines = [f"{frame.file}:{frame.line}" for frame in (*origin.frames, *origin.forward)[:1]]
        if name_operator(node) in self._allow or any(line.endswith(tuple(self._allow)) for line in lines):
            return True
        if self._measure is not measure_nonfinite or level > INFINITE:
            return False
        return node.op == "get_attr" or _has_infinity([*node.args, *node.kwargs.values()])

    def list_waits(self) -> dict[str, list[str]]:
        """List for each exit that refused values left by the collectives that brought some of them."""
        waits = {}
        for place, trace in self._left.items():
            starts = map(self._find_start, trace)
            waits[place] = [start for start in starts if start]
        return waits

    def _find_start(self, node: Node) -> str:
        """Find the collective that a node waits for; empty for makers."""
        if not graph_nodes.is_wait(node):
            return ""
        (buffer,) = node.all_input_nodes
        return self._exits.get(next(iter(buffer.all_input_nodes), buffer), "")

    def find_maker(self, waits_by_rank: Sequence[Mapping[str, Sequence[str]]]) -> Node | None:
        """Find the first maker on this rank of what went wrong on any, following values through collectives.

        Args:
            waits_by_rank: What `list_waits` returned on each rank.

        Returns:
            The maker; None if there is none here. A collective that got refused values nowhere is a maker where it is
            waited for.
        """
        reached: set[str] = set()
        pending = [RESULTS]
        while pending:
            place = pending.pop()
            if place not in reached:
                reached.add(place)
                for waits in waits_by_rank:
                    pending += waits.get(place, ())
        makers = []
        for place in reached & self._left.keys():
            for node in self._left[place]:
                start = self._find_start(node)
                if not any(start in waits for waits in waits_by_rank):
                    makers.append(node)
        return min(makers, key=lambda node: (node in self.masks, self._operations.order(node)), default=None)


def _has_infinity(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_infinity, value))
    return isinstance(value, float) and math.isinf(value)
