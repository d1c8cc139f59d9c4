"""Plain state dicts of modules; leaves by name, gathered into full tensors or cut out of them."""

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from fshard import comm
from fshard.errors import Problem, expect, refuse
from fshard.interop.pieces import (
    bytes_of,
    described,
    dtype_name,
    empty_like,
    is_tensor,
    layout_of,
    nbytes_of,
    piece_of,
    replicas,
    shape_of,
)
from fshard.interop.ranks import (
    TRUST,
    CheckpointError,
    agree,
    check_call,
    check_path,
    expect_file,
    raise_on_all_ranks,
    refuse_untrusted,
)
from fshard.mesh import world
from fshard.shard import hash_of, unsharded
from fshard.tree import Tree, flatten, is_sharded, names_of, tensor_of, tree_map, unflatten
from fshard.tree.checks import check_flags, check_local, check_types, describe

Value = TypeVar("Value")

# Small leaves are gathered together, up to this many bytes.
BUCKET_BYTES = 32 << 20


def to_state_dict(
    params: Tree, *, module: nn.Module | None = None, rank0_only: bool = False
) -> dict[str, torch.Tensor]:
    """Gather a plain state dict, for `module.load_state_dict` or `torch.save`. Every rank must call this.

    Args:
        params: Any pytree of parameters, Sharded or full; `{**params, **buffers}` has the buffers in it too.
        module: The module whose parameters they are, on any device: a tied parameter then has all its names, and
            buffers that are not persistent are left out, as in `module.state_dict()`.
        rank0_only: Whether the first rank alone gets it; other ranks get an empty dict.

    Returns:
        Full tensors, of storage of their own, by their leaves' names, joined by dots.

    Raises:
        ValueError: on every rank, if a leaf is no tensor, the module has none of that name, or ranks hold
            different leaves.

    >>> import fshard as fs
    >>> params = fs.shard({"w": torch.ones(3)}, fs.zero2(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> to_state_dict(params)
    {'w': tensor([1., 1., 1.])}
    """
    label, names = "checkpoint.to_state_dict", Names(module)
    with raise_on_all_ranks(label):
        check_flags(label, rank0_only=rank0_only)
    leaves = by_name(label, params, names)
    replicas(label, leaves, world())
    # Names of one tensor share it, as they do in a module's own.
    full = owned_tensors(leaves, rank0_only)
    return {alias: tensor for name, tensor in full.items() for alias in names.saved_as(name)}


def from_state_dict(
    state_dict: Mapping[str, Any], like: Tree, *, module: nn.Module | None = None, cast: bool = False
) -> Tree:
    """Cut this rank's part out of each tensor of a plain state dict. Every rank must call this, with the same dict.

    Args:
        state_dict: Full tensors by name, such as `module.state_dict()`.
        like: Parameters as they shall be, perhaps with buffers: leaves say which dtype, shape and layout; their values
            are not used and may be on the meta device.
        module: The module whose parameters they are, on any device: the state dict may then have a tied parameter
            under any of its names, or under several with the same values, and need not have buffers that are not
            persistent, which stay as they are in `like`.
        cast: Whether to convert from one floating dtype to another.

    Returns:
        A tree of the structure, specs, dtypes and devices of `like`, in storage of its own.

    Raises:
        ValueError: on every rank, with every leaf that the state dict lacks, has otherwise or has besides, or
            that differs between ranks, or where names that are tied have different values.

    >>> from_state_dict({"w": torch.ones(3)}, {"w": torch.zeros(3)})
    {'w': tensor([1., 1., 1.])}
    """
    label, names = "checkpoint.from_state_dict", Names(module)
    check_types(label, Mapping, "a mapping from names to tensors", state_dict=state_dict)
    problems = [
        Problem(str(name), describe(value), "a full tensor")
        for name, value in state_dict.items()
        if type(value) not in (torch.Tensor, nn.Parameter)
    ]
    agree(label, {problem.path: problem.got for problem in problems})
    refuse(f"{label}: found no plain state dict", problems, "pass full tensors by name")
    found = {name: entry_of(tensor, f" of hash {hash_of(tensor)}") for name, tensor in state_dict.items()}
    return filled(label, found, like, names, cast)


