"""models: estimates of a model that a user's factory makes, by extrapolation over its depth where it has one."""

import inspect
import math
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

import fshard as fs
from fshard.ext.plan.plan import plan
from fshard.ext.plan.report import Bytes, Rates, format_bytes
from fshard.extend import describe, expect, fake_axes, fake_maker, named_parameters

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
# A deep model is traced at two depths: at least so many layers, and so many more.
MIN_LAYERS = 4
ADDED_LAYERS = 4
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
NO_UNITS = (
    "units: none, so the whole module is gathered at once: no container holds several blocks. Name some with --units."
)


class Workload(NamedTuple):
    """A module and a batch to train it on.

    Attributes:
        make: Makes the module of a depth, on the meta device; called with the batch it returns a scalar loss.
        batch: One rank's batch, tensors of any kind.
        units: A rule, as `fs.functionalize` takes it; None takes the blocks that are repeated, by `find_blocks`.
        layers: The depth; None where the module has one depth only.
    """

    make: Callable[[int | None], nn.Module]
    batch: tuple[Any, ...]
    units: Any
    layers: int | None


def make_workload(name: str, units: Any = None) -> Workload:
    """Make the workload of a factory.

    Args:
        name: package:factory. The factory is a function without arguments that returns (module, batch), where
            module(*batch) is the loss, a scalar. It may take `layers`, with the depth as the default.
        units: As for `Workload`.

    Returns:
        The workload.

    Raises:
        ValueError: if there is no such factory, or it returns something else.
    """
    factory = _import_factory(name)
    parameter = inspect.signature(factory).parameters.get("layers")
    depth = parameter.default if parameter and isinstance(parameter.default, int) else None

    def make(layers: int | None) -> tuple[nn.Module, Any]:
        with torch.device("meta"):
            pair = factory(layers=layers) if depth and layers else factory()
        is_pair = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], nn.Module)
        expect(is_pair, "plan", f"{name} to return (module, batch), where module(*batch) is the loss", describe(pair))
        return pair

    _, batch = make(None)
    if not isinstance(batch, tuple):
        batch = (batch,)
    return Workload(lambda layers: make(layers)[0], batch, units, depth)


def _import_factory(name: str) -> Callable[..., Any]:
    try:
        factory = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"plan: model must be package:factory, a function that can be imported, and {name!r} cannot: {error}"
        ) from None
    expect(callable(factory), "plan", f"model {name} to be a function", describe(factory))
    return factory


class Block(NamedTuple):
    """A submodule that a container holds among others of its class.

    Attributes:
        path: Its name.
        pattern: Its name with `*` for each name that a container gives.
        module: The submodule.
    """

    path: str
    pattern: str
    module: nn.Module


def find_blocks(module: nn.Module) -> list[Block]:
    """Find the submodules that containers hold several of.

    Containers are ModuleList, ModuleDict and Sequential. Those inside others count as one with them. Blocks that are
    repeated inside a block, such as the experts of a mixture or the layers of a stage, are blocks too, unless they are
    as small as one linear layer.

    Args:
        module: The module, with values or on the meta device.

    Returns:
        The blocks, outer ones before those inside them.
    """
    blocks: list[Block] = []

    def visit(part: Block, is_inside: bool) -> None:
        is_container = isinstance(part.module, CONTAINERS)
        children = list(_list_content(part))
        counts = Counter(type(child.module) for child in children)
        for child in children:
            has_parameters = any(True for _ in child.module.parameters())
            has_parts = any(True for _ in child.module.children())
            is_repeated = is_container and counts[type(child.module)] > 1
            is_block = is_repeated and has_parameters and (has_parts or not is_inside)
            if is_block:
                blocks.append(child)
            visit(child, is_inside or is_block)

    visit(Block("", "", module), is_inside=False)
    return blocks


def choose_units(workload: Workload, module: nn.Module) -> Any:
    """Choose the units of a workload's module, as `fs.functionalize` takes them."""
    if workload.units is not None:
        return workload.units
    paths = {block.path for block in find_blocks(module)}
    return (lambda path, _: path in paths) if paths else None


def describe_units(workload: Workload) -> str:
    """Write which submodules a workload is planned with as units."""
    if workload.units is not None:
        return f"units: {workload.units}"
    blocks = find_blocks(workload.make(workload.layers))
    counts = Counter((block.pattern, type(block.module).__name__) for block in blocks)
    texts = [f"{pattern} ({count} {name})" for (pattern, name), count in counts.items()]
    return f"units: {', '.join(texts)}" if texts else NO_UNITS


def _list_content(part: Block) -> Iterator[Block]:
    """Yield what a module holds, in a container also what containers inside it hold.

    A subclass of a container is content.
    """
    is_container = isinstance(part.module, CONTAINERS)
    for name, module in part.module.named_children():
        path = f"{part.path}.{name}".lstrip(".")
        pattern = f"{part.pattern}.{'*' if is_container else name}".lstrip(".")
        child = Block(path, pattern, module)
        if is_container and type(module) in CONTAINERS:
            yield from _list_content(child)
        else:
            yield child


class Estimate(NamedTuple):
    """The cost of one step of one rank.

    Attributes:
        strategy: The name of the strategy.
        mesh: Ranks on each axis.
        peak: Bytes held when most are.
        sent: Nominal ring bytes over each axis, scalars left out.
        collectives: How many; about so many where the depth is extrapolated, because small gradients of several layers
            share a collective and fill it at depths that were not traced.
        flops: Floating-point operations.
        seconds: An estimate of the time, from stated rates.
        waiting: Seconds among these in which the device waits for a link.
        agreement: Seconds of the host in which each call compares with other ranks; an estimate.
        sockets: Sockets that a rank opens.
    """

    strategy: str
    mesh: dict[str, int]
    peak: Bytes
    sent: dict[str, float]
    collectives: int
    flops: int
    seconds: float
    waiting: float
    agreement: float
    sockets: int

    def __str__(self) -> str:
        """Write one row of a table."""
        ranks = " x ".join(map(str, self.mesh.values()))
        peak = format_bytes(self.peak.total)
        sent = format_bytes(sum(self.sent.values()))
        return (
            f"{self.strategy:<6} {ranks:>12} {peak:>10} {sent:>10} "
            f"{self.collectives:>12} {self.flops:>9.3g} "
            f"{1e3 * self.agreement:>9.2g} {self.sockets:>8} {self.seconds:>9.3g}"
        )


