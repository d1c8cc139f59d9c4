"""The program of a rank that `recovery.py` kills: fshard, or FSDP2 with torch's own checkpoints, as users write them.

It imports no more than the system that it trains, and tells by events how far it is.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from launch import EventWriter, process_start

# As in rivals.py, which imports all systems.
ADAMW = {"lr": 1e-3, "fused": True}
MB = 10**6
WIDTH = 1000


def main() -> None:
    args = parse_args()
    events = EventWriter(args.events)
    events.write("created", process_start())
    {"fshard": train_fshard, "fsdp2": train_fsdp2, "cost": measure_cost}[args.system](args, events)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=("fshard", "fsdp2", "cost"))
    parser.add_argument("events")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--configuration", required=True)
    parser.add_argument("--form", choices=("eager", "jitted"), default="eager")
    parser.add_argument("--memory", type=Path)
    parser.add_argument("--cache", action="store_true")
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10**6)
    return parser.parse_args()


def configuration_of(args: argparse.Namespace) -> Any:
    from trained_gpt import Configuration

    return Configuration.parse(args.configuration)


def open_manager(args: argparse.Namespace) -> Any:
    import fshard as fs

    options = {"memory": args.memory} if args.memory else {}
    return fs.checkpoint.Manager(args.directory / "checkpoints", keep=2, every=args.every, **options)


def make_fshard(args: argparse.Namespace, mesh: Any) -> tuple[Callable[[], Any], Callable[[Any, Any], Any]]:
    """What creates the first state, and the step of a state and a batch."""
    import torch

    import fshard as fs

    configuration = configuration_of(args)
    with torch.device("meta"):
        module = fs.with_init_weights(configuration.module())
    model = fs.functionalize(module, units=configuration.block)
    tx = fs.from_torch(torch.optim.AdamW, **ADAMW)
    donate = args.form == "eager"

    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = fs.value_and_grad(lambda params: model.apply(params, *batch))(state.params)
        return fs.update(tx, state, grads, donate=donate), loss

    def create() -> Any:
        return fs.TrainState.create(model.init(fs.zero3(mesh), seed=0), tx)

    if donate:
        return create, train_step
    options = {"cache": fs.graph_cache(args.directory / "graphs")} if args.cache else {}
    return create, fs.jit(train_step, donate_argnums=0, **options)


def train_fshard(args: argparse.Namespace, events: EventWriter) -> None:
    import torch

    import fshard as fs

    events.write("imported")
    torch.set_num_threads(1)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    events.write("mesh")
    create, train_step = make_fshard(args, mesh)
    configuration = configuration_of(args)
    manager = open_manager(args)
    events.write("built")
    if args.memory:
        state = manager.restore_or(create)
    else:
        state = create()
        if manager.latest_step() is not None:
            state = manager.restore(like=state)
    events.write("restored", step=int(state.step))
    with manager:
        try:
            for number in range(int(state.step), args.steps):
                batch = configuration.tokens(mesh.get_rank() + mesh.size() * number)
                events.write("step begins", step=number + 1)
                state, loss = train_step(state, batch)
                events.write("step", step=number + 1, loss=loss.item())
                manager.save(state)
        except fs.comm.CollectiveError:
            events.write("lost")
            raise


def train_fsdp2(args: argparse.Namespace, events: EventWriter) -> None:
    """FSDP2 with asynchronous checkpoints, as in torch's recipes."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.fsdp import fully_shard

    events.write("imported")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # Its threads communicate while steps do.
    group = dist.new_group(backend="gloo")
    events.write("mesh")
    configuration = configuration_of(args)
    module = configuration.module()
    for unit in (*module.blocks, module):
        fully_shard(unit)
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    events.write("built")

    last = newest(args.directory / "checkpoints")
    if last is not None:
        state = state_of_fsdp2(module, optimizer)
        dcp.load(state, checkpoint_id=args.directory / "checkpoints" / str(last))
        set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    events.write("restored", step=last or 0)
    saving = None
    for number in range(last or 0, args.steps):
        batch = configuration.tokens(dist.get_rank() + dist.get_world_size() * number)
        events.write("step begins", step=number + 1)
        loss = module(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / dist.get_world_size()
        dist.all_reduce(total)
        events.write("step", step=number + 1, loss=total.item())
        if (number + 1) % args.every == 0:
            if saving is not None:
                saving.result()
            folder = args.directory / "checkpoints" / str(number + 1)
            saving = dcp.async_save(state_of_fsdp2(module, optimizer), checkpoint_id=folder, process_group=group)


def state_of_fsdp2(module: Any, optimizer: Any) -> dict[str, Any]:
    """What torch's recipes save."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optim = get_state_dict(module, optimizer)
    return {"model": model, "optim": optim}


def newest(directory: Path) -> int | None:
    """The step of the newest checkpoint of torch that is complete."""
    return max((int(path.parent.name) for path in directory.glob("*/.metadata")), default=None)


def measure_cost(args: argparse.Namespace, events: EventWriter) -> None:
    """Steps with a generation each and steps without, in turns; then saves of shards of 40 MB."""
    import torch

    import fshard as fs

    torch.set_num_threads(1)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    create, train_step = make_fshard(args, mesh)
    configuration = configuration_of(args)
    state = create()
    batch = configuration.tokens(mesh.get_rank())
    seconds: dict[str, list[float]] = {"saving": [], "plain": []}
    with open_manager(args) as manager:
        for number in range(args.steps):
            # The first step of each turn pays for what the turn before has left to do.
            for name, position in ((name, position) for name in seconds for position in range(3)):
                begin = time.perf_counter()
                state, loss = train_step(state, batch)
                loss.item()
                if name == "saving":
                    manager.save(state)
                if number and position:
                    seconds[name].append(time.perf_counter() - begin)
    del state
    results = {"seconds": seconds, "main_thread_ms": list(main_thread_ms(args, mesh))}
    events.write("cost", **results)


def main_thread_ms(args: argparse.Namespace, mesh: Any) -> Iterator[float]:
    """The milliseconds that the main thread is in `save` for 40 MB of shards, when the save before is complete."""
    import torch

    import fshard as fs

    leaves = 40 * MB * mesh.size() // (4 * WIDTH * WIDTH)
    state = fs.shard({f"w{i}": torch.ones(WIDTH, WIDTH) for i in range(leaves)}, fs.zero2(mesh))
    fresh = argparse.Namespace(**vars(args) | {"directory": args.directory / "forty"})
    with open_manager(fresh) as manager:
        for step in range(1, 13):
            manager.wait()
            begin = time.perf_counter()
            manager.save(state, step)
            if step > 2:
                yield 1e3 * (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
