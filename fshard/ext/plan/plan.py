"""plan: the cost of a step on a mesh of any size, found in one process without running it; limits of it as a test."""

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule, Node

import fshard as fs
from fshard import comm
from fshard.ext import _compat
from fshard.ext.plan.report import Bytes, Moment, Rates, StepPlan, check_rates, flops_of, is_number, readable, unit_of
from fshard.extend import describe, expect, fake_axes, fake_maker, flatten, refuse

# Uses of the buffers that collectives of these verbs fill.
_VERBS: Mapping[str, str] = MappingProxyType({comm.Verb.GATHER: "gathered", comm.Verb.SCATTER: "gradients"})

aten = torch.ops.aten
# Operators that bring numbers elsewhere, or to another dtype.
_MOVES = (
    *(aten.clone.default, aten.cat.default, _compat.TO_COPY, aten.constant_pad_nd.default, aten.copy_.default),
    *(aten.stack.default, aten.slice_scatter.default),
)
BACKENDS = ("nccl", "gloo")
_OPS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
# So many units are named that broke a budget.
_NAMED = 6


def plan(
    step: Callable[..., Any],
    state: Any,
    *batch: Any,
    mesh: Mapping[str, int],
    rank: int = 0,
    backend: str = "nccl",
    rates: Rates = Rates(),  # noqa: B008
) -> StepPlan:
    """Find the memory, traffic and arithmetic of a train step on a mesh of any size, and estimate its time.

    The step is traced on tensors without values, as `fs.make_graph` does, with the state laid out on that mesh: axes
    are matched by name. One process does it, whether or not torch.distributed runs, and nothing is sent or allocated.
    Memory is that of operators run one by one, arguments included; the allocator's and the backend's own is not.

    Args:
        step: A pure function of (state, *batch), or a jitted one: donated states are written in place.
        state: A TrainState, or any tree with Sharded leaves, of a mesh with the same names of axes; one rank will do,
            and so will tensors on the meta device, or what `shard` makes of torch's fake tensors. Buffers without
            values must be in it, for `model.apply(buffers=)`.
        *batch: The step's other arguments, as one rank gets them; tensors count by shape and dtype, and an Axis becomes
            that of the mesh with its name.
        mesh: Ranks on each axis by its name, outermost first.
        rank: Whose step it is: its number, the last axis varying fastest.
        backend: "nccl" or "gloo": the backend of collectives, by which their algorithm is chosen.
        rates: Speed of the device and its links, for the time alone.

    Returns:
        The plan: it prints as a table, and tells the peak by use, the timeline, collectives and bytes by axis and
        unit, floating-point operations and an estimate of the time.

    Raises:
        ValueError: if the mesh, the rank, the backend or a rate makes no sense, axes are not those of the
            state, the step looks at values, or it sends over an axis that it closes over.

    >>> import torch, fshard as fs
    >>> params = fs.shard({"w": torch.ones(4096, 1)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> def step(params, x):
    ...     return fs.value_and_grad(lambda p, x: (x @ fs.gather(p)["w"]).sum())(params, x)
    >>> found = plan(step, params, torch.ones(8, 4096), mesh={"shard": 1024})
    >>> found.by_axis(), found.by_unit()["['w']"].collectives
    ({'shard': Traffic(collectives=3, bytes=32736.0)}, 2)
    """
    place = _coordinates(mesh, rank)
    check_rates(rates, mesh)
    expect(backend in BACKENDS, "plan", f"backend to be one of {BACKENDS}", repr(backend))
    expect(callable(step), "plan", "step to be a function of (state, *batch)", describe(step))
    flat = flatten((state, *batch))
    _check_leaves(flat, mesh)
    with fake_axes("plan", mesh, place, backend) as axes:
        args = _laid_out(flat, axes)
        graph = fs.make_graph(step)(*args)
        inputs = [use or "inputs" for use, leaf in _uses_of(args) if isinstance(leaf, fs.Sharded | torch.Tensor)]
        of_inputs = zip(graph.module.graph.find_nodes(op="placeholder"), inputs, strict=True)
        known = {node: use for use, node in _uses_of(graph.results) if use and node is not None} | dict(of_inputs)
        arguments, moments = _timeline(graph, known)
        seconds, waiting = _seconds(moments, graph.memory.pending_buffers, rates)
        return StepPlan(dict(mesh), place, arguments, list(moments.values()), seconds, waiting, rates)


