"""models: estimates of a model that a user's factory makes, by extrapolation over its depth where it has one."""

import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

import fshard as fs
from fshard.ext.plan.plan import plan
from fshard.ext.plan.report import Bytes, Rates, readable
from fshard.extend import describe, expect, fake_maker

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
# Depths that are traced of a deeper model.
DEPTHS = (2, 3, 4)


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
        bytes_sent: Nominal ring bytes, scalars left out.
        collectives: How many; about so many where the depth is extrapolated, because small gradients of several layers
            share a collective and fill it at depths that were not traced.
        flops: Floating-point operations.
        seconds: An estimate of the time, from stated rates.
    """

    strategy: str
    mesh: dict[str, int]
    peak: Bytes
    bytes_sent: float
    collectives: int
    flops: int
    seconds: float

    def __str__(self) -> str:
        """Write one row of a table."""
        return (
            f"{self.strategy:<6} {' x '.join(map(str, self.mesh.values())):>12} {readable(self.peak.total):>10} "
            f"{readable(self.bytes_sent):>10} {self.collectives:>12} {self.flops:>9.3g} {self.seconds:>9.3g}"
        )


def estimate(
    workload: Workload,
    strategy: str,
    mesh: Mapping[str, int],
    rates: Rates = Rates(),  # noqa: B008
    full_depth: bool = False,
) -> Estimate:
    """Plan a workload, by extrapolation over its depth where that is known and large.

    Args:
        workload: The module and its batch.
        strategy: The name of the strategy.
        mesh: Ranks on each axis.
        rates: As for `fs.plan`.
        full_depth: Whether to trace all layers instead.

    Returns:
        The estimate.

    Raises:
        ValueError: as by `fs.plan`.
    """

    def row(layers: int | None) -> tuple[float, ...]:
        step, state = prepared(workload, strategy, layers)
        found = plan(step, state, *workload.batch, mesh=mesh, rates=rates)
        return (*found.peak, found.bytes_sent(), len(found.collectives()), found.flops, found.seconds)

    deeper = 0 if full_depth or workload.layers is None else max(0, workload.layers - DEPTHS[-1])
    columns = zip(*map(row, DEPTHS if deeper else [None]), strict=True)
    # Where growth is uneven, the mean of the traced depths goes on.
    *held, sent, count, flops, seconds = (
        last + deeper * (last - middle if last - middle == middle - first else (last - first) / 2)
        for first, middle, last in ((column[0], column[len(column) // 2], column[-1]) for column in columns)
    )
    peak = Bytes(*(max(0, round(size)) for size in held))
    return Estimate(strategy, dict(mesh), peak, sent, round(count), round(flops), seconds)


def mesh_of(strategy: str, ranks: int, node: int = 8) -> dict[str, int]:
    """Choose the mesh of a strategy: one axis, or hsdp's two."""
    if strategy != "hsdp":
        return {"shard": ranks}
    needed = f"world size to be a multiple of hsdp's {node} ranks a node"
    expect(node > 0 and not ranks % node, "plan", needed, str(ranks), "pass another")
    return {"replicate": ranks // node, "shard": node}


def prepared(workload: Workload, strategy: str, layers: int | None = None) -> tuple[Callable[..., Any], fs.TrainState]:
    """Make the jitted step of a workload, with AdamW and its state donated, and the state on one rank without values.

    Args:
        workload: The module and its batch.
        strategy: The name of the strategy.
        layers: Another depth than the workload's.
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
    whole = {name: nn.Parameter(fake(p), p.requires_grad) for name, p in module.named_parameters()}
    mesh = fs.init_mesh(dict.fromkeys(mesh_of(strategy, 8), 1), device="cpu")
    params = fs.shard(whole, getattr(fs, strategy)(mesh))
    return fs.jit(step, donate_argnums=0), fs.TrainState.create(params, tx, buffers=model.buffers)
