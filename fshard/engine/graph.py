"""The autograd nodes by which gradients come to the engine, and checks of the graph that they are part of.

Only this file of the engine looks at nodes of autograd's graph, each time with a sentence that says why.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from fshard import _compat
from fshard.collectives import Variance, refuse_mixed, refuse_unsummed, walk_graph
from fshard.engine.gathered_unit import GatheredUnit
from fshard.engine.leaf import Leaf
from fshard.reduction_order import order_of

# Every delivering node has this input. Because a backward asks for its gradient, it also runs nodes of calls that have
# ended, which then raise instead of being skipped.
ANY_CALL = torch.zeros((), requires_grad=True)

Grads = Sequence[torch.Tensor | None]

Receive = Callable[[GatheredUnit, Grads], None]


class _Deliver(Function):
    """Deliver full tensors to the function, and their gradients to the call that receives them."""

    @staticmethod
    def forward(ctx: Any, receive: Receive, gathered: GatheredUnit, _: torch.Tensor) -> Any:
        ctx.receive = receive
        ctx.gathered = gathered
        specs = [leaf.spec for leaf in gathered.trained]
        # Thousands of leaves share their specs.
        distinct = {id(spec): spec for spec in specs}.values()
        axes = dict.fromkeys([axis for spec in distinct for axis in spec.roles])
        # Checks of values that vary between ranks read this from the node.
        ctx.variance = Variance("fs.gather", tuple(axes), specs, result=True)
        ctx.set_materialize_grads(False)
        full = gathered.wait()
        return tuple([full[leaf].detach() for leaf in gathered.trained])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.receive(ctx.gathered, grads)
        return None, None, None


@_compat.outside_selective_checkpoint
def deliver(receive: Receive, gathered: GatheredUnit) -> dict[Leaf, torch.Tensor]:
    """Make one autograd node for the leaves of a unit that take a gradient.

    Args:
        receive: Takes the gradients when autograd has differentiated everything that computed with the unit.
        gathered: The gathered unit.

    Returns:
        The tensor that the function receives for each of these leaves.
    """
    outputs = _Deliver.apply(receive, gathered, ANY_CALL)
    return dict(zip(gathered.trained, outputs, strict=True))


def find_used_leaves(loss: torch.Tensor, trained: Sequence[Leaf]) -> set[Leaf]:
    """Find the leaves that a loss depends on.

    This walks through the graph, because gradients do not tell: a derived leaf passes gradients on to the leaves that
    it was computed from, even if this rank's loss does not use it.

    Args:
        loss: The loss.
        trained: The leaves that the call bound and that take a gradient.

    Returns:
        The bound and derived leaves that the loss depends on.
    """
    leaf_of_node = {get_gradient_edge(leaf.tensor).node: leaf for leaf in trained}
    used: set[Leaf] = set()

    def list_edges_behind(edge: tuple[Any, int]) -> list[tuple[Any, int]]:
        node, output_number = edge
        if node is None:
            return []
        # A node of autograd has the attributes that its forward set on `ctx`; nodes of other operators may have any.
        gathered = getattr(node, "gathered", None)
        if not isinstance(gathered, GatheredUnit):
            return list(node.next_functions)
        # A node that delivers has no edges to the shards that it gathered. Go on behind a derived leaf at its own node.
        leaf = gathered.trained[output_number]
        used.add(leaf)
        return [get_gradient_edge(leaf.tensor)[:2]] if leaf.derived else []

    for node, _ in walk_graph([(loss.grad_fn, loss.output_nr)], list_edges_behind):
        if node in leaf_of_node:
            used.add(leaf_of_node[node])
    return used


def check_direct_gradients(
    api_name: str,
    outputs: Sequence[torch.Tensor],
    bound: Sequence[Leaf],
    direct: Sequence[Leaf],
    derived: Sequence[Leaf],
) -> None:
    """Refuse math on the shards of leaves whose gradients only a gather would sum.

    Args:
        api_name: The public function that runs, for the error.
        outputs: Where the graph of the loss begins.
        bound: The leaves that the call bound.
        direct: Those that autograd itself found gradients for.
        derived: The leaves that the function computed. The gradients that these pass on do not come through a gather of
            the parameter either.

    Raises:
        ValueError: with the path of every such leaf.
    """
    order = order_of(bound[0].spec)
    order.refuse_math_on_shards(api_name, [leaf.path for leaf in (*direct, *derived)])
    named = [(leaf.path, leaf.spec, leaf.tensor) for leaf in direct]
    refuse_unsummed(api_name, outputs, named)


def check_derived_leaves(api_name: str, derived: Sequence[Leaf], trained: Sequence[Leaf]) -> None:
    """Refuse leaves that the function computes in a way that would make gradients wrong.

    Args:
        api_name: The public function that runs, for the error.
        derived: The leaves that the function computed.
        trained: The leaves that the call bound and that take a gradient.

    Raises:
        ValueError: as `refuse_mixed` does.
    """
    # The check starts at the nodes that computed the leaves.
    computed = [(leaf.spec, get_gradient_edge(leaf.tensor)[:2]) for leaf in derived]
    refuse_mixed(api_name, computed, [(leaf.path, leaf.spec, leaf.tensor) for leaf in trained])
