"""Storage: shard full tensors, unshard them again, reshard from one layout to another."""

import functools
import zlib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from fshard import _compat, comm
from fshard.comm.ops import view_as_bytes
from fshard.errors import Problem, expect, refuse
from fshard.transforms import LayoutError, ShardTransform
from fshard.transforms.axis import _FullyShard
from fshard.transforms.base import expect_transform, lay_out
from fshard.transforms.compose import masks, resolve_masks
from fshard.transforms.structure import layout_axes
from fshard.tree import Axis, Flat, Sharded, Spec, Tree, flatten, grouped, is_sharded, map_leaves, storage_device
from fshard.tree.checks import (
    check_local,
    check_matches,
    describe,
    describe_axis,
    describe_node_types,
    is_reachable,
    refuse_donated,
    tree_remedy,
)
from fshard.tree.masks import MASK, Mask, is_mask, matches

# The remedy of an unshard in a loss.
LOOK = "use fs.gather in a loss, and fs.gather(...) and detach() for a constant. To look at values use torch.no_grad()"
FULL_TENSORS = "pass full tensors whose shapes fit the strategy"
SAME_TREE = "build the same tree on every rank from the same seed"


def shard(full_tree: Tree, transform: ShardTransform, *, frozen: Mask | None = None) -> Tree:
    """Keep this rank's piece of every tensor, after checking that all ranks hold the same tree and values.

    Pieces are on the mesh's device, wherever the full tensors are, or where the transform keeps them (`offload`).

    Args:
        full_tree: Pytree of full tensors, the same on every rank; None leaves stay None.
            Fake tensors, of torch's FakeTensorMode, give leaves without values, to plan with.
        transform: A strategy or any other ShardTransform.
        frozen: Which leaves take no gradient: a glob pattern of their names, such as "blocks.*.weight", several, or a
            function of (name, leaf), as `masked` takes it. Parameters that do not require a gradient are frozen too.

    Returns:
        The tree with Sharded leaves that own their storage.

    Raises:
        ValueError: on every rank, if ranks hold different trees, shapes, dtypes or values, a leaf is not a
            tensor, or a shape does not fit the transform; if a leaf is on an accelerator, and the mesh is not.

    >>> import fshard as fs
    >>> fs.shard({"w": torch.ones(4, 512)}, fs.zero2(fs.init_mesh({"shard": -1}, device="cpu")))
    {'w': Sharded(float32[4, 512], P('shard'), local [4, 512])}
    """
    check_transform(transform, "shard")
    flat = flatten(full_tree)
    refuse_donated("shard", flat)
    layouts = Layouts("shard", transform, flat.names, flat.leaves)
    chosen = _choose_frozen("shard", frozen, flat)
    remedy = tree_remedy(flat.leaves, FULL_TENSORS)
    stays_on_cpu = transform.storage is None and mesh_device(transform) == "cpu"
    # What ranks compare, by the leaves' paths.
    entries = {"(structure)": describe_node_types(flat.treedef)}
    specs: list[Spec | None] = []
    for path, name, leaf, is_chosen in zip(flat.paths, flat.names, flat.leaves, chosen, strict=True):
        if leaf is None:
            entries[path] = "None"
            specs.append(None)
            continue
        misfit = unfit(leaf)
        if misfit is None and stays_on_cpu and leaf.device.type != "cpu":
            misfit = f"one on {leaf.device}", "a tensor on the CPU, as the mesh is"
            remedy = (
                f'make the mesh with fs.init_mesh(shape, device="{leaf.device.type}"), or move the tensors to the CPU'
            )
        spec = None
        if misfit is not None:
            layouts.problems.append(Problem(path, *misfit))
            entries[path] = misfit[0]
        else:
            whole = Spec(tuple(leaf.shape), frozen=is_chosen or is_frozen(leaf))
            spec = layouts.of(path, name, leaf, whole)
            entries[path] = fingerprint(leaf, spec)
        specs.append(spec)
    layouts.check(entries, remedy)
    shards: list[Sharded | None] = []
    for leaf, spec in zip(flat.leaves, specs, strict=True):
        if spec is None:
            shards.append(None)
        else:
            shards.append(stored(local_piece(leaf.detach(), spec), spec))
    return flat.unflatten(shards)


