"""Names and weights as transformers converts them between files and models: its own code, run on planned tensors."""

import copy
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn

import fshard as fs
from fshard.checkpoint import CheckpointError
from fshard.ext import _compat
from fshard.extend import Entry, Exchange, piece_of

Box = tuple[slice, ...]
Read = Callable[[Box], torch.Tensor]


class Planned(torch.Tensor):
    """A tensor on the meta device with a plan of how to read a box of it.

    Functions of torch return planned tensors again. Those that move whole slices read no more than the box needs; any
    other reads its operands in full and computes.

    Attributes:
        read: Reads a box.
        sources: The names of all tensors that it reads from.
    """

    read: Read
    sources: frozenset[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch on shapes, and plan how its results are read.

        Raises:
            NotImplementedError: if it writes to a tensor.
        """
        kwargs = kwargs or {}
        out = super().__torch_function__(func, types, args, kwargs)
        outs = out if isinstance(out, tuple | list) else [out]
        operands = [leaf for leaf in fs.tree_leaves((args, kwargs)) if isinstance(leaf, Planned)]
        if func in _UNCHANGED and out is args[0]:
            return out
        if out is None or any(a is b for a in outs for b in operands):
            raise NotImplementedError(f"{getattr(func, '__name__', func)} writes to a weight, which cannot be planned")
        if not any(isinstance(each, Planned) for each in outs):
            return out
        plan, indices = _PLANS.get(func), range(len(outs)) if outs is out else [None]
        reads = plan(outs, *args, **kwargs) if plan else [_computed(func, args, kwargs, index) for index in indices]
        for each, read in zip(outs, reads, strict=True):
            each.read, each.sources = read, frozenset().union(*(operand.sources for operand in operands))
        return out

    def value(self) -> torch.Tensor:
        """Read all of it."""
        return self.read(tuple(slice(0, n) for n in self.shape))


def planned(shape: Sequence[int], dtype: torch.dtype, read: Read, source: str) -> Planned:
    """Make a planned tensor that is read from one source."""
    made = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(Planned)
    made.read, made.sources = read, frozenset([source])
    return made


def _stacked(outs: Sequence[Planned], tensors: Sequence[Planned], dim: int = 0) -> list[Read]:
    dim %= outs[0].dim()

    def read(box: Box) -> torch.Tensor:
        return torch.stack([each.read(box[:dim] + box[dim + 1 :]) for each in tensors[box[dim]]], dim)

    return [read]


def _joined(outs: Sequence[Planned], tensors: Sequence[Planned], dim: int = 0) -> list[Read]:
    dim %= outs[0].dim()
    sizes = [each.shape[dim] for each in tensors]
    starts = itertools.accumulate(sizes, initial=0)
    places = list(zip(starts, sizes, tensors, strict=False))

    def read(box: Box) -> torch.Tensor:
        first, last = box[dim].start, box[dim].stop
        parts = [
            each.read((*box[:dim], slice(max(first - at, 0), min(last - at, n)), *box[dim + 1 :]))
            for at, n, each in places
            if first < at + n and last > at
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    return [read]


def _cut(outs: Sequence[Planned], tensor: Planned, sizes: Any = None, dim: int = 0, **_: Any) -> list[Read]:
    dim %= tensor.dim()

    def read(at: int, box: Box) -> torch.Tensor:
        return tensor.read((*box[:dim], slice(box[dim].start + at, box[dim].stop + at), *box[dim + 1 :]))

    starts = itertools.accumulate((each.shape[dim] for each in outs[:-1]), initial=0)
    return [partial(read, at) for at in starts]


def _taken(outs: Sequence[Planned], tensor: Planned, dim: int = 0) -> list[Read]:
    dim %= tensor.dim()

    def read(at: int, box: Box) -> torch.Tensor:
        return tensor.read((*box[:dim], slice(at, at + 1), *box[dim:])).squeeze(dim)

    return [partial(read, at) for at in range(len(outs))]


def _squeezed(outs: Sequence[Planned], tensor: Planned, dim: int) -> list[Read]:
    return _taken(outs, tensor, dim) if tensor.shape[dim] == 1 else [tensor.read]


def _transposed(outs: Sequence[Planned], tensor: Planned, dim0: int, dim1: int) -> list[Read]:
    order = list(range(tensor.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return [lambda box: tensor.read(tuple(box[dim] for dim in order)).transpose(dim0, dim1)]


def _computed(func: Any, args: Any, kwargs: Any, index: int | None) -> Read:
    def value(leaf: Any) -> Any:
        return leaf.value() if isinstance(leaf, Planned) else leaf

    def read(box: Box) -> torch.Tensor:
        out = func(*fs.tree_map(value, args), **fs.tree_map(value, kwargs))
        return (out if index is None else out[index])[box]

    return read


_UNCHANGED = frozenset([torch.Tensor.contiguous])
_PLANS: Mapping[Any, Callable[..., list[Read]]] = MappingProxyType(
    {
        torch.stack: _stacked,
        torch.cat: _joined,
        torch.concat: _joined,
        torch.chunk: _cut,
        torch.Tensor.chunk: _cut,
        torch.split: _cut,
        torch.Tensor.split: _cut,
        torch.unbind: _taken,
        torch.Tensor.unbind: _taken,
        torch.squeeze: _squeezed,
        torch.Tensor.squeeze: _squeezed,
        torch.transpose: _transposed,
        torch.Tensor.transpose: _transposed,
        torch.Tensor.contiguous: lambda outs, tensor: [tensor.read],
    }
)


class Found(NamedTuple):
    """The weights of files, by the names of the module.

    Attributes:
        entries: How each is read.
        optional: The names that transformers lets files lack.
    """

    entries: dict[str, Entry]
    optional: frozenset[str] = frozenset()


def is_pretrained(module: nn.Module | None) -> TypeGuard[nn.Module]:
    """Tell whether transformers knows how to convert a module's weights: one that from_pretrained can make."""
    # A library that nobody has imported has made no module.
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return base is not None and isinstance(module, base)


def from_files(found: Mapping[str, Entry], module: nn.Module) -> Found:
    """Rename and convert the weights of files to those of a model, as from_pretrained does.

    Args:
        found: The tensors of the files, by name.
        module: The model of transformers, on any device; its values are not used.

    Returns:
        The entries by the model's names; others stay under the name that they have in the files, but for those that
        transformers ignores.

    Raises:
        CheckpointError: if transformers cannot convert a weight.
    """
    loading = _library("core_model_loading")
    transforms = _library("conversion_mapping").get_model_conversion_mapping(module)
    renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    needed: dict[str, Any] = module.state_dict()
    out: dict[str, Entry] = {}
    others: dict[str, list[str]] = {}
    conversions: dict[str, Any] = {}
    # The order of the library, in which sources of a conversion are collected.
    for name in sorted(found, key=loading.dot_natural_key):
        new, pattern = loading.rename_source_key(name, renamings, converters, module.base_model_prefix, needed)
        if new not in needed and name in needed:
            new, pattern = loading.rename_source_key(name, [], [], module.base_model_prefix, needed)
        if new not in needed:
            others.setdefault(new, []).append(name)
        elif pattern is None:
            out.setdefault(new, found[name])
        else:
            conversion = conversions.setdefault(new, copy.deepcopy(by_pattern[pattern]))
            source = planned(found[name].shape, found[name].dtype, found[name].read, name)
            conversion.add_tensor(new, name, pattern, source)
    for new, conversion in conversions.items():
        sources = [name for names in conversion.layer_targets.values() for name in sorted(names)]
        try:
            made = conversion.convert(new, model=module, config=module.config)
        except Exception as error:
            shown = ", ".join(sources[:4]) + (", ..." if len(sources) > 4 else "")
            raise CheckpointError(f"{shown}: transformers cannot convert them to {new}: {error}") from error
        for name, tensor in made.items():
            each = tensor[0] if isinstance(tensor, list) else tensor
            out[name] = Entry(each.dtype, tuple(each.shape), each.read)
    missing, unexpected = _compat.not_ignored(module, set(needed) - set(out), set(others))
    out.update({name: found[name] for new in others if new in unexpected for name in others[new]})
    return Found(out, frozenset(set(needed) - set(out) - missing))


def to_files(
    exchange: Exchange, leaves: Mapping[str, Any], module: nn.Module, full: Mapping[str, Any]
) -> dict[str, Planned]:
    """Rename and convert the weights of a model to those of files, as save_pretrained does.

    Args:
        exchange: The exchange, which has the names of the module.
        leaves: The parameters and buffers that the model saves, by the first of their names.
        module: The model of transformers, on any device; its values are not used.
        full: The full leaves by name, when results are read.

    Returns:
        Planned tensors by their names in the files, whose sources are names of leaves.
    """
    loading, modeling = _library("core_model_loading"), _library("modeling_utils")
    skipped = _compat.not_saved(module)
    # On the meta device, where the library finds tied weights by the module's own.
    state = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in module.state_dict().items()
        if isinstance(tensor, torch.Tensor) and name not in skipped
    }
    kept = modeling.remove_tied_weights_from_state_dict(state, module)
    sources = {name: as_planned(leaves, exchange.first[name], full) for name in kept}
    return dict(loading.revert_weight_conversion(module, sources))


def _library(name: str) -> Any:
    """Import a module of transformers, which has been imported already where it has made a model.

    Raises:
        ImportError: if it is an older version.
    """
    try:
        return import_module(f"transformers.{name}")
    except ImportError as error:
        found = getattr(import_module("transformers"), "__version__", "an unknown version")
        raise ImportError(
            f"expected transformers 5.23 or newer, got {found} ({error}); install fshard[models]"
        ) from error


def as_planned(leaves: Mapping[str, Any], name: str, full: Mapping[str, Any]) -> Planned:
    """Plan to read a leaf from a dict of full ones."""
    piece = piece_of(leaves[name])
    return planned(piece.full_shape, piece.tensor.dtype, lambda box: full[name][box], name)
