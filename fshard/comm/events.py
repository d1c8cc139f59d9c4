"""Events: which collective runs, who asks for it, for which units and leaves; values that all readers share.

The recorder, `trace`, `plan`, graphs and messages of failures read these values. Text is made where it is printed.
"""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import Any, NamedTuple

import torch

from fshard import _compat

# So many leaves of a unit are printed, which may have hundreds, and so many characters of the names of units.
LEAVES, WIDTH = 6, 200

# The units and leaves that collectives which start now are for.
_subject: ContextVar[tuple[Any, ...]] = ContextVar("fshard_subject", default=())

# The dtypes and shapes of tensors.
Shapes = tuple[tuple[torch.dtype, torch.Size], ...]
# The axis of a collective, its size and group, and the encoded label.
Whose = tuple[str, int, str, str]


class Verb(StrEnum):
    """Those that ask for collectives and are known by name; others, such as users' transforms, pass any word.

    >>> import fshard as fs
    >>> [str(verb) for verb in fs.comm.Verb], fs.comm.Label("gather").verb == fs.comm.Verb.GATHER
    (['start', 'gather', 'scatter', 'agree', 'objective'], True)
    """

    START = "start"
    GATHER = "gather"
    SCATTER = "scatter"
    AGREE = "agree"
    OBJECTIVE = "objective"


class Label(NamedTuple):
    """Who asks for a collective, and what for.

    Attributes:
        verb: Who asks: a `Verb`, or any word.
        units: Names of the units that it is for; of the message that begins a call, its verb.
        leaves: Paths of the leaves that travel.
        parts: The dtypes and shapes of the operands, or another text that is the same on every rank.

    >>> import fshard as fs
    >>> label = fs.comm.Label(fs.comm.Verb.GATHER, units=("layers.0",), leaves=("['weight']", "['bias']"))
    >>> label.unit, str(label)
    ('layers.0', "gather | layers.0 | ['weight'], ['bias']")
    """

    verb: str
    units: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    parts: str = ""

    @property
    def is_comparison(self) -> bool:
        """Whether ranks compare what they do by it, and so may come to it from different calls."""
        return self.verb in (Verb.START, Verb.AGREE)

    @property
    def unit(self) -> str:
        """The units as text, or where they have no names the leaves."""
        line = ", ".join(self.units).partition("\n")[0] or listed(self.leaves)
        return line if len(line) <= WIDTH else f"{line[:WIDTH]}..."

    def __str__(self) -> str:
        return " | ".join(filter(None, (self.verb, self.unit, listed(self.leaves) if self.units else "")))


def listed(leaves: Sequence[str]) -> str:
    """Write the paths of leaves as text.

    Args:
        leaves: The paths.

    Returns:
        A line that names the first ones, and how many more there are.
    """
    more = [f"and {len(leaves) - LEAVES} more"] if len(leaves) > LEAVES else []
    return ", ".join([*leaves[:LEAVES], *more])


def labelled(who: str | Label, tensors: Sequence[torch.Tensor] = (), keep: int = 0) -> Label:
    """Make a label of who asks and of the purpose that `concerning` names; a whole label stays as it is.

    Args:
        who: The one who asks, or the label.
        tensors: The operands, to be shown where no purpose is known.
        keep: Their first dims that are not shown.

    Returns:
        The label.
    """
    if isinstance(who, Label):
        return who
    if subject := _subject.get():
        return Label(who, *subject)
    return Label(who, parts=described(tuple((tensor.dtype, tensor.shape[keep:]) for tensor in tensors)))


@functools.lru_cache(maxsize=1024)
def described(shapes: Shapes) -> str:
    """Describe tensors by their dtypes, shapes and bytes; of many the first ones."""
    each = [f"{str(dtype).removeprefix('torch.')} {tuple(shape)}" for dtype, shape in shapes]
    nbytes = sum(dtype.itemsize * shape.numel() for dtype, shape in shapes)
    return f"{listed(each)}, {nbytes} bytes" if each else ""


