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
from fshard.ext._compat import Frame, find_start, name_operator, origin_of
from fshard.ext.replay.observed_run import run_step, tensors_in
from fshard.ext.replay.operations import OperationReport, Operations, show_frame
from fshard.extend import calling, describe, expect, flatten, graph_nodes, ranks_of, walk_graph

# So many operations before the maker are shown.
MAX_BEFORE = 3
Watch = str | Callable[[torch.Tensor, Node], object]
# The makers of a refused value, and the waits that brought some, each with the identity of its collective.
Trace = dict[Node, str]
# What is wrong with a value, the worse the later; a level is an index of these.
PROBLEMS = ("", "infinities", "NaN", "values that watch refuses")
INFINITE, NAN, REFUSED = 1, 2, 3
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
            meta["origin"] has its lines, module and phase. Views are not looked at where they are made.
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
        facts, left = _trace_refusals(operations, watch, tuple(allow))
        maker = _find_maker(operations, left)
        return operations.report_first(maker, **facts.get(maker, {}))


def _check_options(watch: Any, allow: Any) -> None:
    is_watch = watch == "nonfinite" or callable(watch)
    expect(is_watch, "replay", 'watch to be "nonfinite" or a function', describe(watch))
    is_collection = isinstance(allow, Collection) and not isinstance(allow, str)
    are_texts = is_collection and all(isinstance(name, str) for name in allow)
    expect(are_texts, "replay", "allow to be a collection of operators and lines", describe(allow))


def _trace_refusals(
    operations: Operations, watch: Watch, allow: tuple[str, ...]
) -> tuple[dict[Node | None, dict[str, Any]], dict[str, Trace]]:
    """Run a step, and find out where refused values come from.

    A value is looked at where it is made. Where it is read, it is looked at again if it may be to blame: its memory has
    held refused values, and it leaves the graph or the node made refused ones.

    Returns:
        For the makers and waits of all traces what a report says of them; and for each exit that refused values left
        by their traces.
    """
    storages = graph_nodes.find_storages(operations.nodes)
    # For each storage the trace of the last refused value in it.
    traces: dict[Hashable, Trace] = {}
    facts: dict[Node | None, dict[str, Any]] = {}
    left: dict[str, Trace] = defaultdict(dict)
    for node, operands, results in run_step(operations):
        # What a view shows has been looked at, and lies in memory that has its trace.
        level = 0 if graph_nodes.is_view(node) else _measure(watch, node, results)
        level_read = 0
        trace: Trace = {}
        for source, value in operands.items():
            traces_read = [traces[storage] for storage in storages[source] if storage in traces]
            if not traces_read:
                continue
            place = _find_exit(operations, source, node)
            level_of_source = _measure(watch, source, tensors_in(value)) if level or place else 0
            if level_of_source:
                level_read = max(level_of_source, level_read)
                trace |= ChainMap(*traces_read)
                if place:
                    left[place] |= ChainMap(*traces_read)
        if level and graph_nodes.is_wait(node):
            start, _ = find_start(node)
            trace = {node: operations.identities[start]}
        elif level > level_read and not _is_legal(operations, node, level, allow):
            trace[node] = ""
        if node in trace:
            facts[node] = _describe(operations, node, level, operands, results)
        if level:
            for written in (node, *graph_nodes.find_write_targets(node)):
                traces |= dict.fromkeys(storages[written], trace)
        if level == REFUSED:
            left[RESULTS] |= trace
    return facts, left


def _find_exit(operations: Operations, source: Node, node: Node) -> str:
    """Find the exit by which a value leaves the graph where a node reads it; empty if the value stays."""
    if node.op == "output":
        leaves = source.op != "placeholder"
    else:
        is_gradient = origin_of(node).phase == "update" != origin_of(source).phase
        leaves = is_gradient and source.op == "call_function"
    return operations.identities.get(node, RESULTS if leaves else "")


