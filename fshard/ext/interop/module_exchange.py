"""Leaves of modules to and from formats by their names in state dicts."""

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import nn

import fshard as fs
from fshard.extend import (
    Entry,
    Exchange,
    check_flags,
    describe,
    expect,
    flatten,
    named_buffers,
    named_parameters,
    refuse,
    tensor_of,
    unsaved_buffers,
    unsharded,
)


class ModuleExchange(Exchange):
    """Moves parameters and buffers of a module: every rank makes the same calls.

    A tied parameter of a module has several names, of which fshard uses the first.

    Attributes:
        first: The first name of each tensor of the module, by each of its names, with those of wrappers.
        saved: The names that a state dict has of each tensor, by the first.
        unsaved: The names of buffers that are not persistent.
        by_tensor: The first name of each tensor, by its id.
    """

    def __init__(self, label: str, module: nn.Module | None = None) -> None:
        """Read the names of a module.

        Args:
            label: The public function, for errors.
            module: The module whose tensors are moved; None leaves every name as it is.
        """
        super().__init__(label)
        self._known = module is not None
        given = nn.Module() if module is None else module
        expect(isinstance(given, nn.Module), label, "module to be a torch module or None", describe(module))
        named = dict[str, torch.Tensor](named_parameters(given, remove_duplicate=False))
        named |= named_buffers(given, remove_duplicate=False)
        self.by_tensor = {id(tensor): name for name, tensor in reversed(named.items())}
        in_module = dict[str, torch.Tensor](given.named_parameters(remove_duplicate=False))
        in_module |= given.named_buffers(remove_duplicate=False)
        self.first = {name: self.by_tensor[id(tensor)] for name, tensor in (named | in_module).items()}
        self.saved: dict[str, list[str]] = {}
        self.unsaved = unsaved_buffers(given)
        for name in filter(given.state_dict().__contains__, named):
            self.saved.setdefault(self.first[name], []).append(name)

    def saved_as(self, name: str) -> list[str]:
        """The names under which a state dict has a leaf; none for a buffer that is not persistent."""
        return self.saved.get(name, []) if self._known else [name]

    def leaves(self, tree: Any, **flags: Any) -> dict[str, Any]:
        """The leaves of a tree by name.

        Raises:
            ValueError: on every rank, if a leaf is no tensor or unknown to the module, or a flag is no bool.
        """
        with self.raise_on_all_ranks():
            check_flags(self.label, **flags)
            flat = self.flat(tree)
            leaves = {name: leaf for name, leaf in zip(flat.names, flat.leaves, strict=True) if leaf is not None}
            problems = [
                (name, describe(leaf), "a tensor")
                for name, leaf in leaves.items()
                if not isinstance(leaf, torch.Tensor | fs.Sharded)
            ]
            if self._known:
                problems += [(name, "a leaf", expected) for name in leaves if (expected := self._misnamed(name))]
            refuse(f"{self.label}: leaves do not fit", problems, "pass the parameters and buffers of this module")
        return leaves

    def _misnamed(self, name: str) -> str | None:
        """Say what is expected in the place of a leaf; None for one that has its place in the module's state dict."""
        if self.first.get(name) != name:
            return self.first.get(name, "a parameter or a buffer of the module")
        if name in self.saved or name in self.unsaved:
            return None
        return "one that module.state_dict() has under a name of module.named_parameters() or named_buffers()"

    def gathered(self, leaves: Mapping[Any, Any], rank0_only: bool) -> dict[Any, torch.Tensor]:
        """Gather leaves one by one into storage of their own, which no later step writes to and no other tensor has."""
        out: dict[Any, torch.Tensor] = {}
        for name, leaf in leaves.items():
            full = unsharded([leaf])[0] if isinstance(leaf, fs.Sharded) else leaf.detach()
            if not (rank0_only and self.rank):
                out[name] = full.clone(memory_format=torch.contiguous_format)
        return out

    def fill(
        self, found: Mapping[str, Entry], leaves: Mapping[str, Any], cast: bool = False, optional: Container[str] = ()
    ) -> dict[str, Any]:
        """Read this rank's part of every leaf by its name, or refuse, on every rank, what does not fit.

        Args:
            found: The entries by name; a tied parameter has any of its names, or several.
            leaves: The leaves by name.
            cast: Whether to convert from one floating dtype to another.
            optional: Leaves that need no entry if they have values.

        Returns:
            New leaves by name.
        """
        groups: dict[str, list[Entry]] = {}
        for name, entry in found.items():
            first = self.first.get(name, name)
            dtype = tensor_of(leaves[first]).dtype if cast and first in leaves else entry.dtype
            if dtype.is_floating_point and entry.dtype.is_floating_point:
                entry = entry._replace(dtype=dtype)
            groups.setdefault(first, []).append(entry)
        # A state dict has no buffers that are not persistent, which stay as they are if they have values.
        missing = {name: leaf for name, leaf in leaves.items() if name not in groups}
        kept = {
            name: fs.tree_map(torch.clone, leaf)
            for name, leaf in missing.items()
            if (not self.saved_as(name) or name in optional) and not tensor_of(leaf).is_meta
        }
        needed = {name: leaf for name, leaf in leaves.items() if name not in kept}
        remedy = "pass a tree of the same names; module= knows which are tied or not saved, cast=True changes dtypes"
        return kept | self.read(needed, groups, remedy)

    @staticmethod
    def with_leaves(tree: Any, leaves: Mapping[str, Any]) -> Any:
        """Return a tree with other leaves, by their names; None stays None."""
        flat = flatten(tree)
        pairs = zip(flat.names, flat.leaves, strict=True)
        return flat.unflatten([None if leaf is None else leaves[name] for name, leaf in pairs])
