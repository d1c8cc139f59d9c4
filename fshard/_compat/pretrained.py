"""What transformers keeps private of its models."""

import sys
from collections.abc import Callable
from typing import Any

from torch import nn


def is_pretrained_model(module: nn.Module) -> bool:
    """Tell whether a module is a model of transformers.

    Checked on transformers 5.23.
    """
    # A library that nobody has imported has made no module.
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return base is not None and isinstance(module, base)


def initializer_of(module: nn.Module, path: str) -> Callable[[nn.Module], Any] | None:
    """Find what initialises a submodule, or a copy of it: the innermost model of transformers that it is or lies in.

    Checked on transformers 5.23.
    """
    found = module.get_submodule(path)
    if path and not is_pretrained_model(found):
        return initializer_of(module, path.rpartition(".")[0])
    return found._init_weights if is_pretrained_model(found) else None  # type: ignore[return-value]


def untied(module: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Give tied parameters of models of transformers memory of their own, as these draw them, to keep one of the two.

    Checked on transformers 5.23.

    Returns:
        The parameters put in the place of others.
    """
    made = {}
    for model in filter(is_pretrained_model, module.modules()):
        found = dict(model.named_parameters(remove_duplicate=False))
        for target, source in getattr(model, "all_tied_weights_keys", {}).items():
            if source in found and found.get(target) is found[source]:
                holder, _, key = target.rpartition(".")
                own = nn.Parameter(found[source].clone(), requires_grad=found[source].requires_grad)
                setattr(model.get_submodule(holder), key, own)
                made[own] = found[source]
    return made
