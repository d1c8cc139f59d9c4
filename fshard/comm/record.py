"""A recorder of collectives: off unless entered, per thread, and without a hook on anything."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from fshard import _compat
from fshard.comm import ops
from fshard.comm.labels import parts

# The label of what ranks compare while they run.
AGREE = "agree"
# The label of an objective, with which ranks tell each other of the leaves that they used.
OBJECTIVE = "objective"


class Collective(NamedTuple):
    """One collective as it was issued.

    Attributes:
        op: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
        axis: Name of the mesh axis.
        size: Ranks on it.
        label: Who asked for it.
        bytes: Padded bytes of the full tensors; of an all-to-all, those that this rank holds.
        tensors: Buffers it carried.
        scalar: Whether it carried single numbers only, or the few by which ranks agree on what comes next, or tell each
            other with the objective which leaves they used.
        unit: What it was for, where the one who asked has said so.
    """

    op: str
    axis: str
    size: int
    label: str
    bytes: int
    tensors: int
    scalar: bool
    unit: str = ""

    @property
    def sent(self) -> float:
        """Bytes each rank sends, in nominal ring terms: (N-1)/N of the bytes, twice that for an all-reduce."""
        return (2 if self.op == "all_reduce" else 1) * self.bytes * (self.size - 1) / self.size


class Record(list[Collective]):
    """The collectives of a recording, in the order of their issue."""

    def bytes_sent(self) -> float:
        """Bytes each rank sent, in nominal ring terms, scalars left out."""
        return sum(entry.sent for entry in self if not entry.scalar)

    def scalar_bytes_sent(self) -> float:
        """Bytes each rank sent in collectives that carry single numbers only."""
        return sum(entry.sent for entry in self if entry.scalar)


def collective_of(func: Any, args: Any) -> Collective | None:
    """What a call of an operator sends; None where it is none of the collectives.

    Args:
        func: The operator.
        args: Its arguments, tensors of any kind.

    Returns:
        The entry of a record.
    """
    if func in (ops.all_gather, ops.reduce_scatter, ops.all_reduce):
        tensors, axis, size, _, _, label = args
        label, unit, _ = parts(label)
        full = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        full *= size if func is ops.all_gather else 1
        single = all(tensor.numel() == (size if func is ops.reduce_scatter else 1) for tensor in tensors)
        name = func.name().removeprefix("fshard::").removesuffix(".default")
        return Collective(name, axis, size, label, full, len(tensors), single or label in (AGREE, OBJECTIVE), unit)
    if func is ops.all_to_all:
        rows, _, _, axis, size, _, label = args
        label, unit, _ = parts(label)
        return Collective("all_to_all", axis, size, label, rows.numel(), 1, False, unit)
    return None


class _Recorder(_compat.DispatchMode):
    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        entry = collective_of(func, args)
        if entry is not None:
            self.record.append(entry)
        return func(*args, **(kwargs or {}))


@contextmanager
def record() -> Iterator[Record]:
    """Record every collective this thread issues inside the context, those of a backward pass included.

    Yields:
        A list of Collective that grows as collectives are issued.
    """
    entries = Record()
    with _Recorder(entries):
        yield entries
