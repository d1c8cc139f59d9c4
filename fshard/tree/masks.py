"""Masks: choose leaves by their names, their shapes or a tree of bools; units or modules by their names."""

import fnmatch
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fshard.tree.nodes import flatten, is_sharded, names_of, tensor_of

Mask = str | tuple[str, ...] | Callable[..., bool]

# The masks of leaves, as errors say them.
MASK = "a glob pattern of leaves' names, several, a function of the name or of (name, leaf), or a tree of bools"


@dataclass(frozen=True)
class TreeMask:
    """The mask of a tree of bools, each for the leaf of its name or for all leaves below it; equal ones compare equal.

    Attributes:
        entries: The bools with their names.
    """

    entries: tuple[tuple[str, bool], ...]
    _table: dict[str, bool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_table", dict(self.entries))

    def __call__(self, name: str) -> bool:
        """Return the bool of a leaf; False where there is none."""
        entry = self.entry_of(name)
        return entry is not None and self._table[entry]

    def entry_of(self, name: str) -> str | None:
        """Return the name of the bool for a leaf; None where there is none."""
        keys = name.split(".")
        uppers = (".".join(keys[:end]) for end in range(len(keys), 0, -1))
        return next((upper for upper in uppers if upper in self._table), None)

    def misfits(self, names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
        """List the leaves without a bool and the bools without a leaf, each with what was expected and got."""
        found = [(name, self.entry_of(name)) for name in names]
        yield from ((name, "a bool", "none") for name, entry in found if entry is None)
        used = {entry for _, entry in found}
        yield from ((entry, "a leaf", "none") for entry, _ in self.entries if entry not in used)


def as_mask(value: Any) -> Any:
    """Turn a tree of bools into a mask; other values stay as they are, also those that are no mask."""
    if isinstance(value, bool | str) or callable(value):
        return value
    flat = flatten(value)
    # A tree that fs.tree_map has made of parameters has each bool in a Sharded leaf.
    leaves = [tensor_of(leaf) for leaf in flat.leaves]
    if not any(isinstance(leaf, bool) for leaf in leaves) or any(
        type(leaf) not in (bool, type(None)) for leaf in leaves
    ):
        return value
    return TreeMask(tuple(zip(names_of(flat.treedef), map(bool, leaves), strict=True)))


def is_mask(value: Any) -> bool:
    """Tell whether a value is a glob pattern, several, or a function."""
    patterns = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    return callable(value) or (bool(patterns) and all(isinstance(pattern, str) for pattern in patterns))


def reads_leaves(mask: Mask) -> bool:
    """Tell whether a mask is a function of a name and a leaf."""
    if not callable(mask) or isinstance(mask, TreeMask):
        return False
    try:
        parameters = inspect.signature(mask).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return sum(each.kind in positional and each.default is each.empty for each in parameters) == 2


def matches(mask: Mask, name: str, leaf: Any = None) -> bool:
    """Tell whether a mask matches a leaf.

    Args:
        mask: The mask.
        name: The leaf's name.
        leaf: The leaf: a tensor or Sharded. A function of a name and a leaf gets a tensor of its full shape and its
            dtype, on the meta device; it matches nothing else.

    Returns:
        Whether one of its glob patterns matches the name, or its function returns True.
    """
    if callable(mask):
        if not reads_leaves(mask):
            return bool(mask(name))
        tensor = tensor_of(leaf)
        shape = leaf.spec.shape if is_sharded(leaf) else getattr(leaf, "shape", None)
        if shape is None or not isinstance(getattr(tensor, "dtype", None), torch.dtype):
            return False
        return bool(mask(name, torch.empty(tuple(shape), dtype=tensor.dtype, device="meta")))
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in ((mask,) if isinstance(mask, str) else mask))
