"""Exchange: leaves to and from formats by their names, and errors that every rank raises."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fshard import _compat, comm
from fshard.checkpoint.errors import CheckpointError, reason
from fshard.checkpoint.files import bytes_of, name_of
from fshard.errors import Problem, expect, refuse
from fshard.mesh import Mesh, ranks_of
from fshard.shard import Layouts, check_transform, hash_of, local_ranges, padded, without_padding
from fshard.tree import Axis, Flat, Sharded, Tree, flatten, is_sharded, tensor_of
from fshard.tree.checks import check_local, describe

# A part of a tensor by its start and end along each dim, and by its start and shape.
Box = tuple[slice, ...]
Place = tuple[tuple[int, ...], tuple[int, ...]]


class Piece(NamedTuple):
    """A box of a leaf: where it starts along each dim, a tensor with its elements, and the leaf's global shape."""

    offset: tuple[int, ...]
    tensor: torch.Tensor
    full_shape: tuple[int, ...]


class Entry(NamedTuple):
    """A full tensor to read from.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        read: Returns a box of it in memory that nothing else holds.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[Box], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Entry":
        """An entry that copies from a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda box: tensor.detach()[box].clone())


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf holds elements: a tensor, or Sharded."""
    return is_sharded(leaf) or isinstance(leaf, torch.Tensor)


def shape_of(leaf: Any) -> tuple[int, ...]:
    """The global shape of a leaf or an entry."""
    return leaf.spec.shape if is_sharded(leaf) else tuple(leaf.shape)


def described(leaf: Any) -> str:
    """The dtype and global shape of a leaf or an entry, as errors write them; of another value what it is."""
    if not is_tensor(leaf) and not isinstance(leaf, Entry):
        return describe(leaf)
    return f"{name_of(tensor_of(leaf).dtype)}{list(shape_of(leaf))}"


def piece_of(leaf: Any) -> Piece:
    """This rank's part of a leaf, a view without padding; perhaps empty."""
    if not is_sharded(leaf):
        return Piece((0,) * leaf.dim(), leaf.detach(), tuple(leaf.shape))
    shape, tensor = leaf.spec.shape, without_padding(leaf).detach()
    if not shape and tensor.numel():
        # A leaf without dims that is split is stored with one, and one rank has the element.
        tensor = tensor.reshape(())
    return Piece(tuple(start for start, _ in local_ranges(leaf.spec))[: len(shape)], tensor, shape)


