"""Leaves and their specs: Sharded, Spec, Axis, P; pytrees of them; shape arithmetic."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol

import optree
import torch
from optree.registry import __GLOBAL_NAMESPACE as GLOBAL_NAMESPACE

from fshard import _compat
from fshard.errors import Problem, leaf_error

Tree = Any
Treedef = optree.PyTreeSpec


@dataclass(frozen=True)
class Axis:
    """A named axis of the device mesh: the ranks that share a dim or a sum.

    It holds no rank, so that specs agree between ranks, and no DeviceMesh, whose equality depends on the thread.
    """

    name: str
    size: int
    group_name: str


class P(tuple[str | tuple[str, ...] | None, ...]):
    """Which mesh axes each dim is split over: None, a name, or several names, major first.

    Follows jax.sharding.PartitionSpec; dims beyond its length are not split.

    >>> P("shard"), P(None, ("shard", "tp")), P()
    (P('shard'), P(None, ('shard', 'tp')), P())
    """

    def __new__(cls, *dims: str | tuple[str, ...] | None) -> "P":
        """Build from one entry per dim."""
        return super().__new__(cls, dims)

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self))})"

    def __reduce__(self) -> tuple[type["P"], tuple[Any, ...]]:
        return P, tuple(self)

    def names(self, dim: int) -> tuple[str, ...]:
        """The axes that split `dim`, major first."""
        entry = self[dim] if dim < len(self) else None
        return () if entry is None else (entry,) if isinstance(entry, str) else entry


class Transform(Protocol):
    """What a spec holds of a ShardTransform, which is defined above this room."""

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The mesh axes it communicates over."""

    @property
    def new_gradients(self) -> bool | None:
        """Whether scatter returns new tensors; None where it returns what it was given."""

    def gather(self, leaves: Sequence[torch.Tensor], specs: Sequence["Spec"]) -> Sequence[torch.Tensor]:
        """Stored tensors to computed ones."""

    def scatter(self, grads: Sequence[torch.Tensor], specs: Sequence["Spec"]) -> Sequence[torch.Tensor]:
        """Gradients back to storage."""


@dataclass(frozen=True)
class Residency:
    """How long full tensors stay, inside `value_and_grad` and in forward passes of sharded parameters.

    Attributes:
        regather: Whether units are dropped after their forward and gathered again in the backward: for all of them,
            for those whose names match a glob pattern or a function of the name, or for none.
        prefetch: How many units are gathered ahead of the one that computes.
        merge_bytes: Neighbours are gathered together up to this many bytes, because latency would cost more than the
            transfer.
        early: Whether gradients are reduced as they appear, rather than after the backward.
        inputs: Dtype that a model's floating inputs are cast to.
        outputs: Dtype that a model's floating outputs are cast to.
    """

    regather: bool | str | tuple[str, ...] | Callable[[str], bool] = True
    prefetch: int = 1
    merge_bytes: int = 2 * 1024 * 1024
    early: bool = True
    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None


