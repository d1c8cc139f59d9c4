"""What imports and exports share: leaves by name, reads from full tensors, and files that appear at once."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from fshard import comm
from fshard.checkpoint import files
from fshard.checkpoint.alike import alike, check_call
from fshard.checkpoint.check import check_path
from fshard.checkpoint.format import CheckpointError, dtype_name
from fshard.checkpoint.layout import empty_like, local_of, piece_of, shape_of
from fshard.checkpoint.write import bytes_of
from fshard.checks import check_flags, check_local, check_types, kind
from fshard.errors import Problem, leaf_error
from fshard.mesh import world
from fshard.shard import unsharded
from fshard.tree import Tree, flatten, is_sharded, names_of, tree_map, unflatten

Value = TypeVar("Value")

# Small leaves travel together, up to this many bytes.
BUCKET_BYTES = 32 << 20


class Entry(NamedTuple):
    """A full tensor to read from: dtype and shape, what reads a box of it, and what ranks must agree on besides."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], torch.Tensor] | None = None
    mark: str = ""

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Names:
    """What a module calls its tensors: one that is tied has several names, of which fshard uses the first."""

    def __init__(self, module: nn.Module | None) -> None:
        """Read the names of a module, or of none, which leaves every name as it is."""
        check_types("checkpoint", (nn.Module, NoneType), "a torch module or None", module=module)
        self.known = module is not None
        self.aliases: dict[str, list[str]] = {}
        self.first: dict[str, str] = {}
        self.by_tensor: dict[int, str] = {}
        self.saved: frozenset[str] = frozenset(module.state_dict()) if module is not None else frozenset()
        if module is None:
            return
        for name, tensor in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ):
            first = self.by_tensor.setdefault(id(tensor), name)
            self.first[name] = first
            self.aliases.setdefault(first, []).append(name)

    def saved_as(self, name: str) -> list[str]:
        """The names under which a state dict has a leaf; none for a buffer that is not persistent."""
        if not self.known:
            return [name]
        return [alias for alias in self.aliases.get(name, [name]) if alias in self.saved]

    def problem(self, name: str) -> Problem | None:
        """What is wrong with a leaf that the module does not have."""
        if not self.known or name in self.aliases:
            return None
        first = self.first.get(name)
        needed = f"it as {first!r}, to which it is tied" if first else "a parameter or a buffer of the module"
        return Problem(name, "a leaf", needed)

    def grouped(self, found: Mapping[str, Value]) -> dict[str, list[Value]]:
        """What was found under any name of a tensor, by the first of them."""
        out: dict[str, list[Value]] = {}
        for name in sorted(found, key=lambda name: name in self.first and self.first[name] != name):
            out.setdefault(self.first.get(name, name), []).append(found[name])
        return out


def by_name(label: str, tree: Tree, names: Names) -> dict[str, Any]:
    """The leaves of a tree, by their names joined by dots; the same on every rank.

    Raises:
        ValueError: if a leaf is no tensor or unknown to the module, two have one name, or a shard does not match its
            spec.
    """
    if hasattr(tree, "opt_state"):
        raise ValueError(f"{label}: expected parameters, got a {type(tree).__name__}; pass state.params")
    flat = flatten(tree)
    check_call(label, flat)
    check_local(label, flat)
    problems: list[Problem] = []
    out: dict[str, Any] = {}
    for name, leaf in zip(names_of(flat.treedef), flat.leaves, strict=True):
        if leaf is None:
            continue
        if not isinstance(local_of(leaf) if is_sharded(leaf) else leaf, torch.Tensor):
            problems.append(Problem(name, kind(leaf), "a tensor"))
            continue
        if name in out:
            problems.append(Problem(name, "two leaves of that name", "one"))
        elif problem := names.problem(name):
            problems.append(problem)
        out[name] = leaf
    texts = {name: described(leaf) for name, leaf in out.items()}
    agree(label, texts | {problem.path: problem.got for problem in problems})
    if problems:
        raise leaf_error(f"{label}: leaves do not fit", problems, "pass the parameters and buffers of this module")
    return out