def _measure(watch: Watch, node: Node, tensors: Sequence[torch.Tensor]) -> int:
    """Measure how bad the tensors of a node are; 0 if they are accepted."""
    if callable(watch):
        is_refused = any(watch(tensor, node) for tensor in tensors)
        return REFUSED if is_refused else 0
    return max(map(measure_nonfinite, tensors), default=0)


def _is_legal(operations: Operations, node: Node, level: int, allow: tuple[str, ...]) -> bool:
    """Whether the program means to make such a value: it wrote an infinity down, or the caller allows it."""
    place = "".join(f"{frame.file}:{frame.line}" for frame in _list_frames(node))
    if name_operator(node) in allow or place.endswith(allow):
        return True
    if level != INFINITE:
        return False
    if node.op != "call_function":
        # A constant, or an argument such as a mask.
        return not isinstance(operations.leaves.get(node), Sharded)
    constants: list[Any] = []
    map_aggregate((node.args, node.kwargs), constants.append)
    return math.inf in constants or -math.inf in constants


def _describe(
    operations: Operations,
    node: Node,
    level: int,
    operands: Mapping[Node, Any],
    results: Sequence[torch.Tensor],
) -> dict[str, Any]:
    """Describe a node that made refused values, or brought some, while its operands are there."""
    verb = "made" if node.op == "call_function" else "has"
    read = []
    for source, value in operands.items():
        name = operations.names[source].operator
        read += [f"{name}: {_describe_range(tensor)}" for tensor in tensors_in(value)]
    return {
        "verdict": f"{verb} {PROBLEMS[level]}",
        "read": read,
        "value": list(map(_describe_range, results)),
        "before_it": _list_before(node),
    }


def _find_maker(operations: Operations, left: Mapping[str, Trace]) -> Node | None:
    """Find the first maker on this rank of what went wrong on any, following values through collectives.

    Returns:
        The maker; None if there is none here. A collective that got refused values nowhere is a maker where it is
        waited for.
    """
    senders: dict[str, list[str]] = defaultdict(list)
    senders_here = {place: list(trace.values()) for place, trace in left.items()}
    for senders_of_rank in operations.gather(senders_here):
        for place, identities in senders_of_rank.items():
            senders[place] += identities
    makers = []
    for place in walk_graph([RESULTS], lambda place: senders.get(place, ())):
        for node, sender in left.get(place, {}).items():
            if sender not in senders:
                makers.append(node)
    return min(makers, key=operations.nodes.index, default=None)


def _list_frames(node: Node) -> list[Frame]:
    """List the innermost line of the program that ran a node, if any did."""
    origin = origin_of(node)
    return [*origin.frames, *origin.forward][:1]


def _list_before(node: Node) -> list[str]:
    """List operations whose results led to a node, the nearest first; views are left out."""
    sources = walk_graph(reversed(node.all_input_nodes), lambda reached: reversed(reached.all_input_nodes))
    computed = (source for source in sources if source.op == "call_function" and not graph_nodes.is_view(source))
    lines = []
    for source in islice(computed, MAX_BEFORE):
        lines.append(" at ".join([name_operator(source), *map(show_frame, _list_frames(source))]))
    return lines


def measure_nonfinite(tensor: torch.Tensor) -> int:
    """Return NAN if a tensor has NaN, INFINITE if it has infinities, else 0."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    numbers = _as_real_numbers(tensor)
    # A sum takes less time than anything else that reads all elements, and is finite only if all of them are.
    if math.isfinite(numbers.sum()):
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
    dtype = str(tensor.dtype).removeprefix("torch.")
    text = f"{dtype}{list(tensor.shape)}"
    numbers = _as_real_numbers(tensor)
    finite = numbers[numbers.isfinite()]
    if finite.numel():
        text += f", {finite.min():.3g} to {finite.max():.3g}"
    kinds = {"NaN": numbers.isnan(), "infinite": numbers.isinf()}
    for word, is_of_kind in kinds.items():
        if is_of_kind.any():
            text += f", {is_of_kind.sum()} {word}"
    return text
