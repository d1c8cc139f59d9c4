"""assert_budget: a limit of the memory and communication of a step, as a test."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import fshard as fs
from fshard.ext.plan.plan import plan
from fshard.ext.plan.report import StepPlan, format_bytes, name_unit
from fshard.extend import NOT_NEGATIVE, check_numbers, describe, expect, flatten

API_NAME = "assert_budget"
_OPS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
# At most so many units are named that break a budget.
_MAX_UNITS = 6


def assert_budget(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    peak_bytes: float | None = None,
    bytes_sent: float | None = None,
    collectives: int | Mapping[str, int] | None = None,
    mesh: Mapping[str, int] | None = None,
    **options: Any,
) -> StepPlan:
    """Assert that a train step stays in a budget of memory and communication; nothing is run.

    Args:
        step: As for `fs.plan`.
        args: Its arguments, the state first.
        peak_bytes: The most bytes that a rank may hold at a time, state and batch included.
        bytes_sent: The most bytes that it may send, in nominal ring terms.
        collectives: The most collectives, in all or by op, as {"all_gather": 12}.
        mesh: Ranks on each axis, as for `fs.plan`; None takes the mesh of the state.
        **options: Passed to `fs.plan`. With the mesh of the state the backend is that of its process groups.

    Returns:
        The plan, for further assertions.

    Raises:
        ValueError: if a budget or the arguments make no sense, or there is none, and as by `fs.plan`.
        AssertionError: with each budget that is broken, by how much, and by what.

    >>> import torch, fshard as fs
    >>> params = fs.shard({"w": torch.ones(4096, 1)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> step = fs.value_and_grad(lambda params, x: (x @ fs.gather(params)["w"]).sum())
    >>> args = params, torch.ones(8, 4096)
    >>> fs.testing.assert_budget(step, args, mesh={"shard": 4}, bytes_sent=20e3, collectives=1)
    Traceback (most recent call last):
    AssertionError: assert_budget: the step breaks its budget on a mesh of shard 4
      bytes_sent is 24576, at most 20000 allowed; sent for ['w'] 24.58 kB
      collectives is 3, at most 1 allowed; issued for ['w'] 2, objective 1
    """
    is_sequence = isinstance(args, list | tuple) and len(args) > 0
    expect(is_sequence, API_NAME, "args to be the step's arguments as a tuple, the state first", describe(args))
    budget = _read_budget(peak_bytes, bytes_sent, collectives)
    if mesh is None:
        flat = flatten(tuple(args))
        mesh = {axis.name: axis.size for axis in flat.axes}
        is_on_cpu = {leaf.local.device.type for leaf in flat.leaves if isinstance(leaf, fs.Sharded)} == {"cpu"}
        options = {"backend": "gloo" if is_on_cpu else "nccl", **options}
    step_plan = plan(step, *args, mesh=mesh, **options)
    excesses = list(_list_excesses(step_plan, budget))
    if excesses:
        place = ", ".join(f"{name} {size}" for name, size in step_plan.mesh.items())
        headline = f"{API_NAME}: the step breaks its budget on a mesh of {place}"
        raise AssertionError("\n  ".join([headline, *excesses]))
    return step_plan


class _Budget(NamedTuple):
    """What a step may take at most.

    Attributes:
        collectives: Collectives by op; those of all ops by the empty text.
        peak_bytes: Bytes that a rank holds at a time.
        bytes_sent: Bytes that it sends.
    """

    collectives: Mapping[str, int]
    peak_bytes: float = math.inf
    bytes_sent: float = math.inf


def _read_budget(peak_bytes: Any, bytes_sent: Any, collectives: Any) -> _Budget:
    """Check the limits that the caller gives; those that are None are infinite."""
    given = {"peak_bytes": peak_bytes, "bytes_sent": bytes_sent}
    limits = {name: limit for name, limit in given.items() if limit is not None}
    check_numbers(API_NAME, NOT_NEGATIVE, **limits)
    by_op = {} if collectives is None else collectives
    if not isinstance(by_op, Mapping):
        by_op = {"": by_op}
    for op, limit in by_op.items():
        is_limit = op in ("", *_OPS) and type(limit) is int and limit >= 0
        expected = f"collectives to be a whole number, 0 or more, or one for each op of {_OPS}"
        expect(is_limit, API_NAME, expected, f"{collectives!r:.100}")
    if not limits and not by_op:
        raise ValueError(f"{API_NAME}: no budget is given. Pass peak_bytes=, bytes_sent= or collectives=.")
    return _Budget(by_op, **limits)


def _list_excesses(step_plan: StepPlan, budget: _Budget) -> Iterator[str]:
    """Write a line for each limit that is exceeded, with the units that exceed it."""
    peak_bytes = step_plan.peak_bytes
    if peak_bytes > budget.peak_bytes:
        by_use = {use.replace("_", " "): nbytes for use, nbytes in step_plan.peak._asdict().items()}
        yield f"peak_bytes is {peak_bytes}, at most {budget.peak_bytes:.0f} allowed; held {_format_largest(by_use)}"
        if step_plan.timeline:
            yield f"  at {step_plan.at_peak.operator} ({step_plan.at_peak.name})"
    bytes_sent = step_plan.bytes_sent()
    if bytes_sent > budget.bytes_sent:
        by_unit = {name: traffic.bytes for name, traffic in step_plan.by_unit().items()}
        largest = _format_largest(by_unit)
        yield f"bytes_sent is {bytes_sent:.0f}, at most {budget.bytes_sent:.0f} allowed; sent for {largest}"
    for op, limit in budget.collectives.items():
        issued = Counter(name_unit(entry) for entry in step_plan.collectives() if op in ("", entry.op))
        if issued.total() > limit:
            subject = f"collectives of {op}" if op else "collectives"
            largest = _format_largest(issued, str)
            yield f"{subject} is {issued.total()}, at most {limit} allowed; issued for {largest}"


def _format_largest(sizes: Mapping[str, float], format_size: Callable[[float], str] = format_bytes) -> str:
    """List the largest sizes by their names, the largest first."""
    items = sorted(sizes.items(), key=lambda item: -item[1])
    texts = [f"{name} {format_size(size)}" for name, size in items if size]
    if len(texts) > _MAX_UNITS:
        texts[_MAX_UNITS:] = [f"and {len(texts) - _MAX_UNITS} more"]
    return ", ".join(texts)
