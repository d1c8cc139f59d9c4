"""check_pure: a step changes nothing that it is given."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from fshard.checks import GIVEN_UP, kind
from fshard.errors import Problem, leaf_error
from fshard.tree import flatten, is_sharded


def check_pure(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a step and assert that it has changed no bit of its arguments.

    A write in place that autograd counts is refused by `value_and_grad` and `apply` themselves. This check also sees
    the others, through `tensor.data`, `tensor.numpy()` or a custom kernel, by a digest of every tensor before the step
    and after it.

    Args:
        step: The function, such as a train step.
        *args: Its arguments: pytrees, whose tensors and Sharded leaves are compared.
        **kwargs: Those by keyword, likewise.

    Returns:
        What the step returned. Tensors that were donated to it are not compared.

    Raises:
        AssertionError: with the path of every tensor that changed.

    >>> check_pure(lambda tree: tree["w"] + 1, {"w": torch.ones(2)})
    tensor([2., 2.])
    """
    if not callable(step):
        raise ValueError(f"check_pure: expected step to be a function, got {kind(step)}")
    trees = [(f"argument {i}", arg) for i, arg in enumerate(args)]
    flats = [(name, flatten(tree)) for name, tree in (*trees, *kwargs.items())]
    tensors = [
        (f"{name}{path}", tensor)
        for name, flat in flats
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
        if isinstance(tensor := leaf.local if is_sharded(leaf) else leaf, torch.Tensor)
    ]
    before = [_digest(tensor) for _, tensor in tensors]
    out = step(*args, **kwargs)
    problems = [
        Problem(path, "other values after the step", "those before it")
        for (path, tensor), digest in zip(tensors, before, strict=True)
        if GIVEN_UP not in tensor.__dict__ and _digest(tensor) != digest
    ]
    if problems:
        remedy = "find the write in place to these tensors or to a view of them, and compute a new tensor instead"
        raise AssertionError(leaf_error("check_pure: the step changed its arguments", problems, remedy).args[0])
    return out


def _digest(tensor: torch.Tensor) -> bytes:
    """A digest of a tensor's shape, dtype and bits."""
    values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    header = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    return hashlib.blake2b(header + values.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