def load_torch(
    path: str | PathLike[str], like: Tree, *, module: nn.Module | None = None, cast: bool = False, trusted: bool = False
) -> Tree:
    """Read a file that `torch.save` made of a state dict. Every rank must call this.

    Args:
        path: The file, which all ranks read.
        like: As for `from_state_dict`.
        module: As for `from_state_dict`.
        cast: As for `from_state_dict`.
        trusted: The file is a pickle; True says that you trust whoever wrote it. Only tensors are taken from it, but a
            pickle can be made to run code as it is read.

    Returns:
        A tree of the structure, specs, dtypes and devices of `like`.

    Raises:
        ValueError: as `from_state_dict`.
        CheckpointError: on every rank, if the file is not trusted or cannot be read.

    >>> import tempfile, torch, fshard as fs
    >>> like = fs.shard({"w": torch.zeros(2)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     torch.save({"w": torch.tensor([1.0, 2.0])}, f"{directory}/model.pt")
    ...     params = fs.checkpoint.load_torch(f"{directory}/model.pt", like, trusted=True)
    >>> params, params["w"].local
    ({'w': Sharded(float32[2], P(), local [2])}, tensor([1., 2.]))
    """
    label, names = "checkpoint.load_torch", Names(module)
    found: dict[str, Entry] = {}
    with raise_on_all_ranks(label, path):
        check_flags(label, TRUST, trusted=trusted)
        check_path(label, "path", path)
        refuse_untrusted(path, trusted)
        found = {name: entry_of(tensor) for name, tensor in read_pickle(Path(path)).items()}
    return filled(label, found, like, names, cast)


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
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
        raise CheckpointError(f"{path}: found no state dict that torch.save wrote ({type(error).__name__})") from error
    expect_file(isinstance(found, Mapping), str(path), "a state dict", describe(found))
    remedy = "torch.load it yourself and pass the state dict in it to from_state_dict"
    for name, tensor in found.items():
        got = f"{describe(tensor)} as {name!r}"
        expect_file(isinstance(tensor, torch.Tensor), str(path), "a tensor", got, remedy)
    return dict(found)


class Names:
    """The names of a module's tensors: a tied one has several, of which fshard uses the first."""

    def __init__(self, module: nn.Module | None) -> None:
        """Read the names of a module, or of none, which leaves every name as it is."""
        check_types("checkpoint", (nn.Module, NoneType), "a torch module or None", module=module)
        self.known = module is not None
        self.first: dict[str, str] = {}
        self.aliases: dict[str, list[str]] = {}
        self.by_tensor: dict[int, str] = {}
        self.saved = frozenset(module.state_dict()) if module is not None else frozenset()
        for kinds in (module.named_parameters, module.named_buffers) if module is not None else ():
            for name, tensor in kinds(remove_duplicate=False):
                self.first[name] = first = self.by_tensor.setdefault(id(tensor), name)
                self.aliases.setdefault(first, []).append(name)

    def saved_as(self, name: str) -> list[str]:
        """The names under which a state dict has a leaf; none for a buffer that is not persistent."""
        if not self.known:
            return [name]
        return [alias for alias in self.aliases.get(name, [name]) if alias in self.saved]

    def problem(self, name: str) -> Problem | None:
        """The problem with a leaf that the module does not have."""
        if not self.known or name in self.aliases:
            return None
        first = self.first.get(name)
        needed = f"it as {first!r}, to which it is tied" if first else "a parameter or a buffer of the module"
        return Problem(name, "a leaf", needed)

    def grouped(self, found: Mapping[str, Value]) -> dict[str, list[Value]]:
        """Values that were found under any name of a tensor, by the first of its names."""
        out: dict[str, list[Value]] = {}
        for name in sorted(found, key=lambda name: self.first.get(name, name) != name):
            out.setdefault(self.first.get(name, name), []).append(found[name])
        return out


