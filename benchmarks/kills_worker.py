"""The program that `kills.py` kills: a few layers, trained on rows that follow from the number of the step.

Each rank tells what it does by events, and what bits it has by digests of all shards of its state.
"""

import argparse
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launch import EventWriter, process_start

WIDTH, LAYERS, ROWS = 256, 4, 8
# The variable with the name of the host that a rank runs on, where one machine has several.
HOST = "RECOVERY_HOST"


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_args(arguments)
    events = EventWriter(args.events)
    events.write("created", process_start(), host=os.environ.get(HOST, ""))
    # Torch is imported only now: a launcher that has not imported it may have its ranks killed meanwhile.
    events.write("imports")
    train(args, events)


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("events", help="the pipe that takes events")
    parser.add_argument("directory", type=Path, help="of checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=1, help="steps from one checkpoint on disk to the next")
    parser.add_argument("--memory", help="a folder for generations in memory; {host} is the name of the host")
    parser.add_argument("--form", choices=("eager", "jitted"), default="eager")
    parser.add_argument("--reduction-order", choices=("tree",))
    return parser.parse_args(arguments)


def train(args: argparse.Namespace, events: EventWriter) -> None:
    """Train to the last step, from the newest state that is there."""
    import torch

    import fshard as fs

    events.write("mesh begins")
    torch.set_num_threads(1)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    events.write("build begins")
    step, create = make_program(mesh, args)
    with fs.checkpoint.Manager(args.directory, **options_of(args)) as manager:
        events.write("restore begins")
        state = manager.restore_or(create)
        events.write("restored", step=int(state.step), digest=digest(state))
        for number in range(int(state.step), args.steps):
            events.write("step begins", step=number + 1)
            state, loss = step(state, number)
            events.write("step", step=number + 1, loss=loss.item(), digest=digest(state))
            # As docs/how_to/resume.md says: a rank that is killed after the block has nothing left in memory.
            manager.save(state, force=number + 1 == args.steps)
            events.write("saved", step=number + 1)
    events.write("end", whole=digest(fs.unshard(state.params)))


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of the manager."""
    options = {"keep": 2, "every": args.every}
    if args.memory:
        options["memory"] = args.memory.format(host=os.environ.get(HOST, ""))
    return options


def make_program(mesh: Any, args: argparse.Namespace) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """Return the step of a number, and the function that creates the first state."""
    import torch
    from torch import nn

    import fshard as fs

    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = fs.functionalize(nn.Sequential(*layers), units=nn.Linear)
    order = args.reduction_order
    adamw = fs.from_torch(torch.optim.AdamW, lr=1e-3, fused=False, reduction_order=order)
    tx = fs.chain(fs.clip_by_global_norm(1.0, reduction_order=order), adamw)

    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (model.apply(params, x) - x).square().mean()

    def train_step(state: Any, microbatches: Any) -> Any:
        loss, grads = fs.accumulate(loss_fn, reduction_order=order)(state.params, microbatches)
        return fs.update(tx, state, grads), loss

    run = train_step
    if args.form == "jitted":
        run = fs.jit(train_step, donate_argnums=0, cache=fs.graph_cache(args.directory / "graphs"))

    def step(state: Any, number: int) -> Any:
        rows = torch.randn(4, ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
        return run(state, fs.microbatches([*rows], like=state.params))

    return step, lambda: fs.TrainState.create(model.init(fs.zero3(mesh), seed=0), tx)


def digest(state: Any) -> str:
    """The SHA-256 of all that this rank holds of a state."""
    import fshard as fs

    sha = hashlib.sha256()
    for leaf in fs.tree_leaves(state):
        tensor = getattr(leaf, "local", leaf)
        sha.update(tensor.detach().numpy().tobytes() if hasattr(tensor, "detach") else repr(tensor).encode())
    return sha.hexdigest()


if __name__ == "__main__":
    main()