def assert_budget(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    peak_bytes: float | None = None,
    bytes_sent: float | None = None,
    collectives: int | Mapping[str, int] | None = None,
    mesh: Mapping[str, int] | None = None,
    **options: Any,
) -> StepPlan:
    """Assert that a train step stays in a budget of memory and communication; nothing is run.

    Args:
        step: As for `fs.plan`.
        args: Its arguments, the state first.
        peak_bytes: The most bytes that a rank may hold at a time, state and batch included.
        bytes_sent: The most bytes that it may send, in nominal ring terms.
        collectives: The most collectives, in all or by op, as {"all_gather": 12}.
        mesh: Ranks on each axis, as for `fs.plan`; None takes the state's own.
        **options: Passed to `fs.plan`; with the state's own mesh the backend is that of its process groups.

    Returns:
        The plan, for further assertions.

    Raises:
        ValueError: if a budget or the arguments make no sense, or there is none, and as by `fs.plan`.
        AssertionError: with each budget that is broken, by how much, and by what.

    >>> import torch, fshard as fs
    >>> params = fs.shard({"w": torch.ones(4096, 1)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> step = fs.value_and_grad(lambda params, x: (x @ fs.gather(params)["w"]).sum())
    >>> args = params, torch.ones(8, 4096)
    >>> fs.testing.assert_budget(step, args, mesh={"shard": 4}, bytes_sent=20e3, collectives=1)
    Traceback (most recent call last):
    AssertionError: assert_budget: the step breaks its budget on a mesh of shard 4
      bytes_sent is 24576, at most 20000 allowed; sent for ['w'] 24.58 kB
      collectives is 3, at most 1 allowed; issued for ['w'] 2, objective 1
    """
    what, needed = "assert_budget", "args to be the step's arguments as a tuple, the state first"
    expect(isinstance(args, list | tuple) and args, what, needed, describe(args))
    budgets = {"peak_bytes": peak_bytes, "bytes_sent": bytes_sent}
    limits = {name: limit for name, limit in budgets.items() if limit is not None}
    for name, limit in limits.items():
        expect(is_number(limit) and limit >= 0, what, f"{name} to be a number of bytes, 0 or more", f"{limit!r:.40}")
    by_op = collectives if isinstance(collectives, Mapping) else {} if collectives is None else {"": collectives}
    fits = all(op in ("", *_OPS) and type(limit) is int and limit >= 0 for op, limit in by_op.items())
    needed = f"collectives to be a whole number, 0 or more, or one for each op of {_OPS}"
    expect(fits, what, needed, f"{collectives!r:.100}")
    expect(limits or by_op, what, "peak_bytes=, bytes_sent= or collectives=", "none of them")
    if mesh is None:
        leaves = [leaf for leaf in flatten(tuple(args)).leaves if isinstance(leaf, fs.Sharded)]
        mesh = {axis.name: axis.size for leaf in leaves for axis in leaf.spec.axes}
        on_host = {leaf.local.device.type for leaf in leaves} == {"cpu"}
        options = {"backend": "gloo" if on_host else "nccl", **options}
    found = plan(step, *args, mesh=mesh, **options)
    broken = list(_broken(found, limits, by_op))
    if broken:
        place = ", ".join(f"{name} {size}" for name, size in found.mesh.items())
        raise AssertionError("\n  ".join([f"{what}: the step breaks its budget on a mesh of {place}", *broken]))
    return found


def _broken(found: StepPlan, limits: Mapping[str, float], by_op: Mapping[str, int]) -> Iterator[str]:
    """Write a line for each budget that is broken, with the units that break it."""
    if found.peak_bytes > limits.get("peak_bytes", math.inf):
        held = {name.replace("_", " "): size for name, size in found.peak._asdict().items()}
        yield f"peak_bytes is {found.peak_bytes}, at most {limits['peak_bytes']:.0f} allowed; held {_most(held)}"
        if found.timeline:
            yield f"  at {found.at_peak.operator} ({found.at_peak.name})"
    if found.bytes_sent() > limits.get("bytes_sent", math.inf):
        sent = _most({name: traffic.bytes for name, traffic in found.by_unit().items()})
        yield f"bytes_sent is {found.bytes_sent():.0f}, at most {limits['bytes_sent']:.0f} allowed; sent for {sent}"
    for op, limit in by_op.items():
        issued = Counter(unit_of(entry) for entry in found.collectives() if op in ("", entry.op))
        if issued.total() > limit:
            what = f"collectives of {op}" if op else "collectives"
            yield f"{what} is {issued.total()}, at most {limit} allowed; issued for {_most(issued, str)}"


def _most(sizes: Mapping[str, float], show: Callable[[float], str] = readable) -> str:
    shown = [f"{name} {show(size)}" for name, size in sorted(sizes.items(), key=lambda item: -item[1]) if size]
    return ", ".join([*shown[:_NAMED], *([f"and {len(shown) - _NAMED} more"] if len(shown) > _NAMED else [])])


