"""Saved tensors: autograd saves a handle instead of the full weight; the backward all-gathers it again."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.engine.unit import State, Use


class FunctionTransform(Exception):  # noqa: N818
    """The function calls torch.func, which takes no saved-tensor hooks."""


class Handle(NamedTuple):
    """A saved view of a full tensor, without the tensor."""

    use: Use
    place: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any
    conj: bool
    neg: bool


class Saved:
    """The two hooks of torch.autograd.graph.saved_tensors_hooks, and the storages that they know."""

    def __init__(self, fetch: Callable[[Use, int], torch.Tensor]) -> None:
        """Call `fetch` when a gathered tensor is needed."""
        self._fetch, self._hooked = fetch, False
        # By a storage's address: a weak reference, the use, the leaf's place in it, the tensor's type, and whether it
        # is a conjugate or negative view. The weak reference keeps the address from being reused by another storage.
        self._known: dict[int, tuple[object, Use, int, type, bool]] = {}

    def hooks(self) -> AbstractContextManager[None]:
        """Make the context in which the function runs, so that autograd saves no gathered tensor."""
        self._hooked = True
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def watch(self, use: Use) -> None:
        """Register a use's tensors, except those that share memory with stored shards."""
        if not self._hooked or use.state is not State.FULL or not use.regathered:
            return
        for place, (leaf, tensor) in enumerate(zip(use.unit.leaves, use.full, strict=True)):
            if tensor is not None:
                key = _compat.storage_key(tensor)
                if key != _compat.storage_key(leaf.stored):
                    alive, lazy = _compat.StorageWeakRef(tensor.untyped_storage()), tensor.is_conj() or tensor.is_neg()
                    self._known[key] = (alive, use, place, type(tensor), lazy)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | Handle:
        """Save a handle of a gathered tensor, or the tensor itself."""
        if tensor.layout is not torch.strided or _compat.is_transformed(tensor):
            return tensor
        found = self._known.get(_compat.storage_key(tensor))
        # After its use has closed, a tensor is saved as it is: the backward needs it before it regathers the use.
        if found is None or found[1].closed:
            return tensor
        _, use, place, cls, lazy = found
        # A subclass has more state than its values; a conjugate or negative view has other values in another dtype.
        if type(tensor) is not cls or (lazy and tensor.dtype is not use.unit.leaves[place].dtype):
            return tensor
        use.saved = True
        layout = tensor.size(), tensor.stride(), tensor.storage_offset()
        return Handle(use, place, tensor.dtype, *layout, tensor.is_conj(), tensor.is_neg())

    def unpack(self, saved: torch.Tensor | Handle) -> torch.Tensor:
        """Give back what was saved."""
        if not isinstance(saved, Handle):
            return saved
        full = self._fetch(saved.use, saved.place)
        if full.dtype is not saved.dtype:
            # Take all of the memory as one dim, cut to whole elements of the saved dtype, which a view needs.
            nbytes = full.untyped_storage().nbytes() // saved.dtype.itemsize * saved.dtype.itemsize
            full = full.as_strided((nbytes // full.dtype.itemsize,), (1,), 0).view(saved.dtype)
        view = full.as_strided(saved.size, saved.stride, saved.offset)
        view = view if view.is_conj() == saved.conj else view.conj()
        return view if view.is_neg() == saved.neg else _compat.negated_view(view)
