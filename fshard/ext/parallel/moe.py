"""Mixtures of experts: tokens are sent to the ranks that own their experts, and the experts' results come back.

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

Shared experts (Dai et al., "DeepSeekMoE", 2024) are ordinary layers beside it, on leaves that are sharded like others.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

import fshard as fs
from fshard.extend import NUMBER, check_arguments, check_axis, describe, expect, is_tracing, widen

__all__ = ["Routing", "Sent", "combine", "dispatch", "load_balance", "route", "z_loss"]


class Routing(NamedTuple):
    """The experts that each token is sent to.

    Attributes:
        experts: Numbers of experts, (tokens, k), for each token in the order of its choice.
        weights: The factors of the experts' outputs, (tokens, k).
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
        places: The place of each choice's row among those that this rank sent. The first choices of all tokens come
            before the second ones.
        capacity: How many rows each expert took from this rank; None means all.
        received: Without a capacity: the order of received rows by expert, and the numbers of rows sent to each rank
            and received from it.

    >>> import torch, fshard as fs
    >>> tokens, logits = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0.0, 9.0], [9.0, 0.0], [0.0, 9.0]])
    >>> rows, sent = fs.moe.dispatch(tokens, fs.moe.route(logits), capacity=1)
    >>> rows.tolist(), sent.capacity  # there is no room for the third token
    ([[[2.0]], [[1.0]]], 1)
    """

    routing: Routing
    axis: fs.Axis | None
    places: torch.Tensor
    capacity: int | None = None
    received: tuple[torch.Tensor, list[int], list[int]] | None = None


def route(logits: torch.Tensor, k: int = 1, *, normalize: bool = True) -> Routing:
    """Choose for each token the k experts with the highest probability: the softmax of a router's logits.

    An activation checkpoint makes the choice again in the backward. If rounding changes it, gradients are those of
    other experts. To keep the choice, use `fs.remat(layer, save=("aten.topk",))`, or torch.utils.checkpoint with
    `context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.topk.default])` and, from torch 2.14 on,
    `respect_saved_tensors_hooks=True`.

    Args:
        logits: The router's outputs, (tokens, number of experts).
        k: How many experts a token is sent to.
        normalize: Whether to divide the weights of several experts by their sum, as in Mixtral. The weight of a single
            expert stays its probability, through which the router learns.

    Returns:
        The routing.

    Raises:
        ValueError: if `logits` does not have two dims, or there are fewer than k experts.

    >>> import torch, fshard as fs
    >>> logits = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.1, 0.4]]).log()  # two tokens, three experts
    >>> routing = fs.moe.route(logits, k=2)
    >>> routing.experts, routing.weights
    (tensor([[1, 2],
            [0, 2]]), tensor([[0.6667, 0.3333],
            [0.5556, 0.4444]]))
    """
    expect(logits.dim() == 2, "moe.route", "logits of shape (tokens, experts)", describe(logits), "flatten other dims")
    experts_count = logits.shape[1]
    is_in_range = type(k) is int and 1 <= k <= experts_count
    expect(is_in_range, "moe.route", f"k to be from 1 to {experts_count}", f"{k!r:.40}")
    probs = logits.softmax(-1)
    weights, experts = probs.topk(k)
    if normalize and k > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(experts, weights, probs)


def dispatch(
    tokens: torch.Tensor,
    routing: Routing,
    axis: fs.Axis | None = None,
    *,
    capacity: int | None = None,
) -> tuple[Sequence[torch.Tensor] | torch.Tensor, Sent]:
    """Send each token to the ranks that own its experts, which are spread over an axis in equal blocks.

    Without a capacity every token arrives; ranks first send each other the sizes of their messages. With a capacity
    sizes are fixed, as fs.jit requires: each expert takes `capacity` rows from each rank, first choices before second
    ones, and among these the first tokens. A choice for which there is no room is dropped, and its output is zero.

    Args:
        tokens: This rank's tokens, (tokens, width).
        routing: Their experts.
        axis: The mesh axis that experts are spread over; None if this rank has all of them.
        capacity: How many rows an expert takes from each rank; None means all.

    Returns:
        The rows of each expert of this rank, one tensor (rows, width) for each; with a capacity one tensor (experts of
        this rank, ranks * capacity, width), with zeros in unused rows. Second, the value that `combine` needs.

    Raises:
        ValueError: if `tokens` do not fit `routing`, the axis does not divide the number of experts, the capacity is
            not a positive number, or there is none inside fs.jit.

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
    api_name = "moe.dispatch"
    rows_count, k = routing.experts.shape
    is_matrix = tokens.dim() == 2 and len(tokens) == rows_count
    expect(is_matrix, api_name, f"tokens of shape ({rows_count}, width), as routed", describe(tokens))
    experts_count = routing.probs.shape[-1]
    if axis is not None:
        check_axis(api_name, axis)
        expected = f"a multiple of {axis.size} experts, one block for each rank"
        expect(experts_count % axis.size == 0, api_name, expected, str(experts_count))
    # [tokens, k] -> [k * tokens], the first choices of all tokens before the second ones
    choices = routing.experts.T.reshape(-1)
    rows = tokens.repeat(k, 1)
    if capacity is None:
        expected = "a capacity inside fs.jit, where sizes are fixed"
        expect(not is_tracing(), api_name, expected, "None", "pass capacity=")
        return _send_all(rows, choices, routing, axis)
    check_arguments(api_name, NUMBER, capacity=capacity)
    is_chosen = choices[:, None] == torch.arange(experts_count, device=choices.device)
    # How many choices of the same expert come before each one.
    counts = is_chosen.cumsum(0) - 1
    # [choices, experts] -> [choices, 1] -> [choices]
    before = counts.gather(1, choices[:, None]).squeeze(1)
    # Choices without room all go to one row behind the others.
    dropped = experts_count * capacity
    places = torch.where(before < capacity, choices * capacity + before, dropped)
    slots = rows.new_zeros(dropped + 1, tokens.shape[1])
    slots = slots.index_add(0, places, rows)[:-1]
    # [experts * capacity, width] -> [experts, capacity, width]
    slots = slots.unflatten(0, (experts_count, capacity))
    if axis is not None:
        slots = fs.all_to_all(slots, axis, split_dim=0, concat_dim=1)
    return slots, Sent(routing, axis, places, capacity)


