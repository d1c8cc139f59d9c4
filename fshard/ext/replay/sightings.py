"""Sightings: the values of a graph that are refused, and the way back from them to the operations that made them."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fshard import Sharded
from fshard.ext.replay.places import Operations, name_operator, origin_of, show_frame
from fshard.ext.replay.repeat import TracedCall
from fshard.ext.replay.run import tensors_in
from fshard.extend import graph_nodes

# Measures how bad a value is; 0 if it is accepted. Is called with a tensor and the node that made it.
Measure = Callable[[torch.Tensor, Node], int]
INFINITE = 1
NAN = 2
# The place that a walk through the results of a graph begins at. All others are collectives.
RESULTS = "results"


class Maker(NamedTuple):
    """A node that made a refused value out of values that are accepted. The smallest of several comes first.

    Attributes:
        is_input: Whether it is an infinite input other than a Sharded leaf, such as a mask of attention. It is to blame
            only if nothing else is.
        waits: How many buffers this rank waits for up to the node. Ranks wait in the same order, and so this orders
            nodes of different ranks; their positions do not.
        position: The place of the node in the graph.
        operation: The operator, its lines and its module, to find the same operation on other ranks.
    """

    is_input: bool
    waits: int
    position: int
    operation: str


class Walk(NamedTuple):
    """What a walk back through the refused values of one rank finds.

    Attributes:
        maker: The first maker on the way.
        waits: The waits on the way, each under the collective that it waits for, whose senders have the next maker.
    """

    maker: Maker | None
    waits: Mapping[str, Maker]


NOTHING = Walk(None, {})


def measure_nonfinite(tensor: torch.Tensor, _: Node) -> int:
    """Return 2 if a tensor has NaN, 1 if it has infinities, else 0."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or not tensor.numel():
        return 0
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()
    bounds = torch.stack(torch.aminmax(tensor)).tolist()
    if math.isnan(bounds[0]):
        return NAN
    return INFINITE if math.inf in map(abs, bounds) else 0


def _describe_range(tensor: torch.Tensor) -> str:
    if tensor.is_complex() or not tensor.numel():
        return ""
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()
    finite = tensor[tensor.isfinite()]
    text = f", {finite.min().item():.3g} to {finite.max().item():.3g}" if finite.numel() else ""
    for word, count in (("NaN", tensor.isnan().sum()), ("infinite", tensor.isinf().sum())):
        text += f", {count} {word}" if count else ""
    return text


