"""The operators of torch that a program calls, in their order."""

from typing import Any

import torch
from torch.utils import _pytree as pytree

from fshard import _compat


class Operators(_compat.DispatchMode):
    """Notes every operator that is computed, not one that a checkpoint stops at, and those that make new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.allocating: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(operator))
        result = operator(*args, **(kwargs or {}))
        if not memory_of(result) <= memory_of((args, kwargs)):
            self.allocating.append(str(operator))
        return result


def memory_of(tree: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
