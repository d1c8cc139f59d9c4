"""with_init_weights: submodules draw their values by the `_init_weights` of the model that they lie in."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fshard.extend import describe, expect, named_modules, named_parameters

Initializer = Callable[[nn.Module], Any]


def with_init_weights(module: nn.Module) -> nn.Module:
    """Copy a module so that each submodule draws its values by the `_init_weights` of the innermost model around it.

    `Model.init` then draws the values that `init_weights` of a model of transformers draws, to the bit. Tied weights
    are drawn as if they were not tied, and keep the values of their source, as in transformers. Values that a
    constructor draws are not drawn again.

    Args:
        module: The module, with values or on the meta device. It is not changed. Each `_init_weights` in it takes a
            submodule and sets its values.

    Returns:
        A copy that has the same tensors, for `fs.functionalize`.

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
    is_module = isinstance(module, nn.Module)
    expect(is_module, "with_init_weights", "module to be a torch module", describe(module))
    # `deepcopy` takes these for copies of themselves.
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    copied = copy.deepcopy(module, shared)
    tied_keys = _find_tied_keys(module)
    copies = dict(named_modules(copied))
    initializers: dict[str, Initializer] = {}
    for path, submodule in named_modules(module):
        parent = path.rpartition(".")[0]
        initialize = getattr(submodule, "_init_weights", None) or initializers.get(parent)
        if initialize:
            initializers[path] = initialize
            part = copies[path]
            part.__class__ = _make_drawing_class(type(part), initialize, tied_keys.get(submodule, set()))
    return copied


def _make_drawing_class(cls: type[nn.Module], initialize: Initializer, tied_keys: set[str]) -> type[nn.Module]:
    """Make a class whose instances draw their values by a model's method.

    A method that is an attribute of the instance would refer to it, so that the garbage collector alone could free it.
    """

    def reset_parameters(self: nn.Module) -> None:
        kept = {key: self.get_parameter(key) for key in tied_keys}
        for key, parameter in kept.items():
            drawn = torch.empty_like(parameter)
            setattr(self, key, nn.Parameter(drawn, requires_grad=parameter.requires_grad))
        try:
            initialize(self)
        finally:
            for key, parameter in kept.items():
                setattr(self, key, parameter)

    attributes = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "reset_parameters": reset_parameters,
    }
    return type(cls.__name__, (cls,), attributes)


def _find_tied_keys(module: nn.Module) -> dict[nn.Module, set[str]]:
    """List the keys of tied weights by the submodules that hold them, as the models around these declare."""
    tied_keys: dict[nn.Module, set[str]] = {}
    for model in module.modules():
        ties = getattr(model, "all_tied_weights_keys", {})
        if not ties:
            continue
        submodules = dict(named_modules(model, remove_duplicate=False))
        parameters = dict(named_parameters(model, remove_duplicate=False))
        for target, source in ties.items():
            if source in parameters and parameters.get(target) is parameters[source]:
                path, _, key = target.rpartition(".")
                tied_keys.setdefault(submodules[path], set()).add(key)
    return tied_keys
