"""Saved tensors: autograd saves a handle instead of the full weight; the backward all-gathers it again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.engine.use import Use


class Handle(NamedTuple):
    """A saved view of a full tensor, without the tensor."""

    use: Use
    place: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class Saved:
    """The two hooks of torch.autograd.graph.saved_tensors_hooks, and the storages that they know."""

    def __init__(self, fetch: Callable[[Use, int], torch.Tensor]) -> None:
        """Call `fetch` when a gathered tensor is needed."""
        self._fetch = fetch
        # By a storage's address: a weak reference, which keeps the address from being reused by another storage, the
        # use, the leaf's place in it, and the full tensor's dtype and type.
        self._known: dict[int, tuple[object, Use, int, torch.dtype, type]] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make the context in which the function runs, so that autograd saves no tensor that is watched."""
        try:
            yield
        finally:
            if self._known:
                with _compat.without_saved_tensor_hooks() as hooks:
                    hooks.remove((self.pack, self.unpack))

    def watch(self, use: Use) -> None:
        """Register a use's tensors, except those that share memory with stored shards."""
        if not use.unit.regathered:
            return
        for place, (leaf, tensor) in enumerate(zip(use.leaves, use.wait(), strict=True)):
            key = _compat.storage_key(tensor)
            if key != _compat.storage_key(leaf.stored) and not (tensor.is_conj() or tensor.is_neg()):
                if not self._known:
                    # Below the hooks of the caller's own contexts.
                    with _compat.without_saved_tensor_hooks() as hooks:
                        hooks.append((self.pack, self.unpack))
                alive = _compat.StorageWeakRef(tensor.untyped_storage())
                self._known[key] = alive, use, place, tensor.dtype, type(tensor)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | Handle:
        """Save a handle of a gathered tensor, or the tensor itself where a handle could not give back the same."""
        # Most saved tensors are none of these, and this runs for each of them.
        if not self._known or tensor.layout is not torch.strided or _compat.is_transformed(tensor):
            return tensor
        found = self._known.get(_compat.storage_key(tensor))
        # A node that is made after its use has closed runs before the backward gathers the use again.
        if found is None or found[1].closed:
            return tensor
        _, use, place, *kind = found
        # A subclass has more state than its values; a conjugate or negative view has other values.
        if kind != [tensor.dtype, type(tensor)] or tensor.is_conj() or tensor.is_neg():
            return tensor
        return Handle(use, place, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(self, saved: torch.Tensor | Handle) -> torch.Tensor:
        """Give back what was saved."""
        if not isinstance(saved, Handle):
            return saved
        return self._fetch(saved.use, saved.place).as_strided(saved.size, saved.stride, saved.offset)
