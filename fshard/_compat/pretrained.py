"""What transformers keeps private of its models."""

import sys
from types import SimpleNamespace
from typing import Any

from torch import nn


def is_pretrained_model(module: nn.Module) -> bool:
    """Tell whether a module is a model of transformers.

    Checked on transformers 5.23.
    """
    # A library that nobody has imported has made no module.
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return base is not None and isinstance(module, base)


def not_ignored(module: Any, missing: set[str], unexpected: set[str]) -> tuple[set[str], set[str]]:
    """Leave out the names that a model of transformers lets files lack, and those that it lets them have besides.

    Checked on transformers 5.23.
    """
    info = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    module._adjust_missing_and_unexpected_keys(info)
    return info.missing_keys, info.unexpected_keys


def not_saved(module: Any) -> frozenset[str]:
    """The names that a model of transformers does not save.

    Checked on transformers 5.23.
    """
    return frozenset(module._keys_to_ignore_on_save or ())