def named_leaves(tree: Tree) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree that are not None, with their names joined by dots."""
    flat = flatten(tree)
    return ((n, leaf) for n, leaf in zip(names_of(flat.treedef), flat.leaves, strict=True) if leaf is not None)


def with_leaves(tree: Tree, leaves: Mapping[str, Any]) -> Tree:
    """Return a tree with other leaves, by their names; None stays None."""
    flat = flatten(tree)
    pairs = zip(names_of(flat.treedef), flat.leaves, strict=True)
    return unflatten(flat.treedef, [None if leaf is None else leaves[name] for name, leaf in pairs])


def by_name(label: str, tree: Tree, names: Names) -> dict[str, Any]:
    """The leaves of a tree by name, the same on every rank.

    Raises:
        ValueError: if a leaf is no tensor or unknown to the module, two have one name, or a shard does not match its
            spec.
    """
    parameters = not hasattr(tree, "opt_state")
    expect(parameters, label, "parameters", f"a {type(tree).__name__}", "pass state.params")
    flat = flatten(tree)
    check_call(label, flat)
    check_local(label, flat)
    problems: list[Problem] = []
    out: dict[str, Any] = {}
    for name, leaf in named_leaves(tree):
        if not is_tensor(leaf) or not isinstance(tensor_of(leaf), torch.Tensor):
            problems.append(Problem(name, describe(leaf), "a tensor"))
            continue
        if name in out:
            problems.append(Problem(name, "two leaves of that name", "one"))
        elif problem := names.problem(name):
            problems.append(problem)
        out[name] = leaf
    agree(label, {n: layout_of(leaf) for n, leaf in out.items()} | {p.path: p.got for p in problems})
    refuse(f"{label}: leaves do not fit", problems, "pass the parameters and buffers of this module")
    return out


def gathered(leaves: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Full tensors by name, one large leaf or one bucket of small ones at a time. Every rank must take all."""
    for bucket in in_groups(leaves, BUCKET_BYTES):
        yield from _gathered_together({name: leaves[name] for name in bucket}).items()


def gathered_for(
    sources: Mapping[str, Collection[str]], leaves: Mapping[str, Any], full: dict[str, torch.Tensor]
) -> Iterator[str]:
    """Name one result after the other, when the leaves that it is made of are full. Every rank must take all.

    Args:
        sources: The names of the leaves of each result.
        leaves: The leaves by name.
        full: Where full leaves are put, those of one result or of several with small leaves at a time.
    """
    buckets: list[tuple[list[str], dict[str, Any]]] = [([], {})]
    room = BUCKET_BYTES
    for result, names in sources.items():
        new = {name: leaves[name] for name in sorted(names) if name not in buckets[-1][1]}
        nbytes = sum(map(nbytes_of, new.values()))
        if new and buckets[-1][0] and nbytes > room:
            buckets.append(([], {}))
            room, new = BUCKET_BYTES, {name: leaves[name] for name in sorted(names)}
            nbytes = sum(map(nbytes_of, new.values()))
        buckets[-1][0].append(result)
        buckets[-1][1].update(new)
        room -= nbytes
    for results, needed in buckets:
        full.update(_gathered_together(needed))
        yield from results
        full.clear()