def unshard(tree: Tree) -> Tree:
    """Put full tensors together again: the exact inverse of `shard`, for export and comparison.

    Args:
        tree: Pytree with Sharded leaves; other leaves stay as they are.

    Returns:
        The tree with full tensors, bitwise what was sharded. A leaf that this rank holds whole is returned without a
        copy.

    Raises:
        ValueError: if a leaf's shape does not match its spec, or a leaf is differentiated, as inside of a loss.

    >>> import torch, fshard as fs
    >>> def program():
    ...     params = fs.shard({"w": torch.arange(3.0)}, fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu")))
    ...     return params["w"], fs.unshard(params)["w"]
    >>> fs.testing.spmd(program, world=2)[0]
    (Sharded(float32[3], P('shard'), local [2]), tensor([0., 1., 2.]))
    """
    flat = flatten(tree)
    check_local("unshard", flat)
    _refuse_derivatives("unshard", flat, LOOK)
    comm.check_same_call("unshard", _split_over(flat), flat)
    full = iter(unsharded(flat.sharded))
    return map_leaves(lambda leaf: next(full) if is_sharded(leaf) else leaf, tree)


def _refuse_derivatives(api_name: str, flat: Flat, remedy: str) -> None:
    """Refuse leaves whose gradient or tangent would be lost, or that vmap maps over: nothing here has a rule for it."""

    def misfit(leaf: Any) -> str | None:
        if not is_sharded(leaf):
            return None
        levels = _compat.levels(leaf.local)
        if any(map(_compat.is_mapped, levels)):
            return "is mapped by torch.vmap here"
        if _compat.is_differentiated(leaf.local) or _compat.any_dual([leaf.local]):
            return "is differentiated here"
        return None

    refuse(f"{api_name}: the result takes no gradient and no vmap", flat.problems(misfit), remedy)


