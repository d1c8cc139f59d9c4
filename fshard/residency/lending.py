"""Lending: leaves that lead back to a call, and what may outlive it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fshard import comm
from fshard.errors import Problem, leaf_error
from fshard.residency.call import Call
from fshard.tree import Axis, Flat, Sharded, Tree, flatten, is_sharded, unflatten


def call_of(what: str, flat: Flat) -> Call | None:
    """Find the running call that lent the leaves of a tree.

    Args:
        what: The verb that asks, for its error.
        flat: The tree.

    Returns:
        The call; None where all leaves are the caller's own.

    Raises:
        ValueError: if a leaf outlived the call that lent it.
    """
    found = None
    problems = []
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if is_sharded(leaf) and leaf.spec.call is not None:
            call = leaf.spec.call()
            if call is None or call.ended:
                problems.append(Problem(path, "a leaf that value_and_grad lent to a call now over", "the caller's own"))
            found = call or found
    if problems:
        remedy = "gather the parameters that you passed, or those that the running call lends"
        raise leaf_error(f"{what}: leaves of an ended call", problems, remedy)
    return found


def settled(tree: Tree) -> Tree:
    """Make a tree that may outlive a call: detached, and with specs that do not lead back."""
    flat = flatten(tree)
    leaves = list(flat.leaves)
    for i, leaf in enumerate(leaves):
        if is_sharded(leaf):
            leaves[i] = Sharded(leaf.local.detach(), leaf.spec.lent_by(None))
        elif isinstance(leaf, torch.Tensor):
            leaves[i] = leaf.detach()
    return unflatten(flat.treedef, leaves)


@contextmanager
def forward_only(what: str, flat: Flat, axes: Sequence[Axis]) -> Iterator[Call]:
    """Make a call without a backward, for evaluation: units are gathered just in time and dropped.

    Args:
        what: The verb that runs, for errors.
        flat: The parameters.
        axes: The mesh axes that they live on.

    Yields:
        The call, which ends with the context.
    """
    call = Call(what, flat, axes, comm.facts_of(what, flat), differentiable=False)
    try:
        yield call
    finally:
        call.end()
