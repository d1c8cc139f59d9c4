"""plan: the cost of a step on a mesh of any size, found in one process without running it."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fshard import _compat, comm
from fshard.checks import check_local, describe
from fshard.errors import Problem, leaf_error
from fshard.jit.graph import traced_as_run
from fshard.jit.memory import lifetimes
from fshard.jit.passes import placeholders, results
from fshard.plan.rates import Rates, check_rates
from fshard.plan.report import Plan
from fshard.plan.timeline import step_seconds, timeline_of, uses_of
from fshard.transforms import transform_state
from fshard.transforms.compose import layout_axes
from fshard.tree import Axis, Sharded, flatten, is_sharded, rebuilt, tree_map, unflatten

BACKENDS = ("nccl", "gloo")


def plan(
    step: Callable[..., Any],
    state: Any,
    *batch: Any,
    mesh: Mapping[str, int],
    rank: int = 0,
    backend: str = "nccl",
    rates: Rates = Rates(),  # noqa: B008
) -> Plan:
    """Find the memory, traffic and arithmetic of a train step on a mesh of any size, and estimate its time.

    The step is traced on tensors without values, as `fs.make_graph` does, with the state laid out on that mesh: axes
    are matched by name. One process does it, whether or not torch.distributed runs, and nothing is sent or allocated.
    Memory is that of operators run one by one, arguments included; the allocator's and the backend's own is not.

    Args:
        step: A pure function of (state, *batch), or a jitted one: donated states are written in place.
        state: A TrainState, or any tree with Sharded leaves, of a mesh with the same names of axes; one rank will do,
            and so will tensors on the meta device. Buffers without values must be in it, for `model.apply(buffers=)`.
        *batch: The step's other arguments, as one rank gets them; tensors count by shape and dtype.
        mesh: Ranks on each axis by its name, outermost first.
        rank: Whose step it is: its number, the last axis varying fastest.
        backend: "nccl" or "gloo": the backend of collectives, by which their algorithm is chosen.
        rates: Speed of the device and its links, for the time alone.

    Returns:
        The plan: it prints as a table, and tells the peak by use, the timeline, collectives and bytes by axis and
        unit, floating-point operations and an estimate of the time.

    Raises:
        ValueError: if the mesh, the rank, the backend or a rate makes no sense, axes are not those of the state, a
            shard does not fit its spec, the step looks at values, or it sends over an axis that it closes over.

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
    if backend not in BACKENDS:
        raise ValueError(f"plan: expected backend to be one of {BACKENDS}, got {backend!r}")
    if not callable(step):
        raise ValueError(f"plan: expected step to be a function of (state, *batch), got {describe(step)}")
    _check_axes((state, *batch), mesh)
    with comm.fake_world(mesh, place, backend) as axes:
        fake, move = _compat.fake_maker(symbols=True), _mover(axes)
        args = tuple(_laid_out(argument, fake, move) for argument in (state, *batch))
        traced = traced_as_run(step, args, {}, "plan")
        graph = traced.graph.graph
        inputs = [use or "inputs" for use, leaf in uses_of(args) if is_sharded(leaf) or isinstance(leaf, torch.Tensor)]
        outputs = [use for use, out in uses_of(unflatten(traced.treedef, traced.outputs)) if out is not None]
        of_results = {node: use for node, use in zip(results(graph), outputs, strict=True) if use}
        known = of_results | dict(zip(placeholders(graph), inputs, strict=True))
        life = lifetimes(graph)
        arguments, moments = timeline_of(graph, life, known)
        seconds, waiting = step_seconds(moments, life, rates)
        return Plan(dict(mesh), place, arguments, list(moments.values()), seconds, waiting, rates)


def _coordinates(mesh: Any, rank: Any) -> dict[str, int]:
    """Find a rank's coordinate on each axis, the last of which varies fastest, as in a DeviceMesh."""
    items = list(mesh.items()) if isinstance(mesh, Mapping) else []
    if not items or not all(isinstance(name, str) and type(size) is int and size > 0 for name, size in items):
        needed = 'a mapping from names of axes to whole numbers of ranks from 1, as {"shard": 4096}'
        raise ValueError(f"plan: expected mesh to be {needed}, got {mesh!r:.100}")
    ranks = math.prod(mesh.values())
    if type(rank) is not int or not 0 <= rank < ranks:
        needed = f"a whole number from 0 to {ranks - 1} for the mesh {dict(mesh)}"
        raise ValueError(f"plan: expected rank to be {needed}, got {rank!r:.40}")
    place = {}
    for name, size in reversed(items):
        rank, place[name] = divmod(rank, size)
    return place


def _check_axes(args: Sequence[Any], mesh: Mapping[str, int]) -> None:
    """Refuse leaves that do not match their specs, and a mesh whose axes are not those that leaves live on."""
    flat = flatten(tuple(args))
    check_local("plan", flat)
    leaves = [leaf for leaf in flat.leaves if is_sharded(leaf)]
    if not leaves:
        raise ValueError(
            "plan: expected the state of a step, got arguments without a Sharded leaf; make it by fs.shard"
        )
    names = {axis.name for leaf in leaves for axis in _axes_of(leaf)}
    if names != set(mesh):
        found, needed = ", ".join(map(repr, sorted(mesh))), ", ".join(map(repr, sorted(names))) or "none"
        remedy = "give each a size, or make the state with a strategy of other axes"
        raise ValueError(f"plan: expected mesh to have the state's axes, {needed}, got {found}; {remedy}")


def _axes_of(leaf: Sharded) -> list[Axis]:
    transform: Any = leaf.spec.transform
    return [*leaf.spec.axes, *(layout_axes(transform) if transform else ())]


def _laid_out(argument: Any, fake: Callable[[torch.Tensor], torch.Tensor], move: Callable[[Any], Any]) -> Any:
    """Lay an argument of a step out on another mesh: its axes in all specs, and tensors without values."""
    if (states := getattr(argument, "transform_state", None)) is not None:
        # It has a row for each rank of the mesh.
        argument = argument._replace(transform_state=None)
    flat = flatten(argument)
    leaves = list(flat.leaves)
    for i, leaf in enumerate(leaves):
        if is_sharded(leaf):
            spec = move(leaf.spec)
            leaves[i] = Sharded(fake(torch.empty(spec.local_shape, dtype=leaf.local.dtype, device="meta")), spec)
        elif isinstance(leaf, torch.Tensor):
            leaves[i] = fake(leaf.detach())
    problems = [
        Problem(
            path, f"a transform that communicates over {axis.name!r} of {axis.size} ranks still", "an axis in a field"
        )
        for path, leaf in zip(flat.paths, leaves, strict=True)
        if is_sharded(leaf)
        for axis in _axes_of(leaf)
        if move(axis) is not axis
    ]
    if problems:
        raise leaf_error("plan: transforms cannot be moved", problems, "keep an Axis as a field of the dataclass")
    argument = unflatten(flat.treedef, leaves)
    if states is not None:
        argument = argument._replace(transform_state=tree_map(fake, transform_state(argument.params)))
    return argument


def _mover(axes: Mapping[str, Axis]) -> Callable[[Any], Any]:
    """Make a function that puts axes in the place of others of their names, in all fields of dataclasses."""
    # By identity, with each value kept alive: leaves share their transforms.
    seen: dict[int, tuple[Any, Any]] = {}

    def move(value: Any) -> Any:
        if isinstance(value, Axis):
            return axes.get(value.name, value)
        if id(value) in seen:
            return seen[id(value)][1]
        moved = rebuilt(value, move)
        seen[id(value)] = value, moved
        return moved

    return move
