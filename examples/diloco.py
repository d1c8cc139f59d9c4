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
from typing import Any

import optree
import torch
import torch.nn.functional as F
from gpt import GPT, Block, batch, standard_library

import fshard as fs


def train(
    params: Any, own: dict[int, slice], mean: Callable[[list[Any]], Any], model: Any, text: torch.Tensor, args: Any
) -> tuple[dict[int, list[float]], Any, dict[int, fs.TrainState], dict[str, list[Any]]]:
    """Losses of each replica, the common start with its momentum, the replicas' states, and collectives by phase.

    `own` tells which sequences of a batch each replica of this process reads, and `mean` averages over all replicas.
    """
    inner = fs.chain(fs.clip_by_global_norm(1.0), fs.adamw(args.lr, weight_decay=0.1))
    outer = fs.from_torch(torch.optim.SGD, lr=args.outer_rate, momentum=args.momentum, nesterov=args.momentum > 0)

    def loss_fn(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.apply(params, x).flatten(0, 1), y.flatten())

    def inner_step(state: fs.TrainState, x: torch.Tensor, y: torch.Tensor) -> tuple[fs.TrainState, torch.Tensor]:
        loss, grads = fs.value_and_grad(loss_fn)(state.params, x, y)
        return fs.update(inner, state, grads), loss

    states = {replica: fs.TrainState.create(params, inner) for replica in own}
    start, momentum = params, outer.init(params)
    losses: dict[int, list[float]] = {replica: [] for replica in own}
    sent: dict[str, list[Any]] = {"inner": [], "outer": []}
    for turn in range(args.rounds):
        with fs.comm.record() as record:
            for step in range(turn * args.inner, (turn + 1) * args.inner):
                x, y = batch(text, args.batch, args.context, seed=step)
                for replica, rows in own.items():
                    states[replica], loss = inner_step(states[replica], x[rows], y[rows])
                    losses[replica].append(loss.item())
        sent["inner"] += record
        with fs.comm.record() as record:
            moved = mean([fs.tree_map(torch.sub, start, state.params) for state in states.values()])
            start, momentum = outer.update(moved, momentum, start)
            states = {replica: state._replace(params=start) for replica, state in states.items()}
        sent["outer"] += record
    return losses, (start, momentum), states, sent


def as_rows(state: fs.TrainState, axis: fs.Axis) -> Any:
    """Add a first dim to each leaf, split over `axis`: what was a value of each replica is its row of one leaf."""

    def row(leaf: Any) -> Any:
        if not isinstance(leaf, fs.Sharded):
            return leaf
        spec = leaf.spec
        rows = fs.Spec((axis.size, *spec.shape), fs.P(axis.name, *spec.partition), (axis, *spec.axes))
        return fs.Sharded(leaf.local.unsqueeze(0), rows)

    return optree.tree_map(row, state, is_leaf=lambda leaf: isinstance(leaf, fs.Sharded))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"shard": 1, "rounds": 4, "inner": 5, "width": 32, "layers": 2, "context": 32, "batch": 8, "seed": 0}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, rate in {"lr": 3e-3, "outer-rate": 0.7, "momentum": 0.9}.items():
        parser.add_argument(f"--{name}", type=float, default=rate)
    parser.add_argument("--directory", help="keep a checkpoint there")
    args = parser.parse_args()
    mesh = fs.init_mesh({"replica": -1, "shard": args.shard}, device="cpu")
    replica, shard = fs.axis_of(mesh, "replica"), fs.axis_of(mesh, "shard")
    text = standard_library()[0]
    model = fs.functionalize(GPT(args.width, args.layers, 4, args.context).double(), units=Block)
    params = model.init(fs.zero3(mesh), seed=args.seed)
    me, part = fs.comm.rank(replica), fs.comm.rank(shard)
    mine = {me: slice(me + replica.size * part, None, replica.size * shard.size)}
    losses, outer, states, sent = train(params, mine, lambda moved: fs.pmean(moved[0], replica), model, text, args)

    pieces = sum(x.numel() * x.element_size() for x in fs.tree_leaves(params))
    allreduce = 2 * pieces * (replica.size - 1) / replica.size
    counted = {phase: round(sum(c.sent for c in calls if c.axis == "replica")) for phase, calls in sent.items()}
    assert counted["inner"] == 0, counted
    assert counted["outer"] == args.rounds * allreduce, (counted, allreduce)
    if args.directory:
        # A restore gives the rows back, and leaf.local[0] is this replica's.
        fs.checkpoint.save(args.directory, {"outer": outer, "inner": as_rows(states[me], replica)}, step=args.rounds)
    initial, trained = fs.unshard(params), fs.unshard(outer[0])
    if mesh.get_rank() == 0:
        all_of_them = {each: slice(each, None, replica.size) for each in range(replica.size)}
        expected_losses, (expected, _), *_ = train(initial, all_of_them, mean, model, text, args)
        gaps = [float((a - b).abs().max()) for a, b in zip(fs.tree_leaves(trained), fs.tree_leaves(expected))]
        steps = args.rounds * args.inner
        print(f"sent by each rank over 'replica': {counted['inner']} bytes in {steps} inner steps,", end=" ")
        print(f"{counted['outer']} bytes in {args.rounds} outer steps")
        print(f"loss {losses[me][0]:.4f}, after {steps} steps {losses[me][-1]:.4f}")
        moved = max(abs(a - b) for a, b in zip(losses[me], expected_losses[me]))
        print(f"largest difference from one process: {max(moved, *gaps):.1e}")


def mean(trees: list[Any]) -> Any:
    return fs.tree_map(lambda *leaves: sum(leaves) / len(leaves), *trees)


if __name__ == "__main__":
    main()
