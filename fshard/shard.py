"""Storage: shard full tensors, unshard them again, reshard from one layout to another."""

import ctypes
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad

from fshard import _compat, comm
from fshard.errors import Problem, expect, leaf_error, refuse
from fshard.transforms import LayoutError, ShardTransform
from fshard.transforms.compose import at, layout_axes, masks
from fshard.tree import Axis, Flat, Sharded, Spec, Tree, flatten, is_sharded, unflatten
from fshard.tree.checks import (
    check_local,
    check_matches,
    describe,
    is_reachable,
    outline,
    refuse_donated,
)
from fshard.tree.masks import MASK, Mask, TreeMask, as_mask, is_mask, matches, reads_leaves

SAME_TREE = (
    "build the same tree on every rank, from one seed; simulated ranks share a generator, so build it before they start"
)


def shard(full_tree: Tree, transform: ShardTransform, *, frozen: Mask | Tree | None = None) -> Tree:
    """Keep this rank's piece of every tensor, after checking that all ranks hold the same tree and values.

    Args:
        full_tree: Pytree of full tensors, the same on every rank; None leaves stay None.
            Fake tensors, of torch's FakeTensorMode, give leaves without values, to plan with.
        transform: A strategy or any other ShardTransform.
        frozen: Which leaves take no gradient, as `masked` takes a mask; but a function of one argument gets a leaf's
            path, such as "['w']". Parameters that do not require a gradient are frozen too.

    Returns:
        The tree with Sharded leaves that own their storage.

    Raises:
        ValueError: on every rank, if ranks hold different trees, shapes, dtypes or values, a leaf is not a
            tensor, or a shape does not fit the transform.

    >>> import fshard as fs
    >>> fs.shard({"w": torch.ones(4, 512)}, fs.zero2(fs.init_mesh({"shard": -1}, device="cpu")))
    {'w': Sharded(float32[4, 512], P('shard'), local [4, 512])}
    """
    check_transform(transform, "shard")
    flat = flatten(full_tree)
    layouts = Layouts("shard", transform, flat.names, flat.leaves)
    chosen = [False] * len(flat.names) if frozen is None else _chosen("shard", frozen, flat, flat.names)
    out: list[Any] = []
    entries: dict[str, str] = {}
    for path, name, leaf, is_chosen in zip(flat.paths, flat.names, flat.leaves, chosen, strict=True):
        misfit = unfit(leaf)
        if leaf is None or misfit:
            layouts.problems += [Problem(path, *misfit)] if misfit else []
            out.append(None)
            entries[path] = misfit[0] if misfit else "None"
            continue
        spec = Spec(tuple(leaf.shape), frozen=is_chosen or is_frozen(leaf))
        spec = layouts.of(path, name, leaf, spec)
        out.append((leaf.detach(), spec))
        entries[path] = fingerprint(leaf, spec)
    entries["(structure)"] = outline(flat.treedef)
    # Ranks compare before any of them refuses its tree: a tree may be wrong on one rank alone.
    difference = comm.disagreement(entries, layout_axes(transform), "shard")
    if difference:
        raise leaf_error("shard: ranks hold different trees", [difference], SAME_TREE)
    refuse_donated("shard", flat)
    refuse("shard: leaves cannot be sharded", layouts.problems, "pass full tensors whose shapes fit the strategy")
    return unflatten(flat.treedef, [leaf and Sharded(stored(local_piece(*leaf), leaf[1]), leaf[1]) for leaf in out])


def unshard(tree: Tree) -> Tree:
    """Put full tensors together again: the exact inverse of `shard`, for export and comparison.

    Args:
        tree: Pytree with Sharded leaves; other leaves stay as they are.

    Returns:
        The tree with full tensors, bitwise what was sharded. A leaf that this rank holds whole is returned without a
        copy.

    Raises:
        ValueError: if a leaf's shape does not match its spec.

    >>> import torch, fshard as fs
    >>> def program():
    ...     params = fs.shard({"w": torch.arange(3.0)}, fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu")))
    ...     return params["w"], fs.unshard(params)["w"]
    >>> fs.testing.spmd(program, world=2)[0]
    (Sharded(float32[3], P('shard'), local [2]), tensor([0., 1., 2.]))
    """
    flat = flatten(tree)
    check_local("unshard", flat)
    if any(_compat.is_batched(leaf.local) for leaf in flat.leaves if is_sharded(leaf)):
        raise ValueError("unshard: expected one tree, got a batch of them, by vmap; call fs.gather there")
    sharded = [i for i, leaf in enumerate(flat.leaves) if is_sharded(leaf)]
    comm.same_call("unshard", _split_over(flat), flat)
    leaves = list(flat.leaves)
    for i, tensor in zip(sharded, unsharded([leaves[i] for i in sharded]), strict=True):
        leaves[i] = tensor
    return unflatten(flat.treedef, leaves)


