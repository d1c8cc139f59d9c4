"""Operations of a step: its graph, words for each that hold in other graphs too, and the report of one of them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.fx import Node

import fshard as fs
from fshard import Axis, Sharded
from fshard.comm import Collective, Verb
from fshard.ext._compat import Frame, frames_of, name_operator, noting_origins, origin_of
from fshard.extend import (
    Jitted,
    all_gather_object,
    describe,
    expect,
    flatten,
    graph_nodes,
    is_donated,
    name_ranks,
    process_rank,
    refuse,
    unflatten,
    walk_graph,
)

# Operators that take a gathered buffer apart, and those of a sum over ranks that a graph adds up itself.
_MOVES = ("aten.split_with_sizes_copy", "aten.cat", "aten.add", "aten.add_", "aten.div_")
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
        leaf: For an operation of the backward or the update the path of the nearest result that it goes into. Of three
            or more that are as near, as where a learning rate goes into all leaves, the first one and their number.
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
    """The nodes of a step's graph, and what ranks tell each other about them.

    Attributes:
        axes: The axes over which ranks tell each other what they see.
        program: The graph, whose nodes know their origins, and the function that runs it.
        flat: The step's arguments, taken apart.
        nodes: The nodes in their order.
        names: Words for each node that other ranks, and other versions of a step, have too.
        leaves: For each input the leaf that it stands for.
        result_paths: The paths of the nodes that are results.
        result_specs: The specs of those that are Sharded.
        microbatches: The number of microbatches of this rank.
        collectives: The nodes that start a collective.
        identities: For each of these a name that its ranks have in common.
    """

    def __init__(
        self,
        tool: str,
        axes: Sequence[Axis],
        step: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Trace a call of a step. Ranks compare their graphs.

        Args:
            tool: The function that asks, for errors and reports.
            axes: The axes over which ranks tell each other what they see.
            step: The step. Of a function of `jit` it is the function inside, which writes to no argument.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Raises:
            ValueError: if an argument was donated, or the step cannot be one graph.
        """
        self.axes = axes
        self._tool = tool
        self.program, self.flat = _trace(tool, step, args, kwargs or {})
        traced = self.program.traced
        graph = traced.module.graph
        self.nodes: list[Node] = list(graph.nodes)
        self.leaves: dict[Node, Any] = {}
        names = {node: _describe(node) for node in self.nodes}
        for node, index in zip(graph_nodes.find_inputs(graph), traced.input_leaves, strict=True):
            self.leaves[node] = self.flat.leaves[index]
            names[node] = names[node]._replace(operator=self.flat.paths[index])
        self.names = _number(names)
        results = flatten(unflatten(traced.treedef, graph_nodes.find_results(graph)))
        self.result_paths = {node: path for path, node in results.named_leaves}
        specs = zip(results.leaves, traced.specs, strict=True)
        self.result_specs = {node: spec for node, spec in specs if spec is not None}
        self.microbatches = 1 + max(origin_of(node).microbatch for node in self.nodes)
        self.collectives: dict[Node, Collective] = {}
        self.identities: dict[Node, str] = {}
        for node in self.nodes:
            collective = graph_nodes.find_collective(node)
            if collective is not None:
                self.identities[node] = f"{len(self.collectives)} {node.args[-2]}"
                self.collectives[node] = collective

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
            number = self.nodes.index(node)
            # Numbers of nodes differ between ranks, but they wait for the same buffers in the same order.
            waits = sum(map(graph_nodes.is_wait, self.nodes[: number + 1]))
            report = self.locate(node, verdict=verdict, ranks=tuple(ranks), **details)
            entry = waits, number, process_rank(), str(self.names[node]), report
        entries = [entry for entry in self.gather(entry) if entry is not None]
        if not entries:
            return None
        first_waits, _, _, first_name, fields = min(entries)
        alike = []
        for waits, _, rank, name, _ in entries:
            if (waits, name) == (first_waits, first_name):
                alike.append(rank)
        report = OperationReport(*fields)
        return report._replace(ranks=tuple(report.ranks or alike))

    def locate(self, node: Node, **details: Any) -> OperationReport:
        """Find out where an operation is, for a report with these details."""
        origin = origin_of(node)
        leaves = self._find_leaves(node) if origin.phase in _LATE else []
        collective = next(self._list_collectives(node), None) if _only_moves(node) else None
        phase = "" if node in self.leaves else origin.phase
        is_repeated = self.microbatches > 1 and phase not in ("", "update")
        return OperationReport(
            tool=self._tool,
            operator=self.names[node].operator,
            phase=phase,
            microbatch=f"{origin.microbatch + 1} of {self.microbatches}" if is_repeated else "",
            at=list(map(show_frame, origin.frames)),
            backward_of=list(map(show_frame, origin.forward)),
            # A buffer lands while some other module runs.
            module="" if collective else origin.module,
            collective=collective.op if collective else "",
            unit=collective.unit if collective else self._find_unit(node, leaves),
            leaf=" and ".join(leaves if len(leaves) < 3 else [leaves[0], f"{len(leaves) - 1} more"]),
            **details,
        )

    def _find_leaves(self, node: Node) -> list[str]:
        """Find the paths of the results that the fewest operations compute from a node."""
        reached: dict[Node, None] = {node: None}
        leaves: list[str] = []
        while reached and not leaves:
            leaves = [self.result_paths[each] for each in reached if each in self.result_paths]
            users: dict[Node, None] = {}
            for each in reached:
                users |= each.users
            reached = users
        return leaves

    def _find_unit(self, node: Node, leaves: Sequence[str]) -> str:
        """Find the unit that a submodule lies in, or else that of all the leaves, or else that of what a node reads."""
        module = origin_of(node).module
        units = {unit for entry in self.collectives.values() for unit in entry.about.units}
        around = [unit for unit in units if f"{module}.".startswith(f"{unit}.")]
        if around:
            return max(around, key=len)
        units = {entry.unit for leaf in leaves for entry in self._list_senders(leaf)[:1]}
        if len(units) == 1:
            return units.pop()
        return next((entry.unit for entry in self._list_collectives(node)), "")

    def _list_senders(self, path: str) -> list[Collective]:
        """List the collectives that gather a leaf or reduce its gradient, the last one first."""
        # Those of norms and of the user's sums name leaves of all units at once.
        senders = []
        for entry in reversed(self.collectives.values()):
            moves_leaves = entry.label in (Verb.GATHER, Verb.SCATTER)
            if moves_leaves and path.endswith(entry.about.leaves):
                senders.append(entry)
        return senders

    def _list_collectives(self, node: Node) -> Iterator[Collective]:
        """List the collectives that a node reads something of, the nearest first."""
        for source in walk_graph(node.all_input_nodes, _list_sources_of_move):
            if source in self.collectives:
                yield self.collectives[source]
            elif isinstance(self.leaves.get(source), Sharded):
                # Nothing is gathered where an axis has one rank.
                yield from self._list_senders(self.names[source].operator)


