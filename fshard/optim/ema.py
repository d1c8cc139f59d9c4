"""ema: a running average of the parameters beside them."""

from functools import partial
from typing import Any, NamedTuple

from fshard.checks import Range, check_numbers, kind
from fshard.optim.leaves import check_state, joined, leafwise, like, tensor_of, trained, where_trained
from fshard.tree import Tree, flatten, unflatten
from fshard.update import Optimizer


class EmaState(NamedTuple):
    """State of an optimizer made by `ema`.

    Attributes:
        average: The averaged parameters, sharded as they are; leaves that take no gradient as they are.
        inner: The state of the optimizer inside.
    """

    average: Tree
    inner: Tree


def ema(tx: Optimizer, decay: float) -> Optimizer:
    """Keep an exponential moving average of the parameters that an optimizer makes.

    Starts from the parameters; after each update average = decay * average + (1 - decay) * parameters. Follows
    torch.optim.swa_utils.get_ema_multi_avg_fn, whose averages it has bit for bit from the first update on.

    Args:
        tx: The optimizer.
        decay: How much of the average stays, from 0 to 1.

    Returns:
        The optimizer; its state holds `average`.

    Raises:
        ValueError: if `tx` is no optimizer, or `decay` is out of range.
    """
    if not isinstance(tx, Optimizer):
        raise ValueError(f"ema: expected tx to be an Optimizer, such as fs.from_torch, got {kind(tx)}")
    check_numbers("ema", Range("a number from 0 to 1", lambda number: 0 <= number <= 1), decay=decay)

    def init(params: Tree) -> EmaState:
        flat = flatten(params)
        leaves = list(flat.leaves)
        for i in trained(flat):
            leaves[i] = like(leaves[i], tensor_of(leaves[i]).detach().clone())
        return EmaState(unflatten(flat.treedef, leaves), tx.init(params))

    def run(grads: Tree, state: EmaState, params: Tree, donate: bool = False) -> tuple[Tree, EmaState]:
        check_state("ema", state, EmaState)
        step: Any = (tx.update_donated if donate else None) or tx.update
        params, inner = step(grads, state.inner, params)
        lerp = "lerp_" if donate else "lerp"
        # A leaf without a gradient has not moved, and its average moves on towards it.
        averages = leafwise(
            lambda p, a: (getattr(a, lerp)(p.detach(), 1 - decay),), where_trained(params), state.average, first=1
        )
        return params, EmaState(joined(averages[0], state.average) if averages else state.average, inner)

    return Optimizer(init, run, partial(run, donate=True))
