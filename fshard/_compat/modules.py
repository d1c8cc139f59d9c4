"""Private APIs of modules and optimizers, each with the versions it was checked on."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.optim.optimizer import _get_capturable_supported_devices

# The name of the module inside what checkpoint_wrapper of torch.distributed makes. Checked on 2.13.
_WRAPPED = "_checkpoint_wrapped_module"


def set_flat_weights(module: torch.nn.Module) -> None:
    """Let a recurrent module list the weights that its forward will read. Checked on 2.13."""
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]  # type: ignore[union-attr, assignment]


def forget_flat_weights(module: torch.nn.Module) -> None:
    """Let a recurrent module drop the list of weights that its forward has read. Checked on 2.13."""
    module._flat_weights = []  # type: ignore[assignment]


def parameters_of(module: torch.nn.Module) -> dict[str, Any]:
    """The dict in which a module looks up parameters of its own. Checked on 2.13."""
    return module.__dict__["_parameters"]


def parametrization_cache() -> object | None:
    """The dict that torch caches parametrized tensors in: another in each `cached()`, None outside. Checked on 2.13."""
    return parametrize._cache if parametrize._cache_enabled else None


def read_parametrized_by(module: torch.nn.Module, read: Callable[..., torch.Tensor]) -> None:
    """Let a function compute what a module's parametrized tensors are when they are read. Checked on 2.13.

    Args:
        module: The module, a copy of another one. torch's own cache has one entry for a module and all of its copies.
        read: Called with the module and, as `name`, that of the tensor.
    """
    if not parametrize.is_parametrized(module):
        return
    cls = type(module)
    members = {}
    for name in module.parametrizations:  # type: ignore[union-attr]
        members[name] = property(partial(read, name=name), getattr(cls, name).fset)
    module.__class__ = make_subclass(cls, members)


def make_subclass(cls: type, members: Mapping[str, Any]) -> type:
    """Make a subclass of a module's class that goes by its name, with other members."""
    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **members}
    return type(cls.__name__, (cls,), members)


def compute_parametrized(module: torch.nn.Module, name: str) -> torch.Tensor:
    """Compute a parametrized tensor of a module, past torch's cache. Checked on 2.13."""
    return module.parametrizations[name]()  # type: ignore[index, operator]


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module is what torch.compile made of another. Checked on 2.13."""
    # The compiler is slow to import, and where nobody has, nothing is compiled.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def name_without_wrappers(name: str) -> str:
    """Leave out of a tensor's or a submodule's name what torch's checkpoint_wrapper adds, as its state_dict does.

    Checked on 2.13. torch.compile adds `_orig_mod`, which state_dict keeps.
    """
    if _WRAPPED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != _WRAPPED)


def named_parameters(
    module: torch.nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """List a module's parameters with their names in its state dict, without those of wrappers. Checked on 2.13."""
    for name, parameter in module.named_parameters(remove_duplicate=remove_duplicate):
        yield name_without_wrappers(name), parameter


def named_buffers(module: torch.nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """List a module's buffers with their names in its state dict, without those of wrappers. Checked on 2.13."""
    for name, buffer in module.named_buffers(remove_duplicate=remove_duplicate):
        yield name_without_wrappers(name), buffer


def named_modules(module: torch.nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.nn.Module]]:
    """List a module's submodules without checkpoint wrappers, whose names those inside them get. Checked on 2.13."""
    for name, submodule in module.named_modules(remove_duplicate=remove_duplicate):
        if _WRAPPED not in submodule._modules:
            yield name_without_wrappers(name), submodule


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Find the module inside of wrappers, which hand out its attributes as their own. Checked on 2.13."""
    while True:
        inner = module._modules.get("_orig_mod" if is_compiled(module) else _WRAPPED)
        if inner is None:
            return module
        module = inner


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that torch.optim classes make in their first step; none where a class has no such method.

    Parameters whose grad is None get none. Checked on 2.13.
    """
    init_group = getattr(optimizer, "_init_group", None)
    if init_group is None:
        return
    (group,) = optimizer.param_groups
    lists = len(inspect.signature(init_group).parameters) - 1
    init_group(group, *([] for _ in range(lists)))


def can_capture(device: torch.device, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether torch's optimizers with `capturable` step tensors by counts on a device. Checked on 2.13."""
    is_supported = device.type in _get_capturable_supported_devices(supports_xla=False)
    return is_supported and all(tensor.device == device for tensor in tensors)
