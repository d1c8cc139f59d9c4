"""Operations of a graph: their names, which hold in graphs of other ranks and versions, and their places in reports."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from linecache import getline
from pathlib import Path
from typing import Any, NamedTuple

from torch.fx import Node

from fshard.comm import Collective
from fshard.ext._compat import Frame, origin_of
from fshard.ext.replay.repeat import TracedCall
from fshard.extend import flatten, graph_nodes, unflatten

# Operators that take a gathered buffer apart.
_COPIES = ("aten.split_with_sizes_copy", "aten.cat")
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
    """Where an operation is, as reports show it; the same on every rank.

    Attributes:
        operator: The operator as printed graphs name it, or the path of an argument.
        ranks: The ranks that the report is about.
        phase: "forward", "backward", "recomputed" or "update"; empty for an argument.
        frames: Lines of the user's program that ran it, the innermost first.
        forward: For an operation of the backward the lines of its forward.
        module: The submodule that it belongs to; empty outside of models.
        collective: The collective whose buffer it is; mostly empty.
        unit: The units that it belongs to; empty outside of units.
        leaf: For an operation of the backward or the update the path of the result that it goes into.
        microbatch: The number of the microbatch, counted from 1.
        microbatches: How many there are.
    """

    operator: str
    ranks: tuple[int, ...]
    phase: str
    frames: tuple[Frame, ...]
    forward: tuple[Frame, ...]
    module: str
    collective: str
    unit: str
    leaf: str
    microbatch: int
    microbatches: int

    @classmethod
    def read(cls, values: Sequence[Any], ranks: Sequence[int]) -> "Place":
        """Make a place of the list that ranks exchange in its stead."""
        place = cls(*values)
        frames = tuple(Frame(*frame) for frame in place.frames)
        forward = tuple(Frame(*frame) for frame in place.forward)
        return place._replace(ranks=tuple(ranks), frames=frames, forward=forward)

    @property
    def subject(self) -> str:
        """The operation, or the argument, in a sentence."""
        return self.operator if self.phase else f"the argument {self.operator}"

    def __str__(self) -> str:
        """A line for each fact."""
        phase = self.phase
        if self.microbatches > 1 and phase in ("forward", "backward", "recomputed"):
            phase += f", microbatch {self.microbatch} of {self.microbatches}"
        return list_facts(
            [
                ("phase", [phase]),
                ("at", map(show_frame, self.frames)),
                ("backward of", map(show_frame, self.forward)),
                ("module", [self.module]),
                ("collective", [self.collective]),
                ("unit", [self.unit]),
                ("leaf", [self.leaf]),
            ]
        )


class Operations:
    """The nodes of a graph, with their names and places.

    Attributes:
        nodes: The nodes in their order.
        inputs: The paths of inputs.
        names: The names of inputs, constants and operations.
    """

    def __init__(self, call: TracedCall) -> None:
        traced = call.traced
        graph = traced.module.graph
        self.inputs = {node: call.flat.paths[index] for node, index in call.inputs.items()}
        self.nodes: list[Node] = list(graph.nodes)
        self._numbers = {node: number for number, node in enumerate(self.nodes)}
        self._waits = list(accumulate(map(graph_nodes.is_wait, self.nodes)))
        results = flatten(unflatten(traced.treedef, graph_nodes.find_results(graph)))
        self._paths = dict(zip(results.leaves, results.paths, strict=True))
        self._microbatches = 1 + max(origin_of(node).microbatch for node in self.nodes)
        self.names = self._name_operations()
        collectives = [entry for entry in map(graph_nodes.find_collective, self.nodes) if entry is not None]
        self._units = {unit for entry in collectives for unit in entry.about.units}
        self._unit_of_leaf = {leaf: entry.unit for entry in collectives for leaf in entry.about.leaves}

    def order(self, node: Node) -> tuple[int, int]:
        """Return a key that sorts nodes of all ranks in time, as far as ranks wait for each other."""
        number = self._numbers[node]
        return self._waits[number], number

    def name(self, node: Node) -> str:
        """Name an operator as printed graphs do, or an input by its path."""
        return self.inputs.get(node) or name_operator(node)

    def _name_operations(self) -> dict[Node, Name]:
        names = {node: self._describe(node) for node in self.nodes}
        counts = Counter(names.values())
        numbers: Counter[Name] = Counter()
        for node, name in names.items():
            names[node] = name._replace(number=numbers[name], total=counts[name])
            numbers[name] += 1
        return names

    def _describe(self, node: Node) -> Name:
        origin = origin_of(node)
        frames = origin.forward or origin.frames
        line = _read_line(frames[0]) if frames else ""
        return Name(line, origin.module, origin.phase, origin.microbatch, self.name(node))

    def locate(self, node: Node) -> Place:
        """Find the place of an operation."""
        origin = origin_of(node)
        leaf = self._find_leaf(node) if origin.phase in _LATE else ""
        collective = _find_collective(node, _only_moves)
        return Place(
            operator=self.name(node),
            ranks=(),
            phase="" if node in self.inputs else origin.phase,
            frames=origin.frames,
            forward=origin.forward,
            # A buffer lands while some other module runs.
            module="" if collective else origin.module,
            collective=collective.op if collective else "",
            unit=collective.unit if collective else self._find_unit(node, leaf),
            leaf=leaf,
            microbatch=origin.microbatch + 1,
            microbatches=self._microbatches,
        )

    def _find_leaf(self, node: Node) -> str:
        """Find the path of the nearest result that is computed from a node."""
        users = walk_along(node, lambda reached: reached.users)
        return next((self._paths[user] for user in users if user in self._paths), "")

    def _find_unit(self, node: Node, leaf: str) -> str:
        """Find the unit that a submodule lies in, or else those of a leaf, or else those of what it reads."""
        module = origin_of(node).module
        around = [unit for unit in self._units if f"{module}.".startswith(f"{unit}.")]
        if around:
            return max(around, key=len)
        units = [unit for path, unit in self._unit_of_leaf.items() if leaf.endswith(path)]
        collectives = [_find_collective(source, _reads_one_value) for source in node.all_input_nodes]
        units += [entry.unit for entry in collectives if entry]
        return next(iter(units), "")


def walk_along(node: Node, follow: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """List a node and the nodes that it leads to, the nearest first."""
    pending = deque([node])
    seen = {node}
    while pending:
        reached = pending.popleft()
        yield reached
        for other in follow(reached):
            if other not in seen:
                seen.add(other)
                pending.append(other)


def _find_collective(node: Node, may_follow: Callable[[Node], bool]) -> Collective | None:
    """Find the collective that a node has its values from, by nodes that may be followed to what they read."""
    sources = walk_along(node, lambda reached: reached.all_input_nodes if may_follow(reached) else ())
    return next(filter(None, map(graph_nodes.find_collective, sources)), None)


def _only_moves(node: Node) -> bool:
    """Whether a node takes values from a buffer as they are, or goes on with a sum over ranks."""
    passed = _SUMS if origin_of(node).phase in _LATE else _COPIES
    return graph_nodes.is_wait(node) or graph_nodes.is_view(node) or name_operator(node) in passed


def _reads_one_value(node: Node) -> bool:
    """Whether a node computes something of what it moves or reads alone, such as a cast of a gathered leaf."""
    return _only_moves(node) or len(node.all_input_nodes) == 1


def name_operator(node: Node) -> str:
    """Name the operator of a node, as torch writes it."""
    target: Any = node.target
    name = str(target) if hasattr(target, "_schema") else getattr(target, "__name__", str(target))
    return name.removesuffix(".default").removesuffix(".Tensor")


def _read_line(frame: Frame) -> str:
    return getline(frame.file, frame.line).strip()


def show_frame(frame: Frame) -> str:
    """Show a line of the user's program."""
    return f"{Path(frame.file).name}:{frame.line} in {frame.function}: {_read_line(frame)}"


def name_with_line(node: Node) -> str:
    """Name an operator, and the line that ran it."""
    origin = origin_of(node)
    return " at ".join([name_operator(node), *map(show_frame, (*origin.frames, *origin.forward)[:1])])


def list_facts(facts: Iterable[tuple[str, Iterable[str]]]) -> str:
    """Write a line for each text, after its title."""
    return "\n".join(f"  {title}: {text}" for title, texts in facts for text in texts if text)


def list_ranks(ranks: Iterable[int]) -> str:
    """Name ranks in a sentence."""
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
