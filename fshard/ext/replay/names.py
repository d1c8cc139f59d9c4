"""Operations of a graph: their names, which hold in graphs of other ranks and versions, and their places in reports."""

import linecache
from collections import Counter, deque
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from torch.fx import Node

from fshard.comm import Collective
from fshard.ext._compat import Frame, Origin
from fshard.ext.replay.repeat import TracedCall
from fshard.extend import flatten, graph_nodes, unflatten

# How many nodes are looked at to find the collective that an operation goes on with.
_MAX_STEPS = 16
# Operators of a sum over ranks that a graph adds up itself.
_SUMS = ("aten.add", "aten.add_", "aten.cat", "aten.div_")
_LATE = ("backward", "update")


class Name(NamedTuple):
    """A name of an operation that does not depend on numbers of nodes or of lines.

    Attributes:
        line: The text of the user's line that it comes from; for an operation of the backward that of its forward.
        module: The name of the submodule.
        phase: The phase of the step.
        microbatch: The number of the microbatch.
        operator: The operator.
        number: How many operations with these properties come before it.
        total: How many operations have them. Where totals differ, numbers do not stand for the same operation.
    """

    line: str
    module: str
    phase: str
    microbatch: int
    operator: str
    number: int = 0
    total: int = 0


class Place(NamedTuple):
    """What a report says of an operation.

    Attributes:
        operator: The operator.
        number: Its number among the nodes of the graph, counted from 0.
        size: The number of nodes.
        lines: The lines of the user's program, the innermost first.
        module: The name of the submodule; empty outside of models.
        phase: "forward", "backward", "recomputed" or "update".
        microbatch: The number of the microbatch.
        collective: The collective whose buffer it reads, or whose sum it goes on with; mostly empty.
        unit: The units that it belongs to, as text; empty outside of units.
        leaf: The nearest leaf of the result, of an operation of the backward or of the update.
    """

    operator: str
    number: int
    size: int
    lines: list[str]
    module: str
    phase: str
    microbatch: int
    collective: str
    unit: str
    leaf: str

    def __str__(self) -> str:
        """Lines that begin with the user's."""
        # A buffer lands while some other module runs.
        module = "" if self.collective else self.module
        labels = {"collective": self.collective, "module": module, "unit": self.unit, "leaf": self.leaf}
        place = [f"{label} {text}" for label, text in labels.items() if text]
        numbers = f"{self.phase} of microbatch {self.microbatch}, node {self.number} of {self.size}"
        return "\n".join(f"  {line}" for line in (*self.lines, ", ".join([*place, numbers])))


class Operations:
    """The nodes of a graph, with their names and places.

    Attributes:
        nodes: The nodes in their order.
        names: The names of inputs, constants and operations.
    """

    def __init__(self, call: TracedCall) -> None:
        traced = call.traced
        graph = traced.module.graph
        self._inputs = {node: call.flat.paths[index].removeprefix("[0]") for node, index in call.inputs.items()}
        self.nodes: list[Node] = list(graph.nodes)
        self._numbers = {node: number for number, node in enumerate(self.nodes)}
        self._waits = list(accumulate(map(graph_nodes.is_wait, self.nodes)))
        results = flatten(unflatten(traced.treedef, graph_nodes.find_results(graph)))
        self._paths = dict(zip(results.leaves, results.paths, strict=True))
        self.names = self._name_operations()
        collectives = [entry for entry in map(graph_nodes.find_collective, self.nodes) if entry is not None]
        self._units = {unit for entry in collectives for unit in entry.about.units}
        self._unit_of_leaf = {leaf: entry.unit for entry in collectives for leaf in entry.about.leaves}

    def order(self, node: Node) -> tuple[int, int]:
        """Return a key that sorts nodes of all ranks in time, as far as ranks wait for each other."""
        number = self._numbers[node]
        return self._waits[number], number

    def _name_operations(self) -> dict[Node, Name]:
        names = {node: self._describe(node) for node in self.nodes}
        counts = Counter(names.values())
        numbers: Counter[Name] = Counter()
        for node, name in names.items():
            names[node] = name._replace(number=numbers[name], total=counts[name])
            numbers[name] += 1
        return names

    def locate(self, node: Node) -> Place:
        """Find the place of an operation."""
        origin = origin_of(node)
        lines = [_show(frame) for frame in origin.frames]
        lines += [f"backward of {_show(frame)}" for frame in origin.forward]
        leaf = self._find_leaf(node) if origin.phase in _LATE else ""
        collective = self._find_collective(node, origin)
        return Place(
            self._name_operator(node),
            self._numbers[node],
            len(self.nodes),
            lines,
            origin.module,
            origin.phase,
            origin.microbatch,
            "" if collective is None else collective.op,
            self._find_unit(origin, leaf) if collective is None else collective.unit,
            leaf,
        )

    def _describe(self, node: Node) -> Name:
        origin = origin_of(node)
        frames = origin.forward or origin.frames
        line = _read_line(frames[0]) if frames else ""
        return Name(line, origin.module, origin.phase, origin.microbatch, self._name_operator(node))

    def _name_operator(self, node: Node) -> str:
        return f"the argument {self._inputs[node]}" if node in self._inputs else name_operator(node)

    def _find_leaf(self, node: Node) -> str:
        """Find the path of the nearest result that is computed from a node."""
        queue = deque([node])
        seen = {node}
        while queue:
            nearest = queue.popleft()
            if nearest in self._paths:
                return self._paths[nearest]
            users = [user for user in nearest.users if user not in seen]
            seen.update(users)
            queue.extend(users)
        return ""

    def _find_collective(self, node: Node, origin: Origin) -> Collective | None:
        """Find the collective whose buffer a node reads."""
        passed = _SUMS if origin.phase in _LATE else ()
        queue = deque([node])
        for _ in range(_MAX_STEPS):
            if not queue:
                break
            source = queue.popleft()
            collective = graph_nodes.find_collective(source)
            if collective is not None:
                return collective
            if graph_nodes.is_wait(source) or graph_nodes.is_view(source) or name_operator(source) in passed:
                queue.extend(source.all_input_nodes)
        return None

    def _find_unit(self, origin: Origin, leaf: str) -> str:
        """Find the unit that a submodule lies in, or else those of a leaf."""
        around = [unit for unit in self._units if f"{origin.module}.".startswith(f"{unit}.")]
        if around:
            return max(around, key=len)
        return next((unit for path, unit in self._unit_of_leaf.items() if leaf.endswith(path)), "")


def origin_of(node: Node) -> Origin:
    """Return where a node comes from."""
    origin: Origin = node.meta.get("origin", Origin())
    return origin


def name_operator(node: Node) -> str:
    """Name the operator of a node, as torch writes it."""
    target: Any = node.target
    name = str(target) if hasattr(target, "_schema") else getattr(target, "__name__", str(target))
    return name.removesuffix(".default").removesuffix(".Tensor")


def _read_line(frame: Frame) -> str:
    return linecache.getline(frame.file, frame.line).strip()


def _show(frame: Frame) -> str:
    return f"{Path(frame.file).name}:{frame.line} in {frame.function}: {_read_line(frame)}"


def list_ranks(ranks: Iterable[int]) -> str:
    """Name ranks in a sentence."""
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
