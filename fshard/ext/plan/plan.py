"""plan: the cost of a step on a mesh of any size, predicted in one process without running it."""

import math
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

import fshard as fs
from fshard.ext.plan.report import Bytes, Moment, Rates, StepPlan, check_rates, count_flops
from fshard.ext.plan.timeline import estimate_agreement, estimate_seconds
from fshard.extend import (
    describe,
    expect,
    fake_coordinates,
    fake_maker,
    fake_process_groups,
    flatten,
    refuse_donated,
    refuse_other,
    setting,
    sockets_of_mesh,
)

BACKENDS = ("nccl", "gloo")


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
    Memory is counted as if operators ran one by one, arguments included. What the allocator and the backend take for
    themselves is not counted.

    Args:
        step: A pure function of (state, *batch), or a jitted one: donated states are written in place.
        state: A TrainState, or any tree with Sharded leaves. Its mesh must have the same names of axes, and one rank
            is enough. Leaves may be tensors on the meta device, or what `shard` makes of torch's fake tensors. Put
            buffers without values into it too, for `model.apply(buffers=)`.
        *batch: The step's other arguments, as one rank gets them. Of tensors only shape and dtype count, and an Axis
            is replaced by the axis of the mesh with its name.
        mesh: Ranks on each axis by its name, outermost first.
        rank: The number of the rank whose step is planned. The last axis varies fastest.
        backend: "nccl" or "gloo": the backend of collectives, which decides on their algorithm.
        rates: The speed of the device and its links. They matter for the time only.

    Returns:
        The plan. It prints as a table, and has the peak by use, the timeline, collectives and bytes by axis and unit,
        floating-point operations and estimates of the time. It also says what ranks need to agree: the time of the
        host in each call, and the sockets of a rank, which may be more than this system lets a process open.

    Raises:
        ValueError: if the mesh, the rank, the backend or a rate makes no sense, axes are not those of the
            state, the step looks at values, or it sends over an axis that it closes over.

    >>> import torch, fshard as fs
    >>> params = fs.shard({"w": torch.ones(4096, 1)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> def step(params, x):
    ...     return fs.value_and_grad(lambda p, x: (x @ fs.gather(p)["w"]).sum())(params, x)
    >>> large = plan(step, params, torch.ones(8, 4096), mesh={"shard": 1024})
    >>> large.by_axis(), large.by_unit()["['w']"].collectives
    ({'shard': Traffic(collectives=3, bytes=32736.0)}, 2)
    """
    coordinates = _find_coordinates(mesh, rank, "plan")
    check_rates("plan", rates)
    with lay_out_call(step, (state, *batch), mesh, rank, backend) as args:
        graph = fs.make_graph(step)(*args)
        uses = graph.find_uses(args)
        flops = sum(count_flops(moment.node) for moment in graph.moments)
        seconds, waiting = estimate_seconds(graph, rates)
    return StepPlan(
        dict(mesh),
        coordinates,
        Bytes(**graph.sum_by_use(uses)),
        Bytes(**graph.sum_by_use(uses, graph.at_peak)),
        [Moment(moment.node.name, *moment[1:]) for moment in graph.moments],
        flops,
        seconds,
        waiting,
        rates,
        agreement=estimate_agreement(mesh, rates),
        sockets=sockets_of_mesh(list(mesh.values()), sends_itself=backend != "gloo"),
    )


@contextmanager
def lay_out_call(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    mesh: Mapping[str, int],
    rank: int,
    backend: str,
    api_name: str = "plan",
) -> Iterator[tuple[Any, ...]]:
    """Lay the arguments of a step out on a mesh of any size, to trace the step inside a context.

    Args:
        step: A function of the arguments.
        args: The arguments, as `plan` takes them.
        mesh: Ranks on each axis by its name, outermost first.
        rank: The number of the rank that traces.
        backend: "nccl" or "gloo".
        api_name: The function that is called, for its errors.

    Yields:
        The arguments on that mesh, whose tensors have no values.

    Raises:
        ValueError: as `plan` does for its arguments.

    >>> import torch, fshard as fs
    >>> params = fs.shard({"w": torch.ones(4096)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> with lay_out_call(fs.gather, (params,), {"shard": 1024}, 0, "nccl") as args:
    ...     args[0]["w"].local.shape, fs.make_graph(fs.gather)(*args).bytes_sent()
    (torch.Size([4]), 16368.0)
    """
    coordinates = _find_coordinates(mesh, rank, api_name)
    expect(backend in BACKENDS, api_name, f"backend to be one of {BACKENDS}", repr(backend))
    expect(callable(step), api_name, "step to be a function of (state, *batch)", describe(step))
    flat = flatten(args)
    refuse_donated(api_name, flat)
    _check_axes(flat, mesh, api_name)
    with fake_axes(api_name, mesh, coordinates, backend) as axes:
        yield _lay_out(flat, axes)


@contextmanager
def fake_axes(
    what: str, sizes: Mapping[str, int], place: Mapping[str, int], backend: str
) -> Iterator[dict[str, fs.Axis]]:
    """Let there be axes to trace with, whose groups cannot communicate, and no others to send over.

    torch.distributed need not run, and does so undisturbed.

    Args:
        what: Who asks, for the error of a collective over another axis.
        sizes: Ranks on each axis by its name.
        place: This process's coordinate on each.
        backend: "nccl" or "gloo": the backend that algorithms of collectives are chosen for.

    Yields:
        The axes by their names.

    >>> import torch, fshard as fs
    >>> from fshard.extend import fake_axes
    >>> with fake_axes("example", {"shard": 4096}, {"shard": 0}, "nccl") as axes:
    ...     fs.make_graph(lambda x: fs.all_gather(x, axes["shard"]))(torch.ones(2)).bytes_sent()
    32760.0
    """
    # Names of their own keep them from being taken for real groups.
    axes = {name: fs.Axis(name, size, f"fake {name} {uuid.uuid4().hex}") for name, size in sizes.items()}
    groups = {axis.group_name: (place[name], axis.size) for name, axis in axes.items()}

    def check(axis: fs.Axis) -> None:
        found = f"{axis.name!r} of {axis.size} ranks, which the step closes over"
        remedy = "pass axes as arguments, or read them from the state's leaves, as leaf.spec.axes"
        expect(axis in axes.values(), what, "axes of the planned mesh", found, remedy)

    with setting(refuse_other, check), setting(fake_coordinates, place), fake_process_groups(groups, backend):
        yield axes


def _find_coordinates(mesh: Any, rank: Any, api_name: str) -> dict[str, int]:
    """Find a rank's coordinate on each axis, the last of which varies fastest, as in a DeviceMesh."""
    expected = 'mesh to be a mapping from names of axes to whole numbers of ranks from 1, such as {"shard": 4096}'
    sizes = list(mesh.items()) if isinstance(mesh, Mapping) else []
    are_right = [isinstance(name, str) and type(size) is int and size > 0 for name, size in sizes]
    expect(sizes and all(are_right), api_name, expected, f"{mesh!r:.100}")
    ranks = math.prod(mesh.values())
    expected = f"rank to be a whole number from 0 to {ranks - 1} for the mesh {dict(mesh)}"
    expect(type(rank) is int and 0 <= rank < ranks, api_name, expected, f"{rank!r:.40}")
    coordinates = {}
    for name, size in reversed(sizes):
        rank, coordinates[name] = divmod(rank, size)
    return coordinates


def _check_axes(flat: Any, mesh: Mapping[str, int], api_name: str) -> None:
    """Refuse a mesh whose axes are not those of the leaves."""
    if not flat.specs:
        raise ValueError(
            f"{api_name}: the arguments have no Sharded leaf, so there is no state. Make one with fs.shard."
        )
    names = {axis.name for axis in flat.axes}
    for spec in flat.specs:
        if spec.transform is not None:
            names.update(axis.name for axis in spec.transform.axes)
    if names != set(mesh):
        raise ValueError(
            f"{api_name}: mesh has the axes {sorted(mesh)}, and the state has {sorted(names)}. Give a size to each "
            "axis of the state and to no other, or make the state with a strategy of other axes."
        )


def _lay_out(flat: Any, axes: Mapping[str, fs.Axis]) -> Any:
    """Lay the arguments of a step out on another mesh: its axes in all specs, and tensors without values."""
    make_fake = fake_maker(symbols=True)
    leaves: list[Any] = []
    for leaf in flat.leaves:
        if isinstance(leaf, fs.Sharded):
            spec = _replace_axes(leaf.spec, axes)
            # Members of an ensemble are stacked for vmap along dims before those of the leaf.
            stacked = leaf.local.shape[: leaf.local.dim() - len(spec.local_shape)]
            local = torch.empty((*stacked, *spec.local_shape), dtype=leaf.local.dtype, device="meta")
            leaves.append(fs.Sharded(make_fake(local), spec))
        elif isinstance(leaf, torch.Tensor):
            leaves.append(make_fake(leaf.detach()))
        else:
            leaves.append(_replace_axes(leaf, axes))
    args = list(flat.unflatten(leaves))
    for i, argument in enumerate(args):
        if getattr(argument, "transform_state", None) is not None:
            # It has a row for each rank of the mesh.
            transform_state = fs.tree_map(make_fake, fs.transform_state(argument.params))
            args[i] = argument._replace(transform_state=transform_state)
    return tuple(args)


def _replace_axes(value: Any, axes: Mapping[str, fs.Axis]) -> Any:
    """Put axes in the place of others of their names, in all fields of dataclasses."""
    if isinstance(value, fs.Axis):
        return axes.get(value.name, value)
    if type(value) is tuple:
        return tuple(_replace_axes(part, axes) for part in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changes = {}
    for field in fields(value):
        if field.init:
            old = getattr(value, field.name)
            new = _replace_axes(old, axes)
            if new is not old:
                changes[field.name] = new
    return replace(value, **changes) if changes else value
