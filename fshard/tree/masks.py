"""Masks: choose leaves, units or modules by their names."""

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

Mask = str | tuple[str, ...] | Callable[[str], bool]


def is_mask(value: Any) -> bool:
    """Tell whether a value is a glob pattern, several, or a function."""
    patterns = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    return callable(value) or (bool(patterns) and all(isinstance(pattern, str) for pattern in patterns))


def matches(mask: Mask, name: str) -> bool:
    """Tell whether a mask matches a name: one of its glob patterns does, or its function returns True."""
    if callable(mask):
        return bool(mask(name))
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in ((mask,) if isinstance(mask, str) else mask))
