"""Saved tensors: autograd saves a handle instead of the full weight; the backward all-gathers it again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.engine.use import Use
from fshard.tree.checks import describe


class Handle(NamedTuple):
    """A saved view of a full tensor, without the tensor."""

    use: Use
    place: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class Saved:
    """The two hooks of torch.autograd.graph.saved_tensors_hooks, and the storages that they know.

    Attributes:
        known: By a storage's address a weak reference, which keeps the address from being reused by another storage,
            the use, the leaf's place in it, and the full tensor's dtype and type.
    """

    def __init__(self, fetch: Callable[[Use, int], torch.Tensor]) -> None:
        """Call `fetch` when a gathered tensor is needed."""
        self._fetch = fetch
        self.known: dict[int, tuple[object, Use, int, torch.dtype, type]] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make the context in which the function runs, so that autograd saves no tensor that is watched."""
        try:
            yield
        finally:
            if self.known:
                with _compat.without_saved_tensor_hooks() as hooks:
                    hooks.remove((self.pack, self.unpack))

    def watch(self, use: Use) -> None:
        """Register a use's tensors, except those that share memory with stored shards."""
        if not use.unit.regathered:
            return
        for place, (leaf, full) in enumerate(zip(use.leaves, use.wait(), strict=True)):
            key = _compat.storage_key(full)
            if key != _compat.storage_key(leaf.stored) and not (full.is_conj() or full.is_neg()):
                if not self.known:
                    # Below the hooks of the caller's own contexts.
                    with _compat.without_saved_tensor_hooks() as hooks:
                        hooks.append((self.pack, self.unpack))
                self.known[key] = _compat.StorageWeakRef(full.untyped_storage()), use, place, full.dtype, type(full)

    def pack(self, tensor: torch.Tensor) -> Handle | tuple[torch.Tensor, int]:
        """Save a handle of a gathered tensor; else the tensor itself, and how often it has been written to."""
        # A result that held its own graph would be held by it, and no collector sees that.
        tensor = tensor.detach() if tensor.requires_grad else tensor
        # A subclass has more state than its values, and a conjugate or negative view has other values.
        plain = tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
        found = self.known.get(_compat.storage_key(tensor)) if plain and not _compat.is_transformed(tensor) else None
        # A node that is made after its use has closed runs before the backward gathers the use again.
        if found and not found[1].closed and found[3:] == (tensor.dtype, type(tensor)):
            return Handle(*found[1:3], tensor.size(), tensor.stride(), tensor.storage_offset())
        return tensor, _compat.version(tensor)

    def unpack(self, saved: Handle | tuple[torch.Tensor, int]) -> torch.Tensor:
        """Give back what was saved, unless it has been written to, which autograd no longer sees where hooks save."""
        if isinstance(saved, Handle):
            return self._fetch(saved.use, saved.place).as_strided(saved.size, saved.stride, saved.offset)
        tensor, version = saved
        if _compat.version(tensor) != version:
            raise RuntimeError(
                f"value_and_grad: a tensor that autograd saved for the backward ({describe(tensor)}) was modified in "
                "place. Modify a clone instead."
            )
        return tensor