def reshard(tree: Tree, transform: ShardTransform, *, frozen: Mask | None = None) -> Tree:
    """Move Sharded leaves to another layout, strategy or mesh of the same ranks, bitwise; one leaf is full at a time.

    Works on parameters, optimizer state, or a whole TrainState, in which what the optimizer keeps for a parameter is
    laid out as that parameter is. By itself, optimizer state is laid out by its own names and shapes: pass the
    TrainState if a mask or `min_shard_elements` decides, or the optimizer keeps means, as `adafactor` does.

    Args:
        tree: Pytree with Sharded leaves; other leaves stay as they are.
        transform: The strategy that the result is sharded with.
        frozen: Which leaves take no gradient from now on, as for `shard`, such as in a fine-tuning by stages. In a
            TrainState a leaf keeps its optimizer state while it is frozen, and one that had none starts it anew with
            its first gradient, as under torch.optim. None keeps what is frozen, and () freezes nothing.

    Returns:
        The tree with the same values in the new layout, in storage of its own.

    Raises:
        ValueError: if a leaf's shape does not match its spec or does not fit the transform, or a leaf has no transform,
            as the state of one has not; or if a leaf is differentiated, as inside of a loss.

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
    params = flatten(getattr(tree, "params", tree))
    check_local("reshard", flat)
    _refuse_derivatives("reshard", flat, "reshard outside of the loss and of vmap, or under torch.no_grad()")
    names = _name_by_parameter(flat.names, set(params.names))
    layouts = Layouts("reshard", transform, names, flat.leaves)
    chosen = [] if frozen is None else _choose_frozen("reshard", frozen, params)
    is_chosen = dict(zip(params.names, chosen, strict=False))
    specs_of_parameters: dict[str, Spec] = {}
    specs: list[Spec | None] = []
    for path, name, leaf in zip(flat.paths, names, flat.leaves, strict=True):
        if not is_sharded(leaf):
            specs.append(None)
            continue
        if leaf.spec.transform is None:
            got = "the state of a transform, which cannot be resharded"
            expected = "parameters or the state of an optimizer"
            layouts.problems.append(Problem(path, got, expected))
        spec = _lay_out_mean(leaf.spec, specs_of_parameters.get(name))
        if spec is None:
            whole = Spec(leaf.spec.shape, frozen=is_chosen.get(name, leaf.spec.frozen))
            spec = layouts.of(path, name, leaf, whole)
        # A TrainState has its parameters first, and then what the optimizer keeps for each.
        specs_of_parameters.setdefault(name, spec)
        specs.append(spec)
    remedy = "choose a strategy that fits their shapes"
    if any(spec.transform is None for spec in flat.specs):
        remedy = "leave the state of a transform out, and call fs.transform_state on the resharded parameters"
    refuse("reshard: leaves do not fit", layouts.problems, remedy)
    comm.check_same_call("reshard", _split_over(flat), flat, transform=transform)
    leaves = []
    for leaf, new_spec in zip(flat.leaves, specs, strict=True):
        leaves.append(leaf if new_spec is None else stored(_move(leaf, new_spec), new_spec))
    return flat.unflatten(leaves)


def _name_by_parameter(names: Sequence[str], parameters: Container[str]) -> list[str]:
    """Find for each leaf the parameter that it belongs to: in a TrainState, the end of its name.

    Args:
        names: Names of leaves, such as "opt_state.momentum.blocks.0.weight".
        parameters: Names of parameters, such as "blocks.0.weight".

    Returns:
        For each the parameter's name, or its own where there is none.
    """
    by_parameter = []
    for name in names:
        parts = name.split(".")
        endings = (".".join(parts[start:]) for start in range(len(parts)))
        by_parameter.append(next((ending for ending in endings if ending in parameters), name))
    return by_parameter


def local_piece(full: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Cut this rank's shard out of a full tensor, padded with zeros, in storage of its own."""
    piece = full.reshape(spec.storage_shape)
    for dim, (start, size) in enumerate(local_ranges(spec)):
        piece = piece.narrow(dim, start, size)
    return padded(piece, spec).clone(memory_format=torch.contiguous_format)


