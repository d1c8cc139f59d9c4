"""with_init_weights: submodules draw their values by the `_init_weights` of the model that they lie in."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fshard.ext import _compat
from fshard.extend import describe, expect, named_modules, named_parameters

Initializer = Callable[[nn.Module], Any]


def with_init_weights(module: nn.Module) -> nn.Module:
    """Let submodules of a copy draw their values by the `_init_weights` of the innermost module that has one.

    `Model.init` then draws what `init_weights` of a model of transformers does, to the bit. Tied weights are drawn as
    if they were not tied, and the source's values are kept, as transformers does. What a constructor draws besides is
    not drawn.

    Args:
        module: The module, with values or on the meta device, which is not changed. Each `_init_weights` in it takes a
            submodule and sets its values.

    Returns:
        A copy of the same tensors, to be passed to `fs.functionalize`.

    Raises:
        ValueError: if `module` is no module.

    >>> import torch, fshard as fs
    >>> class Model(torch.nn.Sequential):
    ...     def _init_weights(self, submodule):
    ...         if isinstance(submodule, torch.nn.Linear):
    ...             torch.nn.init.constant_(submodule.weight, 0.5)
    >>> model = fs.functionalize(fs.with_init_weights(Model(torch.nn.Linear(2, 1, bias=False))))
    >>> model.init(fs.ddp(fs.init_mesh({"shard": -1}, device="cpu")), seed=0)["0.weight"].local
    tensor([[0.5000, 0.5000]])
    """
    known = isinstance(module, nn.Module)
    expect(known, "with_init_weights", "module to be a torch module", describe(module))
    same: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    made, initializers, tied = copy.deepcopy(module, same), dict[str, Initializer](), _tied(module)
    parts = dict(named_modules(made))
    for path, submodule in named_modules(module):
        initialize = _compat.initializer_of(submodule) or initializers.get(path.rpartition(".")[0])
        if initialize is not None:
            initializers[path] = initialize
            part = parts[path]
            part.__class__ = _drawing(type(part), initialize, tuple(tied.get(submodule, ())))
    return made


def _drawing(cls: type[nn.Module], initialize: Initializer, tied: tuple[str, ...]) -> type[nn.Module]:
    """Make a class whose instances draw their values by a model's method; an attribute would keep them in a cycle."""

    def reset_parameters(self: nn.Module) -> None:
        kept = {key: self.get_parameter(key) for key in tied}
        for key, parameter in kept.items():
            setattr(self, key, nn.Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad))
        try:
            initialize(self)
        finally:
            for key, parameter in kept.items():
                setattr(self, key, parameter)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**names, "reset_parameters": reset_parameters})


def _tied(module: nn.Module) -> dict[nn.Module, set[str]]:
    """List keys of weights that are the same as others by the submodules that hold them, as models around these say."""
    tied: dict[nn.Module, set[str]] = {}
    for model in module.modules():
        ties = getattr(model, "all_tied_weights_keys", {})
        if not ties:
            continue
        submodules = dict(named_modules(model, remove_duplicate=False))
        parameters = dict(named_parameters(model, remove_duplicate=False))
        for target, source in ties.items():
            if source in parameters and parameters.get(target) is parameters[source]:
                path, _, key = target.rpartition(".")
                tied.setdefault(submodules[path], set()).add(key)
    return tied
