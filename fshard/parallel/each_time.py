"""Leaves of a stage that are gathered for each forward and each backward of a microbatch, and dropped in between."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.autograd import Function

from fshard import _compat
from fshard.transforms.compose import pair
from fshard.tree import Spec, grouped


class _Handle(NamedTuple):
    """A saved view of a full tensor, without the tensor."""

    leaf: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class _Deliver(Function):
    """Hand out full tensors, and keep their gradients."""

    @staticmethod
    def forward(ctx: Any, grads: list[Any], token: torch.Tensor, *full: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.grads = grads
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in full)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.grads[:] = grads
        return None, None, *(None for _ in grads)


class EachTime:
    """Leaves of one virtual stage. Every call gathers or reduces all of them, whatever a rank has used.

    Attributes:
        token: An input of the graphs of all that is gathered.
    """

    def __init__(self, leaves: Mapping[int, tuple[torch.Tensor, Spec]]) -> None:
        """Nothing is gathered yet.

        Args:
            leaves: The shard and the spec of each leaf, by its number.
        """
        self.token = torch.zeros((), requires_grad=True)
        self._leaves = leaves
        self._full: dict[int, torch.Tensor] = {}
        self._known: dict[int, int] = {}
        self._grads: list[torch.Tensor | None] = []

    def gather(self) -> Mapping[int, torch.Tensor]:
        """Gather the leaves, outside of any graph."""
        with torch.no_grad():
            for group in self._groups():
                run, _ = pair(self._leaves[group[0]][1].transform, [self._leaves[i][1] for i in group])  # type: ignore[arg-type]
                self._full.update(zip(group, run([self._leaves[i][0] for i in group]), strict=True))
        return self._full

    def deliver(self) -> Mapping[int, torch.Tensor]:
        """Gather the leaves for a forward, whose graph saves handles of them inside of `hooks`."""
        full = self.gather()
        if not full:
            return full
        self._known = {_compat.storage_key(tensor): i for i, tensor in full.items()}
        return dict(zip(full, _Deliver.apply(self._grads, self.token, *full.values()), strict=True))

    def hooks(self) -> AbstractContextManager[None]:
        """Make the context of a forward."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def drop(self) -> None:
        """Drop the full tensors."""
        self._full, self._known = {}, {}

    def reduce(self) -> Mapping[int, torch.Tensor]:
        """Reduce the gradients of the last backward to shards, with zeros where this rank has none; drop the rest."""
        grads = dict(zip(self._full, self._grads or [None] * len(self._full), strict=True))
        found: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for group in self._groups():
                _, transpose = pair(self._leaves[group[0]][1].transform, [self._leaves[i][1] for i in group])  # type: ignore[arg-type]
                rows = [torch.zeros_like(self._full[i]) if (grad := grads[i]) is None else grad for i in group]
                found.update(zip(group, transpose(rows), strict=True))
        self._grads.clear()
        self.drop()
        return found

    def _groups(self) -> Sequence[list[int]]:
        """The leaves that travel together."""
        numbers, specs = list(self._leaves), [spec for _, spec in self._leaves.values()]
        return [[numbers[n] for n in group] for group in grouped(specs, lambda spec: spec.transform).values()]

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Handle:
        strided = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
        leaf = self._known.get(_compat.storage_key(tensor)) if strided and self._known else None
        if leaf is None or tensor.dtype is not self._full[leaf].dtype:
            return tensor
        return _Handle(leaf, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _unpack(self, saved: torch.Tensor | _Handle) -> torch.Tensor:
        if not isinstance(saved, _Handle):
            return saved
        return self._full[saved.leaf].as_strided(saved.size, saved.stride, saved.offset)