def reshard(tree: Tree, transform: ShardTransform, *, frozen: Mask | Tree | None = None) -> Tree:
    """Move Sharded leaves to another layout, strategy or mesh of the same ranks, bitwise; one leaf is full at a time.

    Works on parameters, optimizer state, or a whole TrainState.

    Args:
        tree: Pytree with Sharded leaves; other leaves stay as they are.
        transform: The strategy that the result is sharded with.
        frozen: Which leaves take no gradient from now on, as for `shard`, such as in a fine-tuning by stages. In a
            TrainState a leaf keeps its optimizer state while it is frozen, and one that had none starts it anew with
            its first gradient, as under torch.optim. None keeps what is frozen, and () freezes nothing.

    Returns:
        The tree with the same values in the new layout, in storage of its own.

    Raises:
        ValueError: if a leaf's shape does not match its spec or does not fit the transform, a leaf has no transform,
            as the state of one has not, or `frozen` matches names where it is asked for paths.

    >>> import torch, fshard as fs
    >>> def program():
    ...     mesh = fs.init_mesh({"shard": -1}, device="cpu")
    ...     rows = fs.shard({"w": torch.arange(4).reshape(2, 2)}, fs.fully_shard(mesh))
    ...     columns = fs.reshard(rows, fs.fully_shard(mesh, dim=1))
    ...     return rows["w"].local.tolist(), columns["w"].local.tolist()
    >>> fs.testing.spmd(program, world=2)
    [([[0, 1]], [[0], [2]]), ([[2, 3]], [[1], [3]])]
    """
    check_transform(transform, "reshard")
    flat = flatten(tree)
    check_local("reshard", flat)
    names = _names_of_parameters(tree, flat)
    layouts = Layouts("reshard", transform, names, flat.leaves)
    chosen: dict[str, bool] = {}
    if frozen is not None:
        params = flatten(getattr(tree, "params", tree))
        chosen = dict(zip(params.names, _chosen("reshard", frozen, params, params.names), strict=True))
    out: list[Any] = []
    specs: dict[str, Spec] = {}
    for path, name, leaf in zip(flat.paths, names, flat.leaves, strict=True):
        spec = None
        if is_sharded(leaf):
            if leaf.spec.transform is None:
                own = "state of a transform, this rank's own"
                layouts.problems.append(Problem(path, own, "leaves that have a transform"))
            dims = _reduced(leaf.spec, specs.get(name))
            if dims:
                spec = specs[name].reduced(dims)
            else:
                whole = Spec(leaf.spec.shape, frozen=chosen.get(name, leaf.spec.frozen))
                spec = layouts.of(path, name, leaf, whole)
            # A TrainState has its parameters first, and then what the optimizer keeps for each.
            specs.setdefault(name, spec)
        out.append((leaf, spec))
    if any(is_sharded(leaf) and leaf.spec.transform is None for leaf in flat.leaves):
        remedy = "reshard without it, and make it anew by fs.transform_state"
        raise leaf_error("reshard: leaves belong to their ranks", layouts.problems, remedy)
    refuse("reshard: leaves do not fit", layouts.problems, "choose a strategy that fits their shapes")
    comm.same_call("reshard", _split_over(flat), flat, transform=transform)
    leaves = [leaf if spec is None else Sharded(stored(_move(leaf, spec), spec), spec) for leaf, spec in out]
    return unflatten(flat.treedef, leaves)


