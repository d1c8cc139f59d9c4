"""replay: run a step again on its arguments, and name the first operation that made a wrong value."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

import fshard as fs
from fshard.ext._compat import Frame, noting_origins
from fshard.ext.replay.run import run_nodes
from fshard.ext.replay.sightings import (
    NO_ORIGIN,
    Maker,
    Measure,
    Sightings,
    Walk,
    find_first,
    measure_nonfinite,
    show_frame,
)
from fshard.extend import (
    Exchange,
    Jitted,
    Traced,
    calling,
    describe,
    expect,
    flatten,
    graph_nodes,
    is_donated,
    refuse,
    tensors_of,
    unflatten,
)

# So many operations before the maker are shown.
MAX_BEFORE = 3


class Report(NamedTuple):
    """The first operation that made a refused value, or the argument that has one; the same on every rank.

    Attributes:
        operator: The operator as printed graphs name it, or the path of the argument.
        problem: What it made or has: "NaN", "infinities" or "values that watch refuses".
        ranks: The ranks where this operation made one first.
        phase: "forward", "backward", "recomputed" or "update"; empty for an argument.
        frames: Lines of the user's program that ran it, the innermost first.
        forward: For an operation of the backward the lines of its forward.
        module: The submodule that it belongs to.
        unit: The unit that the submodule lies in, or the units of the nearest collective.
        leaf: For an operation of the backward or the update the path of the result that it goes into.
        microbatch: The number of the microbatch, counted from 1.
        microbatches: How many there are.
        operands: What it read, with ranges.
        results: What it made.
        before: Up to three operations before it, the last one first.
    """

    operator: str
    problem: str
    ranks: list[int]
    phase: str
    frames: list[Frame]
    forward: list[Frame]
    module: str
    unit: str
    leaf: str
    microbatch: int
    microbatches: int
    operands: list[str]
    results: list[str]
    before: list[str]

    def __str__(self) -> str:
        """Write the report, a line for each fact."""
        return "\n  ".join(self._list_lines())

    def _list_lines(self) -> Iterator[str]:
        ranks = "rank " if len(self.ranks) == 1 else "ranks "
        ranks += ", ".join(map(str, self.ranks))
        subject, verb = (self.operator, "made") if self.phase else (f"the argument {self.operator}", "has")
        yield f"replay: {subject} {verb} {self.problem} on {ranks}"
        phase = self.phase
        if self.microbatches > 1 and phase != "update":
            phase += f", microbatch {self.microbatch} of {self.microbatches}"
        facts = [
            ("phase", [phase]),
            ("at", map(show_frame, self.frames)),
            ("backward of", map(show_frame, self.forward)),
            ("module", [self.module]),
            ("unit", [self.unit]),
            ("leaf", [self.leaf]),
            ("read", self.operands),
            (verb, self.results),
            ("before it", self.before),
        ]
        for title, texts in facts:
            yield from (f"{title}: {text}" for text in texts if text)


Watch = str | Callable[[torch.Tensor, Node], object]


def replay(
    step: Callable[..., Any], *args: Any, watch: Watch = "nonfinite", allow: Collection[str] = (), **kwargs: Any
) -> Report | None:
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
            meta["origin"] has its lines, module and phase.
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
    >>> report.operator, report.problem, report.phase, report.ranks, report.operands
    ('aten.log', 'infinities', 'forward', [0], ["[0][0]['w']: float32[2], 0 to 1"])
    >>> fs.replay(step, params, torch.ones(2), allow=["aten.log", "aten.div"])
    """
    with calling("replay", lambda: flatten((args, kwargs)).axes):
        is_watch = watch == "nonfinite" or callable(watch)
        expect(is_watch, "replay", 'watch to be "nonfinite" or a function', describe(watch))
        are_texts = not isinstance(allow, str) and all(isinstance(name, str) for name in allow)
        expect(are_texts, "replay", "allow to be a collection of operators and lines", describe(allow))
        _refuse_donated(flatten((args, kwargs)))
        traced, flat = _trace(step, args, kwargs)
        sightings = Sightings(traced, _name_inputs(traced, flat), _make_measure(watch), allow)
        tensors = [tensor for tensor in tensors_of(flat.leaves) if isinstance(tensor, torch.Tensor)]
        run_nodes(traced, tensors, sightings.watch)
        return _report(Exchange("replay"), traced, sightings)


def _refuse_donated(flat: Any) -> None:
    def misfit(leaf: Any) -> str | None:
        return "was donated to an earlier call, so it is empty now" if is_donated(leaf) else None

    remedy = (
        "keep the argument of the step that went wrong, as fs.tree_map(torch.clone, state), or leave out "
        "donate_argnums and donate=True while you search; or restore the last checkpoint and go on from there"
    )
    refuse("replay: arguments were donated, and a step cannot run again without them", flat.problems(misfit), remedy)


