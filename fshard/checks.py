"""Checks that every verb makes of its trees before it communicates."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fshard import _compat
from fshard.errors import Problem, leaf_error
from fshard.tree import Flat, is_sharded


def check_local(what: str, flat: Flat) -> None:
    """Refuse Sharded leaves whose local tensor is not what their spec says.

    Args:
        what: The verb that asks, for its error.
        flat: The tree.

    Raises:
        ValueError: with every wrong leaf's path, what it holds and what its spec needs.
    """
    problems = []
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if not is_sharded(leaf):
            continue
        local, needed = leaf.local, f"a local tensor of shape {leaf.spec.local_shape}"
        if not isinstance(local, torch.Tensor):
            problems.append(Problem(path, f"a local {type(local).__name__}", needed))
        elif tuple(local.shape) != leaf.spec.local_shape:
            problems.append(Problem(path, f"a local tensor of shape {tuple(local.shape)}", needed))
    if problems:
        raise leaf_error(
            f"{what}: shards do not match their specs", problems, "keep a leaf's shape when mapping over it"
        )


def same_structure(what: str, flat: Flat, needed: Flat) -> None:
    """Refuse a tree whose structure differs from the one needed.

    Args:
        what: The verb that asks and the tree's part in it, for its error.
        flat: The tree.
        needed: The tree it is held against.

    Raises:
        ValueError: with every path that only one of the two has.
    """
    if flat.treedef == needed.treedef:
        return
    here, there = dict.fromkeys(flat.paths), dict.fromkeys(needed.paths)
    problems = [Problem(path, "nothing", "a leaf") for path in there if path not in here]
    problems += [Problem(path, "a leaf", "nothing") for path in here if path not in there]
    problems = problems or [Problem("(root)", str(flat.treedef), str(needed.treedef))]
    raise leaf_error(f"{what}: trees differ in structure", problems, "pass trees made from the same parameters")


@contextmanager
def refuse_writes(what: str, paths: Sequence[str], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Find in-place writes to tensors that may share memory with the caller's state, by their version counters.

    Args:
        what: The verb that asks, for its error.
        paths: The tensors' paths.
        tensors: What must not be written to inside the context.

    Raises:
        ValueError: when the context ends, with the path of every tensor written to.
    """
    versions = [_compat.version(tensor) for tensor in tensors]
    yield
    problems = [
        Problem(path, f"{_compat.version(tensor) - version} in-place writes", "none")
        for path, tensor, version in zip(paths, tensors, versions, strict=True)
        if _compat.version(tensor) != version
    ]
    if problems:
        remedy = "compute a new tensor instead; the values written may already have reached the caller's state"
        raise leaf_error(f"{what}: parameters were written to", problems, remedy)
