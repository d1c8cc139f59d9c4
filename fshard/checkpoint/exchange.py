"""Exchange: leaves to and from formats by their names, and errors that every rank raises."""

import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fshard import _compat, comm
from fshard.checkpoint.errors import CheckpointError, reason
from fshard.checkpoint.files import bytes_of, name_of
from fshard.errors import Problem, expect, refuse
from fshard.mesh import Mesh, ranks_of
from fshard.shard import Layouts, check_transform, hash_of, local_ranges, padded, unsharded, without_padding
from fshard.tree import Axis, Flat, Sharded, Tree, flatten, is_sharded, tensor_of, tree_map
from fshard.tree.checks import check_flags, check_local, describe

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

    A tied parameter of a module has several names, of which fshard uses the first.

    Attributes:
        label: The public function, for errors.
        ranks: The ranks that call, as one axis.
        rank: The place of this rank among them.
        first: The first name of each tensor of the module, by each of its names, with those of wrappers.
        saved: The names that a state dict has of each tensor, by the first.
        unsaved: The names of buffers that are not persistent.
        by_tensor: The first name of each tensor, by its id.
    """

    def __init__(self, label: str, module: nn.Module | None = None, mesh: Mesh | Axis | None = None) -> None:
        """Read the names of a module.

        Args:
            label: The public function, for errors.
            module: The module whose tensors are moved; None leaves every name as it is.
            mesh: The mesh of the ranks that call; None for all ranks of this run.
        """
        self.label, self.ranks, self._known = label, ranks_of(mesh), module is not None
        self.rank = comm.rank(self.ranks)
        given = nn.Module() if module is None else module
        expect(isinstance(given, nn.Module), label, "module to be a torch module or None", describe(module))
        named = dict[str, torch.Tensor](_compat.named_parameters(given, remove_duplicate=False))
        named |= _compat.named_buffers(given, remove_duplicate=False)
        self.by_tensor = {id(tensor): name for name, tensor in reversed(named.items())}
        in_module = dict[str, torch.Tensor](given.named_parameters(remove_duplicate=False))
        in_module |= given.named_buffers(remove_duplicate=False)
        self.first = {name: self.by_tensor[id(tensor)] for name, tensor in (named | in_module).items()}
        self.saved: dict[str, list[str]] = {}
        self.unsaved = _compat.unsaved_buffers(given)
        for name in filter(given.state_dict().__contains__, named):
            self.saved.setdefault(self.first[name], []).append(name)

    def saved_as(self, name: str) -> list[str]:
        """The names under which a state dict has a leaf; none for a buffer that is not persistent."""
        return self.saved.get(name, []) if self._known else [name]

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

    def leaves(self, tree: Tree, **flags: Any) -> dict[str, Any]:
        """The leaves of a tree by name.

        Raises:
            ValueError: on every rank, if a leaf is no tensor or unknown to the module, or a flag is no bool.
        """
        with self.raise_on_all_ranks():
            check_flags(self.label, **flags)
            flat = self.flat(tree)
            leaves = {name: leaf for name, leaf in zip(flat.names, flat.leaves, strict=True) if leaf is not None}
            problems = [(name, describe(leaf), "a tensor") for name, leaf in leaves.items() if not is_tensor(leaf)]
            if self._known:
                problems += [(name, "a leaf", expected) for name in leaves if (expected := self._misnamed(name))]
            refuse(f"{self.label}: leaves do not fit", problems, "pass the parameters and buffers of this module")
        return leaves

    def _misnamed(self, name: str) -> str | None:
        """Say what is expected in the place of a leaf; None for one that has its place in the module's state dict."""
        if self.first.get(name) != name:
            return self.first.get(name, "a parameter or a buffer of the module")
        if name in self.saved or name in self.unsaved:
            return None
        return "one that module.state_dict() has under a name of module.named_parameters() or named_buffers()"

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

    def gathered(self, leaves: Mapping[Any, Any], rank0_only: bool) -> dict[Any, torch.Tensor]:
        """Gather leaves one by one into storage of their own, which no later step writes to and no other tensor has."""
        out: dict[Any, torch.Tensor] = {}
        for name, leaf in leaves.items():
            full = unsharded([leaf])[0] if is_sharded(leaf) else leaf.detach()
            if not (rank0_only and self.rank):
                out[name] = full.clone(memory_format=torch.contiguous_format)
        return out

    def fill(
        self, found: Mapping[str, Entry], leaves: Mapping[str, Any], cast: bool = False, optional: Container[str] = ()
    ) -> dict[str, Any]:
        """Read this rank's part of every leaf by its name, or refuse, on every rank, what does not fit.

        Args:
            found: The entries by name; a tied parameter has any of its names, or several.
            leaves: The leaves by name.
            cast: Whether to convert from one floating dtype to another.
            optional: Leaves that need no entry if they have values.

        Returns:
            New leaves by name.
        """
        groups: dict[str, list[Entry]] = {}
        for name, entry in found.items():
            first = self.first.get(name, name)
            dtype = tensor_of(leaves[first]).dtype if cast and first in leaves else entry.dtype
            if dtype.is_floating_point and entry.dtype.is_floating_point:
                entry = entry._replace(dtype=dtype)
            groups.setdefault(first, []).append(entry)
        # A state dict has no buffers that are not persistent, which stay as they are if they have values.
        missing = {name: leaf for name, leaf in leaves.items() if name not in groups}
        kept = {
            name: tree_map(torch.clone, leaf)
            for name, leaf in missing.items()
            if (not self.saved_as(name) or name in optional) and not tensor_of(leaf).is_meta
        }
        needed = {name: leaf for name, leaf in leaves.items() if name not in kept}
        remedy = "pass a tree of the same names; module= knows which are tied or not saved, cast=True changes dtypes"
        return kept | self.read(needed, groups, remedy)

    @staticmethod
    def with_leaves(tree: Tree, leaves: Mapping[str, Any]) -> Tree:
        """Return a tree with other leaves, by their names; None stays None."""
        flat = flatten(tree)
        pairs = zip(flat.names, flat.leaves, strict=True)
        return flat.unflatten([None if leaf is None else leaves[name] for name, leaf in pairs])

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
