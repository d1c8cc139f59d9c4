"""assert_budget: limits of the memory and traffic of a train step, as a unit test."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import fshard as fs
from fshard.ext.plan.plan import plan
from fshard.ext.plan.report import StepPlan, bytes_from, readable, unit_of
from fshard.extend import describe, expect, flatten

_OPS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
# So many units are named that broke a budget.
_NAMED = 6


def assert_budget(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    peak_bytes: int | str | None = None,
    bytes_sent: int | str | None = None,
    collectives: int | Mapping[str, int] | None = None,
    mesh: Mapping[str, int] | None = None,
    **options: Any,
) -> StepPlan:
    """Assert that a train step stays in a budget of memory and communication; nothing is run.

    Args:
        step: As for `fs.plan`.
        args: Its arguments, the state first.
        peak_bytes: The most bytes that a rank may hold at a time, state and batch included: a number, or as "80GB".
        bytes_sent: The most bytes that it may send, in nominal ring terms.
        collectives: The most collectives, in all or by op, as {"all_gather": 12}.
        mesh: Ranks on each axis, as for `fs.plan`; None takes the state's own.
        **options: Passed to `fs.plan`; with the state's own mesh the backend is that of its process groups.

    Returns:
        The plan, for further assertions.

    Raises:
        ValueError: if a budget or the arguments make no sense, or there is none, and as by `fs.plan`.
        AssertionError: with each budget that is broken, by how much, and by which units.

    >>> import torch, fshard as fs
    >>> params = fs.shard({"w": torch.ones(4096, 1)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> step = fs.value_and_grad(lambda params, x: (x @ fs.gather(params)["w"]).sum())
    >>> args = params, torch.ones(8, 4096)
    >>> fs.testing.assert_budget(step, args, mesh={"shard": 4}, bytes_sent="20kB", collectives=1)
    Traceback (most recent call last):
    AssertionError: assert_budget: the step breaks its budget on a mesh of shard 4
      bytes_sent is 24576, at most 20000 allowed; sent for ['w'] 24.58 kB
      collectives is 3, at most 1 allowed; issued for ['w'] 2, objective 1
    """
    what, needed = "assert_budget", "args to be the step's arguments as a tuple, the state first"
    expect(isinstance(args, list | tuple) and args, what, needed, describe(args))
    budgets = {"peak_bytes": peak_bytes, "bytes_sent": bytes_sent}
    limits = {name: bytes_from(what, name, value) for name, value in budgets.items() if value is not None}
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


def _broken(found: StepPlan, limits: Mapping[str, int], by_op: Mapping[str, int]) -> Iterator[str]:
    """Write a line for each budget that is broken, with the units that break it."""
    if found.peak_bytes > limits.get("peak_bytes", math.inf):
        held = {name.replace("_", " "): size for name, size in found.peak._asdict().items()}
        yield f"peak_bytes is {found.peak_bytes}, at most {limits['peak_bytes']} allowed; held {_most(held)}"
        if found.timeline:
            units = f", with {', '.join(found.at_peak.units)} gathered or in flight" if found.at_peak.units else ""
            yield f"  at {found.at_peak.operator} ({found.at_peak.name}){units}"
    if found.bytes_sent() > limits.get("bytes_sent", math.inf):
        sent = _most({name: traffic.bytes for name, traffic in found.by_unit().items()})
        yield f"bytes_sent is {found.bytes_sent():.0f}, at most {limits['bytes_sent']} allowed; sent for {sent}"
    for op, limit in by_op.items():
        issued = Counter(unit_of(entry) for entry in found.collectives() if op in ("", entry.op))
        if issued.total() > limit:
            what = f"collectives of {op}" if op else "collectives"
            yield f"{what} is {issued.total()}, at most {limit} allowed; issued for {_most(issued, str)}"


def _most(sizes: Mapping[str, float], show: Callable[[float], str] = readable) -> str:
    shown = [f"{name} {show(size)}" for name, size in sorted(sizes.items(), key=lambda item: -item[1]) if size]
    return ", ".join([*shown[:_NAMED], *([f"and {len(shown) - _NAMED} more"] if len(shown) > _NAMED else [])])
