"""Kinds of arguments that optimizers of this room share."""

from collections.abc import Callable, Sequence

import torch

Number = float | torch.Tensor
Mask = str | Sequence[str] | Callable[..., bool]
Rate = Number | Callable[[torch.Tensor], Number]
