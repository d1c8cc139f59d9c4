"""Private APIs by which initialisers run on tensors without values, each with the versions it was checked on."""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def fake_maker(symbols: bool = False) -> Callable[..., torch.Tensor]:
    """Return a function that makes fake tensors of the shapes and dtypes of others, without values.

    They are on the CPU, or on the device that it is given as a second argument.

    Operators on them and on others give such tensors again. Asking for a value raises, or gives a symbol of it, as in
    traces by make_fx, for which torch.optim asks for its counts. Checked on 2.13.
    """
    # Imported late, because it takes long.
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    environment = ShapeEnv() if symbols else None
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment, static_shapes=True)

    def make(tensor: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
        with mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    return make


def is_fake(value: Any) -> bool:
    """Whether a tensor holds no values although it says so. Checked on 2.13."""
    return isinstance(value, FakeTensor)
