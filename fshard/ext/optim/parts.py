"""Kinds of hyperparameters, and the check of an order of sums, that optimizers of this room share."""

from collections.abc import Callable
from typing import Any

import torch

import fshard as fs
from fshard.extend import expect

Number = float | torch.Tensor
Rate = Number | Callable[[torch.Tensor], Number]


def check_sums(what: str, sums: Any) -> None:
    """Refuse an unknown order of sums."""
    expect(sums in (None, "tree"), what, 'sums to be "tree" or None', repr(sums))


def is_trained(leaf: Any) -> bool:
    """Whether a leaf takes gradients."""
    return leaf is not None and not (isinstance(leaf, fs.Sharded) and leaf.spec.frozen)
