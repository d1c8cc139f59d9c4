"""Operations of a graph: names, which hold in graphs of other ranks and versions, and the report of one of them."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, count
from linecache import getline
from pathlib import Path
from typing import Any, NamedTuple

from torch.fx import Node

from fshard import Axis
from fshard.comm import Collective
from fshard.ext._compat import Frame, origin_of
from fshard.ext.replay.observed_run import TracedCall
from fshard.extend import all_gather_object, flatten, graph_nodes, name_ranks, process_rank, unflatten

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


class OperationReport(NamedTuple):
    """The operation, or the argument, that `replay`, `verify` or `diff` names; the same on every rank. Print it.

    Attributes:
        tool: The function that reports it.
        operator: The operator as printed graphs name it, or the path of an argument.
        verdict: What is wrong with it, such as "made NaN".
        ranks: The ranks on which it is.
        phase: "forward", "backward", "recomputed" or "update"; empty for an argument.
        microbatch: The number of the microbatch, such as "1 of 2"; empty if there is one.
        at: Lines of the user's program that ran it, the innermost first.
        backward_of: For an operation of the backward the lines of its forward.
        module: The submodule that it belongs to; empty outside of models.
        collective: The collective whose buffer it is; mostly empty.
        unit: The units that it belongs to; empty outside of units.
        leaf: For an operation of the backward or the update the path of the result that it goes into.
        read: What it read, with ranges. Only of `replay`, as the next two.
        value: What it made, or what the argument has.
        before_it: Up to three operations before it, the last one first.
    """

    tool: str
    operator: str
    verdict: str
    ranks: tuple[int, ...]
    phase: str
    microbatch: str
    at: list[str]
    backward_of: list[str]
    module: str
    collective: str
    unit: str
    leaf: str
    read: Sequence[str] = ()
    value: Sequence[str] = ()
    before_it: Sequence[str] = ()

    def __str__(self) -> str:
        """A line for each fact."""
        subject = self.operator if self.phase else f"the argument {self.operator}"
        lines = [f"{self.tool}: {subject} {self.verdict} on {name_ranks(self.ranks)}"]
        fields = list(self._asdict().items())
        for title, value in fields[4:]:
            texts = [value] if isinstance(value, str) else value
            lines += [f"  {title.replace('_', ' ')}: {text}" for text in texts if text]
        return "\n".join(lines)


class Operations:
    """The nodes of a graph, and what ranks tell each other about them.

    Attributes:
        call: The call that the graph is of.
        axes: The axes over which ranks tell each other what they see.
        nodes: The nodes in their order.
        microbatches: The number of microbatches of this rank.
        order: Keys that sort nodes of all ranks in time, as far as ranks wait for each other.
        result_paths: The paths of the nodes that are results.
        names: The names of inputs, constants and operations.
        collectives: The nodes that start a collective.
        identities: For each of these a name that its ranks have in common.
    """

    def __init__(self, tool: str, call: TracedCall, axes: Sequence[Axis]) -> None:
        self.call = call
        self.axes = axes
        self._tool = tool
        traced = call.traced
        self.nodes: list[Node] = list(traced.module.graph.nodes)
        # Numbers of nodes differ between ranks, but they wait for the same buffers in the same order.
        waits = accumulate(map(graph_nodes.is_wait, self.nodes))
        self.order = dict(zip(self.nodes, zip(waits, count(), strict=False), strict=True))
        results = flatten(unflatten(traced.treedef, graph_nodes.find_results(traced.module.graph)))
        self.result_paths = dict(zip(results.leaves, results.paths, strict=True))
        self.microbatches = 1 + max(origin_of(node).microbatch for node in self.nodes)
        self.names = self._name_operations()
        self.collectives: dict[Node, Collective] = {}
        self.identities: dict[Node, str] = {}
        for node in self.nodes:
            collective = graph_nodes.find_collective(node)
            if collective is not None:
                self.identities[node] = f"{len(self.collectives)} {node.args[-2]}"
                self.collectives[node] = collective

    def name(self, node: Node) -> str:
        """Name an operator as printed graphs do, or an input by its path."""
        if node in self.call.inputs:
            return self.call.flat.paths[self.call.inputs[node]]
        return name_operator(node)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, as JSON holds them."""
        return all_gather_object(value, self.axes, self._tool)

    def report_first(
        self, node: Node | None, verdict: str = "", ranks: Sequence[int] = (), **details: Any
    ) -> OperationReport | None:
        """Report the first of the nodes that ranks bring.

        Args:
            node: This rank's node; None if it has none.
            verdict: What is wrong with it.
            ranks: The ranks that it is about; if empty those that bring the same operation after as many waits.
            **details: Other fields of the report.

        Returns:
            The report, the same on every rank; None if no rank brings a node.
        """
        entry = None
        if node is not None:
            waits, number = self.order[node]
            report = self.locate(node)._replace(verdict=verdict, ranks=tuple(ranks), **details)
            entry = [waits, number, str(self.names[node]), process_rank(), report]
        entries = [entry for entry in self.gather(entry) if entry is not None]
        if not entries:
            return None
        first_waits, _, first_name, _, fields = min(entries)
        alike = []
        for waits, _, name, rank, _ in entries:
            if (waits, name) == (first_waits, first_name):
                alike.append(rank)
        report = OperationReport(*fields)
        return report._replace(ranks=tuple(report.ranks or alike))

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

    def locate(self, node: Node) -> OperationReport:
        """Find out where an operation is; the report has no verdict yet."""
        origin = origin_of(node)
        leaf = self._find_leaf(node) if origin.phase in _LATE else ""
        collective = self._find_collective(node, _only_moves)
        phase = "" if node in self.call.inputs else origin.phase
        is_repeated = self.microbatches > 1 and phase not in ("", "update")
        return OperationReport(
            tool=self._tool,
            operator=self.name(node),
            verdict="",
            ranks=(),
            phase=phase,
            microbatch=f"{origin.microbatch + 1} of {self.microbatches}" if is_repeated else "",
            at=list(map(show_frame, origin.frames)),
            backward_of=list(map(show_frame, origin.forward)),
            # A buffer lands while some other module runs.
            module="" if collective else origin.module,
            collective=collective.op if collective else "",
            unit=collective.unit if collective else self._find_unit(node, leaf),
            leaf=leaf,
        )

    def _find_leaf(self, node: Node) -> str:
        """Find the path of the nearest result that is computed from a node."""
        users = walk_along(node, lambda reached: reached.users)
        for user in users:
            if user in self.result_paths:
                return self.result_paths[user]
        return ""

    def _find_unit(self, node: Node, leaf: str) -> str:
        """Find the unit that a submodule lies in, or else those of a leaf, or else those of what it reads."""
        module = origin_of(node).module
        units = {unit for entry in self.collectives.values() for unit in entry.about.units}
        around = [unit for unit in units if f"{module}.".startswith(f"{unit}.")]
        if around:
            return max(around, key=len)
        sources = [self._find_collective(source, _reads_one_value) for source in node.all_input_nodes]
        of_leaf = [entry for entry in self.collectives.values() if leaf.endswith(tuple(entry.about.leaves))]
        for entry in [*reversed(of_leaf), *sources]:
            if entry is not None:
                return entry.unit
        return ""

    def _find_collective(self, node: Node, may_follow: Callable[[Node], bool]) -> Collective | None:
        """Find the collective that a node has its values from, by nodes that may be followed to what they read."""
        sources = walk_along(node, lambda reached: reached.all_input_nodes if may_follow(reached) else ())
        for source in sources:
            if source in self.collectives:
                return self.collectives[source]
        return None


def find_start(wait: Node) -> tuple[Node, int]:
    """Find the collective that a node waits for, and the index of the buffer."""
    buffer: Any = wait.args[0]
    start, index = buffer.args
    return start, index


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