def _gathered_together(leaves: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    sharded = [name for name, leaf in leaves.items() if is_sharded(leaf)]
    full = dict(zip(sharded, unsharded([leaves[name] for name in sharded]), strict=True))
    return {name: full.get(name, leaf).detach() for name, leaf in leaves.items()}


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


def owned_tensors(leaves: Mapping[str, Any], rank0_only: bool) -> dict[str, torch.Tensor]:
    """Gather leaves into storage of their own, which no later step writes to and no other tensor shares."""
    out = {}
    for name, full in gathered(leaves):
        if rank0_only and comm.rank(world()):
            continue
        storage = full.untyped_storage()
        shared = storage.data_ptr() == tensor_of(leaves[name]).untyped_storage().data_ptr()
        own = not shared and storage.nbytes() == full.nbytes and full.is_contiguous()
        out[name] = full if own else full.clone(memory_format=torch.contiguous_format)
    return out


class Entry(NamedTuple):
    """A full tensor to read from: dtype and shape, a function that reads a box of it, and a mark that ranks compare."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], torch.Tensor]
    mark: str = ""

    def __str__(self) -> str:
        return f"{dtype_name(self)}{list(self.shape)}"


def entry_of(tensor: torch.Tensor, mark: str = "") -> Entry:
    """An entry that reads from a tensor."""
    return Entry(tensor.dtype, tuple(tensor.shape), tensor.detach().__getitem__, mark)


def filled(
    label: str,
    found: Mapping[str, Entry],
    like: Tree,
    names: Names,
    cast: bool,
    optional: Container[str] = (),
    strict: bool = True,
) -> Tree:
    """Read this rank's part of every leaf of a tree by its name, or refuse, on every rank, entries that do not fit.

    Args:
        label: The public function, for errors.
        found: The entries by name.
        like: The tree.
        names: The names of its module.
        cast: Whether to convert from one floating dtype to another.
        optional: Leaves that need no entry if they have values.
        strict: Whether every other leaf needs an entry, and every entry a leaf.
    """
    needed, groups = by_name(label, like, names), names.grouped(found)
    remedy = "pass a tree of the same names; module= knows which are tied or not saved, cast=True changes dtypes"

    def stays(name: str) -> bool:
        # A state dict has no buffers that are not persistent, which stay as they are.
        valued = not tensor_of(needed[name]).is_meta
        return not names.saved_as(name) or (valued and (not strict or name in optional))

    if not strict:
        groups = {name: entries for name, entries in groups.items() if name in needed}
        expect(groups or not needed, label, "names of leaves among those in the files", "none of them", remedy)
    kept = {name: needed.pop(name) for name in list(needed) if name not in groups and stays(name)}
    made = read_leaves(label, needed, groups, remedy, cast)
    return with_leaves(like, made | {name: tree_map(torch.clone, leaf) for name, leaf in kept.items()})


def read_leaves(
    label: str, needed: Mapping[str, Any], found: Mapping[str, Sequence[Entry]], remedy: str, cast: bool = False
) -> dict[str, Any]:
    """Read this rank's part of each leaf.

    Args:
        label: The public function, for errors.
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
        castable = cast is True and entry.dtype.is_floating_point and local is not None and local.is_floating_point()
        if local is None or entry.shape != shape_of(leaf) or (entry.dtype != local.dtype and not castable):
            problems.append(Problem(name, str(entry), "nothing" if leaf is None else described(leaf)))
    order = {name: i for i, name in enumerate(dict.fromkeys((*needed, *found)))}
    entries = {f"{name} {i}": f"{entry}{entry.mark}" for name in found for i, entry in enumerate(found[name])}
    agree(label, entries | {name: layout_of(leaf) for name, leaf in needed.items()} | {"(cast)": repr(cast)})
    check_flags(label, cast=cast)
    refuse(f"{label}: leaves do not fit", sorted(problems, key=lambda p: order[p[0]]), remedy)
    made = {}
    with raise_on_all_ranks(label):
        for name, leaf in needed.items():
            first, *others = found[name]
            made[name] = _read(first, leaf)
            data = bytes_of(tensor_of(made[name])) if others else None
            if any(str(other) != str(first) or bytes_of(tensor_of(_read(other, leaf))) != data for other in others):
                remedy = "untie the module's, so that each has its own"
                found_others = f"expected {name} to have the same values under all its names, got others"
                raise CheckpointError(f"{found_others}; {remedy}")
    return made


def _read(entry: Entry, like: Any) -> Any:
    """This rank's part of a full tensor, as a leaf of the same type and place as another."""
    made = empty_like(like)
    piece = piece_of(made)
    if piece.tensor.numel():
        piece.tensor.copy_(entry.read(tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.shape, strict=True))))
    return made