@dataclass(frozen=True)
class Spec:
    """Static, hashable description of one leaf: its global shape and how it is split, not its dtype or rank.

    Attributes:
        shape: Global shape of the leaf.
        partition: Axes that split each dim.
        axes: Every mesh axis the leaf lives on, split or replicated.
        frozen: True when the leaf takes no gradient.
        transform: The ShardTransform that gathers the leaf and scatters its gradient.
        residency: How long the full tensor stays; None means a plain Residency().
        call: Weak reference to the running call of `value_and_grad` that lent the leaf; no part of what a spec is.
    """

    shape: tuple[int, ...]
    partition: P = P()
    axes: tuple[Axis, ...] = ()
    frozen: bool = False
    transform: Transform | None = None
    residency: Residency | None = None
    call: Callable[[], Any] | None = field(default=None, compare=False, repr=False)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Specs are looked up often, and what they hold is slow to hash."""
        return hash((self.shape, self.partition, self.axes, self.frozen, self.transform, self.residency))

    def lent_by(self, call: Callable[[], Any] | None) -> "Spec":
        """The same spec with another reference to a call; faster than dataclasses.replace."""
        spec = object.__new__(Spec)
        spec.__dict__.update(self.__dict__, call=call)
        return spec

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The global shape as stored: a split 0-d leaf is stored with one dim."""
        return (1,) if self.partition and not self.shape else self.shape

    @functools.cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """The global shape with every split dim rounded up to a multiple of its axes' sizes."""
        return tuple(-(-n // k) * k for n, k in zip(self.full_shape, self._splits(), strict=True))

    @functools.cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of one rank's shard."""
        return tuple(-(-n // k) for n, k in zip(self.full_shape, self._splits(), strict=True))

    def split_axes(self, dim: int) -> tuple[Axis, ...]:
        """The axes that split `dim`, major first."""
        by_name = {axis.name: axis for axis in self.axes}
        return tuple(by_name[name] for name in self.partition.names(dim))

    def partition_axes(self) -> tuple[Axis, ...]:
        """Every axis that splits some dim."""
        return tuple(axis for dim in range(len(self.partition)) for axis in self.split_axes(dim))

    def dim_of(self, axis: Axis) -> int | None:
        """The dim that `axis` splits, or None when the leaf is replicated over it."""
        dims = (dim for dim in range(len(self.partition)) if axis.name in self.partition.names(dim))
        return next(dims, None)

    def _splits(self) -> tuple[int, ...]:
        return tuple(math.prod(axis.size for axis in self.split_axes(d)) for d in range(len(self.full_shape)))


def split(spec: Spec, axis: Axis, dim: int) -> Spec:
    """Split `dim` over `axis` as well, minor to the axes that split it already."""
    entries = [spec.partition.names(d) for d in range(max(len(spec.partition), dim + 1))]
    entries[dim] = (*entries[dim], axis.name)
    partition = P(*(names if len(names) > 1 else names[0] if names else None for names in entries))
    return on_axis(replace(spec, partition=partition), axis)


def on_axis(spec: Spec, axis: Axis) -> Spec:
    """Place the leaf on `axis` too, without splitting it."""
    return spec if axis in spec.axes else replace(spec, axes=(*spec.axes, axis))


@dataclass(frozen=True, eq=False)
class Sharded:
    """This rank's shard of a leaf and the spec that says what it is a shard of.

    A pytree node of optree and torch whose one child is the local tensor, so tree_map, torch.func and optimizers see
    plain tensors and every result keeps its spec. Not a tensor: nothing communicates unless a verb is called.

    Attributes:
        local: This rank's tensor, of shape spec.local_shape.
        spec: The leaf's description, equal on every rank of one mesh row.
    """

    local: torch.Tensor
    spec: Spec

    def __repr__(self) -> str:
        if not isinstance(self.local, torch.Tensor):
            return f"Sharded({self.local!r}, {self.spec.partition})"
        dtype = str(self.local.dtype).removeprefix("torch.")
        return f"Sharded({dtype}{list(self.spec.shape)}, {self.spec.partition}, local {list(self.local.shape)})"


def _flatten_sharded(node: Sharded) -> tuple[tuple[torch.Tensor], Spec]:
    return (node.local,), node.spec


def _unflatten_sharded(spec: Spec, children: Any) -> Sharded:
    return Sharded(children[0], spec)


# Users' own optree calls must see into Sharded too, hence optree's global namespace.
optree.register_pytree_node(
    Sharded,  # type: ignore[arg-type]
    lambda node: (*_flatten_sharded(node), ("local",)),  # type: ignore[arg-type]
    _unflatten_sharded,  # type: ignore[arg-type]
    path_entry_type=optree.GetAttrEntry,
    namespace=GLOBAL_NAMESPACE,
)
_compat.register_torch_pytree(
    Sharded, _flatten_sharded, lambda children, spec: _unflatten_sharded(spec, children), "fshard.Sharded"
)


class Flat(NamedTuple):
    """A tree taken apart: one path per leaf, the leaves (Sharded and None kept whole) and the structure."""

    paths: list[str]
    leaves: list[Any]
    treedef: Treedef


def is_sharded(node: Any) -> bool:
    """Whether `node` is a Sharded leaf."""
    return isinstance(node, Sharded)


def flatten(tree: Tree) -> Flat:
    """Take a tree apart without looking inside Sharded leaves; None counts as a leaf."""
    leaves, treedef = optree.tree_flatten(tree, is_leaf=is_sharded, none_is_leaf=True)
    return Flat(list(_paths(treedef)), leaves, treedef)


@functools.lru_cache(maxsize=256)
def _paths(treedef: Treedef) -> tuple[str, ...]:
    """Spell out the leaves' paths, as in ['blocks'][0]; slow enough to remember."""
    return tuple(accessor.codify("") or "(root)" for accessor in optree.treespec_accessors(treedef))


def unflatten(treedef: Treedef, leaves: list[Any]) -> Tree:
    """Put leaves back into the structure that `flatten` returned."""
    return optree.tree_unflatten(treedef, leaves)


def tree_map(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Map `f` over the plain tensors of a tree, those inside Sharded leaves included; specs are kept.

    Args:
        f: Called with one tensor of each tree.
        tree: The tree whose structure and specs the result has.
        *rest: Trees of the same structure.

    Returns:
        A tree of f's results.

    Raises:
        ValueError: if structures or specs differ.

    >>> tree_map(lambda x: x + 1, {"a": 1, "b": (2, None)})
    {'a': 2, 'b': (3, None)}
    """
    try:
        return optree.tree_map(f, tree, *rest)
    except ValueError:
        if problems := [problem for other in rest for problem in _differing_specs(flatten(tree), flatten(other))]:
            raise leaf_error("tree_map: specs differ", problems, "shard both alike, frozen= included") from None
        raise


def _differing_specs(flat: Flat, other: Flat) -> Iterator[Problem]:
    pairs = zip(flat.paths, flat.leaves, other.leaves, strict=True) if flat.treedef == other.treedef else ()
    for path, *leaves in pairs:
        specs = [leaf.spec for leaf in leaves if is_sharded(leaf)]
        names = [f.name for f in fields(Spec) if f.compare and len({getattr(spec, f.name) for spec in specs}) > 1]
        if names:
            needed, found = (", ".join(f"{name}={getattr(spec, name)!r}" for name in names) for spec in specs)
            yield Problem(path, found, needed)


def tree_leaves(tree: Tree) -> list[Any]:
    """List the plain tensors of a tree, the local tensors of Sharded leaves included.

    Args:
        tree: Any pytree.

    Returns:
        Its leaves, dict entries in the order of their sorted keys.

    >>> tree_leaves({"b": 2, "a": (1, None)})
    [1, 2]
    """
    return optree.tree_leaves(tree)