class Exchange:
    """Moves leaves to or from a format: every rank makes the same calls.

    Attributes:
        label: The public function, for errors.
        ranks: The ranks that call, as one axis.
        rank: The place of this rank among them.
    """

    def __init__(self, label: str, *, mesh: Mesh | Axis | None = None) -> None:
        """Begin an exchange.

        Args:
            label: The public function, for errors.
            mesh: The mesh of the ranks that call; None for all ranks of this run.
        """
        self.label = label
        self.ranks = ranks_of(mesh)
        self.rank = comm.rank(self.ranks)

    @contextmanager
    def raise_on_all_ranks(self, place: object = "") -> Iterator[None]:
        """Raise on every rank the first exception that any of them raises inside, where no rank may wait for another.

        Args:
            place: The file or directory that an error is about which names none.
        """
        failure, said = None, None
        try:
            yield
        except Exception as error:
            failure, said = error, [type(error) is ValueError, reason(error, place)]
        for is_argument, text in filter(None, self.everyone(said)):
            raise (ValueError(text) if is_argument else CheckpointError(f"{self.label}: {text}")) from failure

    def everyone(self, said: Any) -> list[Any]:
        """Gather what every rank says, in rank order."""
        return comm.all_gather_object(said, [self.ranks], self.label)

    def agree(self, entries: Mapping[str, str], what: str, remedy: str) -> None:
        """Refuse on every rank entries that differ between ranks."""
        difference = comm.find_disagreement(entries, [self.ranks], self.label)
        refuse(f"{self.label}: {what}", [difference] if difference else [], remedy)

    def path(self, name: str, path: Any) -> Path:
        """Return the path of a file or a directory, and refuse an argument of another type."""
        expect(isinstance(path, str | PathLike) and str(path), self.label, f"{name} to be a path", f"{path!r:.40}")
        return Path(path)

    def flat(self, tree: Tree) -> Flat:
        """Take a tree apart.

        Raises:
            ValueError: with each leaf that was donated or does not fit its spec, or each name that several have.
        """
        flat = flatten(tree)
        plain = not (_compat.is_tracing() or _compat.transforms_active())
        expect(plain, self.label, "a call outside of fs.jit and torch.func, on their results", "one inside")
        problems = [(n, f"{k} leaves", "one of each name") for n, k in Counter(flat.names).items() if k > 1]
        refuse(f"{self.label}: leaves of one name", problems, "give keys that print differently")
        check_local(self.label, flat)
        return flat

    def layouts(self, flat: Flat, strategy: Any) -> Layouts:
        """The specs that a strategy gives the leaves of a tree; refuses what is no strategy of this process."""
        check_transform(strategy, self.label, "strategy")
        return Layouts(self.label, strategy, flat.names, flat.leaves)

    def replicas(self, leaves: Mapping[str, Any], values: Mapping[str, str]) -> dict[str, dict[Place, list[int]]]:
        """Find the ranks that hold each part of each leaf, and refuse different values of one part.

        Each rank hashes the parts that several ranks hold, which takes less time than to copy them.

        Args:
            leaves: Tensors and Sharded leaves by path.
            values: Texts of all else that must be the same on every rank.

        Returns:
            The ranks, by path and by the place of a part.

        Raises:
            ValueError: on every rank, with the first leaf of another dtype or shape, or every leaf whose values differ.
        """
        remedy = "make all but the values of Sharded leaves the same on every rank"
        same = {path: described(leaf) for path, leaf in leaves.items()}
        self.agree({**same, **values}, "ranks hold different leaves", remedy)
        own = []
        for leaf in leaves.values():
            offset, tensor, _ = piece_of(leaf)
            parts = math.prod(axis.size for axis in leaf.spec.partition_axes()) if is_sharded(leaf) else 1
            own.append([offset, tensor.shape, hash_of(tensor) if parts < self.ranks.size else ""])
        problems, replicas = dict[str, Problem](), {}
        for path, rows in zip(leaves, zip(*self.everyone(own), strict=True), strict=True):
            held: dict[Place, list[int]] = {}
            for rank, (offset, shape, value) in enumerate(rows):
                ranks = held.setdefault((tuple(offset), tuple(shape)), [])
                ranks.append(rank)
                if value != rows[ranks[0]][2]:
                    problems.setdefault(path, Problem(path, f"other values on rank {rank}", "the same on all ranks"))
            replicas[path] = held
        remedy = "make them the same, buffers by fs.sync_buffers, or store a row of one leaf for each rank"
        refuse(f"{self.label}: ranks hold different values of one leaf", [*problems.values()], remedy)
        return replicas

    def read(self, needed: Mapping[str, Any], found: Mapping[str, Sequence[Any]], remedy: str) -> dict[str, Any]:
        """Read this rank's part of each leaf.

        Args:
            needed: Leaves by name, whose values are not used.
            found: The entries of each name, several for a parameter that is tied; or a value that is no tensor.
            remedy: What the caller can do about leaves that do not fit.

        Returns:
            New leaves of the same types and places, by name.

        Raises:
            ValueError: on every rank, with every leaf that was not found, was found otherwise or besides.
            CheckpointError: on every rank, if an entry cannot be read, or the entries of a leaf differ.
        """
        with self.raise_on_all_ranks():
            problems = []
            for name in dict.fromkeys((*needed, *found)):
                expected = described(needed[name]) if name in needed else "nothing"
                got = map(described, found[name]) if name in found else ["nothing"]
                problems += [(name, each, expected) for each in got if each != expected]
            refuse(f"{self.label}: leaves do not fit", problems, remedy)
            made = {}
            for name, leaf in needed.items():
                made[name] = _read(name, leaf, found[name]) if is_tensor(leaf) else found[name][0]
            return made


def _read(name: str, leaf: Any, entries: Sequence[Entry]) -> Any:
    """Read this rank's part of a leaf, whose values are not used."""
    offset, tensor, _ = piece_of(leaf)
    box = tuple(slice(start, start + size) for start, size in zip(offset, tensor.shape, strict=False))
    local = without_padding(leaf) if is_sharded(leaf) else leaf
    parts = [entry.read(box) if local.numel() else torch.empty(local.shape, device="cpu") for entry in entries]
    if any(bytes_of(part) != bytes_of(parts[0]) for part in parts[1:]):
        found = f"expected {name} to have the same values under all its names, got others"
        raise CheckpointError(f"{found}; untie the module's, so that each has its own")
    device = torch.get_default_device() if local.is_meta else local.device
    made = parts[0].to(device, entries[0].dtype).reshape(local.shape)
    if not made.is_contiguous() or made.untyped_storage().nbytes() != made.nbytes:
        made = made.clone(memory_format=torch.contiguous_format)
    return Sharded(padded(made, leaf.spec), leaf.spec) if is_sharded(leaf) else made