def padded(piece: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Fill this rank's elements up to the shape of a shard, with zeros; the same tensor where none are missing.

    One dtype has no zero, so that it is filled with ones.
    """
    missing = [size - present for size, present in zip(spec.local_shape, piece.shape, strict=True)]
    if not any(missing):
        return piece
    # torch's order: the last dim first, each with what goes before it and what goes after it.
    widths = []
    for rows in reversed(missing):
        widths += [0, rows]
    return pad(piece, widths, value=float(piece.dtype is torch.float8_e8m0fnu))


def local_ranges(spec: Spec) -> list[tuple[int, int]]:
    """Find where this rank's elements of the full tensor start along each dim, and how many there are."""
    ranges = []
    for dim, size in enumerate(spec.storage_shape):
        start = 0
        elements = size
        # Pieces of equal size but for the last ones, which may be shorter or empty.
        piece_size = size
        for axis in spec.split_axes(dim):
            piece_size = -(-piece_size // axis.size)
            skipped = min(comm.rank(axis) * piece_size, elements)
            start += skipped
            elements = min(piece_size, elements - skipped)
        ranges.append((start, elements))
    return ranges


def without_padding(leaf: Sharded) -> torch.Tensor:
    """Return this rank's elements of a leaf without the padding at its ends: a view of leaf.local, perhaps empty."""
    local = leaf.local
    if leaf.spec.padded_shape == leaf.spec.storage_shape:
        return local
    for dim, (_, size) in enumerate(local_ranges(leaf.spec)):
        local = local.narrow(dim, 0, size)
    return local


def _split_over(flat: Flat) -> tuple[Axis, ...]:
    """List the axes that leaves are put together over."""
    axes: dict[Axis, None] = {}
    for spec in flat.specs:
        axes |= dict.fromkeys(spec.partition_axes())
    return tuple(axes)


def unsharded(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Make full tensors of Sharded leaves, as `unshard` does, for callers whose ranks have agreed to it."""
    tensors = [leaf.local for leaf in leaves]
    for axes, positions in grouped(leaves, lambda leaf: leaf.spec.partition_axes()).items():
        specs = [leaves[i].spec for i in positions]
        # Minor axes first within a dim.
        for axis in reversed(axes):
            gathered = _FullyShard(axis, 0, 0).gather([tensors[i] for i in positions], specs)
            for i, tensor in zip(positions, gathered, strict=True):
                tensors[i] = tensor
    # Views, so that memory which leaves and full tensors share is seen to be shared.
    return [tensor.reshape(leaf.spec.shape) for tensor, leaf in zip(tensors, leaves, strict=True)]


def stored(piece: torch.Tensor, spec: Spec) -> Sharded:
    """Make a new shard, on the device that its transform keeps shards on, else on the mesh's."""
    device = storage_device(spec)
    if device is not None and (device.index is not None or device.type != piece.device.type):
        piece = piece.to(device)
    return pin_leaf(Sharded(piece, spec))


def pin_leaf(leaf: Any) -> Any:
    """Move an offloaded shard to pinned memory if it is not there: only from there a copy runs beside what computes."""
    if not is_sharded(leaf) or not find_copy_target([leaf.spec]) or leaf.local.is_pinned():
        return leaf
    return Sharded(leaf.local.pin_memory(), leaf.spec)


def find_copy_target(specs: Iterable[Spec]) -> torch.device | None:
    """Find the accelerator that gathers copy shards to which are kept on the CPU; None if no leaf's are."""
    for spec in specs:
        storage = spec.transform and spec.transform.storage
        if not storage or storage.device.type != "cpu":
            continue
        if storage.compute_device.type != "cpu":
            return storage.compute_device
    return None


def mesh_device(transform: ShardTransform) -> str | None:
    """Find the type of the devices of the mesh that a transform is on; None where it is on none."""
    return next((axis.device_type for axis in layout_axes(transform) if axis.device_type), None)


def _lay_out_mean(spec: Spec, parameter: Spec | None) -> Spec | None:
    """Lay a mean that an optimizer keeps of a parameter out as the parameter; None for other state.

    Args:
        spec: Of the optimizer's leaf.
        parameter: Of the parameter that it belongs to, if any.
    """
    if parameter is None or spec.shape == parameter.shape:
        return None
    mean_dims = []
    for dim, (size, parameter_size) in enumerate(zip(spec.shape, parameter.shape, strict=False)):
        if size != parameter_size:
            mean_dims.append(dim)
    mean = parameter.reduced(mean_dims)
    return mean if mean.shape == spec.shape else None


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

    def __init__(self, api_name: str, transform: ShardTransform, names: Sequence[str], leaves: Sequence[Any]) -> None:
        """Refuse masks that match none of the leaves.

        Args:
            api_name: The verb that asks, for an error.
            transform: The transform.
            names: The names of all leaves.
            leaves: The leaves.
        """
        check_matches(api_name, masks(transform), names, leaves)
        self.problems: list[Problem] = []
        self._transform = transform
        # Leaves of equal specs share one object, which is found sooner than an equal one. A mask in a composition makes
        # a new composition for each leaf. Of equal ones the first is kept.
        self._lay_out = functools.cache(_lay_out)

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
        transform = resolve_masks(self._transform, name, leaf)
        try:
            return self._lay_out(transform, spec)
        except LayoutError as error:
            self.problems.append(Problem(path, error.got, error.expected))
            return spec

    def check(self, facts: Mapping[str, str], remedy: str = FULL_TENSORS) -> None:
        """Refuse, on every rank, trees that differ between ranks or do not fit the transform.

        Args:
            facts: What ranks compare, by the leaves' paths.
            remedy: What the caller can do about leaves that do not fit.
        """
        # Ranks compare before any of them refuses its tree: a tree may be wrong on one rank alone.
        differences = comm.find_disagreement(facts, layout_axes(self._transform), "shard")
        refuse("shard: ranks hold different trees", differences, SAME_TREE)
        refuse("shard: leaves cannot be sharded", self.problems, remedy)


def _lay_out(transform: ShardTransform, spec: Spec) -> Spec:
    return replace(lay_out(transform, spec), transform=transform)


def is_frozen(leaf: torch.Tensor) -> bool:
    """Tell whether a leaf is a parameter that takes no gradient."""
    return isinstance(leaf, torch.nn.Parameter) and not leaf.requires_grad


def _choose_frozen(api_name: str, frozen: Mask | None, flat: Flat) -> list[bool]:
    """Tell for each leaf whether it is to be frozen."""
    if frozen in (None, (), []):
        return [False] * len(flat.leaves)
    return choose_leaves(api_name, "frozen", frozen, flat)


def choose_leaves(api_name: str, argument: str, mask: Any, flat: Flat) -> list[bool]:
    """Tell for each leaf whether a mask chooses it: two leaves may have one name. Refuse a mask that chooses none."""
    expect(is_mask(mask), api_name, f"{argument} to be {MASK}", describe(mask))
    check_matches(api_name, [mask], flat.names, flat.leaves)
    chosen = []
    for name, leaf in zip(flat.names, flat.leaves, strict=True):
        chosen.append(matches(mask, name, leaf))
    return chosen


def unfit(leaf: Any) -> tuple[str, str] | None:
    """Describe a leaf that cannot be cut, and the leaf expected."""
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter) and not _compat.is_fake(leaf):
        return describe(leaf), "a plain full tensor"
    if _compat.is_transformed(leaf) or leaf.is_meta or leaf.layout != torch.strided:
        return f"a {leaf.layout} tensor on device {leaf.device}", "a plain strided tensor with values"
    if leaf.grad_fn is not None and torch.is_grad_enabled():
        return "a result whose gradient would end here", "a tensor without history, such as leaf.detach()"
    return None


def fingerprint(leaf: torch.Tensor, spec: Spec, origin: str | None = None) -> str:
    """Write the facts that ranks compare: a leaf's dtype, shape, layout, and a hash or the origin of its values."""
    dtype = str(leaf.dtype).removeprefix("torch.")
    source = origin or ("without values" if _compat.is_fake(leaf) else f"of hash {hash_of(leaf)}")
    return f"{'frozen ' if spec.frozen else ''}{dtype}{list(leaf.shape)} {source} split by {spec.partition!r}"


def hash_of(tensor: torch.Tensor) -> str:
    """Compute a checksum of a tensor's values, several times as fast as a hash that nobody could forge."""
    return f"{zlib.crc32(bytes_of(tensor)):08x}"


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor as bytes on the host: its own memory if it is contiguous there.

    Not by `tensor.numpy()`, which marks memory as an array's for good, so that no donated step would write to it.
    """
    on_host = tensor.detach().cpu()
    dense = on_host.resolve_conj().resolve_neg().contiguous()
    memory = view_as_bytes(dense)
    return np.from_dlpack(memory).data


def check_transform(transform: Any, verb: str, argument: str = "transform") -> None:
    """Refuse what is no transform, or one of another mesh than this process is on."""
    expect_transform(verb, argument, transform)
    try:
        hash(transform)
    except TypeError as error:
        raise TypeError(
            f"{verb}: {argument} cannot be hashed ({error}). Keep tuples instead of lists and dicts in its fields."
        ) from error
    unreachable = [describe_axis(axis) for axis in layout_axes(transform) if not is_reachable(axis)]
    if unreachable:
        raise ValueError(
            f"{verb}: {', '.join(unreachable)} of {argument} does not belong to a mesh of this process. Build the "
            "transform from the mesh that this process made."
        )