def agree(label: str, entries: Mapping[str, str]) -> None:
    """Refuse, on every rank alike, what differs between ranks."""
    difference = comm.disagreement(entries, [world()], label)
    if difference:
        remedy = "make what is not Sharded the same on every rank, and read the same files"
        raise leaf_error(f"{label}: ranks hold different leaves", [difference], remedy)


def described(leaf: Any) -> str:
    """What ranks must agree on before they gather a leaf."""
    partition = f" split by {leaf.spec.partition!r}" if is_sharded(leaf) else ""
    return f"{dtype_name(local_of(leaf))}{list(shape_of(leaf))}{partition}"


def gathered(leaves: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Full tensors by name, one large leaf or one bucket of small ones at a time. Every rank must take all."""
    bucket: list[str] = []
    room = BUCKET_BYTES
    for name, leaf in leaves.items():
        nbytes = local_of(leaf).element_size() * torch.Size(shape_of(leaf)).numel()
        if bucket and nbytes > room:
            yield from _unsharded(bucket, leaves)
            bucket, room = [], BUCKET_BYTES
        bucket.append(name)
        room -= nbytes
    yield from _unsharded(bucket, leaves)


def _unsharded(names: Sequence[str], leaves: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    sharded = [name for name in names if is_sharded(leaves[name])]
    full = dict(zip(sharded, unsharded([leaves[name] for name in sharded]), strict=True))
    yield from ((name, full.get(name, leaves[name]).detach()) for name in names)


def owned(full: torch.Tensor, leaf: Any) -> torch.Tensor:
    """A gathered tensor in storage of its own, which no later step writes to and no other tensor shares."""
    storage = full.untyped_storage()
    shared = storage.data_ptr() == local_of(leaf).untyped_storage().data_ptr()
    if shared or storage.nbytes() != full.nbytes or not full.is_contiguous():
        return full.clone(memory_format=torch.contiguous_format)
    return full


def entry_of(tensor: torch.Tensor, mark: str = "") -> Entry:
    """An entry that reads from a tensor."""
    return Entry(tensor.dtype, tuple(tensor.shape), tensor.detach().__getitem__, mark)


def misfits(needed: Mapping[str, Any], found: Mapping[str, Entry], cast: bool = False) -> list[Problem]:
    """Leaves that were not found, or otherwise, and what was found and has no leaf."""
    problems = []
    for name, leaf in needed.items():
        entry, local = found.get(name), local_of(leaf)
        wanted = f"{dtype_name(local)}{list(shape_of(leaf))}"
        if entry is None:
            problems.append(Problem(name, "nothing", wanted))
            continue
        castable = cast is True and entry.dtype.is_floating_point and local.is_floating_point()
        if entry.shape != shape_of(leaf) or (entry.dtype != local.dtype and not castable):
            problems.append(Problem(name, str(entry), wanted))
    return problems + [Problem(name, str(found[name]), "nothing") for name in found if name not in needed]


def filled(label: str, found: Mapping[str, Entry], like: Tree, names: Names, cast: bool) -> Tree:
    """Read this rank's part of every leaf, or refuse, on every rank alike, what does not fit."""
    needed, groups = by_name(label, like, names), names.grouped(found)
    # A state dict has no buffers that are not persistent, which stay as they are.
    kept = {name: needed.pop(name) for name in list(needed) if not names.saved_as(name) and name not in groups}
    problems = misfits(needed, {name: group[0] for name, group in groups.items()}, cast)
    agree(label, {name: f"{entry}{entry.mark}" for name, entry in found.items()} | {"(cast)": repr(cast)})
    check_flags(label, cast=cast)
    if problems:
        remedy = "pass a tree of the same names; module= knows which are tied or not saved, cast=True changes dtypes"
        raise leaf_error(f"{label}: leaves do not fit", problems, remedy)
    made = {name: tree_map(torch.clone, leaf) for name, leaf in kept.items()}
    with alike(label):
        for name, leaf in needed.items():
            made[name] = read_leaf(groups[name][0], leaf)
            for entry in groups[name][1:]:
                same = str(entry) == str(groups[name][0])
                check_tied(name, made[name], read_leaf(entry, leaf) if same else None)
    flat = flatten(like)
    pairs = zip(names_of(flat.treedef), flat.leaves, strict=True)
    return unflatten(flat.treedef, [None if leaf is None else made[name] for name, leaf in pairs])


def check_tied(name: str, leaf: Any, other: Any) -> None:
    """Refuse a tied parameter that was not tied where it comes from; None is a tensor of another kind."""
    if other is None or bytes_of(local_of(leaf)) != bytes_of(local_of(other)):
        remedy = "untie the module's, so that each has its own"
        raise CheckpointError(f"expected {name} to have the same values under all its names, got others; {remedy}")


def read_leaf(entry: Entry, like: Any) -> Any:
    """This rank's part of a full tensor, as a leaf of the same kind and place as another."""
    made = empty_like(like)
    piece = piece_of(made)
    if entry.read is not None and piece.tensor.numel():
        box = tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.shape, strict=True))
        piece.tensor.copy_(entry.read(box))
    return made