def local_piece(full: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Cut this rank's shard out of a full tensor, padded with zeros, in storage of its own."""
    piece = full.reshape(spec.full_shape)
    for dim, (start, size) in enumerate(local_ranges(spec)):
        piece = piece.narrow(dim, start, size)
    filled = padded(piece, spec)
    return piece.clone(memory_format=torch.contiguous_format) if filled is piece else filled


def padded(piece: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Fill this rank's elements up to the shape of a shard, with zeros; the same tensor where none are missing."""
    missing = [n - k for n, k in zip(spec.local_shape, piece.shape, strict=True)]
    return pad(piece, [n for size in reversed(missing) for n in (0, size)]) if any(missing) else piece


def local_ranges(spec: Spec) -> list[tuple[int, int]]:
    """Where this rank's elements of the full tensor start along each dim, and how many there are."""
    ranges = []
    for dim, left in enumerate(spec.full_shape):
        start, nominal = 0, left
        for axis in spec.split_axes(dim):
            nominal = -(-nominal // axis.size)
            skipped = min(comm.rank(axis) * nominal, left)
            start, left = start + skipped, min(nominal, left - skipped)
        ranges.append((start, left))
    return ranges


def without_padding(leaf: Sharded) -> torch.Tensor:
    """This rank's elements of a leaf without the padding at its ends: a view of leaf.local, perhaps empty."""
    local = leaf.local
    for dim, (_, size) in enumerate(local_ranges(leaf.spec)):
        local = local.narrow(dim, 0, size)
    return local


def _split_over(flat: Flat) -> tuple[Axis, ...]:
    """The axes that leaves are put together over."""
    return tuple(dict.fromkeys(axis for spec in flat.specs for axis in spec.partition_axes()))


def unsharded(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Full tensors of Sharded leaves, as `unshard` makes them, for callers whose ranks have agreed to it."""
    out, specs = [leaf.local for leaf in leaves], [leaf.spec for leaf in leaves]
    # Minor axes first within a dim; leaves whose next axis is the same travel together.
    plans = [
        [(axis, dim) for dim in range(len(spec.partition)) for axis in reversed(spec.split_axes(dim))] for spec in specs
    ]
    while any(plans):
        axis = next(plan[0][0] for plan in plans if plan)
        together = [i for i, plan in enumerate(plans) if plan and plan[0][0] == axis]
        stacks = comm.all_gather([out[i] for i in together], axis, "unshard")
        for i, rows in zip(together, stacks, strict=True):
            _, dim = plans[i].pop(0)
            out[i] = rows.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, specs[i].shared_out(dim, axis))
    for i, spec in enumerate(specs):
        out[i] = out[i].reshape(spec.shape)
    return out


def stored(piece: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Bring a new shard to the device that its transform keeps it on."""
    transform: Any = spec.transform
    storage = transform and transform.storage
    if storage is None:
        return piece
    kept = piece.to(storage.device)
    # Only from pinned memory does a copy run beside what computes.
    return kept.pin_memory() if kept.device.type == "cpu" != storage.compute_device.type else kept


def _names_of_parameters(tree: Tree, flat: Flat) -> tuple[str, ...]:
    """The leaves' names; in a TrainState those of the parameters that they belong to."""
    if not hasattr(tree, "params"):
        return flat.names
    known = sorted(flatten(tree.params).names, key=len, reverse=True)
    return tuple(next((own for own in known if f".{name}".endswith(f".{own}")), name) for name in flat.names)


def _reduced(spec: Spec, own: Spec | None) -> list[int]:
    """The dims that the optimizer has taken a mean of a parameter over: none of state that has its shape."""
    if own is None or len(spec.shape) != len(own.shape):
        return []
    pairs = list(zip(spec.shape, own.shape, strict=True))
    return [dim for dim, (n, k) in enumerate(pairs) if n != k] if all(n in (1, k) for n, k in pairs) else []


def _move(leaf: Sharded, spec: Spec) -> torch.Tensor:
    if (leaf.spec.partition, leaf.spec.partition_axes()) == (spec.partition, spec.partition_axes()):
        return leaf.local.clone()
    (full,) = unsharded([leaf])
    return local_piece(full, spec)


class Layouts:
    """The specs that a transform gives the leaves of a tree, by whose names it may choose.

    Attributes:
        problems: The leaves that it cannot lay out.
    """

    def __init__(self, what: str, transform: ShardTransform, names: Sequence[str], leaves: Sequence[Any]) -> None:
        """Refuse masks that match none of the leaves.

        Args:
            what: The verb that asks, for an error.
            transform: The transform.
            names: The names of all leaves.
            leaves: The leaves.
        """
        check_matches(what, masks(transform), names, leaves)
        self.problems: list[Problem] = []
        self._transform = transform
        # Leaves of equal specs share one object, which is found sooner than an equal one.
        self._known: dict[tuple[int, Spec], Spec] = {}

    def of(self, path: str, name: str, leaf: Any, spec: Spec) -> Spec:
        """Find the spec of a leaf.

        Args:
            path: The leaf's path.
            name: Its name.
            leaf: The leaf.
            spec: The leaf as a whole.

        Returns:
            The spec; the one given where there was a problem.
        """
        transform = at(self._transform, name, leaf)
        key = id(transform), spec
        try:
            if key not in self._known:
                self._known[key] = replace(transform.layout(spec), transform=transform)
        except LayoutError as error:
            self.problems.append(Problem(path, error.got, error.expected))
            return spec
        return self._known[key]


def is_frozen(leaf: torch.Tensor) -> bool:
    """Whether a leaf is a parameter that takes no gradient."""
    return isinstance(leaf, torch.nn.Parameter) and not leaf.requires_grad


def _chosen(what: str, frozen: Mask | Tree, flat: Flat, names: Sequence[str]) -> list[bool]:
    """Tell which leaves are to be frozen."""
    if isinstance(frozen, tuple | list) and not frozen:
        return [False] * len(names)
    mask = as_mask(frozen)
    expect(is_mask(mask), what, f"frozen to be {MASK}", describe(frozen))
    is_function = callable(mask) and not isinstance(mask, TreeMask)
    if not is_function:
        check_matches(what, [mask], names, flat.leaves)
    if not is_function or reads_leaves(mask):
        return [matches(mask, name, leaf) for name, leaf in zip(names, flat.leaves, strict=True)]
    chosen = [bool(mask(path)) for path in flat.paths]
    if not any(chosen) and any(map(mask, names)):
        path, name = next(pair for pair in zip(flat.paths, names, strict=True) if mask(pair[1]))
        remedy = f'test for paths such as "{path}", or pass a glob pattern or a function of (name, leaf)'
        expect(False, what, "frozen to match some paths", f"a function that matches names such as {name!r}", remedy)
    return chosen


def unfit(leaf: Any) -> tuple[str, str] | None:
    """Describe a leaf that cannot be cut, and the leaf expected."""
    if is_sharded(leaf):
        return "a Sharded leaf", "a full tensor; reshard changes layouts"
    if leaf is not None and type(leaf) not in (torch.Tensor, torch.nn.Parameter) and not _compat.is_fake(leaf):
        return describe(leaf), "a tensor" + (
            "; from_dtensor takes DTensors over" if isinstance(leaf, torch.Tensor) else ""
        )
    if leaf is not None and _compat.is_transformed(leaf):
        return "a tensor of a torch.func transform", "one outside of it; shard constants before"
    if leaf is not None and (leaf.is_meta or leaf.layout != torch.strided):
        layout = str(leaf.layout).removeprefix("torch.")
        return f"a {layout} tensor on device {leaf.device}", "a strided tensor with values"
    return None


def fingerprint(leaf: torch.Tensor, spec: Spec, origin: str | None = None) -> str:
    """Write the facts that ranks compare: a leaf's dtype, shape, layout, and a hash or the origin of its values."""
    dtype = str(leaf.dtype).removeprefix("torch.")
    source = origin or ("without values" if _compat.is_fake(leaf) else f"of hash {hash_of(leaf)}")
    return f"{'frozen ' if spec.frozen else ''}{dtype}{list(leaf.shape)} {source} split by {spec.partition!r}"


def hash_of(tensor: torch.Tensor) -> str:
    """A checksum of a tensor's values, several times as fast as a hash that nobody could forge."""
    dense = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    # A single element counts as contiguous whatever its stride, which a view as bytes does not allow.
    flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    # Not by numpy, which would keep the memory from ever being freed before the tensor is.
    values = (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())
    return f"{zlib.crc32(values):08x}"


def check_transform(transform: Any, verb: str, argument: str = "transform") -> None:
    """Refuse what is no transform, or one of another mesh than this process is on."""
    needed = f"{argument} to be a ShardTransform such as fs.zero2(mesh)"
    expect(isinstance(transform, ShardTransform), verb, needed, describe(transform))
    needed = "a strategy over axes whose groups have their size and this process in them"
    for axis in layout_axes(transform):
        found = f"axis {axis.name!r} of {axis.size} ranks in group {axis.group_name!r}"
        expect(is_reachable(axis), verb, needed, found, "make it of this process's mesh")
