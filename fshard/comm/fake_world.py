"""A world of any size for traces: axes whose groups cannot communicate."""

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from fshard import _compat
from fshard.tree import Axis

_axes: ContextVar[frozenset[Axis] | None] = ContextVar("fshard_fake_axes", default=None)


@contextmanager
def fake_world(sizes: Mapping[str, int], ranks: Mapping[str, int], backend: str) -> Iterator[dict[str, Axis]]:
    """Let there be axes to trace with, which only this context knows and which are gone with it.

    Args:
        sizes: Ranks on each axis, by its name.
        ranks: This rank's coordinate on each.
        backend: What their groups say they run on, by which collectives choose their algorithm.

    Yields:
        The axes by their names.
    """
    # Names of their own keep them from being taken for real groups.
    axes = {name: Axis(name, size, f"fake {name} {uuid.uuid4().hex}") for name, size in sizes.items()}
    groups = {axis.group_name: (ranks[name], axis.size) for name, axis in axes.items()}
    token = _axes.set(frozenset(axes.values()))
    try:
        with _compat.fake_process_groups(groups, backend):
            yield axes
    finally:
        _axes.reset(token)


def has_one_rank(axis: Axis) -> bool:
    """Whether nothing is to be sent over an axis.

    Raises:
        ValueError: inside of a fake world, if the axis is not of it.
    """
    known = _axes.get()
    if known is not None and axis not in known:
        sizes = ", ".join(f"{other.name!r} of {other.size} ranks" for other in sorted(known, key=lambda a: a.name))
        raise ValueError(
            f"plan: expected the step to send over axes of the planned mesh, {sizes or 'which has none'}, got axis "
            f"{axis.name!r} of {axis.size} ranks, which it closes over; read axes from the state's leaves, as "
            "leaf.spec.axes"
        )
    return axis.size == 1