def _send_all(
    rows: torch.Tensor,
    choices: torch.Tensor,
    routing: Routing,
    axis: fs.Axis | None,
) -> tuple[Sequence[torch.Tensor], Sent]:
    """Send every row to the rank of its expert, and group those that arrive by expert."""
    order = choices.argsort(stable=True)
    rows = rows[order]
    places = order.argsort()
    counts = choices.bincount(minlength=routing.probs.shape[-1])
    if axis is None:
        sizes = counts.tolist()
        return rows.split(sizes), Sent(routing, axis, places)
    arriving = fs.all_to_all(counts, axis, split_dim=0, concat_dim=0)
    # [experts] -> [ranks, experts of a rank]
    by_rank = (axis.size, -1)
    leaving = counts.unflatten(0, by_rank)
    table = arriving.unflatten(0, by_rank)
    send = leaving.sum(1).tolist()
    receive = table.sum(1).tolist()
    arrived = fs.ragged_all_to_all(rows, axis, send, receive)
    local_experts = torch.arange(table.shape[1], device=table.device)
    experts = local_experts.repeat(axis.size)
    grouping = experts.repeat_interleave(arriving).argsort(stable=True)
    sizes = table.sum(0).tolist()
    rows_of_experts = arrived[grouping].split(sizes)
    return rows_of_experts, Sent(routing, axis, places, received=(grouping, send, receive))


