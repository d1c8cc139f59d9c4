"""The autograd nodes by which gradients come to the engine, and checks of the graph that they are part of."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function

from fshard import _compat
from fshard.collectives import linear_call, refuse_unsummed, walked
from fshard.engine.unit import Leaf, Use, transform_of
from fshard.errors import Problem, leaf_error
from fshard.transforms.compose import pair
from fshard.tree import grouped

# An input of every node: it lets a backward reach nodes of ended calls, so that they raise.
ANY_CALL = torch.zeros((), requires_grad=True)


Grads = Sequence[torch.Tensor | None]

# Takes the gradients of a use's outputs for some of its leaves; returns those from which autograd goes on.
Receive = Callable[[Use, Sequence[int], Grads], Grads]


class _Deliver(Function):
    """Hand full tensors to the function, and their gradients to the call that receives them."""

    @staticmethod
    def forward(
        ctx: Any, receive: Receive, use: Use, group: Sequence[int], full: list[Any], *tensors: torch.Tensor
    ) -> Any:
        ctx.receive, ctx.use, ctx.group, ctx.others = receive, use, group, len(tensors) - len(group)
        ctx.set_materialize_grads(False)
        # The last output lets the backward reach the node on a rank that uses none of the others.
        anchor = [torch.zeros(())] if use.unit.leaves[group[0]].derived else []
        return (*(tensor.detach() for tensor in full), *anchor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        received = ctx.receive(ctx.use, ctx.group, grads[: len(ctx.group)])
        return None, None, None, None, *received, *[None] * ctx.others


def _delivers(node: Any) -> bool:
    """Tell whether a node in autograd's graph delivers full tensors."""
    return isinstance(getattr(node, "use", None), Use)


def graph_outlived_call(paths: Sequence[str]) -> ValueError:
    """Make the error of a backward that reaches leaves of a call that has ended."""
    return leaf_error(
        "value_and_grad: the loss uses full tensors of a call now over, which take no gradient any more",
        [Problem(path, "a full tensor that an earlier call gathered", "this call's") for path in paths],
        "gather inside of each call, or keep full.detach() where a constant is intended",
    )


@_compat.outside_selective_checkpoint()
def deliver(receive: Receive, use: Use, group: Sequence[int]) -> None:
    """Make the outputs of a use for some of its leaves, with one autograd node for all of them."""
    full = use.wait()
    tensors = [use.unit.leaves[i].tensor for i in group]
    if any(tensor.requires_grad for tensor in tensors):
        tensors.append(ANY_CALL)
    outputs = _Deliver.apply(receive, use, group, [full[i] for i in group], *tensors)
    use.outputs.update(zip(group, outputs, strict=False))
    if len(outputs) > len(group):
        use.anchor = outputs[-1]


def scattered(leaves: Sequence[Leaf], grads: Grads) -> list[torch.Tensor]:
    """Reduce gradients differentiably and at once, for code that differentiates inside the call."""
    out = [leaf.zeros() if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]
    for transform, group in grouped(leaves, transform_of).items():
        transpose, run = pair(transform, [leaves[i].spec for i in group])
        for i, reduced in zip(group, linear_call(run, transpose, [out[i] for i in group]), strict=True):
            out[i] = reduced.to(leaves[i].stored.dtype)
    return out


def mark_used(loss: torch.Tensor, leaves: Sequence[Leaf]) -> None:
    """Mark the leaves that a loss depends on by maths on shards.

    A non-None gradient does not prove use, because every rank runs the backward of derived leaves.

    Args:
        loss: This rank's loss, after its backward.
        leaves: The call's own leaves.
    """
    ends = {torch.autograd.graph.get_gradient_edge(leaf.tensor).node: leaf for leaf in leaves}

    def behind(node: Any) -> list[Any]:
        edges = [edge for edge, _ in getattr(node, "next_functions", ())]
        if _delivers(node):
            # One node delivers several leaves; a leaf of the call's own was marked when its gradient arrived.
            members = [node.use.unit.leaves[i] for i in node.group]
            edges = [edge for edge, leaf in zip(edges, members, strict=False) if leaf.derived and leaf.used]
        return [edge for edge in edges if edge is not None]

    for node in walked([] if loss.grad_fn is None else [loss.grad_fn], behind):
        if node in ends:
            ends[node].used = True


def check_graph(what: str, outputs: Sequence[torch.Tensor], leaves: Sequence[Leaf], grads: Grads) -> None:
    """Refuse maths on the shards of leaves whose gradients only a gather would sum.

    Args:
        what: The verb that runs, for the error.
        outputs: Where the graph of the loss begins.
        leaves: The leaves.
        grads: The gradients that autograd itself found for them.

    Raises:
        ValueError: with the path of every such leaf.
    """
    direct = [leaf for leaf, grad in zip(leaves, grads, strict=True) if grad is not None]
    refuse_unsummed(what, outputs, [(leaf.path, leaf.spec, leaf.tensor) for leaf in direct], _delivers)
