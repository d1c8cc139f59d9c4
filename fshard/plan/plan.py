"""plan: what a step takes on a mesh of any size, found in one process without running it."""

from collections.abc import Callable, Mapping
from typing import Any

from fshard import comm
from fshard.checks import kind
from fshard.jit.graph import operator_name, sent_by, traced_as_run
from fshard.jit.memory import lifetimes
from fshard.jit.passes import placeholders, results
from fshard.jit.trace import Traced
from fshard.plan.kinds import memory_of
from fshard.plan.layout import check_axes, check_mesh, coordinates, laid_out_on
from fshard.plan.rates import Rates, check_rates, flops_of, step_seconds
from fshard.plan.report import Moment, Plan

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
    """Find out what a train step takes on a mesh of any size: memory, traffic, arithmetic and an estimate of time.

    The step is traced on tensors without values, as `fs.make_graph` does, with the state laid out on that mesh: axes
    are matched by name. One process does it, whether or not torch.distributed runs, and nothing is sent or allocated.
    Memory is that of operators run one by one, arguments included; the allocator's and the backend's own is not.

    Args:
        step: A pure function of (state, *batch), or what `fs.jit` made of one: donated states are written in place.
        state: A TrainState, or any tree with Sharded leaves, of a mesh with the same names of axes; one rank will do,
            and so will tensors on the meta device. Buffers without values must be in it, for `model.apply(buffers=)`.
        *batch: The step's other arguments, as one rank gets them; tensors count by shape and dtype.
        mesh: Ranks on each axis by its name, outermost first.
        rank: Whose step it is: its number, the last axis varying fastest.
        backend: "nccl" or "gloo": what carries collectives, which are put together differently.
        rates: What the device and its links achieve, for the time alone.

    Returns:
        The plan: it prints as a table, and tells the peak by what it is held for, the timeline, collectives and bytes
        by axis and unit, floating-point operations and an estimate of the time.

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
    sizes = check_mesh(mesh)
    place = coordinates(sizes, rank)
    check_rates(rates, sizes)
    if backend not in BACKENDS:
        raise ValueError(f"plan: expected backend to be one of {BACKENDS}, got {backend!r}")
    if not callable(step):
        raise ValueError(f"plan: expected step to be a function of (state, *batch), got {kind(step)}")
    check_axes((state, *batch), sizes)
    with comm.fake_world(sizes, place, backend) as axes:
        traced = traced_as_run(step, laid_out_on((state, *batch), axes), {}, "plan")
        return _planned(traced, sizes, place, rates)


def _planned(traced: Traced, mesh: dict[str, int], place: dict[str, int], rates: Rates) -> Plan:
    graph = traced.graph.graph
    paths = dict(zip(placeholders(graph), traced.paths, strict=True))
    out_paths = [path for path, out in zip(traced.out_paths, traced.outputs, strict=True) if out is not None]
    by_result = dict(zip(results(graph), out_paths, strict=True))
    life = lifetimes(graph)
    memory = memory_of(graph, life, paths, by_result)
    timeline, order = [], []
    for node, held, there in memory.moments:
        sent, flops = sent_by(node), flops_of(node)
        timeline.append(Moment(node.name, operator_name(node), held, there, sent, flops))
        order.append((node, flops, sent))
    return Plan(mesh, place, memory.arguments, timeline, *step_seconds(order, life, rates), rates)
