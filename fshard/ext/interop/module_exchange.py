"""Leaves of modules to and from formats by their names in state dicts."""

from collections.abc import Container, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

import fshard as fs
from fshard.ext._compat import unsaved_buffers
from fshard.extend import (
    Entry,
    Exchange,
    Problem,
    check_flags,
    describe,
    expect,
    flatten,
    name_without_wrappers,
    refuse,
    tensor_of,
    unsharded,
)

# What a caller can do about leaves that do not fit.
REMEDY = (
    "pass a tree of the same names; module= knows which are tied or not saved, cast=True of from_state_dict and "
    "load_huggingface changes dtypes, strict=False of the latter passes over what only one has"
)


class ModuleExchange(Exchange):
    """Moves parameters and buffers of a module: every rank makes the same calls.

    A tied parameter of a module has several names, of which fshard uses the first.

    Attributes:
        first: The first name of each tensor of the module, by each of its names, with those of wrappers and of FSDP2.
        saved: The names that a state dict has of each tensor, by the first.
        unsaved: The names of buffers that a state dict does not have.
        by_tensor: The first name of each tensor, by its id.
        frozen: The first names of tensors that take no gradient.
    """

    def __init__(self, label: str, module: nn.Module | None = None) -> None:
        """Read the names of a module.

        Args:
            label: The public function, for errors.
            module: The module whose tensors are moved; None leaves every name as it is.
        """
        super().__init__(label)
        self._has_module = module is not None
        if module is None:
            module = nn.Module()
        expect(isinstance(module, nn.Module), label, "module to be a torch module or None", describe(module))

        self.first: dict[str, str] = {}
        self.saved: dict[str, list[str]] = {}
        self.by_tensor: dict[int, str] = {}
        self.frozen: set[str] = set()
        in_state_dict = module.state_dict().keys()
        parameters = module.named_parameters(remove_duplicate=False)
        for name_with_wrappers, tensor in chain(parameters, module.named_buffers(remove_duplicate=False)):
            name = name_without_wrappers(name_with_wrappers)
            first = self.by_tensor.setdefault(id(tensor), name)
            self.first |= dict.fromkeys((name, name_with_wrappers), first)
            if not tensor.requires_grad:
                self.frozen.add(first)
            if name in in_state_dict:
                self.saved.setdefault(first, []).append(name)
        # Another tensor may have such a name itself.
        self.first = {name_of_fsdp2(name): first for name, first in self.first.items()} | self.first
        self.unsaved = unsaved_buffers(module) - self.saved.keys()

    def saved_as(self, name: str) -> list[str]:
        """The names under which a state dict has a leaf; none for a buffer that is not persistent."""
        return self.saved.get(name, []) if self._has_module else [name]

    def leaves(self, tree: Any, *, needs_values: bool = True, **flags: Any) -> dict[str, Any]:
        """The leaves of a tree by name.

        Raises:
            ValueError: on every rank, if a leaf is no tensor or unknown to the module, or a flag is no bool.
        """
        with self.raise_on_all_ranks():
            check_flags(self.label, **flags)
            self.flat(tree, needs_values=needs_values)
            leaves = named_leaves(tree)
            under = "a name of module.named_parameters() or named_buffers()"
            problems = []
            for name, leaf in leaves.items():
                is_tensor = isinstance(leaf, torch.Tensor | fs.Sharded)
                if not is_tensor or tensor_of(leaf).layout != torch.strided:
                    problems.append(Problem(name, describe(leaf), "a strided tensor"))
                expected = self.first.get(name, "a parameter or a buffer of the module")
                if expected == name and name not in self.saved and name not in self.unsaved:
                    expected = f"one that module.state_dict() has under {under}"
                if self._has_module and expected != name:
                    problems.append(Problem(name, "a leaf", expected))
            refuse(f"{self.label}: leaves do not fit", problems, "pass the parameters and buffers of this module")
        return leaves

    def gather(self, leaves: Mapping[Any, Any], rank0_only: bool) -> dict[Any, torch.Tensor]:
        """Gather leaves one by one into storage of their own, which no later step writes to and no other tensor has."""
        full_tensors = {}
        for name, leaf in leaves.items():
            full = unsharded([leaf])[0] if isinstance(leaf, fs.Sharded) else leaf.detach()
            if not (rank0_only and self.rank):
                full_tensors[name] = full.clone(memory_format=torch.contiguous_format)
        return full_tensors

    def fill(
        self,
        entries: Mapping[str, Entry],
        leaves: Mapping[str, Any],
        cast: bool = False,
        optional: Container[str] = (),
        remedy: str = REMEDY,
    ) -> dict[str, Any]:
        """Read this rank's box of every leaf by its name, or refuse, on every rank, what does not fit.

        Args:
            entries: The entries by name; a tied parameter has any of its names, or several.
            leaves: The leaves by name.
            cast: Whether to convert from one floating dtype to another.
            optional: Names of leaves that need no entry if they have values.
            remedy: What the caller can do about what does not fit.

        Returns:
            New leaves by name.
        """
        entries_of: dict[str, list[Entry]] = {}
        for name, entry in entries.items():
            first = self.first.get(name, name)
            dtype = tensor_of(leaves[first]).dtype if cast and first in leaves else entry.dtype
            if dtype.is_floating_point and entry.dtype.is_floating_point:
                entry = entry._replace(dtype=dtype)
            entries_of.setdefault(first, []).append(entry)

        kept = {}
        for name, leaf in leaves.items():
            # A state dict has no buffers that are not persistent, which stay as they are if they have values.
            is_optional = name in optional or name in self.unsaved
            if name not in entries_of and is_optional and not tensor_of(leaf).is_meta:
                kept[name] = fs.tree_map(torch.clone, leaf)
        others = {name: leaf for name, leaf in leaves.items() if name not in kept}
        return kept | self.read(others, entries_of, remedy)

    @staticmethod
    def with_leaves(tree: Any, leaves: Mapping[str, Any]) -> Any:
        """Return a tree with other leaves, by their names; leaves that are None stay."""
        flat = flatten(tree)
        new_leaves = []
        for name, leaf in zip(flat.names, flat.leaves, strict=True):
            new_leaves.append(None if leaf is None else leaves[name])
        return flat.unflatten(new_leaves)


def is_full(value: Any) -> bool:
    """Whether a value of a state dict is a full tensor: neither a DTensor, nor sparse, nor on the meta device."""
    return type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_meta


def name_of_fsdp2(name: str) -> str:
    """Leave out what torch.compile adds to a name: state_dict() of a module keeps it, and get_state_dict does not."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree that are not None, by name; sorted, as ranks may hold them in several orders."""
    flat = flatten(tree)
    leaves = dict(zip(flat.names, flat.leaves, strict=True))
    return {name: leaves[name] for name in sorted(leaves) if leaves[name] is not None}