def check_trusted(label: str, trusted: Any) -> None:
    """Refuse, before anything is read, a flag for pickles that is neither True nor False."""
    check_flags(label, "pass trusted=True if you trust whoever wrote it", trusted=trusted)


def refuse_untrusted(what: str, trusted: bool) -> None:
    """Refuse to read a pickle unless the caller has said that it may be read."""
    if not trusted:
        remedy = "pass trusted=True if you trust whoever wrote it, or have it written as safetensors"
        raise CheckpointError(f"{what} is pickled, and reading it can run code of its author; {remedy}")


@contextmanager
def fresh(label: str, given: str | PathLike[str], deciding: Sequence[str]) -> Iterator[Path]:
    """A new directory whose files are moved to another one when all ranks have ended well.

    Args:
        label: Who asks, for errors.
        given: The directory where they are moved; made where there is none.
        deciding: Files by which a reader knows that the others are complete: moved last, and not there before.

    Yields:
        The new directory, inside the other, so that a move is a rename.

    Raises:
        CheckpointError: on every rank alike, if a deciding file is there, or a rank could not write.
    """
    first = not comm.rank(world())
    name, directory = "", Path()
    with alike(label, given):
        directory = check_path(label, "directory", given)
        if first:
            directory.mkdir(parents=True, exist_ok=True)
            _refuse_taken(directory, deciding)
            files.remove_leftovers(directory, files.EXPORTING)
            name = files.make_temporary(directory, files.EXPORTING).name
    temporary = directory / comm.texts(name, world(), label)[0]
    try:
        with alike(label, directory):
            yield temporary
        with alike(label, directory):
            if first:
                _publish(temporary, directory, deciding)
    except BaseException:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _refuse_taken(directory: Path, names: Sequence[str]) -> None:
    """Refuse to write over files that are there."""
    for name in names:
        if os.path.lexists(directory / name):
            remedy = "write to another directory, or remove what is there"
            raise CheckpointError(f"{directory / name}: expected no file of that name, got one; {remedy}")


def _publish(temporary: Path, directory: Path, deciding: Sequence[str]) -> None:
    files.sync(temporary)
    made = sorted((name in deciding, name) for name in os.listdir(temporary) if name != files.MARK)
    names = [name for _, name in made]
    _refuse_taken(directory, names)
    moved = []
    try:
        for name in names:
            os.replace(temporary / name, directory / name)
            moved.append(name)
    except BaseException:
        # Else they would be in the way of the next export.
        for name in moved:
            os.rename(directory / name, temporary / name)
        raise
    shutil.rmtree(temporary)
    files.sync(directory)
