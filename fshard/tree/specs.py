"""Specs: what one leaf is and how it is split; axes, partitions and their shape arithmetic."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from fshard.tree.exact import Exact

Role = Literal["gathered", "summed", "owned"]


@dataclass(frozen=True)
class Axis:
    """A named axis of the device mesh: the ranks that share a dim or a sum.

    It holds no rank, so that specs agree between ranks, and no DeviceMesh, whose equality depends on the thread.

    Attributes:
        name: The name of the mesh's dimension.
        size: How many ranks it has.
        group_name: The name of their process group.
        device_type: The type of the mesh's devices, such as "cuda", which leaves are sharded to; None leaves them on
            the device that they are on.

    >>> import fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     return axis.name, axis.size
    >>> fs.testing.spmd(program, world=2)
    [('shard', 2), ('shard', 2)]
    """

    name: str
    size: int
    group_name: str
    device_type: str | None = None


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

    def __reduce__(self) -> Any:
        return P, tuple(self)

    def names(self, dim: int) -> tuple[str, ...]:
        """The axes that split `dim`, major first."""
        entry = self[dim] if dim < len(self) else None
        if entry is None:
            return ()
        return (entry,) if isinstance(entry, str) else entry


@dataclass(frozen=True)
class ReshardPolicy:
    """How long full tensors stay, inside `value_and_grad` and in forward passes of sharded parameters.

    Attributes:
        regather: Whether units are dropped after their forward and gathered again in the backward: for all of them,
            for those whose names match a glob pattern or a function of the name, or for none.
        regather_axis: The mesh axis that the backward gathers over, because each rank keeps what the forward gathered
            over the axes before it; None means all axes.
        prefetch: How many units are gathered ahead of the one that computes; None means one, and more while they are
            together below `ahead_bytes`. As many stay from the end of the forward to the backward.
        bucket_bytes: Neighbours are gathered together up to this many bytes, because latency would cost more than the
            transfer.
        reduce_each_microbatch: Whether gradients are reduced as they appear, rather than after the backward.
        reduction_order: The name of the order that sums over microbatches and ranks are in; None means in turn.
    """

    regather: bool | str | tuple[str, ...] | Callable[[str], bool] = True
    prefetch: int | None = None
    bucket_bytes: int = 16 * 1024 * 1024
    reduce_each_microbatch: bool = True
    reduction_order: str | None = None
    regather_axis: str | None = None

    @property
    def ahead_bytes(self) -> int:
        """Bytes that are gathered ahead at a time, and of gradients under way; of larger units it is one."""
        return 2 * self.bucket_bytes

    @property
    def sums_in_tree(self) -> bool:
        """Whether ranks are added up in one binary tree, whatever the backend."""
        return self.reduction_order == "tree"


@dataclass(frozen=True)
class ModelDtypes:
    """The dtypes that the floating inputs and outputs of a model, or of a unit, are cast to; None keeps theirs.

    Attributes:
        inputs: The dtype of inputs.
        outputs: The dtype of outputs.
    """

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
        reshard: How long the full tensor stays; None means a plain ReshardPolicy().
        model_dtypes: The dtypes of inputs and outputs of models that have the leaf.
        owned: Of the axes that split a dim, those whose ranks compute with their own piece.

    >>> import fshard as fs
    >>> spec = fs.Spec((3, 2), fs.P("shard"), (fs.Axis("shard", 2, "0"),))
    >>> spec.padded_shape, spec.local_shape
    ((4, 2), (2, 2))
    """

    shape: tuple[int, ...]
    partition: P = P()
    axes: tuple[Axis, ...] = ()
    frozen: bool = False
    transform: Any = None
    reshard: ReshardPolicy | None = None
    model_dtypes: ModelDtypes | None = None
    owned: tuple[Axis, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the fields alone: another process hashes texts in another way, so no cached hash may get there."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @functools.cached_property
    def _hash(self) -> int:
        """Specs are looked up often, and what they hold is slow to hash."""
        return hash(tuple(self.__getstate__().values()))

    @functools.cached_property
    def exact(self) -> Exact:
        """Return a key that compares specs as `==` does, and numbers in transforms by type and bits."""
        return Exact(self)

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """The global shape as stored: a split 0-d leaf is stored with one dim."""
        return (1,) if self.partition and not self.shape else self.shape

    @functools.cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """The global shape with every split dim rounded up to a multiple of its axes' sizes."""
        return tuple(size * pieces for size, pieces in zip(self.local_shape, self._pieces_by_dim(), strict=True))

    @functools.cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of one rank's shard."""
        return _divide_rounding_up(self.storage_shape, self._pieces_by_dim())

    def split_axes(self, dim: int) -> tuple[Axis, ...]:
        """The axes that split `dim`, major first."""
        by_name = {axis.name: axis for axis in self.axes}
        return tuple(by_name[name] for name in self.partition.names(dim))

    def partition_axes(self) -> tuple[Axis, ...]:
        """Every axis that splits some dim."""
        return tuple(axis for dim in range(len(self.partition)) for axis in self.split_axes(dim))

    @functools.cached_property
    def effective_partition(self) -> P:
        """The partition without axes of one rank, so that layouts whose shards are the same have the same one."""
        # A split number is stored with a dim.
        if not self.shape:
            return self.partition
        entries = []
        for dim in range(len(self.partition)):
            entries.append(tuple([axis.name for axis in self.split_axes(dim) if axis.size > 1]))
        return _partition(entries)

    def dim_of(self, axis: Axis) -> int | None:
        """The dim that `axis` splits, or None when the leaf is replicated over it."""
        return self._dims.get(axis.name)

    @functools.cached_property
    def _dims(self) -> Mapping[str, int]:
        """The dim that each axis splits."""
        return {name: dim for dim in range(len(self.partition)) for name in self.partition.names(dim)}

    @functools.cached_property
    def roles(self) -> Mapping[Axis, Role]:
        """What each axis is to the leaf: gathered (split, made full), summed (whole) or owned (split, used as a piece).

        Axes over which the leaf is replicated and not summed are left out.
        """
        summed = self.transform.axes if self.transform else ()
        split = self.partition_axes()
        roles: dict[Axis, Role] = {}
        for axis in (*summed, *split):
            if axis in self.owned or axis not in summed:
                roles[axis] = "owned"
            else:
                roles[axis] = "gathered" if axis in split else "summed"
        return roles

    @functools.cached_property
    def scattered_axes(self) -> tuple[Axis, ...]:
        """The axes that the transform's scatter sums gradients over: all that they are reduced over but owned ones."""
        return tuple(axis for axis, role in self.roles.items() if role != "owned")

    @functools.cached_property
    def gathered_shape(self) -> tuple[int, ...]:
        """The shape that the transform gathers: the global one, but for dims split over axes that it leaves alone."""
        pieces = [1] * len(self.shape)
        for axis, role in self.roles.items():
            dim = self.dim_of(axis)
            # The dim of a number that is split is not among those of its shape.
            if role == "owned" and dim is not None and self.shape:
                pieces[dim] *= axis.size
        return _divide_rounding_up(self.shape, pieces)

    def shared_out(self, dim: int, axis: Axis) -> int:
        """How many elements of `dim` the ranks of an axis share: those that the axes major to it leave to each rank.

        Of a dim of 16 over ("shard", "tp") with two ranks each, the ranks of "shard" share 16 and those of "tp" 8.
        """
        axes = self.split_axes(dim)
        pieces = math.prod(major.size for major in axes[: axes.index(axis)])
        return -(-self.storage_shape[dim] // pieces)

    def split(self, axis: Axis, dim: int, *, owned: bool = False) -> "Spec":
        """Split `dim`, counted from the front, over `axis` as well, minor to the axes that split it already.

        Args:
            axis: The mesh axis.
            dim: The dim.
            owned: Whether each rank computes with its own piece, which is never gathered.

        Returns:
            The spec.

        >>> import fshard as fs
        >>> shard, tp = fs.Axis("shard", 2, "0"), fs.Axis("tp", 4, "1")
        >>> spec = fs.Spec((16, 8)).split(shard, dim=0).split(tp, dim=0)
        >>> spec.partition, spec.local_shape
        (P(('shard', 'tp')), (2, 8))
        """
        num_entries = max(len(self.partition), dim + 1)
        entries = [self.partition.names(other) for other in range(num_entries)]
        entries[dim] = (*entries[dim], axis.name)
        pieces = (*self.owned, axis) if owned else self.owned
        return replace(self, partition=_partition(entries), owned=pieces).on(axis)

    def reduced(self, dims: Iterable[int]) -> "Spec":
        """Describe a mean of the leaf over some dims, which get a size of 1 that no axis splits.

        A dim that has this size stays as it is, so that `reshard` lays the mean out as the leaf, whose shape it has.

        Args:
            dims: The dims, counted from the front.

        Returns:
            The spec.

        >>> import fshard as fs
        >>> rows = fs.Spec((16, 8)).split(fs.Axis("shard", 2, "0"), dim=0)
        >>> rows.reduced([1]).partition, rows.reduced([0]).partition, rows.reduced([0]).shape
        (P('shard'), P(), (1, 8))
        """
        chosen = [dim for dim in dims if self.shape[dim] != 1]
        shape = tuple(1 if dim in chosen else size for dim, size in enumerate(self.shape))
        entries = []
        for dim in range(len(self.partition)):
            entries.append(() if dim in chosen else self.partition.names(dim))
        return replace(self, shape=shape, partition=_partition(entries))

    def on(self, axis: Axis) -> "Spec":
        """Place the leaf on `axis` too, without splitting it.

        >>> import fshard as fs
        >>> shard, replicate = fs.Axis("shard", 2, "0"), fs.Axis("replicate", 2, "1")
        >>> spec = fs.Spec((16, 8)).split(shard, dim=0).on(replicate)
        >>> [axis.name for axis in spec.axes], spec.local_shape, spec.dim_of(shard), spec.dim_of(replicate)
        (['shard', 'replicate'], (8, 8), 0, None)
        """
        return self if axis in self.axes else replace(self, axes=(*self.axes, axis))

    def _pieces_by_dim(self) -> list[int]:
        """Count the pieces that each stored dim is cut into."""
        dims = range(len(self.storage_shape))
        return [math.prod(axis.size for axis in self.split_axes(dim)) for dim in dims]


def describe_difference(spec: Spec, expected: Spec) -> tuple[str, str] | None:
    """Describe two specs by one field that differs, because all fields fill several lines; None if they are equal."""
    # Most leaves of two trees share one spec object, and specs are slow to compare.
    if spec is expected or spec == expected:
        return None
    names = [field.name for field in fields(Spec) if getattr(spec, field.name) != getattr(expected, field.name)]
    # A transform's text is long, and most of what it decides for a leaf is in other fields.
    name = min(names, key="transform".__eq__)
    return f"{name} {getattr(spec, name)}", f"{name} {getattr(expected, name)}"


def _divide_rounding_up(sizes: Iterable[int], divisors: Iterable[int]) -> tuple[int, ...]:
    return tuple(-(-size // divisor) for size, divisor in zip(sizes, divisors, strict=True))


def _partition(entries: list[tuple[str, ...]]) -> P:
    """Write the axes of each dim as a partition."""
    while entries and not entries[-1]:
        entries.pop()
    dims = []
    for names in entries:
        dims.append(names if len(names) > 1 else next(iter(names), None))
    return P(*dims)
