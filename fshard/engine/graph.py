"""The autograd nodes by which gradients come to the engine, and checks of the graph that they are part of."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from fshard import _compat
from fshard.collectives import Variance, refuse_mixed, refuse_unsummed, walked
from fshard.engine.leaf import Leaf
from fshard.engine.use import Use
from fshard.errors import Problem, leaf_error, refuse

# An input of every node: it lets a backward reach nodes of ended calls, so that they raise.
ANY_CALL = torch.zeros((), requires_grad=True)

Grads = Sequence[torch.Tensor | None]

Receive = Callable[[Use, Grads], None]


class _Deliver(Function):
    """Hand full tensors to the function, and their gradients to the call that receives them."""

    @staticmethod
    def forward(ctx: Any, receive: Receive, use: Use, full: list[torch.Tensor], _: torch.Tensor) -> Any:
        ctx.receive, ctx.use = receive, use
        specs = [leaf.spec for leaf in use.trained]
        axes = dict.fromkeys([axis for spec in specs for axis in spec.roles])
        ctx.variance = Variance("fs.gather", tuple(axes), specs, True)
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in full])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.receive(ctx.use, grads)
        return None, None, None, None


@_compat.outside_selective_checkpoint()
def deliver(receive: Receive, use: Use) -> dict[int, torch.Tensor]:
    """Make one autograd node for the leaves of a use that take a gradient.

    Args:
        receive: Takes the gradients, when autograd has differentiated all that computed with the use.
        use: The use.

    Returns:
        What the function gets for each of them, by its number.
    """
    full, trained = use.wait(), [use.places[leaf] for leaf in use.trained]
    outputs = _Deliver.apply(receive, use, [full[i] for i in trained], ANY_CALL)
    return dict(zip(trained, outputs, strict=True))


def _use_of(node: Any) -> Use | None:
    """The use whose full tensors a node in autograd's graph delivers."""
    use = getattr(node, "use", None)
    return use if isinstance(use, Use) else None


def graph_outlived(paths: Sequence[str]) -> ValueError:
    """Make the error of a backward that reaches leaves of a call that has ended."""
    return leaf_error(
        "value_and_grad: the loss uses full tensors from an earlier call, which no longer receive gradients",
        [Problem(path, "a full tensor that an earlier call gathered", "one that this call gathers") for path in paths],
        "gather inside each call, or use full.detach() for a constant",
    )


def used_by(loss: torch.Tensor, own: Sequence[Leaf]) -> set[Leaf]:
    """Find the leaves that a loss depends on, where gradients come for derived leaves whether it uses them or not.

    Args:
        loss: The loss.
        own: The call's own leaves.

    Returns:
        The leaves.
    """
    ends = {get_gradient_edge(leaf.tensor).node: leaf for leaf in own}
    found: set[Leaf] = set()

    def behind(edge: tuple[Any, int]) -> list[tuple[Any, int]]:
        node, number = edge
        if (use := _use_of(node)) is None:
            return [] if node is None else list(node.next_functions)
        found.add(leaf := use.trained[number])
        return [(leaf.tensor.grad_fn, 0)] if leaf.derived else []

    found.update([ends[node] for node, _ in walked([(loss.grad_fn, 0)], behind) if node in ends])
    return found


def check_direct(what: str, outputs: Sequence[torch.Tensor], leaves: Sequence[Leaf], in_tree: Sequence[Leaf]) -> None:
    """Refuse maths on the shards of leaves whose gradients only a gather would sum.

    Args:
        what: The verb that runs, for the error.
        outputs: Where the graph of the loss begins.
        leaves: The leaves that autograd itself found gradients for.
        in_tree: Those and derived ones, if gradients are added up in one tree: its transpose runs once for each sum.

    Raises:
        ValueError: with the path of every such leaf.
    """
    problems = [Problem(leaf.path, "math on its shard", "a gather of the parameter itself") for leaf in in_tree]
    remedy = "compute with full tensors, after the gather"
    refuse(f'{what}: sums="tree" cannot add up gradients of math on shards', problems, remedy)
    named = [(leaf.path, leaf.spec, leaf.tensor) for leaf in leaves]
    refuse_unsummed(what, outputs, named)


def check_derived(what: str, derived: Sequence[Leaf], trained: Sequence[Leaf]) -> None:
    """Refuse leaves that the function computes in a way that would make gradients wrong.

    Args:
        what: The verb that runs, for the error.
        derived: The leaves that the function computed.
        trained: The call's own leaves that take a gradient.

    Raises:
        ValueError: as `refuse_mixed` does.
    """
    made = [(leaf.spec, get_gradient_edge(leaf.tensor)[:2]) for leaf in derived]
    refuse_mixed(what, made, [(leaf.path, leaf.spec, leaf.tensor) for leaf in trained])
