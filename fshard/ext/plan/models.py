"""models: estimates of a model that a user's factory makes, by extrapolation over its depth where it has one."""

import importlib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

import fshard as fs
from fshard.ext.plan.plan import plan
from fshard.ext.plan.report import Bytes, Rates, readable
from fshard.extend import describe, expect, fake_axes, fake_maker, named_parameters

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
# Of a deeper model two depths are traced, at least LEAST layers and SPAN more.
LEAST, SPAN = 4, 4
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
NO_UNITS = (
    "units: none, the whole module is gathered at once, for no container holds several blocks; name some by --units"
)


class Workload(NamedTuple):
    """A module and a batch to train it on.

    Attributes:
        make: Makes the module of a depth, on the meta device; called with the batch it returns a scalar loss.
        batch: One rank's batch, tensors of any kind.
        units: A rule, as `fs.functionalize` takes it; None takes the blocks that are repeated, by `repeated_blocks`.
        layers: The depth; None where the module has one depth only.
    """

    make: Callable[[int | None], nn.Module]
    batch: tuple[Any, ...]
    units: Any
    layers: int | None


def workload_of(name: str, units: Any = None) -> Workload:
    """Make the workload of a factory.

    Args:
        name: As package:factory: a function of nothing that returns (module, batch), where module(*batch) is the loss,
            a scalar. It may take `layers`, and then has its depth as the default.
        units: As for `Workload`.

    Returns:
        The workload.

    Raises:
        ValueError: if there is no such factory, or it returns something else.
    """
    package, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(package), attribute)
    except (ImportError, AttributeError) as error:
        needed = "model to be package:factory, a function that can be imported"
        raise ValueError(f"plan: expected {needed}, got {name!r}: {error}") from None
    layers = inspect.signature(factory).parameters.get("layers")
    depth = layers.default if layers and isinstance(layers.default, int) else None

    def make(layers: int | None) -> tuple[nn.Module, Any]:
        with torch.device("meta"):
            made = factory(layers=layers) if depth and layers else factory()
        pair = isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)
        needed = f"{name} to return (module, batch), where module(*batch) is the loss"
        expect(pair, "plan", needed, describe(made))
        return made

    _, inputs = make(None)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    return Workload(lambda layers: make(layers)[0], inputs, units, depth)


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


def repeated_blocks(module: nn.Module) -> list[Block]:
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
        counts: Counter[type[nn.Module]] = Counter()
        if isinstance(part.module, CONTAINERS):
            held = _held(part)
            counts.update(type(child.module) for child in held)
        else:
            held = _children(part)
        for child in held:
            has_parameters = any(True for _ in child.module.parameters())
            has_parts = any(True for _ in child.module.children())
            is_block = has_parameters and counts[type(child.module)] > 1 and (has_parts or not is_inside)
            if is_block:
                blocks.append(child)
            visit(child, is_inside or is_block)

    visit(Block("", "", module), is_inside=False)
    return blocks


def units_of(workload: Workload, module: nn.Module) -> Any:
    """Choose the units of a workload's module, as `fs.functionalize` takes them."""
    if workload.units is not None:
        return workload.units
    paths = {block.path for block in repeated_blocks(module)}
    return (lambda path, _: path in paths) if paths else None


def units_text(workload: Workload) -> str:
    """Write which submodules a workload is planned with as units."""
    if workload.units is not None:
        return f"units: {workload.units}"
    blocks = repeated_blocks(workload.make(workload.layers))
    counts = Counter((block.pattern, type(block.module).__name__) for block in blocks)
    texts = [f"{pattern} ({count} {name})" for (pattern, name), count in counts.items()]
    return f"units: {', '.join(texts)}" if texts else NO_UNITS


def _children(part: Block) -> list[Block]:
    """List the submodules right below one."""
    is_container = isinstance(part.module, CONTAINERS)
    return [
        Block(
            ".".join(filter(None, (part.path, name))),
            ".".join(filter(None, (part.pattern, "*" if is_container else name))),
            child,
        )
        for name, child in part.module.named_children()
    ]


