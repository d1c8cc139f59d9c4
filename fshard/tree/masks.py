"""Masks: choose leaves by patterns of their names or by a function of (name, leaf); units by their names."""

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fshard.tree.nodes import tensor_of

Mask = str | Sequence[str] | Callable[..., bool]

# The masks of leaves, as errors say them.
MASK = "a glob pattern of leaves' names, several, or a function of (name, leaf)"


def is_mask(value: Any) -> bool:
    """Tell whether a value is a glob pattern, several, or a function."""
    patterns = value if isinstance(value, list | tuple) else (value,)
    return callable(value) or (bool(patterns) and all(isinstance(pattern, str) for pattern in patterns))


def matches(mask: Mask, name: str, *leaf: Any) -> bool:
    """Tell whether a mask matches a leaf, or the name of a unit.

    Args:
        mask: The mask.
        name: The name.
        *leaf: The leaf. A function gets a tensor of its full shape and its dtype, on the meta device, after the name.
            It never matches a leaf that is not a tensor.

    Returns:
        Whether one of the glob patterns matches the name, or the function returns True.
    """
    if not callable(mask):
        patterns = (mask,) if isinstance(mask, str) else mask
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    described = []
    for value in leaf:
        if not isinstance(tensor_of(value), torch.Tensor):
            return False
        described.append(torch.empty(value.shape, dtype=value.dtype, device="meta"))
    return bool(mask(name, *described))
