"""Private APIs of modules and optimizers, each with the versions it was checked on."""

import inspect
import sys
from typing import Any

import torch


def set_flat_weights(module: torch.nn.Module) -> None:
    """Let a recurrent module list the weights that its forward will read. Checked on 2.13."""
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]  # type: ignore[union-attr, assignment]


def forget_flat_weights(module: torch.nn.Module) -> None:
    """Let a recurrent module drop the list of weights that its forward has read. Checked on 2.13."""
    module._flat_weights = []  # type: ignore[assignment]


def parameters_of(module: torch.nn.Module) -> dict[str, Any]:
    """The dict in which a module looks up parameters of its own. Checked on 2.13."""
    return module.__dict__["_parameters"]


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module is what torch.compile made of another. Checked on 2.13."""
    # The compiler is slow to import, and where nobody has, nothing is compiled.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> bool:
    """Make the state that torch.optim classes make in their first step; False where a class has no such method.

    Parameters whose grad is None get none. Checked on 2.13.
    """
    init_group = getattr(optimizer, "_init_group", None)
    if init_group is None:
        return False
    (group,) = optimizer.param_groups
    lists = len(inspect.signature(init_group).parameters) - 1
    init_group(group, *([] for _ in range(lists)))
    return True
