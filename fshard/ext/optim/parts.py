"""Kinds of hyperparameters, and the question which leaves are trained, that optimizers of this room share."""

from collections.abc import Callable
from typing import Any

import torch

import fshard as fs

Number = float | torch.Tensor
Rate = Number | Callable[[torch.Tensor], Number]


def is_trained(leaf: Any) -> bool:
    """Whether a leaf takes gradients."""
    return leaf is not None and not (isinstance(leaf, fs.Sharded) and leaf.spec.frozen)