def _held(container: Block) -> list[Block]:
    """List what a container holds, itself or by containers in it. A subclass of a container is what it holds."""
    held: list[Block] = []
    for child in _children(container):
        held += _held(child) if type(child.module) in CONTAINERS else [child]
    return held


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
    """

    strategy: str
    mesh: dict[str, int]
    peak: Bytes
    sent: dict[str, float]
    collectives: int
    flops: int
    seconds: float
    waiting: float

    def __str__(self) -> str:
        """Write one row of a table."""
        return (
            f"{self.strategy:<6} {' x '.join(map(str, self.mesh.values())):>12} {readable(self.peak.total):>10} "
            f"{readable(sum(self.sent.values())):>10} {self.collectives:>12} {self.flops:>9.3g} {self.seconds:>9.3g}"
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
        **options: As for `prepared`.

    Returns:
        The estimate.

    Raises:
        ValueError: as by `fs.plan`.
    """

    def row(layers: int | None) -> tuple[float, ...]:
        step, state = prepared(workload, strategy, layers, **options)
        found = plan(step, state, *workload.batch, mesh=mesh, rates=rates)
        sent = (traffic.bytes for traffic in found.by_axis().values())
        return (*found.peak, len(found.collectives()), found.flops, found.seconds, found.waiting, *sent)

    layers = 0 if full_depth else workload.layers or 0
    first = _first_depth(workload, strategy, options) if layers else LEAST
    deeper = layers - first - SPAN
    if deeper <= 0:
        numbers = row(None)
    else:
        # Further layers add as much as those between the traced depths.
        less, more = row(first), row(first + SPAN)
        numbers = tuple(b + deeper / SPAN * (b - a) for a, b in zip(less, more, strict=True))
    uses = len(Bytes._fields)
    peak = Bytes(*(max(0, round(size)) for size in numbers[:uses]))
    count, flops, seconds, waiting = numbers[uses : uses + 4]
    sent = dict(zip(mesh, numbers[uses + 4 :], strict=True))
    return Estimate(strategy, dict(mesh), peak, sent, round(count), round(flops), seconds, waiting)


def _first_depth(workload: Workload, strategy: str, options: Mapping[str, Any]) -> int:
    """Choose the least depth whose layers are more than is gathered ahead and reduced at a time."""
    two, three = (sum(p.nbytes for p in workload.make(layers).parameters()) for layers in (2, 3))
    leaf: Any = next(iter(prepared(workload, strategy, 2, **options)[1].params.values()))
    # Gathers and reductions under way are each up to twice what is merged.
    return max(LEAST, math.ceil(4 * leaf.spec.reshard.bucket_bytes / max(1, three - two)))


def mesh_of(strategy: str, ranks: int, node: int = 8) -> dict[str, int]:
    """Choose the mesh of a strategy: one axis, or hsdp's two."""
    if strategy != "hsdp":
        return {"shard": ranks}
    needed = f"world size to be a multiple of hsdp's {node} ranks a node"
    expect(node > 0 and not ranks % node, "plan", needed, str(ranks), "pass another")
    return {"replicate": ranks // node, "shard": node}


def prepared(
    workload: Workload, strategy: str, layers: int | None = None, on: Any = None, **options: Any
) -> tuple[Callable[..., Any], fs.TrainState]:
    """Make the jitted step of a workload, with AdamW and its state donated, and the state without values.

    Args:
        workload: The module and its batch.
        strategy: The name of the strategy.
        layers: Another depth than the workload's.
        on: A mesh with the strategy's axes, where several ranks run, all of which must call this; None makes one of one
            rank.
        **options: Passed to the strategy, such as `param_dtype`.
    """
    module = workload.make(layers or workload.layers)
    model = fs.functionalize(module, units_of(workload, module))
    tx = fs.from_torch(torch.optim.AdamW, lr=1e-4, fused=True)

    def loss(params: Any, buffers: Any, key: torch.Tensor, *batch: Any) -> tuple[torch.Tensor, Any]:
        return model.apply(params, *batch, buffers=buffers, key=key)

    def step(state: fs.TrainState, *batch: Any) -> tuple[fs.TrainState, torch.Tensor]:
        key = fs.fold_in(0, state.step)
        (value, buffers), grads = fs.value_and_grad(loss, has_aux=True)(state.params, state.buffers, key, *batch)
        return fs.update(tx, state, grads)._replace(buffers=buffers), value

    # Not on the meta device, which fused optimizers refuse.
    fake = fake_maker()
    whole = {name: nn.Parameter(fake(p), p.requires_grad) for name, p in named_parameters(module)}
    if on is None:
        on = fs.init_mesh(dict.fromkeys(mesh_of(strategy, 8), 1), device="cpu")
        with fake_axes("plan", {"shard": 2}, {"shard": 0}, "nccl") as axes:
            # Units are merged as between accelerators, though one processor asks.
            zero3: Any = fs.zero3
            options = {"bucket_bytes": zero3(axes["shard"]).reshard.bucket_bytes} | options
    params = fs.shard(whole, getattr(fs, strategy)(on, **options))
    return fs.jit(step, donate_argnums=0), fs.TrainState.create(params, tx, buffers=model.buffers)
