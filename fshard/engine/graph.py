"""The autograd nodes by which gradients come to the engine, and checks of the graph that they are part of."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.autograd import Function

from fshard import _compat
from fshard.collectives import linear_call, used_without_pvary
from fshard.engine.unit import Leaf, Use, by_transform
from fshard.errors import Problem, leaf_error
from fshard.transforms.compose import pair

# An input of every node, so that a backward reaches units of calls now over, whose graphs have none of its leaves.
ANY_CALL = torch.zeros((), requires_grad=True)


class Receiver(Protocol):
    """The call that takes gradients."""

    ended: bool

    def receive(
        self, use: Use, group: list[int], grads: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Take the gradients of some outputs; return those from which autograd goes on."""


class _Deliver(Function):
    """Hand full tensors to the function, and their gradients to the call."""

    @staticmethod
    def forward(ctx: Any, call: Receiver, use: Use, group: list[int], full: list[Any], *tensors: torch.Tensor) -> Any:
        ctx.call, ctx.use, ctx.group, ctx.others = call, use, group, len(tensors) - len(group)
        ctx.set_materialize_grads(False)
        # The last output keeps the node within reach of a rank that uses none of the others.
        anchor = [torch.zeros(())] if use.unit.leaves[group[0]].derived else []
        return (*(tensor.detach() for tensor in full), *anchor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if ctx.call.ended:
            paths = [ctx.use.unit.leaves[i].path for i, g in zip(ctx.group, grads, strict=False) if g is not None]
            raise leaf_error(
                "value_and_grad: the loss uses full tensors of a call now over, which take no gradient any more",
                [Problem(path, "a full tensor that an earlier call gathered", "this call's") for path in paths],
                "gather inside of each call, or keep full.detach() where a constant is intended",
            )
        received = ctx.call.receive(ctx.use, ctx.group, grads[: len(ctx.group)])
        return None, None, None, None, *received, *[None] * ctx.others


def _delivers(node: Any) -> bool:
    """Whether a node in autograd's graph delivers full tensors."""
    return isinstance(getattr(node, "use", None), Use)


@_compat.outside_selective_checkpoint()
def deliver(call: Receiver, use: Use, group: list[int]) -> None:
    """Make the outputs of a use for some of its leaves, with one autograd node for all of them."""
    full = use.wait()
    tensors = [use.unit.leaves[i].tensor for i in group]
    if any(tensor.requires_grad for tensor in tensors):
        tensors.append(ANY_CALL)
    outputs = _Deliver.apply(call, use, group, [full[i] for i in group], *tensors)
    use.outputs.update(zip(group, outputs, strict=False))
    if len(outputs) > len(group):
        use.anchor = outputs[-1]


def scattered(leaves: Sequence[Leaf], group: Sequence[int], grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Reduce gradients differentiably and at once, for code that differentiates inside the call."""
    full = dict(zip(group, grads, strict=True))
    out: dict[int, torch.Tensor] = {}
    for transform, numbers in by_transform(leaves, group).items():
        tensors = [leaves[i].zeros() if (grad := full[i]) is None else grad for i in numbers]
        transpose, run = pair(transform, [leaves[i].spec for i in numbers])
        out.update(zip(numbers, linear_call(run, transpose, tensors), strict=True))
    return [out[i].to(leaves[i].stored.dtype) for i in group]


def mark_used(loss: torch.Tensor, leaves: Sequence[Leaf]) -> None:
    """Mark the leaves that a loss depends on by maths on shards.

    Ranks run the backwards of leaves that were computed from others whether they use these or not, so that the
    gradients which autograd returns do not tell.

    Args:
        loss: This rank's loss, after its backward.
        leaves: The call's own leaves.
    """
    ends = {torch.autograd.graph.get_gradient_edge(leaf.tensor).node: leaf for leaf in leaves}
    waiting: list[Any] = [loss.grad_fn]
    seen = {loss.grad_fn, None}
    while waiting:
        node = waiting.pop()
        if node in ends:
            ends[node].used = True
        edges = [behind for behind, _ in getattr(node, "next_functions", ())]
        if _delivers(node):
            # One node delivers several leaves; a leaf of the call's own was marked when its gradient arrived.
            members = [node.use.unit.leaves[i] for i in node.group]
            edges = [edge for edge, leaf in zip(edges, members, strict=False) if leaf.derived and leaf.used]
        new = [edge for edge in edges if edge not in seen]
        seen.update(new)
        waiting.extend(new)


def refuse_unsummed(
    what: str, outputs: Sequence[torch.Tensor], leaves: Sequence[Leaf], grads: Sequence[torch.Tensor | None]
) -> None:
    """Refuse gradients of leaves that ranks hold whole which came past `gather` and `pvary`, where they are summed.

    Args:
        what: The verb that runs, for the error.
        outputs: Where the graph of the loss begins.
        leaves: The leaves.
        grads: The gradients that autograd itself found for them.

    Raises:
        ValueError: with the path of every such leaf.
    """
    direct = []
    for leaf, grad in zip(leaves, grads, strict=True):
        axes = leaf.spec.transform.axes if leaf.spec.transform else ()
        agreeing = [axis for axis in axes if axis.size > 1 and leaf.spec.dim_of(axis) is None]
        if grad is not None and agreeing:
            direct.append((leaf, agreeing))
    if not direct:
        return
    found = used_without_pvary(outputs, [(leaf.tensor, axes) for leaf, axes in direct], _delivers)
    problems = [
        Problem(
            leaf.path, f"maths on a leaf that ranks of {[axis.name for axis in axes]} hold alike", "gather or pvary"
        )
        for (leaf, axes), wrong in zip(direct, found, strict=True)
        if wrong
    ]
    remedy = "gather these leaves, or hand them to each rank's own maths by fs.pvary, so that gradients are summed"
    if problems:
        raise leaf_error(f"{what}: gradients would stay unsummed", problems, remedy)


def refuse_unhooked(what: str, leaves: Sequence[Leaf]) -> None:
    """Refuse gradients that hooks on parameters would not see, or see in parts.

    Args:
        what: The verb that runs, for the error.
        leaves: Leaves whose gradients are no part of the full one that is collected in a backward.

    Raises:
        ValueError: with the path of every one that has hooks.
    """
    found = "maths on its shards, or a derivative by it inside the loss"
    problems = [Problem(leaf.path, found, "uses of the gathered leaf alone") for leaf in leaves if leaf.hooks]
    if problems:
        remedy = "gather these leaves first and differentiate outside, or remove the hooks before functionalize"
        raise leaf_error(f"{what}: gradients that hooks on parameters would not see", problems, remedy)