# A label as a text: an operator takes no other values.
encoded: Callable[[Label], str] = functools.lru_cache(maxsize=1024)(json.dumps)


@functools.lru_cache(maxsize=1024)
def decoded(text: str) -> Label:
    """Read a label that `encoded` wrote.

    Args:
        text: The text.

    Returns:
        The label.
    """
    verb, units, leaves, parts = json.loads(text)
    return Label(verb, tuple(units), tuple(leaves), parts)


@contextmanager
def setting(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Set a variable inside the context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def concerning(units: Sequence[str], leaves: Sequence[str] = ()) -> AbstractContextManager[None]:
    """Let the collectives that start inside a context say what they are for.

    Args:
        units: Names of units; none where the leaves have no unit.
        leaves: Paths of the leaves that travel.

    Returns:
        The context.
    """
    return setting(_subject, (tuple(units), tuple(leaves)))


class Collective(NamedTuple):
    """One collective as it was issued.

    Attributes:
        op: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
        axis: Name of the mesh axis.
        size: Ranks on it.
        about: Who asked for it, and what for.
        bytes: Padded bytes of the full tensors; of an all-to-all, those that this rank sends to others.
        tensors: Buffers it carried.
        scalar: Whether it carried single numbers only, or the few by which ranks agree on what comes next, or tell each
            other with the objective which leaves they used.

    >>> import fshard as fs
    >>> label = fs.comm.Label("gather", units=("layers.0",))
    >>> entry = fs.comm.Collective("all_gather", "shard", 4, label, bytes=1000, tensors=1, scalar=False)
    >>> entry.label, entry.unit, entry.sent  # three quarters of the bytes
    ('gather', 'layers.0', 750.0)
    """

    op: str
    axis: str
    size: int
    about: Label
    bytes: int
    tensors: int
    scalar: bool

    @classmethod
    def of(cls, op: str, tensors: Sequence[torch.Tensor], sizes: Sequence[Sequence[int]], whose: Whose) -> "Collective":
        """Describe a collective by what its operator is given: tensors of any kind, and of an all-to-all its sizes."""
        axis, size, group, label = whose
        about, nbytes = decoded(label), sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if sizes:
            # A rank sends nothing to itself.
            nbytes -= nbytes // max(sum(sizes[0]), 1) * sizes[0][_compat.resolve_process_group(group).rank()]
        single = {"all_to_all": -1, "reduce_scatter": size}.get(op, 1)
        scalar = all(t.numel() == single for t in tensors) or about.is_comparison or about.verb == Verb.OBJECTIVE
        return cls(op, axis, size, about, nbytes * (size if op == "all_gather" else 1), len(tensors), scalar)

    @property
    def label(self) -> str:
        """Who asked for it."""
        return self.about.verb

    @property
    def unit(self) -> str:
        """The units it was for, as text; the leaves, or the call, where no unit is known."""
        return self.about.unit

    @property
    def sent(self) -> float:
        """Bytes each rank sends, in nominal ring terms: (N-1)/N of the bytes, twice that for an all-reduce."""
        if self.op == "all_to_all":
            return self.bytes
        return (2 if self.op == "all_reduce" else 1) * self.bytes * (self.size - 1) / self.size


class Record(list[Collective]):
    """The collectives of a recording, in the order of their issue.

    >>> import torch, fshard as fs
    >>> def program():
    ...     params = fs.shard({"w": torch.ones(4)}, fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu")))
    ...     with fs.comm.record() as record:
    ...         fs.gather(params)
    ...     return record.bytes_sent()
    >>> fs.testing.spmd(program, world=2)  # half of 4 times 4 bytes
    [8.0, 8.0]
    """

    def bytes_sent(self) -> float:
        """Bytes each rank sent, in nominal ring terms, scalars left out."""
        return sum(entry.sent for entry in self if not entry.scalar)
