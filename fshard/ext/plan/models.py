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


class Workload(NamedTuple):
    """A module and a batch to train it on.

    Attributes:
        make: Makes the module of a depth, on the meta device; called with the batch it returns a scalar loss.
        batch: One rank's batch, tensors of any kind.
        units: The class of the layers that are repeated; None where none are.
        layers: The depth; None where the module has one depth only.
    """

    make: Callable[[int | None], nn.Module]
    batch: tuple[Any, ...]
    units: Any
    layers: int | None


def workload_of(name: str) -> Workload:
    """Make the workload of a factory.

    Args:
        name: As package:factory: a function of nothing that returns (module, batch), where module(*batch) is the loss,
            a scalar. It may take `layers`, and then has its depth as the default.

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

    module, inputs = make(None)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    return Workload(lambda layers: make(layers)[0], inputs, _repeated(module), depth)


def _repeated(module: nn.Module) -> Any:
    """Find the class of the submodules that follow each other most often; None where none do."""
    found = [list(part.children()) for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    classes = Counter(type(children[0]) for children in found if children for _ in children)
    return max(classes, key=lambda cls: classes[cls], default=None)


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
    return max(LEAST, math.ceil(4 * leaf.spec.reshard.merge_bytes / max(1, three - two)))


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
    model, tx = fs.functionalize(module, workload.units), fs.from_torch(torch.optim.AdamW, lr=1e-4, fused=True)

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
            options = {"merge_bytes": zero3(axes["shard"]).reshard.merge_bytes} | options
    params = fs.shard(whole, getattr(fs, strategy)(on, **options))
    return fs.jit(step, donate_argnums=0), fs.TrainState.create(params, tx, buffers=model.buffers)
