"""replay: run a step again on its arguments, and name the first operation that made a wrong value."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fshard.ext.replay.places import Operations, Place, list_facts, list_ranks, walk_along
from fshard.ext.replay.ranks import Ranks
from fshard.ext.replay.repeat import read_generators, run_repeatably, trace_call
from fshard.ext.replay.sightings import Maker, Measure, Sightings, Walk, find_first, measure_nonfinite
from fshard.extend import calling, describe, expect, flatten, graph_nodes, is_donated, ranks_of, refuse

# So many operations before the maker are shown.
MAX_BEFORE = 3


class Report(NamedTuple):
    """The first operation that made a refused value, or the argument that has one; the same on every rank.

    Attributes:
        place: The operation, or the argument, and the ranks where it made or has one first.
        problem: What it made or has: "NaN", "infinities" or "values that watch refuses".
        operands: What it read, with ranges.
        results: What it made.
        before: Up to three operations before it, the last one first.
    """

    place: Place
    problem: str
    operands: list[str]
    results: list[str]
    before: list[str]

    def __str__(self) -> str:
        """The report, a line for each fact."""
        verb = "made" if self.place.phase else "has"
        headline = f"replay: {self.place.subject} {verb} {self.problem} on {list_ranks(self.place.ranks)}"
        facts = list_facts([("read", self.operands), (verb, self.results), ("before it", self.before)])
        return "\n".join(filter(None, [headline, str(self.place), facts]))


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
    >>> report.place.operator, report.place.phase, report.problem, report.operands
    ('aten.log', 'forward', 'infinities', ["[0][0]['w']: float32[2], 0 to 1"])
    >>> fs.replay(step, params, torch.ones(2), allow=["aten.log", "aten.div"])
    """
    with calling("replay", lambda: flatten((args, kwargs)).axes):
        is_watch = watch == "nonfinite" or callable(watch)
        expect(is_watch, "replay", 'watch to be "nonfinite" or a function', describe(watch))
        is_collection = isinstance(allow, Collection) and not isinstance(allow, str)
        are_texts = is_collection and all(isinstance(name, str) for name in allow)
        expect(are_texts, "replay", "allow to be a collection of operators and lines", describe(allow))
        _refuse_empty_arguments(flatten((args, kwargs)))
        call = trace_call("replay", step, args, kwargs)
        operations = Operations(call)
        sightings = Sightings(call, operations, _make_measure(watch), allow)
        run_repeatably(call, read_generators(), sightings.watch)
        return _report(operations, sightings)


def _refuse_empty_arguments(flat: Any) -> None:
    def misfit(leaf: Any) -> str | None:
        return "was donated to an earlier call, so it is empty now" if is_donated(leaf) else None

    remedy = (
        "keep the argument of the step that went wrong, as fs.tree_map(torch.clone, state), or leave out "
        "donate_argnums and donate=True while you search; or restore the last checkpoint and go on from there"
    )
    refuse("replay: arguments were donated, and a step cannot run again without them", flat.problems(misfit), remedy)


def _make_measure(watch: Watch) -> Measure:
    if not callable(watch):
        return measure_nonfinite
    return lambda tensor, node: int(bool(watch(tensor, node)))


def _report(operations: Operations, sightings: Sightings) -> Report | None:
    """Find the first maker of all ranks, whose rank writes the report for all."""
    ranks = Ranks("replay", [ranks_of(None)])
    walks_by_rank = []
    for walks in ranks.gather(sightings.walk_all()):
        walks_by_rank.append({start: _read_walk(*walk) for start, walk in walks.items()})
    makers = find_first(walks_by_rank)
    if not makers:
        return None
    (maker, writer), *_ = makers
    values = None
    if ranks.place == writer:
        node = operations.nodes[maker.position]
        before = [sightings.describe_node(each) for each in _find_before(node)]
        operands, results = sightings.makers.get(node, ([], []))
        values = [operations.locate(node), sightings.name_problem(node), operands, results, before]
    place, *facts = ranks.gather(values)[writer]
    return Report(Place.read(place, sorted(ranks.numbers[index] for _, index in makers)), *facts)


def _read_walk(maker: Any, waits: Any) -> Walk:
    return Walk(maker and Maker(*maker), {start: Maker(*wait) for start, wait in waits.items()})


def _find_before(node: Node) -> list[Node]:
    """Find operations whose results led to a node, the nearest first; views are left out."""
    operations = []
    for other in walk_along(node, lambda reached: reversed(reached.all_input_nodes)):
        if other is not node and other.op == "call_function" and not graph_nodes.is_view(other):
            operations.append(other)
    return operations[:MAX_BEFORE]