def _trace(step: Any, args: Any, kwargs: Any) -> tuple[Traced, Any]:
    """Trace a step, without donation, into a graph whose nodes know their origins."""
    function: Any = getattr(step, "__wrapped__", step) if isinstance(step, Jitted) else step
    try:
        with noting_origins():
            _, program, flat = fs.jit(function).find_call(args, kwargs)
    except (TypeError, ValueError) as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(f"replay: {name} cannot be made one graph, which replay runs. {error}") from error
    return program.traced, flat


def _name_inputs(traced: Traced, flat: Any) -> dict[Node, tuple[str, bool]]:
    """Find the path of each input, and whether it is a Sharded leaf."""
    names = {}
    for node, index in zip(graph_nodes.find_inputs(traced.module.graph), traced.input_leaves, strict=True):
        names[node] = flat.paths[index], isinstance(flat.leaves[index], fs.Sharded)
    return names


def _make_measure(watch: Watch) -> Measure:
    if not callable(watch):
        return measure_nonfinite
    return lambda tensor, node: int(bool(watch(tensor, node)))


def _report(exchange: Exchange, traced: Traced, sightings: Sightings) -> Report | None:
    """Find the first maker of all ranks, whose rank writes the report for all."""
    walks_by_rank = []
    for walks in exchange.all_gather_object(sightings.walk_all()):
        walks_by_rank.append({place: _read_walk(*walk) for place, walk in walks.items()})
    makers = find_first(walks_by_rank)
    if not makers:
        return None
    (maker, rank), *_ = makers
    ranks = sorted(rank for _, rank in makers)
    is_writer = exchange.rank == rank
    values = exchange.take_first(_write_report(traced, sightings, maker, ranks) if is_writer else None)
    report = Report(*values)
    frames = [Frame(*frame) for frame in report.frames]
    return report._replace(frames=frames, forward=[Frame(*frame) for frame in report.forward])


def _read_walk(maker: Any, waits: Any) -> Walk:
    return Walk(maker and Maker(*maker), {place: Maker(*wait) for place, wait in waits.items()})


def _write_report(traced: Traced, sightings: Sightings, maker: Maker, ranks: list[int]) -> Report:
    node = sightings.nodes[maker.position]
    origin = node.meta.get("origin", NO_ORIGIN)
    operands, results = sightings.makers.get(node, ([], []))
    is_argument = node.op == "placeholder"
    origins = [each.meta["origin"].microbatch for each in sightings.nodes if "origin" in each.meta]
    leaf = _find_result(traced, node) if origin.phase in ("backward", "update") else ""
    return Report(
        operator=sightings.name(node),
        problem=sightings.name_problem(node),
        ranks=ranks,
        phase="" if is_argument else origin.phase,
        frames=list(origin.frames),
        forward=list(origin.forward),
        module=origin.module,
        unit=_find_unit(sightings.nodes, node),
        leaf=leaf,
        microbatch=origin.microbatch + 1,
        microbatches=max(origins, default=0) + 1,
        operands=operands,
        results=results,
        before=[sightings.describe_node(each) for each in _find_before(node)],
    )


def _walk_along(node: Node, follow: Callable[[Node], Any]) -> Iterator[Node]:
    """List the nodes that lead to a node, or that use it, the nearest first."""
    pending = deque([node])
    seen = {node}
    while pending:
        reached = pending.popleft()
        yield reached
        for other in follow(reached):
            if other not in seen:
                seen.add(other)
                pending.append(other)


def _find_result(traced: Traced, node: Node) -> str:
    """Find the path of the result that a node goes into first."""
    results = graph_nodes.find_results(traced.module.graph)
    paths = dict(zip(results, flatten(unflatten(traced.treedef, results)).paths, strict=True))
    return next((paths[user] for user in _walk_along(node, lambda node: node.users) if user in paths), "")


def _find_unit(nodes: Sequence[Node], node: Node) -> str:
    """Find the unit that a node's submodule lies in, or those of the nearest collective that brought what it reads."""
    collectives = filter(None, map(graph_nodes.find_collective, nodes))
    units = {unit for collective in collectives for unit in collective.about.units}
    module = node.meta.get("origin", NO_ORIGIN).module
    around = [unit for unit in units if f"{module}.".startswith(f"{unit}.")]
    if around:
        return max(around, key=len)
    for source in _walk_along(node, lambda node: node.all_input_nodes):
        collective = graph_nodes.find_collective(source)
        if collective is not None and collective.about.units:
            return collective.unit
    return ""


def _find_before(node: Node) -> list[Node]:
    """Find operations whose results led to a node, the nearest first; views are left out."""
    operations = []
    for other in _walk_along(node, lambda node: reversed(node.all_input_nodes)):
        if other is not node and other.op == "call_function" and not graph_nodes.is_view(other):
            operations.append(other)
    return operations[:MAX_BEFORE]
