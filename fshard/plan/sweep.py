"""sweep: plans of a workload under many strategies and sizes, deep models by extrapolation over their depth."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from fshard.plan.kinds import Bytes
from fshard.plan.layout import check_mesh
from fshard.plan.plan import plan
from fshard.plan.rates import Rates
from fshard.plan.report import Plan, bytes_from, readable
from fshard.plan.workload import STRATEGIES, Options, Workload, prepared

# Depths that are traced of a deeper model.
DEPTHS = (2, 3, 4)


class Estimate(NamedTuple):
    """What one step of one rank takes.

    Attributes:
        options: How it is trained.
        mesh: Ranks on each axis.
        peak: What is held when most is.
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

    @property
    def ranks(self) -> int:
        """All ranks of the mesh."""
        ranks = 1
        for size in self.mesh.values():
            ranks *= size
        return ranks

    def __str__(self) -> str:
        """One row of a table."""
        activations = "again" if self.options.checkpointed else "kept"
        mesh = " x ".join(str(size) for size in self.mesh.values())
        return (
            f"{self.options.strategy:<6} {mesh:>12} {activations:>6} {'yes' if self.options.regather else 'no':>9} "
            f"{readable(self.peak.total):>10} {readable(self.bytes_sent):>10} "
            f"{('' if self.traced else '~') + str(self.collectives):>12} {self.flops:>9.3g} {self.seconds:>9.3g}"
        )


def estimate(
    workload: Workload,
    options: Options,
    mesh: Mapping[str, int],
    *,
    backend: str = "nccl",
    rates: Rates = Rates(),  # noqa: B008
    depths: Sequence[int] | None = DEPTHS,
) -> Estimate:
    """Plan a workload, by extrapolation over its depth where that is known and large.

    Args:
        workload: What is trained.
        options: How.
        mesh: Ranks on each axis.
        backend: As for `fs.plan`.
        rates: As for `fs.plan`.
        depths: Three depths to trace, each by one layer deeper; None traces the full one.

    Returns:
        The estimate.

    Raises:
        ValueError: if the depths make no sense, and as by `fs.plan`.
    """
    sizes = check_mesh(mesh)

    def planned(layers: int | None) -> Plan:
        step, state = prepared(workload, options, layers)
        return plan(step, state, *workload.batch, mesh=sizes, backend=backend, rates=rates)

    if depths is not None and (len(depths) != 3 or depths[1] - depths[0] != 1 or depths[2] - depths[1] != 1):
        raise ValueError(f"plan: expected depths to be three in a row, as {DEPTHS}, or None, got {depths!r}")
    if depths is None or workload.layers is None or workload.layers <= depths[-1]:
        rows, deeper = [_row(planned(None))] * 3, 0
    else:
        rows, deeper = [_row(planned(layers)) for layers in depths], workload.layers - depths[-1]
    # What does not grow evenly goes on as it did on the way so far.
    grown = [last + deeper * _slope(*values) for *values, last in zip(*rows, rows[-1], strict=True)]
    *held, sent, count, flops, seconds = grown
    peak = Bytes(*(max(0, round(size)) for size in held))
    return Estimate(options, sizes, peak, sent, round(count), round(flops), seconds, not deeper)


def _row(found: Plan) -> tuple[float, ...]:
    return (*found.peak, found.bytes_sent(), len(found.collectives()), found.flops, found.seconds)


def _slope(first: float, second: float, third: float) -> float:
    return third - second if third - second == second - first else (third - first) / 2


def sweep(
    workload: Workload,
    *,
    world_sizes: Sequence[int],
    strategies: Sequence[str] = STRATEGIES,
    units: Sequence[Any] = (None,),
    regather: Sequence[bool] = (True, False),
    checkpointed: Sequence[bool] = (False, True),
    param_dtype: Any = None,
    node: int = 8,
    report: Callable[[Estimate], Any] | None = None,
    **more: Any,
) -> list[Estimate]:
    """Plan a workload under all combinations of options.

    Args:
        workload: What is trained, such as `gpt("gpt-13b")`.
        world_sizes: Numbers of ranks.
        strategies: Names of strategies.
        units: Rules for what is gathered together; None means the workload's own.
        regather: Whether units are gathered again in the backward, for zero3 and hsdp, which have the choice.
        checkpointed: Whether activations of units are computed again.
        param_dtype: Dtype that parameters are gathered in, for zero3 and hsdp.
        node: Ranks of hsdp's inner axis.
        report: Called with each estimate as soon as it is there.
        **more: Passed to `estimate`.

    Returns:
        The estimates.

    Raises:
        ValueError: if an option is unknown or a world size makes no sense, before anything is planned.
    """
    rows: list[tuple[Options, dict[str, int]]] = []
    for strategy, ranks in product(strategies, world_sizes):
        mesh = mesh_of(strategy, ranks, node)
        chooses = strategy in ("zero3", "hsdp")
        for rule, again, drop in product(units, checkpointed, regather if chooses else (True,)):
            rows.append((Options(strategy, rule, drop, param_dtype if chooses else None, again), mesh))
    found = []
    for options, mesh in rows:
        found.append(estimate(workload, options, mesh, **more))
        if report is not None:
            report(found[-1])
    return found


def mesh_of(strategy: str, ranks: int, node: int = 8) -> dict[str, int]:
    """The mesh of a strategy: one axis, or hsdp's two."""
    if strategy not in STRATEGIES:
        raise ValueError(f"plan: expected strategy to be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"plan: expected world size to be a whole number of ranks from 1, got {ranks!r}")
    if strategy != "hsdp":
        return {"shard": ranks}
    if type(node) is not int or node < 1 or ranks % node:
        raise ValueError(
            f"plan: expected world size to be a multiple of hsdp's {node!r} ranks a node, got {ranks}; pass another"
        )
    return {"replicate": ranks // node, "shard": node}


def cheapest(estimates: Sequence[Estimate], memory: int | str) -> Estimate | None:
    """The estimate that fits and takes the least time of all ranks together for a batch, fewer ranks first.

    Args:
        estimates: What to choose from; all with the same batch for each rank, so that the time of a step is the time
            of all ranks for each sequence.
        memory: What a rank has, in bytes or as "80GB".

    Returns:
        The estimate; None where none fits.

    Raises:
        ValueError: if `memory` is no number of bytes.
    """
    limit = bytes_from("plan", "memory", memory)
    fits = [row for row in estimates if row.peak.total <= limit]
    return min(fits, key=lambda row: (row.seconds, row.ranks), default=None)