def _coordinates(mesh: Any, rank: Any) -> dict[str, int]:
    """Find a rank's coordinate on each axis, the last of which varies fastest, as in a DeviceMesh."""
    items = list(mesh.items()) if isinstance(mesh, Mapping) else []
    sizes = items and all(isinstance(name, str) and type(size) is int and size > 0 for name, size in items)
    needed = 'mesh to be a mapping from names of axes to whole numbers of ranks from 1, as {"shard": 4096}'
    expect(sizes, "plan", needed, f"{mesh!r:.100}")
    ranks = math.prod(mesh.values())
    needed = f"rank to be a whole number from 0 to {ranks - 1} for the mesh {dict(mesh)}"
    expect(type(rank) is int and 0 <= rank < ranks, "plan", needed, f"{rank!r:.40}")
    place = {}
    for name, size in reversed(items):
        rank, place[name] = divmod(rank, size)
    return place


def _check_leaves(flat: Any, mesh: Mapping[str, int]) -> None:
    """Refuse a mesh whose axes are not those that leaves live on."""
    leaves = [leaf for leaf in flat.leaves if isinstance(leaf, fs.Sharded)]
    expect(leaves, "plan", "the state of a step", "arguments without a Sharded leaf", "make it by fs.shard")
    names = {axis.name for leaf in leaves for axis in _axes_of(leaf)}
    found, needed = (", ".join(map(repr, sorted(axes))) or "none" for axes in (mesh, names))
    remedy = "give each a size, or make the state with a strategy of other axes"
    expect(names == set(mesh), "plan", f"mesh to have the state's axes, {needed}", found, remedy)


def _axes_of(leaf: Any) -> list[fs.Axis]:
    transform: Any = leaf.spec.transform
    return [*leaf.spec.axes, *(transform.axes if transform else ())]


def _laid_out(flat: Any, axes: Mapping[str, fs.Axis]) -> Any:
    """Lay the arguments of a step out on another mesh: its axes in all specs, and tensors without values."""
    fake, leaves = fake_maker(symbols=True), list(flat.leaves)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, fs.Sharded):
            spec = _moved(leaf.spec, axes)
            leaves[i] = fs.Sharded(fake(torch.empty(spec.local_shape, dtype=leaf.local.dtype, device="meta")), spec)
        else:
            leaves[i] = fake(leaf.detach()) if isinstance(leaf, torch.Tensor) else _moved(leaf, axes)

    def misfit(leaf: Any) -> tuple[str, str] | None:
        of_leaf = _axes_of(leaf) if isinstance(leaf, fs.Sharded) else ()
        kept = [f"{axis.name!r} of {axis.size} ranks still" for axis in of_leaf if axis not in axes.values()]
        return (f"a transform that communicates over {kept[0]}", "an axis in a field") if kept else None

    remedy = "keep an Axis as a field of the dataclass"
    refuse("plan: transforms cannot be moved", flat._replace(leaves=leaves).problems(misfit), remedy)
    args = list(flat.unflatten(leaves))
    for i, argument in enumerate(args):
        if getattr(argument, "transform_state", None) is not None:
            # It has a row for each rank of the mesh.
            args[i] = argument._replace(transform_state=fs.tree_map(fake, fs.transform_state(argument.params)))
    return tuple(args)


