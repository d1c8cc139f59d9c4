"""The types of hyperparameters, and which leaves are trained: shared by the optimizers of this room."""

from collections.abc import Callable
from typing import Any

import torch

import fshard as fs

Number = float | torch.Tensor
Rate = Number | Callable[[torch.Tensor], Number]


def is_trained(leaf: Any) -> bool:
    """Whether a leaf takes gradients."""
    is_frozen = isinstance(leaf, fs.Sharded) and leaf.spec.frozen
    return leaf is not None and not is_frozen
