"""Exchange: leaves to and from other formats by their names, checked on every rank."""

import json
import math
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import nn

from fshard import _compat, comm
from fshard.checkpoint.errors import KINDS, CheckpointError, expect_file, reason
from fshard.checkpoint.files import EXPORTING, make_temporary, move, refuse_taken, remove_leftovers
from fshard.checkpoint.pieces import (
    Split,
    bytes_of,
    described,
    dtype_name,
    empty_like,
    is_tensor,
    layout_of,
    nbytes_of,
    piece_of,
    shape_of,
    split_of,
)
from fshard.checkpoint.safetensors import DTYPES, lay_out, write_tensors
from fshard.errors import Problem, expect, leaf_error, refuse
from fshard.mesh import world
from fshard.shard import Layouts, check_transform, hash_of, unsharded
from fshard.tree import Axis, Flat, Tree, flatten, is_sharded, tensor_of, tree_map, unflatten
from fshard.tree.checks import check_local, describe

Value = TypeVar("Value")

# Small leaves are gathered together, up to this many bytes.
BUCKET_BYTES = 32 << 20
# The remedy where a pickle is refused.
TRUST = "pass trusted=True if you trust whoever wrote it"


class Entry(NamedTuple):
    """A full tensor to read from: dtype and shape, a function that reads a box of it, and a mark that ranks compare."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], torch.Tensor]
    mark: str = ""

    def __str__(self) -> str:
        return f"{dtype_name(self)}{list(self.shape)}"

    @classmethod
    def of(cls, tensor: torch.Tensor, mark: str = "") -> "Entry":
        """An entry that reads from a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.detach().__getitem__, mark)


