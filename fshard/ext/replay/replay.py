"""replay: run a step again on its arguments, and name the first operation that made a wrong value."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fshard.ext.replay.places import Operations, Place, list_facts, list_ranks, name_with_line, walk_along
from fshard.ext.replay.ranks import Ranks
from fshard.ext.replay.repeat import read_generators, run_repeatably, trace_call
from fshard.ext.replay.sightings import Measure, Sightings, measure_nonfinite
from fshard.extend import calling, describe, expect, flatten, graph_nodes, ranks_of

# So many operations before the maker are shown.
MAX_BEFORE = 3


class ReplayReport(NamedTuple):
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
) -> ReplayReport | None:
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
        _check_options(watch, allow)
        call = trace_call("replay", step, args, kwargs)
        operations = Operations(call)
        sightings = Sightings(call, operations, _make_measure(watch), allow)
        run_repeatably(call, read_generators(), sightings.watch)
        ranks = Ranks("replay", [ranks_of(None)])
        maker = sightings.find_maker(ranks.gather(sightings.list_waits()))
        facts = [] if maker is None else [*sightings.seen[maker], _list_before(maker)]
        first = ranks.find_first(operations, maker, facts, is_last=maker in sightings.masks)
        if first is None:
            return None
        place, first_facts = first
        return ReplayReport(place, *first_facts)


def _check_options(watch: Any, allow: Any) -> None:
    is_watch = watch == "nonfinite" or callable(watch)
    expect(is_watch, "replay", 'watch to be "nonfinite" or a function', describe(watch))
    is_collection = isinstance(allow, Collection) and not isinstance(allow, str)
    are_texts = is_collection and all(isinstance(name, str) for name in allow)
    expect(are_texts, "replay", "allow to be a collection of operators and lines", describe(allow))


def _make_measure(watch: Watch) -> Measure:
    if not callable(watch):
        return measure_nonfinite
    return lambda tensor, node: int(bool(watch(tensor, node)))


def _list_before(node: Node) -> list[str]:
    """List operations whose results led to a node, the nearest first; views are left out."""
    operations = []
    for other in walk_along(node, lambda reached: reversed(reached.all_input_nodes)):
        if other is not node and other.op == "call_function" and not graph_nodes.is_view(other):
            operations.append(name_with_line(other))
    return operations[:MAX_BEFORE]
