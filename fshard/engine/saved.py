"""Saved tensors: autograd saves a handle instead of the full weight; the backward all-gathers it again."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.engine.gathered_unit import GatheredUnit
from fshard.engine.leaf import Leaf
from fshard.tree.checks import describe


class Handle(NamedTuple):
    """A saved view of a full tensor, without the tensor.

    Attributes:
        gathered: The gathered unit that owns the full tensor.
        leaf: The leaf whose full tensor it is.
        size: The size of the view.
        stride: The strides of the view.
        offset: Where the view begins, counted in elements from the start of the storage.
    """

    gathered: GatheredUnit
    leaf: Leaf
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class WatchedStorage(NamedTuple):
    """The storage of a full tensor for which autograd saves handles.

    Attributes:
        reference: A weak reference to the storage. While it lives, no other storage gets the same address.
        gathered: The gathered unit that owns the full tensor.
        leaf: The leaf whose full tensor it is.
        dtype: The full tensor's dtype.
        tensor_type: The full tensor's class.
    """

    reference: object
    gathered: GatheredUnit
    leaf: Leaf
    dtype: torch.dtype
    tensor_type: type


class SavedTensorHooks:
    """The pair of hooks that autograd calls when it saves a tensor, and when the backward reads it.

    Attributes:
        watched_storages: The storages of regathered full tensors, by address.
    """

    def __init__(self, api_name: str, fetch: Callable[[GatheredUnit, Leaf], torch.Tensor]) -> None:
        """Watch nothing yet.

        Args:
            api_name: The public function that runs, for errors.
            fetch: Returns the full tensor of a leaf, and gathers it again if it was dropped.
        """
        self._api_name = api_name
        self._fetch = fetch
        self.watched_storages: dict[int, WatchedStorage] = {}

    def remove(self) -> None:
        """Let autograd save tensors as without these hooks, which are installed when the first storage is watched."""
        if self.watched_storages:
            with _compat.without_saved_tensor_hooks() as hooks:
                hooks.remove((self.pack, self.unpack))

    def watch(self, gathered: GatheredUnit) -> None:
        """Watch a unit's full tensors, except those that share memory with stored shards."""
        if not gathered.unit.is_regathered:
            return
        for leaf, full in gathered.wait().items():
            address = _compat.storage_key(full)
            if address == _compat.storage_key(leaf.stored) or full.is_conj() or full.is_neg():
                continue
            if not self.watched_storages:
                # Outermost, around the hooks of contexts that the function has entered: a running checkpoint must see
                # tensors, not handles.
                with _compat.without_saved_tensor_hooks() as hooks:
                    hooks.append((self.pack, self.unpack))
            reference = _compat.StorageWeakRef(full.untyped_storage())
            self.watched_storages[address] = WatchedStorage(reference, gathered, leaf, full.dtype, type(full))

    def pack(self, tensor: torch.Tensor) -> Handle | tuple[torch.Tensor, int]:
        """Save a handle for a view of a watched tensor; other tensors as they are, with their number of writes."""
        # A saved result of the graph would hold the graph that holds it, and the collector cannot see such a cycle.
        tensor = tensor.detach() if tensor.requires_grad else tensor
        watched = None
        if tensor.layout is torch.strided and not _compat.is_transformed(tensor):
            watched = self.watched_storages.get(_compat.storage_key(tensor))
        # Skip subclasses, which hold more than values, and lazy conjugate or negative views. A node that is made after
        # another unit opened runs before the backward gathers this unit again. A handle would make this rank gather
        # alone.
        if (
            watched is None
            or (watched.dtype, watched.tensor_type) != (tensor.dtype, type(tensor))
            or watched.gathered.is_closed
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return tensor, _compat.version(tensor)
        return Handle(
            gathered=watched.gathered,
            leaf=watched.leaf,
            size=tensor.size(),
            stride=tensor.stride(),
            offset=tensor.storage_offset(),
        )

    def unpack(self, saved: Handle | tuple[torch.Tensor, int]) -> torch.Tensor:
        """Give back what was saved. Refuse tensors that were modified: with hooks, autograd does not check that itself.

        Raises:
            RuntimeError: if the tensor was modified in place since it was saved.
        """
        if isinstance(saved, Handle):
            full = self._fetch(saved.gathered, saved.leaf)
            return full.as_strided(saved.size, saved.stride, saved.offset)
        tensor, version = saved
        if _compat.version(tensor) != version:
            raise RuntimeError(
                f"{self._api_name}: a tensor that autograd saved for the backward ({describe(tensor)}) was modified in "
                "place. Modify a clone instead."
            )
        return tensor
