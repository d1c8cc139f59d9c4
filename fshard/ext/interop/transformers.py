"""Names and weights as transformers converts them between files and models: its own code, run on planned tensors."""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, TypeGuard

import torch
from torch import nn

import fshard as fs
from fshard.checkpoint import CheckpointError
from fshard.ext import _compat
from fshard.ext.interop.module_exchange import ModuleExchange
from fshard.extend import Entry, piece_of

Box = tuple[slice, ...]
Read = Callable[[Box], torch.Tensor]


class Planned(torch.Tensor):
    """A tensor on the meta device with a plan of how to read a box of it.

    Functions of torch return planned tensors again. A stack reads no more than the box needs, `torch.cat` no more along
    other dims than its own; any other function reads its operands in full and computes.

    Attributes:
        read: Reads a box.
        sources: The names of all tensors that it reads from.
        leaf: The name of the leaf that it is; None for what a function has made.
    """

    read: Read
    sources: frozenset[str]
    leaf: str | None = None

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
        if func is torch.Tensor.contiguous and out is args[0]:
            return out
        if out is None or any(a is b for a in outs for b in operands):
            raise NotImplementedError(f"{getattr(func, '__name__', func)} writes to a weight, which cannot be planned")
        if not any(isinstance(each, Planned) for each in outs):
            return out
        # Of these no more is read than a box needs.
        plan = {torch.stack: _stacked, torch.cat: _joined}.get(func)
        sources = frozenset().union(*(operand.sources for operand in operands))

        def read(index: int | None, box: Box) -> torch.Tensor:
            return plan(box, *args, **kwargs) if plan else _computed(func, args, kwargs, index)[box]

        for index, each in enumerate(outs):
            each.read, each.sources = partial(read, index if outs is out else None), sources
        return out

    def value(self) -> torch.Tensor:
        """Read all of it."""
        return self.read(tuple(slice(0, n) for n in self.shape))


def planned(entry: Entry, source: str) -> Planned:
    """Make a planned tensor that is read from one source."""
    made = torch.empty(entry.shape, dtype=entry.dtype, device="meta").as_subclass(Planned)
    made.read, made.sources = entry.read, frozenset([source])
    return made


def _stacked(box: Box, tensors: Sequence[Planned], dim: int = 0) -> torch.Tensor:
    dim %= tensors[0].dim() + 1
    inner = box[:dim] + box[dim + 1 :]
    return torch.stack([each.read(inner) for each in tensors[box[dim]]], dim)


def _joined(box: Box, tensors: Sequence[Planned], dim: int = 0) -> torch.Tensor:
    dim %= tensors[0].dim()
    before, part, behind = box[:dim], box[dim], box[dim + 1 :]
    whole = [(*before, slice(0, each.shape[dim]), *behind) for each in tensors]
    parts = [each.read(inner) for each, inner in zip(tensors, whole, strict=True)]
    return torch.cat(parts, dim).narrow(dim, part.start, part.stop - part.start)


def _computed(func: Any, args: Any, kwargs: Any, index: int | None) -> torch.Tensor:
    def value(leaf: Any) -> Any:
        return leaf.value() if isinstance(leaf, Planned) else leaf

    out = func(*fs.tree_map(value, args), **fs.tree_map(value, kwargs))
    return out if index is None else out[index]


def is_pretrained(module: nn.Module | None) -> TypeGuard[nn.Module]:
    """Tell whether transformers knows how to convert a module's weights: one that from_pretrained can make."""
    # A library that nobody has imported has made no module.
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return base is not None and isinstance(module, base)


def from_files(found: Mapping[str, Entry], module: nn.Module) -> tuple[dict[str, Entry], frozenset[str]]:
    """Rename and convert the weights of files to those of a model, as from_pretrained does.

    Args:
        found: The tensors of the files, by name.
        module: The model of transformers, on any device; its values are not used.

    Returns:
        The entries by the model's names, and the names that transformers lets files lack. Other entries stay under the
        name that they have in the files, but for those that transformers ignores.

    Raises:
        CheckpointError: if transformers cannot convert a weight.
    """
    loading = import_module("transformers.core_model_loading")
    transforms = import_module("transformers.conversion_mapping").get_model_conversion_mapping(module)
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
            conversion.add_tensor(new, name, pattern, planned(found[name], name))
    for new, conversion in conversions.items():
        try:
            made = conversion.convert(new, model=module, config=module.config)
        except Exception as error:
            raise CheckpointError(f"transformers cannot convert the weights for {new}: {error}") from error
        for name, tensor in made.items():
            each = tensor[0] if isinstance(tensor, list) else tensor
            out[name] = Entry(each.dtype, tuple(each.shape), each.read)
    missing, unexpected = _compat.not_ignored(module, set(needed) - set(out), set(others))
    out.update({name: found[name] for new in others if new in unexpected for name in others[new]})
    return out, frozenset(set(needed) - set(out) - missing)


def to_files(
    exchange: ModuleExchange, leaves: Mapping[str, Any], module: nn.Module, full: Mapping[str, Any]
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
    loading = import_module("transformers.core_model_loading")
    skipped = _compat.not_saved(module)
    # On the meta device, where the library finds tied weights by the module's own.
    state = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in module.state_dict().items()
        if isinstance(tensor, torch.Tensor) and name not in skipped
    }
    kept = import_module("transformers.modeling_utils").remove_tied_weights_from_state_dict(state, module)
    sources = {name: as_planned(leaves, exchange.first[name], full) for name in kept}
    return dict(loading.revert_weight_conversion(module, sources))


def as_planned(leaves: Mapping[str, Any], name: str, full: Mapping[str, Any]) -> Planned:
    """Plan to read a leaf from a dict of full ones."""
    piece = piece_of(leaves[name])
    made = planned(Entry(piece.tensor.dtype, piece.full_shape, lambda box: full[name][box]), name)
    made.leaf = name
    return made