def combine(rows: Iterable[torch.Tensor], sent: Sent) -> torch.Tensor:
    """Send the outputs of experts back to their tokens, and add them up, multiplied by their weights.

    Args:
        rows: The outputs of each expert of this rank, as many as `dispatch` returned, or one tensor of all of them.
        sent: The second value that `dispatch` returned.

    Returns:
        One row for each token, (tokens, width of the outputs).

    Raises:
        ValueError: if there is not one output for each row.

    >>> import torch, fshard as fs
    >>> routing = fs.moe.route(torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log(), k=2)
    >>> rows, sent = fs.moe.dispatch(torch.tensor([[1.0], [2.0]]), routing)
    >>> fs.moe.combine([rows[0] * 10, rows[1] * 100], sent)
    tensor([[ 77.5000],
            [110.0000]])
    """
    axis = sent.axis
    join = torch.cat if sent.capacity is None else torch.stack
    back = rows if isinstance(rows, torch.Tensor) else join(list(rows))
    if sent.capacity is not None:
        if axis is not None:
            back = fs.all_to_all(back, axis, split_dim=1, concat_dim=0)
        _check_outputs(back, (sent.routing.probs.shape[-1], sent.capacity))
        # [experts, capacity, width] -> [experts * capacity + 1, width]; the last row, of dropped choices, is zero
        dropped = back.new_zeros(1, back.shape[-1])
        back = torch.cat([back.flatten(0, 1), dropped])
    elif axis is None or sent.received is None:
        _check_outputs(back, sent.places.shape)
    else:
        grouping, send, receive = sent.received
        _check_outputs(back, grouping.shape)
        back = fs.ragged_all_to_all(back[grouping.argsort()], axis, receive, send)
    weights = sent.routing.weights.T
    # [k * tokens, width] -> [k, tokens, width]
    chosen = back[sent.places].unflatten(0, weights.shape)
    return (chosen * weights[:, :, None]).sum(0)


def _check_outputs(outputs: torch.Tensor, sizes: Sequence[int | None]) -> None:
    """Refuse outputs that are not one for each row, which would reach other tokens."""
    expected = f"outputs of shape {tuple(sizes)} and a width, one for each row of dispatch"
    expect(outputs.shape[:-1] == sizes, "moe.combine", expected, describe(outputs))


def load_balance(routing: Routing, axes: Sequence[fs.Axis] = ()) -> torch.Tensor:
    """Compute the loss that keeps experts equally busy; it is least, 1, if each gets the same number of tokens.

    This is the number of experts times the sum over experts of the fraction of choices times the mean probability
    (Fedus et al., 2021, equation 4). With `axes` the fractions are those of the tokens of all ranks, so that the mean
    over ranks with equal batches is the loss of the whole batch (Qiu et al., "Demons in the Detail", 2025).

    Args:
        routing: This rank's routing.
        axes: The mesh axes over whose ranks choices are counted.

    Returns:
        A scalar, in float32 at least; 0 if this rank has no tokens.

    >>> import torch, fshard as fs
    >>> even, uneven = torch.tensor([[99.0, 0.0], [0.0, 99.0]]), torch.tensor([[99.0, 0.0], [99.0, 0.0]])
    >>> fs.moe.load_balance(fs.moe.route(even)), fs.moe.load_balance(fs.moe.route(uneven))
    (tensor(1.), tensor(2.))
    """
    # Counts and sums over tokens pass 65,504, the largest number of float16.
    probs = widen(routing.probs)
    experts_count = probs.shape[-1]
    # [tokens, k] -> [tokens * k, experts]
    choices = routing.experts.reshape(-1, 1)
    is_chosen = choices == torch.arange(experts_count, device=probs.device)
    counts = is_chosen.sum(0).to(probs.dtype)
    for axis in axes:
        counts = fs.psum(counts, axis)
    fractions = counts / counts.sum().clamp(min=1)
    products = fractions * probs.sum(0)
    total = experts_count * products.sum()
    return total / max(len(probs), 1)


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Compute the loss that keeps a router's logits small: the mean square of their log-sum-exp (Zoph et al., 2022).

    Args:
        logits: The router's outputs, (tokens, number of experts).

    Returns:
        A scalar, in float32 at least; 0 if there are no tokens.

    >>> import torch, fshard as fs
    >>> fs.moe.z_loss(torch.zeros(3, 4)), torch.tensor(4.0).log().square()
    (tensor(1.9218), tensor(1.9218))
    """
    squares = widen(logits).logsumexp(-1).square()
    return squares.sum() / max(len(logits), 1)
