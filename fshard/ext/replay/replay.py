"""replay: run a step again on its arguments, and name the first operation that made a wrong value."""

import math
from collections import ChainMap, defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from fshard import Sharded
from fshard.ext._compat import Frame, origin_of
from fshard.ext.replay.observed_run import run_step, tensors_in
from fshard.ext.replay.operations import OperationReport, Operations, find_start, name_operator, show_frame
from fshard.extend import calling, describe, expect, flatten, graph_nodes, ranks_of, walk_graph

# So many operations before the maker are shown.
MAX_BEFORE = 3
Watch = str | Callable[[torch.Tensor, Node], object]
# The makers of a refused value, and the waits that brought some, each with the identity of its collective.
Trace = dict[Node, str]
# How bad a value is; 0 if it is accepted.
INFINITE = 1
NAN = 2
# An exit: where refused values leave the graph with its results and gradients. All other exits are collectives.
RESULTS = "results"


def replay(
    step: Callable[..., Any], *args: Any, watch: Watch = "nonfinite", allow: Collection[str] = (), **kwargs: Any
) -> OperationReport | None:
    """Run a step again on its arguments, and name the first operation that made a value which is not finite.

    Every rank of the run calls it, with the arguments of the step that went wrong. The step is traced, and its graph
    runs node by node, collectives included, so that each value can be looked at. Arguments stay as they are, and no
    result is returned. From the results and gradients that are not finite the search goes back, also through
    collectives to other ranks, to the first operation that made such a value out of operands without. What nobody
    reads, padding and the -inf of a mask cause no report, as they reach no result. A replay takes the time of a trace
    and of a run that looks at each value, and the memory of an eager step.

    Follows jax.debug_nans, which runs a jitted function again operation by operation.

    Args:
        step: The step, a pure function, or what `jit` made of it.
        *args: Its arguments. Those that were donated are lost: keep the state of before, or restore it.
        watch: "nonfinite", or a function of a tensor and its node in the graph that tells whether to refuse the tensor.
            With a function the report names the first operation that made a refused value anywhere; the node's
            meta["origin"] has its lines, module and phase. Views of tensors that were accepted are not looked at.
        allow: Operators, such as "aten.log", and lines, such as "model.py:12", that may make infinities or NaN.
        **kwargs: Its keyword arguments.

    Returns:
        None if all is well. Otherwise the report, the same on every rank; print it.

    Raises:
        ValueError: if `watch` or `allow` make no sense, an argument was donated, or the step cannot be one graph.

    >>> import torch, fshard as fs
    >>> params = fs.shard({"w": torch.tensor([1.0, 0.0])}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> step = fs.value_and_grad(lambda params, x: (fs.gather(params)["w"].log() * x).sum())
    >>> report = fs.replay(step, params, torch.ones(2))
    >>> report.operator, report.phase, report.verdict, report.read
    ('aten.log', 'forward', 'made infinities', ["[0][0]['w']: float32[2], 0 to 1"])
    >>> fs.replay(step, params, torch.ones(2), allow=["aten.log", "aten.div"])
    """
    with calling("replay", lambda: flatten((args, kwargs)).axes):
        _check_options(watch, allow)
        operations = Operations("replay", [ranks_of(None)], step, args, kwargs)
        sightings = _Sightings(operations, watch, allow)
        for event in run_step(operations):
            sightings.observe(*event)
        maker = sightings.find_maker()
        facts = {} if maker is None else sightings.facts[maker]
        return operations.report_first(maker, **facts)


def _check_options(watch: Any, allow: Any) -> None:
    is_watch = watch == "nonfinite" or callable(watch)
    expect(is_watch, "replay", 'watch to be "nonfinite" or a function', describe(watch))
    is_collection = isinstance(allow, Collection) and not isinstance(allow, str)
    are_texts = is_collection and all(isinstance(name, str) for name in allow)
    expect(are_texts, "replay", "allow to be a collection of operators and lines", describe(allow))