def _moved(value: Any, axes: Mapping[str, fs.Axis]) -> Any:
    """Put axes in the place of others of their names, in all fields of dataclasses."""
    if isinstance(value, fs.Axis):
        return axes.get(value.name, value)
    if type(value) is tuple:
        return tuple(_moved(part, axes) for part in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    old = {part.name: getattr(value, part.name) for part in fields(value) if part.init}
    changed = {name: new for name, part in old.items() if (new := _moved(part, axes)) is not part}
    return replace(value, **changed) if changed else value


def _uses_of(trees: Any) -> Iterator[tuple[str | None, Any]]:
    """List the leaves of a step's arguments or results, each with its use; None where it is no field of a state."""
    uses = {"params": "parameters", "opt_state": "optimizer_state", "transform_state": "optimizer_state"}
    for tree in trees if type(trees) is tuple else (trees,):
        for name, part in (tree._asdict() if hasattr(tree, "_asdict") else {"": tree}).items():
            yield from ((uses.get(name), leaf) for leaf in flatten(part).leaves)


def _timeline(graph: Any, known: Mapping[Node, str]) -> tuple[Bytes, dict[Node, Moment]]:
    """Walk through a graph, of whose inputs and results the uses are known.

    Returns:
        The bytes that are held all the time, and the operators in their order.
    """
    life, operators = graph.memory, {moment.node: moment for moment in graph.moments}
    uses = _uses(graph, known)
    flying: Counter[Hashable] = Counter()
    starts, waits = defaultdict[Node, list[Hashable]](list), defaultdict[Node, list[Hashable]](list)
    for flight in life.pending_buffers:
        names = [name for name in (flight.buffer, *flight.held_storages) if name not in life.always_held]
        starts[flight.start] += names
        waits[flight.wait] += names

    def by_use(held: Mapping[Hashable, int], also: Bytes) -> Bytes:
        found = also._asdict()
        for name, nbytes in held.items():
            # Several collectives may work on the same memory.
            found["in_flight" if flying[name] else uses[name]] += nbytes
        return Bytes(**found)

    arguments = by_use(life.always_held, Bytes())
    moments: dict[Node, Moment] = {}
    held: dict[Hashable, int] = {}
    for node in graph.module.graph.nodes:
        held |= life.taken[node]
        flying.update(starts[node])
        if operation := operators.get(node):
            about = (node.name, operation.operator, by_use(held, arguments))
            moments[node] = Moment(*about, operation.collective, flops_of(node))
        flying.subtract(waits[node])
        for name in life.freed.get(node, ()):
            held.pop(name, None)
    return arguments, moments


def _seconds(moments: Mapping[Node, Moment], flights: Any, rates: Rates) -> tuple[float, float]:
    """Play a graph on one device and its links, on each of which collectives follow each other beside the computation.

    Axes share one link where `rates.link` is one number.

    Returns:
        Seconds in all, and those among them in which the device waits for a link.
    """
    ends, free = dict[Node, float](), defaultdict[str, float](float)
    now = idle = 0.0
    waits = {flight.wait: flight.start for flight in flights}
    for node, moment in moments.items():
        landed = ends.get(waits.get(node, node), 0.0)
        idle, now = idle + max(0.0, landed - now), max(now, landed)
        if (sent := moment.collective) is not None:
            link = sent.axis if isinstance(rates.link, Mapping) else ""
            rate = rates.link[link] if isinstance(rates.link, Mapping) else rates.link
            free[link] = ends[node] = max(now, free[link]) + rates.latency + sent.sent / rate
        elif node not in waits and hasattr(node.target, "namespace") and not _is_view(node):
            moved = sum(map(_nbytes, (*node.all_input_nodes, node)))
            # An operator that returns nothing, as a fused optimizer, writes to about as much as it reads.
            if node.meta.get("val") is None:
                moved *= 2
            now += max(moment.flops / rates.flops, moved / rates.memory)
    end = max([now, *free.values()])
    return end, idle + end - now


def _nbytes(node: Node) -> int:
    value = node.meta.get("val")
    return sum(v.nbytes for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, torch.Tensor))


def _uses(graph: Any, known: Mapping[Node, str]) -> dict[Hashable, str]:
    """Find the use of each storage."""
    memory, uses = graph.memory, dict[Hashable, str]()
    sent = {moment.node: moment.collective for moment in graph.moments if moment.collective}
    moved = {"gathered", "parameters"}
    for node, use in (*known.items(), *((node, "gradients") for node in _gradients(graph.module, sent))):
        for name in memory.storages[node]:
            uses.setdefault(name, use)
    for node in graph.module.graph.nodes:
        large = [source for source in node.all_input_nodes if _numel(source) > 1]
        of_given = {uses[name] for source in large for name in memory.storages[source]}
        use = "inputs" if node.op == "get_attr" else "activations"
        if entry := sent.get(node):
            use = _VERBS.get(entry.label, use)
        elif of_given == {"gathered"} or (of_given and of_given <= moved and node.target in _MOVES):
            use = "gathered"
        elif of_given == {"gradients"} and all(_numel(a) in (1, _numel(node)) for a in node.all_input_nodes):
            use = "gradients"
        for name in (*memory.storages[node], *memory.taken[node]):
            uses.setdefault(name, use if name in memory.storages[node] else "in_flight")
    return uses


def _gradients(module: GraphModule, sent: Mapping[Node, comm.Collective]) -> set[Node]:
    """Find the gradients that reductions and fused optimizers are given, and those that they are copies of."""
    found: set[Node] = set()
    for node in reversed(module.graph.nodes):
        named = node.normalized_arguments(module, normalize_to_only_use_kwargs=True)
        if node in sent and sent[node].label == comm.Verb.SCATTER:
            found.update(node.all_input_nodes)
        elif named and "grads" in named.kwargs:
            found.update(named.kwargs["grads"])
        elif node in found and (node.target in _MOVES or _is_view(node)):
            packs = node.target is aten.cat.default
            found.update(a for a in node.all_input_nodes if packs or _numel(a) == _numel(node))
    return found


def _is_view(node: Node) -> bool:
    """Whether a node does no more than look at memory in another way, or take one of several results."""
    return node.target in (operator.getitem, _compat.UNSAFE_VIEW) or getattr(node.target, "is_view", False)


def _numel(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0
