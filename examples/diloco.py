"""Train replicas that seldom communicate: DiLoCo (Douillard et al. 2023, arXiv:2311.08105) with ZeRO-3 in each replica.

Run on four ranks, on two, or on one without a launcher:

    torchrun --standalone --nproc_per_node 4 examples/diloco.py --shard 2
    torchrun --standalone --nproc_per_node 2 examples/diloco.py
    python examples/diloco.py

No leaf is placed on the axis "replica", so each replica has its own values, and the inner steps of AdamW send nothing
over that axis. After every `--inner` steps, the replicas average the differences between their parameters and their
common start. An outer step of Nesterov's SGD moves the common start by this mean. Each replica keeps its own AdamW
state. With `--outer-rate 1 --momentum 0` this is local SGD, which averages parameters.

`--directory` keeps a checkpoint. A leaf that differs between replicas has one row for each replica in it. The program
asserts the bytes sent over "replica", and prints how far the result is from one process that trains all replicas one
after the other, in float64.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
import torch.nn.functional as F
from gpt import GPT, Block, batch, standard_library

import fshard as fs

SIZES = {
    "shard": 1,
    "rounds": 4,
    "inner": 5,
    "width": 32,
    "layers": 2,
    "context": 32,
    "batch": 8,
    "seed": 0,
}
RATES = {
    "lr": 3e-3,
    "outer-rate": 0.7,
    "momentum": 0.9,
}


class Training(NamedTuple):
    """What a training of replicas ends with.

    Attributes:
        losses: Of each replica.
        outer: The common start, and the momentum of its steps.
        states: Of each replica.
        sent: The collectives of inner and of outer steps.
    """

    losses: dict[int, list[float]]
    outer: tuple[Any, Any]
    states: dict[int, fs.TrainState]
    sent: dict[str, list[Any]]


def train(
    params: Any,
    rows_of: dict[int, slice],
    mean: Callable[[list[Any]], Any],
    model: Any,
    text: torch.Tensor,
    args: Any,
) -> Training:
    """Train replicas from common parameters.

    `rows_of` tells which sequences of a batch each replica of this process reads, and `mean` averages over all
    replicas.
    """
    inner, outer = make_optimizers(args)

    def loss_fn(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = model.apply(params, x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def inner_step(state: fs.TrainState, x: torch.Tensor, y: torch.Tensor) -> tuple[fs.TrainState, torch.Tensor]:
        value_and_grad = fs.value_and_grad(loss_fn)
        loss, grads = value_and_grad(state.params, x, y)
        return fs.update(inner, state, grads), loss

    states = {replica: fs.TrainState.create(params, inner) for replica in rows_of}
    losses: dict[int, list[float]] = {replica: [] for replica in rows_of}
    inner_sent: list[Any] = []
    outer_sent: list[Any] = []
    start = params
    momentum = outer.init(params)
    for turn in range(args.rounds):
        first = turn * args.inner
        with fs.comm.record() as record:
            for step in range(first, first + args.inner):
                x, y = batch(text, args.batch, args.context, seed=step)
                for replica, rows in rows_of.items():
                    states[replica], loss = inner_step(states[replica], x[rows], y[rows])
                    losses[replica].append(loss.item())
        inner_sent += record
        with fs.comm.record() as record:
            moves = [fs.tree_map(torch.sub, start, state.params) for state in states.values()]
            start, momentum = outer.update(mean(moves), momentum, start)
        outer_sent += record
        for replica, state in states.items():
            states[replica] = state._replace(params=start)
    sent = {"inner": inner_sent, "outer": outer_sent}
    return Training(losses, (start, momentum), states, sent)


def make_optimizers(args: Any) -> tuple[fs.Optimizer, fs.Optimizer]:
    """That of inner steps, and that of outer steps."""
    clip = fs.clip_by_global_norm(1.0)
    inner = fs.chain(clip, fs.adamw(args.lr, weight_decay=0.1))
    outer = fs.from_torch(
        torch.optim.SGD,
        lr=args.outer_rate,
        momentum=args.momentum,
        nesterov=args.momentum > 0,
    )
    return inner, outer


def as_rows(state: fs.TrainState, axis: fs.Axis) -> Any:
    """Add a first dim to each leaf, split over `axis`: what was a value of each replica is its row of one leaf."""

    def add_dim(leaf: Any) -> Any:
        if not isinstance(leaf, fs.Sharded):
            return leaf
        spec = leaf.spec
        rows = fs.Spec(
            (axis.size, *spec.shape),
            fs.P(axis.name, *spec.partition),
            (axis, *spec.axes),
        )
        return fs.Sharded(leaf.local.unsqueeze(0), rows)

    def is_sharded(leaf: Any) -> bool:
        return isinstance(leaf, fs.Sharded)

    return optree.tree_map(add_dim, state, is_leaf=is_sharded)


def main() -> None:
    args = parse_args()
    mesh = fs.init_mesh({"replica": -1, "shard": args.shard}, device="cpu")
    replica = fs.axis_of(mesh, "replica")
    shard = fs.axis_of(mesh, "shard")
    text, _ = standard_library()
    module = GPT(args.width, args.layers, 4, args.context).double()
    model = fs.functionalize(module, units=Block)
    params = model.init(fs.zero3(mesh), seed=args.seed)
    me = fs.comm.rank(replica)
    first_row = me + replica.size * fs.comm.rank(shard)
    my_rows = slice(first_row, None, replica.size * shard.size)

    def mean_over_ranks(moves: list[Any]) -> Any:
        (move,) = moves
        return fs.pmean(move, replica)

    training = train(params, {me: my_rows}, mean_over_ranks, model, text, args)
    sent = check_bytes(training.sent, params, replica, args.rounds)
    if args.directory:
        # A restore gives the rows back, and leaf.local[0] is this replica's.
        state = {
            "outer": training.outer,
            "inner": as_rows(training.states[me], replica),
        }
        fs.checkpoint.save(args.directory, state, step=args.rounds)
    initial = fs.unshard(params)
    start, _ = training.outer
    trained = fs.unshard(start)
    if mesh.get_rank() != 0:
        return
    rows_of = {}
    for number in range(replica.size):
        rows_of[number] = slice(number, None, replica.size)
    alone = train(initial, rows_of, mean_of_trees, model, text, args)
    report(args, sent, training.losses[me])
    report_difference(training.losses[me], alone.losses[me], trained, alone.outer[0])


def report(args: argparse.Namespace, sent: dict[str, int], losses: list[float]) -> None:
    steps = args.rounds * args.inner
    print(f"sent by each rank over 'replica': {sent['inner']} bytes in {steps} inner steps,", end=" ")
    print(f"{sent['outer']} bytes in {args.rounds} outer steps")
    print(f"loss {losses[0]:.4f}, after {steps} steps {losses[-1]:.4f}")


def report_difference(
    losses: list[float],
    expected_losses: list[float],
    params: Any,
    expected: Any,
) -> None:
    gaps = []
    for loss, expected_loss in zip(losses, expected_losses):
        gaps.append(abs(loss - expected_loss))
    for leaf, expected_leaf in zip(fs.tree_leaves(params), fs.tree_leaves(expected)):
        gap = (leaf - expected_leaf).abs().max()
        gaps.append(float(gap))
    print(f"largest difference from one process: {max(gaps):.1e}")


def check_bytes(
    sent: dict[str, list[Any]],
    params: Any,
    replica: fs.Axis,
    rounds: int,
) -> dict[str, int]:
    """Count the bytes that inner and outer steps sent over "replica", and assert that there are no others."""
    counts = {}
    for phase, collectives in sent.items():
        over_replica = [entry.sent for entry in collectives if entry.axis == "replica"]
        counts[phase] = round(sum(over_replica))
    parameter_bytes = sum(leaf.nbytes for leaf in fs.tree_leaves(params))
    of_all_reduce = 2 * parameter_bytes * (replica.size - 1) / replica.size
    assert counts["inner"] == 0, counts
    assert counts["outer"] == rounds * of_all_reduce, (counts, of_all_reduce)
    return counts


def mean_of_trees(trees: list[Any]) -> Any:
    def mean(*leaves: torch.Tensor) -> torch.Tensor:
        return sum(leaves) / len(leaves)

    return fs.tree_map(mean, *trees)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, rate in RATES.items():
        parser.add_argument(f"--{name}", type=float, default=rate)
    parser.add_argument("--directory", help="keep a checkpoint there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