class _Sightings:
    """The refused values of one run of a graph.

    Each refused value has a trace: the makers that it comes from, which made a refused value out of accepted ones, and
    the waits for collectives that brought some.

    Attributes:
        facts: For the makers and waits of all traces what a report says of them.
    """

    def __init__(self, operations: Operations, watch: Watch, allow: Collection[str]) -> None:
        """Begin before the run.

        Args:
            operations: The nodes of the graph.
            watch: As for `replay`.
            allow: Names of operators, and ends of texts such as "model.py:12", that may make refused values.
        """
        self.facts: dict[Node, dict[str, Any]] = {}
        self._operations = operations
        self._watch = watch
        self._allow = tuple(allow)
        self._storages = graph_nodes.find_storages(operations.nodes)
        # For each storage the trace of the last refused value in it.
        self._traces: dict[Hashable, Trace] = {}
        # For each exit that refused values left by their traces.
        self._left: dict[str, Trace] = defaultdict(dict)

    def observe(self, node: Node, operands: Mapping[Node, Any], results: Sequence[torch.Tensor]) -> None:
        """Look at what a node read and made; called for each node of a run.

        A value is looked at where it is made, and only in memory that has held refused ones again where it is read.
        """
        level_read = 0
        trace: Trace = {}
        for source, value in operands.items():
            traces = [self._traces[storage] for storage in self._storages[source] if storage in self._traces]
            level = self._measure(source, tensors_in(value)) if traces else 0
            if level:
                level_read = max(level, level_read)
                trace_of_source = ChainMap(*traces)
                trace |= trace_of_source
                if self._leaves(source, node):
                    self._left[self._operations.identities.get(node, RESULTS)] |= trace_of_source
        if graph_nodes.is_view(node) and not level_read:
            return
        level = self._measure(node, results)
        if not level:
            return
        if graph_nodes.is_wait(node):
            start, _ = find_start(node)
            trace = {node: self._operations.identities[start]}
            self._describe(node, level, {}, results)
        elif level > level_read and not self._is_legal(node, level):
            trace[node] = ""
            self._describe(node, level, operands, results)
        for written in (node, *graph_nodes.find_write_targets(node)):
            self._traces |= dict.fromkeys(self._storages[written], trace)
        if callable(self._watch):
            self._left[RESULTS] |= trace

    def _leaves(self, source: Node, node: Node) -> bool:
        """Whether what a node reads leaves the graph: as a message, a result, or a gradient that an update reads."""
        if node in self._operations.identities:
            return True
        is_gradient = origin_of(node).phase == "update" != origin_of(source).phase
        return source.op != "placeholder" if node.op == "output" else is_gradient and source.op == "call_function"

    def _measure(self, node: Node, tensors: Sequence[torch.Tensor]) -> int:
        """Measure how bad the tensors of a node are; 0 if they are accepted."""
        if callable(self._watch):
            return int(any(self._watch(tensor, node) for tensor in tensors))
        return max(map(measure_nonfinite, tensors), default=0)

    def _describe(self, node: Node, level: int, operands: Mapping[Node, Any], results: Sequence[torch.Tensor]) -> None:
        problem = "NaN" if level == NAN else "infinities"
        if callable(self._watch):
            problem = "values that watch refuses"
        self.facts[node] = {
            "verdict": f"has {problem}" if node.op == "placeholder" else f"made {problem}",
            "read": self._list_ranges(operands),
            "value": self._list_ranges({node: results}),
            "before_it": _list_before(node),
        }

    def _list_ranges(self, values: Mapping[Node, Any]) -> list[str]:
        lines = []
        for node, value in values.items():
            for tensor in tensors_in(value):
                dtype = str(tensor.dtype).removeprefix("torch.")
                name = self._operations.name(node)
                lines.append(f"{name}: {dtype}{list(tensor.shape)}{_describe_range(tensor)}")
        return lines

    def _is_legal(self, node: Node, level: int) -> bool:
        """Whether the program means to make such a value: it wrote an infinity down, or the caller allows it."""
        lines = [f"{frame.file}:{frame.line}" for frame in _list_frames(node)]
        if name_operator(node) in self._allow or any(line.endswith(self._allow) for line in lines):
            return True
        if callable(self._watch) or level > INFINITE:
            return False
        if node.op != "call_function":
            # A constant, or an argument such as a mask.
            return not isinstance(self._operations.leaves.get(node), Sharded)
        constants: list[Any] = []
        map_aggregate((node.args, node.kwargs), constants.append)
        return math.inf in constants or -math.inf in constants

    def find_maker(self) -> Node | None:
        """Find the first maker on this rank of what went wrong on any, following values through collectives.

        Returns:
            The maker; None if there is none here. A collective that got refused values nowhere is a maker where it is
            waited for.
        """
        senders_of_ranks = {place: list(trace.values()) for place, trace in self._left.items()}
        senders: dict[str, list[str]] = defaultdict(list)
        for senders_of_rank in self._operations.gather(senders_of_ranks):
            for place, identities in senders_of_rank.items():
                senders[place] += identities
        makers = []
        for place in walk_graph([RESULTS], lambda place: senders.get(place, ())):
            for node, sender in self._left[place].items():
                if sender not in senders:
                    makers.append(node)
        return min(makers, key=self._operations.nodes.index, default=None)


def _list_frames(node: Node) -> list[Frame]:
    """List the innermost line of the program that ran a node, if any did."""
    origin = origin_of(node)
    return [*origin.frames, *origin.forward][:1]


def _list_before(node: Node) -> list[str]:
    """List operations whose results led to a node, the nearest first; views are left out."""
    sources = walk_graph([node], lambda reached: reversed(reached.all_input_nodes))
    computed = (other for other in sources if other.op == "call_function" and not graph_nodes.is_view(other))
    lines = []
    for other in islice(computed, MAX_BEFORE + 1):
        lines.append(" at ".join([name_operator(other), *map(show_frame, _list_frames(other))]))
    # The first one is the node itself.
    return lines[1:]


def measure_nonfinite(tensor: torch.Tensor) -> int:
    """Return 2 if a tensor has NaN, 1 if it has infinities, else 0."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    numbers = _as_real_numbers(tensor)
    # A sum takes less time than anything else that reads all elements, and is finite only if all of them are.
    if math.isfinite(numbers.sum().item()):
        return 0
    if numbers.isnan().any():
        return NAN
    # Finite numbers may have an infinite sum.
    return INFINITE if numbers.isinf().any() else 0


def _as_real_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor in a dtype that torch can compare."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.float() if tensor.itemsize == 1 else tensor


def _describe_range(tensor: torch.Tensor) -> str:
    tensor = _as_real_numbers(tensor)
    finite = tensor[tensor.isfinite()]
    text = ""
    if finite.numel():
        text = f", {finite.min():.3g} to {finite.max():.3g}"
    counts = {"NaN": tensor.isnan().sum(), "infinite": tensor.isinf().sum()}
    for word, count in counts.items():
        if count:
            text += f", {count} {word}"
    return text