class Sightings:
    """The refused values of one run of a graph.

    Attributes:
        nodes: The nodes of the graph.
        levels: How bad each refused value is.
        makers: For each node that made one out of accepted values, what it read and made.
    """

    def __init__(self, call: TracedCall, operations: Operations, measure: Measure, allow: Collection[str]) -> None:
        """Begin before the run.

        Args:
            call: The call.
            operations: The nodes of its graph.
            measure: Measures values.
            allow: Operators, and lines as "file.py:12", that may make refused values.
        """
        self.nodes = operations.nodes
        self.levels: dict[Node, int] = {}
        self.makers: dict[Node, tuple[list[str], list[str]]] = {}
        self._call = call
        self._operations = operations
        self._measure = measure
        self._allow = allow
        self._storages = graph_nodes.find_storages(self.nodes)
        self._writers: dict[Hashable, list[Node]] = defaultdict(list)
        self._starts: dict[Node, str] = {}
        for node in self.nodes:
            if graph_nodes.find_collective(node) is not None:
                group = node.args[-2]
                self._starts[node] = f"{len(self._starts)} {group}"

    def watch(self, node: Node, operands: Mapping[Node, Any], result: Any) -> None:
        """Look at what a node read and made; called by `run_repeatably`."""
        level = self._measure_all(result, node)
        if not level:
            return
        self.levels[node] = level
        for target in graph_nodes.find_write_targets(node):
            for storage in self._storages[target]:
                self._writers[storage].append(node)
        worst_operand = max((self._measure_all(value, source) for source, value in operands.items()), default=0)
        if level > worst_operand and not self._is_legal(node, level):
            self.makers[node] = self._describe_values(operands), self._describe_values({node: result})

    def name_problem(self, node: Node) -> str:
        """Say what a node made."""
        if self._measure is not measure_nonfinite:
            return "values that watch refuses"
        return "NaN" if self.levels[node] == NAN else "infinities"

    def describe_node(self, node: Node) -> str:
        """Name an operator, and the line that ran it."""
        origin = origin_of(node)
        return " at ".join([name_operator(node), *map(show_frame, (*origin.frames, *origin.forward)[:1])])

    def _describe_values(self, values: Mapping[Node, Any]) -> list[str]:
        lines = []
        for node, value in values.items():
            for tensor in tensors_in(value):
                dtype = str(tensor.dtype).removeprefix("torch.")
                lines.append(f"{self._operations.name(node)}: {dtype}{list(tensor.shape)}{_describe_range(tensor)}")
        return lines

    def _measure_all(self, value: Any, node: Node) -> int:
        return max((self._measure(tensor, node) for tensor in tensors_in(value)), default=0)

    def _is_legal(self, node: Node, level: int) -> bool:
        """Whether the program means to make such a value: it wrote an infinity down, or the caller allows it."""
        origin = origin_of(node)
        lines = [f"{frame.file}:{frame.line}" for frame in (*origin.frames, *origin.forward)[:1]]
        if name_operator(node) in self._allow or any(line.endswith(tuple(self._allow)) for line in lines):
            return True
        if self._measure is not measure_nonfinite or level > INFINITE:
            return False
        return node.op == "get_attr" or _has_infinity([*node.args, *node.kwargs.values()])

    def find_roots(self) -> list[Node]:
        """Find the refused values that went wrong: gradients and results of a step, or with another watch all."""
        if self._measure is not measure_nonfinite:
            return list(self.levels)
        roots = []
        for node in self.nodes:
            if node.op == "output":
                roots += [source for source in node.all_input_nodes if source.op != "placeholder"]
            if phase_of(node) == "update":
                # What an update reads of the backward is a gradient.
                roots += [source for source in node.all_input_nodes if phase_of(source) not in ("", "update")]
        return [node for node in roots if node in self.levels]

    def walk_all(self) -> dict[str, Walk]:
        """Walk back from the results, and from each collective that sends refused values."""
        walks = {RESULTS: self._walk_back(self.find_roots())}
        for start, place in self._starts.items():
            sources = self._find_sources(start)
            if sources:
                walks[place] = self._walk_back(sources)
        return walks

    def _walk_back(self, nodes: Sequence[Node]) -> Walk:
        makers = []
        waits = {}
        pending = list(nodes)
        seen: set[Node] = set()
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self.makers:
                makers.append(self._name_maker(node))
            start = _find_start(node)
            if start in self._starts:
                waits[self._starts[start]] = self._name_maker(node)
            pending += self._find_sources(node)
        return Walk(min(makers, default=None), waits)

    def _find_sources(self, node: Node) -> list[Node]:
        """Find the nodes that made the refused values that a node reads, or wrote them into the memory of others."""
        sources = []
        for operand in node.all_input_nodes:
            writers = []
            for storage in self._storages[operand]:
                writers += [writer for writer in self._writers.get(storage, ()) if operand < writer < node]
            sources += writers[-1:] or [operand]
        return [source for source in sources if source in self.levels]

    def _name_maker(self, node: Node) -> Maker:
        is_mask = self.levels[node] == INFINITE and not isinstance(self._call.leaf_of(node), Sharded)
        is_input = node.op == "placeholder" and is_mask
        return Maker(is_input, *self._operations.order(node), str(self._operations.names[node]))


def _find_start(node: Node) -> Any:
    """Find the collective whose buffer a node waits for."""
    if not graph_nodes.is_wait(node):
        return None
    (buffer,) = node.all_input_nodes
    return next(iter(buffer.all_input_nodes), buffer)


def phase_of(node: Node) -> str:
    """The phase of a step that a node runs in; empty for inputs."""
    return node.meta["origin"].phase if "origin" in node.meta else ""


def _has_infinity(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_infinity, value))
    return isinstance(value, float) and math.isinf(value)


def find_first(walks_by_rank: Sequence[Mapping[str, Walk]]) -> list[tuple[Maker, int]]:
    """Find the first maker of what went wrong on any rank, following refused values through collectives.

    Args:
        walks_by_rank: What `walk_all` returned on each rank.

    Returns:
        The maker and its rank, then those of the ranks that ran the same operation at the same time; empty if nothing
        went wrong. A collective that got refused values nowhere is a maker where it is waited for.
    """
    makers: list[tuple[Maker, int]] = []
    pending = [RESULTS]
    seen = {RESULTS}
    while pending:
        place = pending.pop()
        for rank, walks in enumerate(walks_by_rank):
            walk = walks.get(place, NOTHING)
            if walk.maker is not None:
                makers.append((walk.maker, rank))
            for start, wait in walk.waits.items():
                if not any(start in walks for walks in walks_by_rank):
                    makers.append((wait, rank))
                elif start not in seen:
                    seen.add(start)
                    pending.append(start)
    if not makers:
        return []
    first, _ = min(makers)
    alike = {rank: maker for maker, rank in makers if maker[1::2] == first[1::2]}
    return [(alike[rank], rank) for rank in sorted(alike, key=lambda rank: (alike[rank] != first, rank))]