class Exchange:
    """Moves leaves to or from another format: every rank makes the same calls.

    A tied parameter of a module has several names, of which fshard uses the first.

    Attributes:
        label: The public function, for errors.
        ranks: The ranks that call, as one axis.
        first: The first name of each tensor of the module, by each of its names.
        aliases: All names of each tensor, by the first.
        by_tensor: The first name of each tensor, by its id.
        dtypes: The dtypes that safetensors has, by their names in files.
    """

    dtypes: ClassVar[Mapping[str, torch.dtype]] = MappingProxyType(
        {stored: getattr(torch, name) for name, stored in DTYPES.items()}
    )

    def __init__(self, label: str, module: nn.Module | None = None, ranks: Axis | None = None) -> None:
        """Read the names of a module.

        Args:
            label: The public function, for errors.
            module: The module whose tensors are moved; None leaves every name as it is.
            ranks: Those that call; None for all of this run.
        """
        known = module is None or isinstance(module, nn.Module)
        expect(known, label, "module to be a torch module or None", describe(module))
        self.label, self.ranks, self._known = label, ranks or world(), module is not None
        self.first: dict[str, str] = {}
        self.aliases: dict[str, list[str]] = {}
        self.by_tensor: dict[int, str] = {}
        self._saved = frozenset(module.state_dict()) if module is not None else frozenset()
        for kinds in (module.named_parameters, module.named_buffers) if module is not None else ():
            for name, tensor in kinds(remove_duplicate=False):
                self.first[name] = first = self.by_tensor.setdefault(id(tensor), name)
                self.aliases.setdefault(first, []).append(name)

    @property
    def rank(self) -> int:
        """The place of this rank among them."""
        return comm.rank(self.ranks)

    def saved_as(self, name: str) -> list[str]:
        """The names under which a state dict has a leaf; none for a buffer that is not persistent."""
        if not self._known:
            return [name]
        return [alias for alias in self.aliases.get(name, [name]) if alias in self._saved]

    def grouped(self, found: Mapping[str, Value]) -> dict[str, list[Value]]:
        """Values that were found under any name of a tensor, by the first of its names."""
        out: dict[str, list[Value]] = {}
        for name in sorted(found, key=lambda name: self.first.get(name, name) != name):
            out.setdefault(self.first.get(name, name), []).append(found[name])
        return out

    @contextmanager
    def raise_on_all_ranks(self, place: object = "") -> Iterator[None]:
        """Raise on every rank the first exception that any of them raises inside, where no rank may wait for another.

        Args:
            place: The file or directory that an error is about which names none.
        """
        failure, said = None, (0, "")
        try:
            yield
        except Exception as error:
            failure, text = error, reason(error, place)
            named = isinstance(error, CheckpointError | OSError)
            kind = next((i for i, kind in enumerate(KINDS) if type(error) is kind), 0)
            said = kind, f"{self.label}: {text}" if named else text
        for kind, text in comm.everyone(said, [self.ranks], self.label):
            if text:
                raise KINDS[kind](text) from failure

    def agree(
        self,
        entries: Mapping[str, str],
        what: str = "ranks hold different leaves",
        remedy: str = "make what is not Sharded the same on every rank, and read the same files",
    ) -> None:
        """Refuse on every rank entries that differ between ranks."""
        difference = comm.disagreement(entries, [self.ranks], self.label)
        refuse(f"{self.label}: {what}", [difference] if difference else [], remedy)

    def agree_on_layouts(self, leaves: Mapping[str, Any]) -> None:
        """Refuse on every rank leaves of other dtypes, shapes or layouts on some ranks."""
        self.agree({name: layout_of(leaf) for name, leaf in leaves.items()})

    def check_flags(self, **flags: Any) -> None:
        """Refuse flags that are neither True nor False."""
        for name, flag in flags.items():
            remedy = TRUST if name == "trusted" else "pass one of the two"
            expect(type(flag) is bool, f"{self.label}: {name}", "True or False", f"{flag!r:.40}", remedy)

    def path(self, name: str, path: Any) -> Path:
        """Return the path of a file or a directory, and refuse an argument of another type."""
        # No file has a name with a null character.
        known = isinstance(path, str | PathLike) and str(path) and "\0" not in str(path)
        expect(known, self.label, f"{name} to be a path", f"{path!r:.40}")
        return Path(path)

    def flat(self, tree: Tree, *, traced: bool = False) -> Flat:
        """Take a tree apart.

        Args:
            tree: The tree.
            traced: Whether a call inside of fs.jit and torch.func is right, where tensors have no values.

        Raises:
            ValueError: with each leaf that was donated or does not fit its spec, or each path that several have.
        """
        flat = flatten(tree)
        plain = traced or not (_compat.is_tracing() or _compat.transforms_active())
        expect(plain, self.label, "a call outside of fs.jit and torch.func, on their results", "one inside")
        counts = Counter(flat.paths).items()
        problems = [Problem(path, f"{n} leaves", "one of each path") for path, n in counts if n > 1]
        refuse(f"{self.label}: leaves of one path", problems, "give keys that print differently")
        check_local(self.label, flat)
        return flat

    def layouts(self, flat: Flat, strategy: Any, argument: str = "strategy") -> Layouts:
        """The specs that a strategy gives the leaves of a tree; refuses what is no strategy of this process."""
        check_transform(strategy, self.label, argument)
        return Layouts(self.label, strategy, flat.names, flat.leaves)

    @staticmethod
    def named_leaves(tree: Tree) -> Iterator[tuple[str, Any]]:
        """The leaves of a tree that are not None, with their names joined by dots."""
        flat = flatten(tree)
        return ((name, leaf) for name, leaf in zip(flat.names, flat.leaves, strict=True) if leaf is not None)

    @staticmethod
    def with_leaves(tree: Tree, leaves: Mapping[str, Any]) -> Tree:
        """Return a tree with other leaves, by their names; None stays None."""
        flat = flatten(tree)
        pairs = zip(flat.names, flat.leaves, strict=True)
        return unflatten(flat.treedef, [None if leaf is None else leaves[name] for name, leaf in pairs])

    def leaves(self, tree: Tree) -> dict[str, Any]:
        """The leaves of a tree by name, the same on every rank.

        Raises:
            ValueError: if a leaf is no tensor or unknown to the module, two have one name, or a shard does not match
                its spec.
        """
        parameters = not hasattr(tree, "opt_state")
        expect(parameters, self.label, "parameters", f"a {type(tree).__name__}", "pass state.params")
        self.flat(tree)
        problems: list[Problem] = []
        out: dict[str, Any] = {}
        for name, leaf in self.named_leaves(tree):
            if not is_tensor(leaf) or not isinstance(tensor_of(leaf), torch.Tensor):
                problems.append(Problem(name, describe(leaf), "a tensor"))
                continue
            if name in out:
                problems.append(Problem(name, "two leaves of that name", "one"))
            elif self._known and name not in self.aliases:
                first = self.first.get(name)
                needed = f"it as {first!r}, to which it is tied" if first else "a parameter or a buffer of the module"
                problems.append(Problem(name, "a leaf", needed))
            out[name] = leaf
        self.agree({n: layout_of(leaf) for n, leaf in out.items()} | {p.path: p.got for p in problems})
        refuse(f"{self.label}: leaves do not fit", problems, "pass the parameters and buffers of this module")
        return out

    def replicas(self, leaves: Mapping[str, Any]) -> dict[Split, list[int]]:
        """Find the ranks that hold the same part of a leaf as this one, and refuse different values of one part.

        Each rank hashes the parts that several ranks hold, which takes less time than to copy them.

        Args:
            leaves: Tensors and Sharded leaves by path, the same on every rank.

        Returns:
            The ranks, by the axes that split a leaf.

        Raises:
            ValueError: on every rank, with the path of every leaf that differs.
        """
        hashes: dict[Split, dict[str, str]] = {}
        for path, leaf in leaves.items():
            split = split_of(leaf)
            shared = math.prod(axis.size for axis in split) < self.ranks.size
            hashes.setdefault(split, {}).update({path: hash_of(piece_of(leaf).tensor)} if shared else {})
        places = [[comm.rank(axis) for axis in split] for split in hashes]
        digests = [f"{zlib.crc32(json.dumps(each).encode()):08x}" for each in hashes.values()]
        rows = comm.everyone([places, digests], [self.ranks], self.label)
        # By the place on a split's axes, the digest of the first rank there; every rank sees every difference.
        first: dict[str, str] = {}
        pairs = [(f"{i} {place}", each) for row in rows for i, (place, each) in enumerate(zip(*row, strict=True))]
        if any(first.setdefault(place, each) != each for place, each in pairs):
            self._refuse_differences(list(hashes.values()), [row[0] for row in rows])
        return {split: [r for r, row in enumerate(rows) if row[0][i] == places[i]] for i, split in enumerate(hashes)}

    def _refuse_differences(
        self, hashes: Sequence[Mapping[str, str]], places: Sequence[Sequence[Sequence[int]]]
    ) -> None:
        """Name the leaves whose hashes differ between ranks in the same place."""
        everybody = comm.everyone(hashes, [self.ranks], self.label)
        problems: dict[str, Problem] = {}
        for i, paths in enumerate(hashes):
            first: dict[tuple[int, ...], int] = {}
            for b, place in enumerate(places):
                a = first.setdefault(tuple(place[i]), b)
                for path in paths:
                    if everybody[a][i][path] != everybody[b][i][path]:
                        found = f"other values on rank {b} than on rank {a}"
                        problems.setdefault(path, Problem(path, found, "the same on both"))
        remedy = (
            "make them the same, buffers by fs.sync_buffers; where ranks differ on purpose, store a row for each: "
            "fs.Sharded(local.unsqueeze(0), fs.Spec((ranks, *shape), fs.P(axis, *partition), axes))"
        )
        ordered = [problems[path] for paths in hashes for path in paths if path in problems]
        raise leaf_error(f"{self.label}: ranks hold different values of one leaf", ordered, remedy)

    @staticmethod
    def full(leaves: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Gather full tensors together. Every rank must call this."""
        sharded = [name for name, leaf in leaves.items() if is_sharded(leaf)]
        full = dict(zip(sharded, unsharded([leaves[name] for name in sharded]), strict=True))
        return {name: full.get(name, leaf).detach() for name, leaf in leaves.items()}

    @staticmethod
    def in_groups(leaves: Mapping[str, Any], nbytes: int) -> list[list[str]]:
        """Names of leaves in their order, in groups of at most so many bytes of full tensors, or of one leaf."""
        groups: list[list[str]] = [[]]
        room = nbytes
        for name, leaf in leaves.items():
            if groups[-1] and nbytes_of(leaf) > room:
                groups.append([])
                room = nbytes
            groups[-1].append(name)
            room -= nbytes_of(leaf)
        return groups

    def owned(self, leaves: Mapping[str, Any], rank0_only: bool) -> dict[str, torch.Tensor]:
        """Gather leaves into storage of their own, which no later step writes to and no other tensor shares."""
        out: dict[str, torch.Tensor] = {}
        for group in self.in_groups(leaves, BUCKET_BYTES):
            for name, full in self.full({name: leaves[name] for name in group}).items():
                if rank0_only and self.rank:
                    continue
                storage = full.untyped_storage()
                shared = storage.data_ptr() == tensor_of(leaves[name]).untyped_storage().data_ptr()
                own = not shared and storage.nbytes() == full.nbytes and full.is_contiguous()
                out[name] = full if own else full.clone(memory_format=torch.contiguous_format)
        return out

    def fill(
        self, found: Mapping[str, Entry], like: Tree, cast: bool, optional: Container[str] = (), strict: bool = True
    ) -> Tree:
        """Read this rank's part of every leaf of a tree by its name, or refuse, on every rank, what does not fit.

        Args:
            found: The entries by name.
            like: The tree.
            cast: Whether to convert from one floating dtype to another.
            optional: Leaves that need no entry if they have values.
            strict: Whether every other leaf needs an entry, and every entry a leaf.
        """
        needed, groups = self.leaves(like), self.grouped(found)
        remedy = "pass a tree of the same names; module= knows which are tied or not saved, cast=True changes dtypes"

        def stays(name: str) -> bool:
            # A state dict has no buffers that are not persistent, which stay as they are.
            valued = not tensor_of(needed[name]).is_meta
            return not self.saved_as(name) or (valued and (not strict or name in optional))

        if not strict:
            groups = {name: entries for name, entries in groups.items() if name in needed}
            known = groups or not needed
            expect(known, self.label, "names of leaves among those in the files", "none of them", remedy)
        kept = {name: needed.pop(name) for name in list(needed) if name not in groups and stays(name)}
        made = self.read(needed, groups, remedy, cast)
        return self.with_leaves(like, made | {name: tree_map(torch.clone, leaf) for name, leaf in kept.items()})

    def read(
        self, needed: Mapping[str, Any], found: Mapping[str, Sequence[Entry]], remedy: str, cast: bool = False
    ) -> dict[str, Any]:
        """Read this rank's part of each leaf.

        Args:
            needed: Leaves by name, whose values are not used.
            found: The entries of each name, several for a parameter that is tied.
            remedy: What the caller can do about leaves that do not fit.
            cast: Whether to convert from one floating dtype to another.

        Returns:
            New leaves of the same types and places, by name.

        Raises:
            ValueError: on every rank, with every leaf that was not found, was found otherwise or besides.
            CheckpointError: on every rank, if an entry cannot be read, or the entries of a leaf differ.
        """
        problems = [Problem(name, "nothing", described(leaf)) for name, leaf in needed.items() if name not in found]
        for name, (entry, *_) in found.items():
            leaf = needed.get(name)
            local = None if leaf is None else tensor_of(leaf)
            floating = entry.dtype.is_floating_point and local is not None and local.is_floating_point()
            castable = cast is True and floating
            if local is None or entry.shape != shape_of(leaf) or (entry.dtype != local.dtype and not castable):
                problems.append(Problem(name, str(entry), "nothing" if leaf is None else described(leaf)))
        order = {name: i for i, name in enumerate(dict.fromkeys((*needed, *found)))}
        entries = {f"{name} {i}": f"{entry}{entry.mark}" for name in found for i, entry in enumerate(found[name])}
        self.agree(entries | {name: layout_of(leaf) for name, leaf in needed.items()} | {"(cast)": repr(cast)})
        self.check_flags(cast=cast)
        refuse(f"{self.label}: leaves do not fit", sorted(problems, key=lambda p: order[p[0]]), remedy)
        with self.raise_on_all_ranks():
            return {name: _read_same(name, found[name], leaf) for name, leaf in needed.items()}

    def refuse_untrusted(self, path: object, trusted: bool) -> None:
        """Refuse to read a pickle unless the caller has passed trusted=True."""
        if not trusted:
            remedy = f"{TRUST}, or have it written as safetensors"
            raise CheckpointError(f"{path} is pickled, and reading it can run code of its author; {remedy}")

    @staticmethod
    def read_pickle(path: Path) -> dict[str, Entry]:
        """Read a pickled state dict, by the unpickler that makes tensors and plain containers alone.

        Raises:
            CheckpointError: if it holds anything else or is damaged.
        """
        try:
            try:
                found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:
                # Files of old versions of torch cannot be mapped.
                found = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, UnpicklingError, EOFError, ValueError, KeyError) as error:
            failure = f"found no state dict that torch.save wrote ({type(error).__name__})"
            raise CheckpointError(f"{path}: {failure}") from error
        expect_file(isinstance(found, Mapping), str(path), "a state dict", describe(found))
        remedy = "torch.load it yourself and pass the state dict in it to from_state_dict"
        for name, tensor in found.items():
            got = f"{describe(tensor)} as {name!r}"
            expect_file(isinstance(tensor, torch.Tensor), str(path), "a tensor", got, remedy)
        return {name: Entry.of(tensor) for name, tensor in found.items()}

    @staticmethod
    def write_safetensors(path: Path, tensors: Mapping[str, Any], value: Callable[[str], torch.Tensor]) -> None:
        """Write a file of safetensors, one tensor at a time, and have it on the disk.

        Args:
            path: The file, which is not there yet.
            tensors: Their dtypes and shapes, by name.
            value: Called with each name, in their order but for larger elements first.
        """
        layout = lay_out({name: (dtype_name(each), each.shape) for name, each in tensors.items()}, format="pt")
        with open(path, "xb", buffering=0) as file:
            write_tensors(file, layout.header, map(value, layout.starts))

    @contextmanager
    def new_files(self, given: str | PathLike[str], deciding: Sequence[str]) -> Iterator[Path]:
        """Make a temporary directory, whose files are moved to another one when all ranks have ended well.

        Args:
            given: The directory that gets the files; made where there is none.
            deciding: Files by which a reader knows that the others are complete: moved last, and not there before.

        Yields:
            The temporary directory.

        Raises:
            CheckpointError: on every rank, if a deciding file is there, or a rank could not write.
        """
        first, name = not self.rank, ""
        with self.raise_on_all_ranks(given):
            directory = self.path("directory", given)
            if first:
                directory.mkdir(parents=True, exist_ok=True)
                refuse_taken(directory, deciding)
                remove_leftovers(directory, re.escape(EXPORTING))
                name = make_temporary(directory, EXPORTING).name
        temporary = directory / comm.everyone(name, [self.ranks], self.label)[0]
        try:
            with self.raise_on_all_ranks(directory):
                yield temporary
            with self.raise_on_all_ranks(directory):
                if first:
                    move(temporary, directory, deciding)
        except BaseException:
            if first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise


def _read_same(name: str, entries: Sequence[Entry], like: Any) -> Any:
    """This rank's part of a leaf, whose entries must have the same values."""
    first, *others = entries
    made = _read(first, like)
    data = bytes_of(tensor_of(made)) if others else None
    if any(str(other) != str(first) or bytes_of(tensor_of(_read(other, like))) != data for other in others):
        found = f"expected {name} to have the same values under all its names, got others"
        raise CheckpointError(f"{found}; untie the module's, so that each has its own")
    return made


def _read(entry: Entry, like: Any) -> Any:
    """This rank's part of a full tensor, as a leaf of the same type and place as another."""
    made = empty_like(like)
    piece = piece_of(made)
    if piece.tensor.numel():
        piece.tensor.copy_(entry.read(tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.shape, strict=True))))
    return made