def estimate(
    workload: Workload,
    strategy: str,
    mesh: Mapping[str, int],
    rates: Rates = Rates(),  # noqa: B008
    full_depth: bool = False,
    **options: Any,
) -> Estimate:
    """Plan a workload, by extrapolation over its depth where that is known and large.

    Args:
        workload: The module and its batch.
        strategy: The name of the strategy.
        mesh: Ranks on each axis.
        rates: As for `fs.plan`.
        full_depth: Whether to trace all layers instead.
        **options: As for `prepare_step`.

    Returns:
        The estimate.

    Raises:
        ValueError: as by `fs.plan`.
    """

    def plan_depth(layers: int | None) -> Estimate:
        step, state = prepare_step(workload, strategy, layers, **options)
        planned = plan(step, state, *workload.batch, mesh=mesh, rates=rates)
        return Estimate(
            strategy,
            dict(mesh),
            planned.peak,
            sent={axis: traffic.bytes for axis, traffic in planned.by_axis().items()},
            collectives=len(planned.collectives()),
            flops=planned.flops,
            seconds=planned.seconds,
            waiting=planned.waiting,
            agreement=planned.agreement,
            sockets=planned.sockets,
        )

    def extrapolate(before: float, after: float) -> float:
        if before == after:
            # Names too stay as they are.
            return after
        # Further layers add as much as those between the traced depths.
        cost = after + untraced / ADDED_LAYERS * (after - before)
        return max(0, round(cost)) if isinstance(after, int) else cost

    depth = 0 if full_depth else workload.layers or 0
    first_depth = _choose_first_depth(workload, options.get("bucket_bytes", _default_bucket_bytes())) if depth else 0
    untraced = max(0, depth - first_depth - ADDED_LAYERS)
    more = plan_depth(first_depth + ADDED_LAYERS if untraced else None)
    less = plan_depth(first_depth) if untraced else more
    return fs.tree_map(extrapolate, less, more)


def _choose_first_depth(workload: Workload, bucket_bytes: int) -> int:
    """Choose the least depth whose layers are more than is gathered ahead and reduced at a time."""
    layer_bytes = _count_parameter_bytes(workload.make(3)) - _count_parameter_bytes(workload.make(2))
    # Gathers under way hold up to twice the bytes of a bucket, and so do reductions.
    return max(MIN_LAYERS, math.ceil(4 * bucket_bytes / max(1, layer_bytes)))


def _count_parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def choose_mesh(strategy: str, ranks: int, node: int = 8) -> dict[str, int]:
    """Choose the mesh of a strategy: one axis, or the two of hsdp.

    Args:
        strategy: The name of the strategy.
        ranks: Ranks in all.
        node: Ranks of hsdp's inner axis, such as those of one node.
    """
    if strategy != "hsdp":
        return {"shard": ranks}
    if node < 1 or ranks % node:
        raise ValueError(f"plan: world size must be a multiple of hsdp's {node} ranks a node, and {ranks} is not.")
    return {"replicate": ranks // node, "shard": node}


def prepare_step(
    workload: Workload, strategy: str, layers: int | None = None, **options: Any
) -> tuple[Callable[..., Any], fs.TrainState]:
    """Make the jitted step of a workload, with AdamW and its state donated, and the state without values.

    Args:
        workload: The module and its batch.
        strategy: The name of the strategy.
        layers: Another depth than the workload's.
        **options: Passed to the strategy, such as `param_dtype`.
    """
    module = workload.make(layers or workload.layers)
    model = fs.functionalize(module, choose_units(workload, module))
    tx = fs.from_torch(torch.optim.AdamW, lr=1e-4, fused=True)

    def loss(params: Any, buffers: Any, key: torch.Tensor, *batch: Any) -> tuple[torch.Tensor, Any]:
        return model.apply(params, *batch, buffers=buffers, key=key)

    def step(state: fs.TrainState, *batch: Any) -> tuple[fs.TrainState, torch.Tensor]:
        key = fs.fold_in(0, state.step)
        (value, buffers), grads = fs.value_and_grad(loss, has_aux=True)(state.params, state.buffers, key, *batch)
        return fs.update(tx, state, grads)._replace(buffers=buffers), value

    # Tensors on the meta device would not do, because fused optimizers refuse them.
    make_fake = fake_maker()
    full = {name: nn.Parameter(make_fake(p), p.requires_grad) for name, p in named_parameters(module)}
    mesh = fs.init_mesh(dict.fromkeys(choose_mesh(strategy, ranks=8), 1), device="cpu")
    options = {"bucket_bytes": _default_bucket_bytes()} | options
    params = fs.shard(full, getattr(fs, strategy)(mesh, **options))
    return fs.jit(step, donate_argnums=0), fs.TrainState.create(params, tx, buffers=model.buffers)


def _default_bucket_bytes() -> int:
    """The size at which units are merged between accelerators, although one CPU plans for them."""
    with fake_axes("plan", {"shard": 2}, {"shard": 0}, "nccl") as axes:
        make_strategy: Any = fs.zero3
        return make_strategy(axes["shard"]).reshard.bucket_bytes
