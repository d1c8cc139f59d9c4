"""Weights of transformers' models under the names that they have in files, converted by transformers itself.

The library's code runs on planned tensors: they have no values, but know how to read them.
"""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn

import fshard as fs
from fshard.checkpoint import CheckpointError
from fshard.ext import _compat
from fshard.ext.interop.module_exchange import ModuleExchange
from fshard.extend import Entry

Box = tuple[slice, ...]
Read = Callable[[Box], torch.Tensor]
# Leaves and entries by name.
Leaves = Mapping[str, Any]
Entries = Mapping[str, Entry]


class PlannedTensor(torch.Tensor):
    """A tensor on the meta device that knows how to read its values, all of them or a box.

    A function of torch returns planned tensors of planned ones. `torch.stack` reads no more than a box needs, and
    `torch.cat` no more along the dims that it does not join. Any other function reads its operands in full.

    Attributes:
        read: Reads a box.
        sources: The names of all tensors that it reads from.
        leaf: The name of the leaf that it is; None for the result of a function.
    """

    read: Read
    sources: frozenset[str]
    leaf: str | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch on shapes, and plan how its results are read.

        Raises:
            CheckpointError: if the function writes to a tensor.
        """
        kwargs = kwargs or {}
        out = super().__torch_function__(func, types, args, kwargs)
        if func is torch.Tensor.contiguous and out is args[0]:
            return out
        results = fs.tree_leaves(out)
        operands = [leaf for leaf in fs.tree_leaves((args, kwargs)) if isinstance(leaf, PlannedTensor)]
        written = set(map(id, operands)).intersection(map(id, results))
        if out is None or written:
            name = getattr(func, "__name__", func)
            raise CheckpointError(f"{name} writes to a weight, and fshard reads weights only after their conversion")
        sources = [operand.sources for operand in operands]
        for position, result in enumerate(results):
            if isinstance(result, PlannedTensor):
                result.read = partial(_read_result, func, args, kwargs, position)
                result.sources = frozenset().union(*sources)
        return out

    def value(self) -> torch.Tensor:
        """Read all of it."""
        return self.read(tuple(slice(0, size) for size in self.shape))


def _read_result(func: Any, args: Any, kwargs: Any, position: int, box: Box) -> torch.Tensor:
    """Read a box of one of the results of a function."""
    if func in (torch.stack, torch.cat):
        return _read_stack_or_cat(func, box, *args, **kwargs)
    args, kwargs = fs.tree_map(_value_of, (args, kwargs))
    whole: torch.Tensor = fs.tree_leaves(func(*args, **kwargs))[position]
    return whole[box]


def _value_of(leaf: Any) -> Any:
    return leaf.value() if isinstance(leaf, PlannedTensor) else leaf


def _read_stack_or_cat(
    func: Callable[..., torch.Tensor], box: Box, tensors: Sequence[PlannedTensor], dim: int = 0
) -> torch.Tensor:
    """Read a box of what torch.stack or torch.cat makes of tensors."""
    dim %= len(box)
    before = box[:dim]
    along = box[dim]
    after = box[dim + 1 :]
    if func is torch.stack:
        parts = [tensor.read(before + after) for tensor in tensors[along]]
        return torch.stack(parts, dim)
    parts = []
    for tensor in tensors:
        whole = slice(0, tensor.shape[dim])
        parts.append(tensor.read((*before, whole, *after)))
    return torch.cat(parts, dim).narrow(dim, along.start, along.stop - along.start)


def plan_entry(entry: Entry, source: str) -> PlannedTensor:
    """Make a planned tensor that reads from an entry, whose name is its source."""
    planned = torch.empty(entry.shape, dtype=entry.dtype, device="meta").as_subclass(PlannedTensor)
    planned.read = entry.read
    planned.sources = frozenset([source])
    return planned


def plan_leaf(leaves: Leaves, name: str, full: Leaves) -> PlannedTensor:
    """Make a planned tensor of a leaf, which reads from a dict of full leaves that is filled later."""
    leaf = leaves[name]
    entry = Entry(leaf.dtype, tuple(leaf.shape), lambda box: full[name][box])
    planned = plan_entry(entry, name)
    planned.leaf = name
    return planned


def is_pretrained(module: nn.Module | None) -> TypeGuard[nn.Module]:
    """Tell whether transformers can convert the weights of a module: whether it is one of its models."""
    # If nobody has imported transformers, no module is one of its models.
    modeling = sys.modules.get("transformers.modeling_utils")
    base = getattr(modeling, "PreTrainedModel", None)
    return base is not None and isinstance(module, base)


def from_files(stored: Entries, module: nn.Module) -> tuple[dict[str, Entry], frozenset[str]]:
    """Rename and convert the weights of files to those of a model, as from_pretrained does.

    Args:
        stored: The tensors of the files, by name.
        module: The model of transformers, on any device; its values are not used.

    Returns:
        The entries by the model's names, and the names that transformers lets files lack. Entries that the model does
        not have keep their names in the files, unless transformers ignores them.

    Raises:
        CheckpointError: if transformers cannot convert a weight.
    """
    expected: dict[str, Any] = module.state_dict()
    renamings, converters = _compat.weight_conversions(module)
    by_pattern: dict[str, Any] = {}
    for converter in converters:
        by_pattern |= dict.fromkeys(converter.source_patterns, converter)
    entries: dict[str, Entry] = {}
    # Conversions with the tensors that they convert, by the first name that they make.
    conversions: dict[str, Any] = {}
    # Names in the files of tensors that the model does not have, by the names that it would give them.
    unknown_names: dict[str, list[str]] = {}
    # A conversion takes its sources in the order in which transformers collects them.
    for name in sorted(stored, key=_compat.weight_order):
        new_name, pattern = _compat.rename_weight(name, module, expected, renamings, converters)
        if new_name not in expected and name in expected:
            new_name, pattern = _compat.rename_weight(name, module, expected, [], [])
        if new_name not in expected:
            unknown_names.setdefault(new_name, []).append(name)
        elif pattern is None:
            entries.setdefault(new_name, stored[name])
        else:
            conversion = conversions.setdefault(new_name, copy.deepcopy(by_pattern[pattern]))
            planned = plan_entry(stored[name], name)
            conversion.add_tensor(new_name, name, pattern, planned)
    for name, conversion in conversions.items():
        entries |= _convert(name, conversion, module)
    absent = expected.keys() - entries.keys()
    missing, unexpected = _compat.drop_ignored_names(module, absent, set(unknown_names))
    for new_name in unexpected:
        entries |= {name: stored[name] for name in unknown_names[new_name]}
    optional = expected.keys() - entries.keys() - missing
    return entries, frozenset(optional)


def _convert(name: str, conversion: Any, module: nn.Module) -> dict[str, Entry]:
    """Run a conversion of transformers, whose first result has this name."""
    try:
        results = conversion.convert(name, model=module, config=module.config)
    except Exception as error:
        raise CheckpointError(f"transformers cannot convert the weights for {name}: {error}") from error
    entries = {}
    for result_name, result in results.items():
        planned = result[0] if isinstance(result, list) else result
        shape = tuple(planned.shape)
        entries[result_name] = Entry(planned.dtype, shape, planned.read)
    return entries


def to_files(exchange: ModuleExchange, leaves: Leaves, module: nn.Module, full: Leaves) -> dict[str, PlannedTensor]:
    """Rename and convert the weights of a model to those of files, as save_pretrained does.

    Args:
        exchange: The exchange, which has the names of the module.
        leaves: The parameters and buffers that the model saves, by the first of their names.
        module: The model of transformers, on any device; its values are not used.
        full: The full leaves by name, when results are read.

    Returns:
        Planned tensors by their names in the files, whose sources are names of leaves.
    """
    unsaved = _compat.list_unsaved_names(module)
    state = {}
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, torch.Tensor) and name not in unsaved:
            # A meta tensor has no memory to compare, so transformers asks the module itself which weights are tied.
            state[name] = torch.empty_like(tensor, device="meta")
    untied = _compat.drop_tied_weights(state, module)
    for name in untied:
        untied[name] = plan_leaf(leaves, exchange.first[name], full)
    return _compat.revert_conversions(module, untied)
