"""Mixtures of experts, an extension: tokens go to the ranks that own their experts, and the experts' results come back.

Follows Shazeer et al., "Outrageously Large Neural Networks" (2017), Lepikhin et al., "GShard" (2020: capacity), Fedus
et al., "Switch Transformers" (2021), Zoph et al., "ST-MoE" (2022), and Gale et al., "MegaBlocks" (2022: no token is
dropped). Weights of experts are stacked along dim 0 and sharded by `fs.own_dim`:

    own = fs.compose(fs.fully_shard(mesh["shard"], dim=1), fs.own_dim(mesh["expert"]))
    layout = fs.masked(own, "*experts*", otherwise=fs.hybrid_shard(mesh, axis="shard", replicate_axis="expert"))
    params = fs.shard(full, fs.zero3(mesh, layout=layout))

    def layer(p, x, axis):                                  # p gathered, x of shape (tokens, width)
        routing = fs.moe.route(x @ p["router"].T, k=2)
        rows, sent = fs.moe.dispatch(x, routing, axis)      # one tensor of rows for each expert of this rank
        rows = [expert(w, row) for w, row in zip(p["experts"], rows)]
        return shared_expert(p, x) + fs.moe.combine(rows, sent)

Shared experts (Dai et al., "DeepSeekMoE", 2024) are maths beside it, on leaves that are sharded like any other.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

import fshard as fs
from fshard.ext import _compat
from fshard.extend import check_axis, describe, expect

__all__ = ["Routing", "Sent", "combine", "dispatch", "load_balance", "route", "z_loss"]


class Routing(NamedTuple):
    """The experts that each token goes to.

    Attributes:
        experts: Numbers of experts, (tokens, k), for each token in the order of its choice.
        weights: The factors of their outputs, (tokens, k).
        probs: The router's probability of every expert, (tokens, number of experts).

    >>> import torch, fshard as fs
    >>> routing = fs.moe.route(torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log())
    >>> routing.probs, routing.weights.shape
    (tensor([[0.2500, 0.7500],
            [0.5000, 0.5000]]), torch.Size([2, 1]))
    """

    experts: torch.Tensor
    weights: torch.Tensor
    probs: torch.Tensor


class Sent(NamedTuple):
    """What `combine` needs to undo a `dispatch`.

    Attributes:
        routing: The routing.
        axis: The mesh axis.
        places: Where each choice's row is among those that this rank sent; first choices of all tokens come first.
        capacity: How many rows each expert took from this rank; None means all.
        received: Otherwise the order of received rows by expert, and how many went to each rank and came from it.

    >>> import torch, fshard as fs
    >>> tokens, logits = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0.0, 9.0], [9.0, 0.0], [0.0, 9.0]])
    >>> rows, sent = fs.moe.dispatch(tokens, fs.moe.route(logits), capacity=1)
    >>> rows.tolist(), sent.capacity  # the third token found no room
    ([[[2.0]], [[1.0]]], 1)
    """

    routing: Routing
    axis: fs.Axis | None
    places: torch.Tensor
    capacity: int | None = None
    received: tuple[torch.Tensor, list[int], list[int]] | None = None


def route(logits: torch.Tensor, k: int = 1, *, normalize: bool = True) -> Routing:
    """Choose for each token the k experts of the highest probability, the softmax of a router's logits.

    An activation checkpoint computes the choice again, and rounding may change it, so that gradients are those of other
    experts. `fs.remat(layer, save=("aten.topk",))` keeps it, and so does torch.utils.checkpoint with
    `context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.topk.default])` and, from torch 2.14 on,
    `respect_saved_tensors_hooks=True`.

    Args:
        logits: The router's outputs, (tokens, number of experts).
        k: How many experts a token goes to.
        normalize: Whether weights of several experts are divided by their sum, as in Mixtral; the weight of one alone
            stays its probability, through which the router learns.

    Returns:
        The routing.

    Raises:
        ValueError: if `logits` has other dims, or there are no k experts.

    >>> import torch, fshard as fs
    >>> logits = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.1, 0.4]]).log()  # two tokens, three experts
    >>> routing = fs.moe.route(logits, k=2)
    >>> routing.experts, routing.weights
    (tensor([[1, 2],
            [0, 2]]), tensor([[0.6667, 0.3333],
            [0.5556, 0.4444]]))
    """
    expect(logits.dim() == 2, "moe.route", "logits of shape (tokens, experts)", describe(logits), "flatten other dims")
    fits = type(k) is int and 1 <= k <= logits.shape[1]
    expect(fits, "moe.route", f"k to be from 1 to {logits.shape[1]}", f"{k!r:.40}")
    probs = logits.softmax(-1)
    weights, experts = probs.topk(k)
    return Routing(experts, weights / weights.sum(-1, keepdim=True) if normalize and k > 1 else weights, probs)


def dispatch(
    tokens: torch.Tensor, routing: Routing, axis: fs.Axis | None = None, *, capacity: int | None = None
) -> tuple[Sequence[torch.Tensor] | torch.Tensor, Sent]:
    """Send each token to the ranks that own its experts, which are spread over an axis in equal blocks.

    Without a capacity every token arrives, in messages whose sizes ranks tell each other first. With one, sizes are
    fixed, as fs.jit needs: an expert takes `capacity` rows from each rank, first choices before second ones, and of
    these the tokens that come first; a choice that finds no room is dropped, and counts as an output of zeros.

    Args:
        tokens: This rank's tokens, (tokens, width).
        routing: Their experts.
        axis: The mesh axis that experts are spread over; None where this rank has all of them.
        capacity: How many rows an expert takes from each rank; None means all.

    Returns:
        The rows of each expert of this rank, one tensor (rows, width) for each; with a capacity one tensor (experts of
        this rank, ranks * capacity, width), zeros where no row is. Beside them what `combine` needs.

    Raises:
        ValueError: if `tokens` do not fit `routing`, the axis does not divide the experts, the capacity is no positive
            number, or there is none inside fs.jit.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"expert": -1}, device="cpu"))
    ...     tokens = torch.tensor([[1.0], [2.0]]) + 10 * fs.axis_index(axis)
    ...     routing = fs.moe.route(torch.tensor([[9.0, 0.0], [0.0, 9.0]]))
    ...     rows, sent = fs.moe.dispatch(tokens, routing, axis)
    ...     return [row.tolist() for row in rows]
    >>> fs.testing.spmd(program, world=2)  # each rank has one expert, and gets that expert's tokens of both
    [[[[1.0], [11.0]]], [[[2.0], [12.0]]]]
    """
    what, number = "moe.dispatch", routing.probs.shape[-1]
    fits = tokens.dim() == 2 and len(tokens) == len(routing.experts)
    expect(fits, what, f"tokens of shape ({len(routing.experts)}, width), as routed", describe(tokens))
    if axis is not None:
        check_axis(what, axis)
        needed = f"a multiple of {axis.size} experts, one block for each rank"
        expect(number % axis.size == 0, what, needed, str(number))
    choices, rows = routing.experts.T.reshape(-1), tokens.repeat(routing.experts.shape[1], 1)
    if capacity is not None:
        expect(type(capacity) is int and capacity > 0, what, "capacity to be a positive number", f"{capacity!r:.40}")
        chosen = choices[:, None] == torch.arange(number, device=choices.device)
        before = (chosen.cumsum(0) - 1).gather(1, choices[:, None]).squeeze(1)
        # What finds no room goes to a row behind the others.
        places = torch.where(before < capacity, choices * capacity + before, number * capacity)
        slots = rows.new_zeros(number * capacity + 1, rows.shape[1]).index_add(0, places, rows)[:-1]
        slots = slots.unflatten(0, (number, capacity))
        return slots if axis is None else fs.all_to_all(slots, axis, 0, 1), Sent(routing, axis, places, capacity)
    expect(not _compat.is_tracing(), what, "a capacity inside fs.jit, where sizes are fixed", "None", "pass capacity=")
    order = choices.argsort(stable=True)
    rows, places = rows[order], order.argsort()
    counts = choices.bincount(minlength=number)
    if axis is None:
        return rows.split(counts.tolist()), Sent(routing, axis, places)
    # Rows for each expert of this rank, by the rank that they come from.
    table = fs.all_to_all(counts, axis, 0, 0).unflatten(0, (axis.size, -1))
    send, receive = counts.unflatten(0, (axis.size, -1)).sum(1).tolist(), table.sum(1).tolist()
    arrived = fs.ragged_all_to_all(rows, axis, send, receive)
    experts = torch.arange(table.shape[1], device=table.device).repeat(axis.size)
    grouping = experts.repeat_interleave(table.flatten()).argsort(stable=True)
    return arrived[grouping].split(table.sum(0).tolist()), Sent(routing, axis, places, None, (grouping, send, receive))


def combine(rows: Iterable[torch.Tensor], sent: Sent) -> torch.Tensor:
    """Bring the outputs of experts back to their tokens and add them up, multiplied by their weights.

    Args:
        rows: The outputs of each expert of this rank, as many as `dispatch` returned.
        sent: What `dispatch` returned beside the rows.

    Returns:
        One row for each token, (tokens, width of the outputs).

    >>> import torch, fshard as fs
    >>> routing = fs.moe.route(torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log(), k=2)
    >>> rows, sent = fs.moe.dispatch(torch.tensor([[1.0], [2.0]]), routing)
    >>> fs.moe.combine([rows[0] * 10, rows[1] * 100], sent)
    tensor([[ 77.5000],
            [110.0000]])
    """
    axis, weights = sent.axis, sent.routing.weights.T
    if sent.capacity is not None:
        slots = rows if isinstance(rows, torch.Tensor) else torch.stack(list(rows))
        slots = slots if axis is None else fs.all_to_all(slots, axis, 1, 0)
        back = torch.cat([slots.flatten(0, 1), slots.new_zeros(1, slots.shape[-1])])
    else:
        back = torch.cat(list(rows))
        if axis is not None and sent.received is not None:
            grouping, send, receive = sent.received
            back = fs.ragged_all_to_all(back[grouping.argsort()], axis, receive, send)
    return (back[sent.places].unflatten(0, weights.shape) * weights[:, :, None]).sum(0)


def load_balance(routing: Routing, axes: Sequence[fs.Axis] = ()) -> torch.Tensor:
    """Compute the loss that keeps experts equally busy, least where each gets the same number of tokens: then 1.

    The number of experts times the sum over experts of the fraction of choices by the mean probability (Fedus et al.,
    2021, equation 4). With `axes` fractions are those of all ranks' tokens, so that the mean over ranks of equal
    batches is the loss of the whole batch (Qiu et al., "Demons in the Detail", 2025).

    Args:
        routing: This rank's routing.
        axes: The mesh axes over whose ranks fractions are taken.

    Returns:
        A scalar; 0 where this rank has no tokens.

    >>> import torch, fshard as fs
    >>> even, uneven = torch.tensor([[99.0, 0.0], [0.0, 99.0]]), torch.tensor([[99.0, 0.0], [99.0, 0.0]])
    >>> fs.moe.load_balance(fs.moe.route(even)), fs.moe.load_balance(fs.moe.route(uneven))
    (tensor(1.), tensor(2.))
    """
    number = routing.probs.shape[-1]
    chosen = routing.experts.reshape(-1, 1) == torch.arange(number, device=routing.experts.device)
    counts = chosen.sum(0).to(routing.probs.dtype)
    for axis in axes:
        counts = fs.psum(counts, axis)
    fractions = counts / counts.sum().clamp(min=1)
    return number * (fractions * routing.probs.sum(0)).sum() / max(len(routing.probs), 1)


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Compute the loss that keeps a router's logits small: the mean square of their log-sum-exp (Zoph et al., 2022).

    Args:
        logits: The router's outputs, (tokens, number of experts).

    Returns:
        A scalar; 0 where there are no tokens.

    >>> import torch, fshard as fs
    >>> fs.moe.z_loss(torch.zeros(3, 4)), torch.tensor(4.0).log().square()
    (tensor(1.9218), tensor(1.9218))
    """
    return logits.logsumexp(-1).square().sum() / max(len(logits), 1)