def _trace(tool: str, step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    expect(callable(step), tool, "the step to be a function", describe(step))
    problems = flatten((args, kwargs)).problems(
        lambda leaf: "was donated to an earlier call, so it is empty now" if is_donated(leaf) else None
    )
    remedy = (
        "keep the argument of the step that went wrong, as fs.tree_map(torch.clone, state), or leave out "
        "donate_argnums and donate=True while you search; or restore the last checkpoint and go on from there"
    )
    refuse(f"{tool}: arguments were donated, and a step cannot run again without them", problems, remedy)
    function = getattr(step, "__wrapped__", step) if isinstance(step, Jitted) else step
    try:
        with noting_origins():
            return fs.jit(function).find_call(args, kwargs)[1:]
    except (TypeError, ValueError) as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(f"{tool}: {name} cannot be made one graph, which {tool} runs. {error}") from error


def _describe(node: Node) -> Name:
    origin = origin_of(node)
    frames = frames_of(node)
    line = frames[0].text if frames else ""
    return Name(line, origin.module, origin.phase, origin.microbatch, name_operator(node))


def _number(names: Mapping[Node, Name]) -> dict[Node, Name]:
    """Number the operations that have the same name."""
    totals = Counter(names.values())
    counts: Counter[Name] = Counter()
    numbered = {}
    for node, name in names.items():
        numbered[node] = name._replace(number=counts[name], total=totals[name])
        counts[name] += 1
    return numbered


def _only_moves(node: Node) -> bool:
    """Whether a node takes values from a buffer as they are, or goes on with a sum over ranks."""
    origin = origin_of(node)
    is_of_engine = not origin.is_users and origin.phase != "update"
    moves = name_operator(node) in _MOVES and is_of_engine
    return moves or graph_nodes.is_wait(node) or graph_nodes.is_view(node)


def _list_sources_of_move(node: Node) -> list[Node]:
    """List what a node only moves, or computes its result of alone, such as a gathered leaf that it casts."""
    is_carried = _only_moves(node) or len(node.all_input_nodes) == 1
    return node.all_input_nodes if is_carried else []


def show_frame(frame: Frame) -> str:
    """Show a line of the user's program."""
    return f"{Path(frame.file).name}:{frame.line} in {frame.function}: {frame.text}"
