"""estimate: the plan of a workload under a strategy, of a deep model by extrapolation over its depth."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.ext.plan.models import Workload
from fshard.ext.plan.plan import plan
from fshard.ext.plan.report import Bytes, Rates, StepPlan, readable
from fshard.extend import expect, fake_maker, select

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
# Those whose full parameters may be dropped after the forward, and have a dtype of their own.
CHOOSE = ("zero3", "hsdp")
# Depths that are traced of a deeper model.
DEPTHS = (2, 3, 4)


class Options(NamedTuple):
    """How a workload is trained.

    Attributes:
        strategy: "ddp", "zero1", "zero2", "zero3" or "hsdp".
        regather: As for `fs.zero3`; it alone, and hsdp, have it.
        param_dtype: As for `fs.zero3`; it alone, and hsdp, have it.
        checkpointed: Whether units compute their activations again in the backward.
    """

    strategy: str = "zero3"
    regather: bool = True
    param_dtype: torch.dtype | None = None
    checkpointed: bool = False


class Estimate(NamedTuple):
    """The cost of one step of one rank.

    Attributes:
        options: How the workload is trained.
        mesh: Ranks on each axis.
        peak: Bytes held when most are.
        bytes_sent: Nominal ring bytes, scalars left out.
        collectives: How many; about so many where the depth is extrapolated, because small gradients of several layers
            share a collective and fill it at depths that were not traced.
        flops: Floating-point operations.
        seconds: An estimate of the time, from stated rates.
        traced: Whether the full depth was traced.
    """

    options: Options
    mesh: dict[str, int]
    peak: Bytes
    bytes_sent: float
    collectives: int
    flops: int
    seconds: float
    traced: bool

    def __str__(self) -> str:
        """Write one row of a table."""
        activations = "again" if self.options.checkpointed else "kept"
        regather, count = "yes" if self.options.regather else "no", f"{'' if self.traced else '~'}{self.collectives}"
        return (
            f"{self.options.strategy:<6} {' x '.join(map(str, self.mesh.values())):>12} {activations:>6} {regather:>9} "
            f"{readable(self.peak.total):>10} {readable(self.bytes_sent):>10} {count:>12} "
            f"{self.flops:>9.3g} {self.seconds:>9.3g}"
        )


def estimate(
    workload: Workload,
    options: Options,
    mesh: Mapping[str, int],
    rates: Rates = Rates(),  # noqa: B008
    full_depth: bool = False,
) -> Estimate:
    """Plan a workload, by extrapolation over its depth where that is known and large.

    Args:
        workload: The module and its batch.
        options: How it is trained.
        mesh: Ranks on each axis.
        rates: As for `fs.plan`.
        full_depth: Whether to trace all layers instead.

    Returns:
        The estimate.

    Raises:
        ValueError: as by `fs.plan`.
    """

    def row(layers: int | None) -> tuple[float, ...]:
        step, state = prepared(workload, options, layers)
        found: StepPlan = plan(step, state, *workload.batch, mesh=mesh, rates=rates)
        return (*found.peak, found.bytes_sent(), len(found.collectives()), found.flops, found.seconds)

    deeper = 0 if full_depth or workload.layers is None else max(0, workload.layers - DEPTHS[-1])
    columns = zip(*map(row, DEPTHS if deeper else [None]), strict=True)
    # Where growth is uneven, the mean of the traced depths goes on.
    *held, sent, count, flops, seconds = (
        last + deeper * (last - middle if last - middle == middle - first else (last - first) / 2)
        for first, middle, last in ((column[0], column[len(column) // 2], column[-1]) for column in columns)
    )
    peak = Bytes(*(max(0, round(size)) for size in held))
    return Estimate(options, dict(mesh), peak, sent, round(count), round(flops), seconds, not deeper)


def mesh_of(strategy: str, ranks: int, node: int = 8) -> dict[str, int]:
    """Choose the mesh of a strategy: one axis, or hsdp's two."""
    if strategy != "hsdp":
        return {"shard": ranks}
    needed = f"world size to be a multiple of hsdp's {node} ranks a node"
    expect(node > 0 and not ranks % node, "plan", needed, str(ranks), "pass another")
    return {"replicate": ranks // node, "shard": node}


def cheapest(estimates: Sequence[Estimate], memory: int) -> Estimate | None:
    """Find the estimate that fits and takes the least time of all ranks together for a batch, fewer ranks first.

    Args:
        estimates: Estimates with the same batch for each rank, so that the time of a step is the time of all ranks for
            each sequence.
        memory: The memory of a rank, in bytes.

    Returns:
        The estimate; None where none fits.
    """
    fits = [row for row in estimates if row.peak.total <= memory]
    return min(fits, key=lambda row: (row.seconds, math.prod(row.mesh.values())), default=None)


def prepared(
    workload: Workload, options: Options, layers: int | None = None
) -> tuple[Callable[..., Any], fs.TrainState]:
    """Make the jitted step of a workload, with AdamW and its state donated, and the state on one rank without values.

    Args:
        workload: The module and its batch.
        options: How it is trained.
        layers: Another depth than the workload's.
    """
    module = workload.make(layers or workload.layers)
    named, remedy = not options.checkpointed or workload.units is not None, "name them, or keep all"
    expect(named, "plan", "units that compute activations again", "none", remedy)
    for part in map(module.get_submodule, select(module, workload.units) if options.checkpointed else ()):
        part.forward = partial(checkpoint, part.forward, use_reentrant=False)
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
    mesh = fs.init_mesh(dict.fromkeys(mesh_of(options.strategy, 8), 1), device="cpu")
    given = {"regather": options.regather, "param_dtype": options.param_dtype} if options.strategy in CHOOSE else {}
    params = fs.shard(whole, getattr(fs, options.strategy)(mesh, **given))
    return fs.jit(step, donate_argnums=0), fs.TrainState.create(params, tx, buffers=model.buffers)
