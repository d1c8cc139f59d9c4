"""Steps on meshes of four ranks by other axes, next to the same step in one process, round by round.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 benchmarks/axes.py

The model and the step are those of examples/four_dimensions.py, in float32. For each mesh of (pipe, shard, cp, tp): the
median over rounds of the ratio of step times, and what rank 0 sends over each axis. In one process a step takes one
core; where there are fewer cores than ranks no mesh can take less than a core's share of that.
"""

import argparse
import os
import statistics
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
from rounds import measure, paired

import fshard as fs

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import four_dimensions as example

# (pipe, shard, cp, tp)
MESHES = ((1, 4, 1, 1), (1, 1, 4, 1), (1, 1, 1, 4), (4, 1, 1, 1), (1, 2, 2, 1), (2, 2, 1, 1), (2, 1, 1, 2))
ALONE = "one process"


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    fs.init_mesh({"ranks": 4}, device="cpu")

    programs = {ALONE: alone(args)} | {
        label(name): on_mesh(args, name[:4], len(name) > 4) for name in (*MESHES, (*MESHES[-1], "jitted"))
    }
    sent = {name: bytes_of(program) for name, program in programs.items()}
    samples = measure(programs, args.dropped, args.rounds)
    if dist.get_rank() == 0:
        rows, found = {}, {}
        for name, values in samples.items():
            ratios = paired(values.seconds, samples[ALONE].seconds)
            lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
            found[name] = {"ratio": median, "ratio_quartiles": [lower, upper], "bytes": sent[name]}
            found[name] |= {"seconds": values.seconds}
            traffic = ", ".join(f"{axis} {nbytes / 1e6:.2f}" for axis, nbytes in sent[name].items()) or "none"
            milliseconds = f"{1e3 * statistics.median(values.seconds):.0f}"
            rows[name] = [milliseconds, f"{median:.2f}", f"{lower:.2f} to {upper:.2f}", traffic]
        cores = os.cpu_count()
        title = f"(pipe, shard, cp, tp) on 4 ranks of {cores} cores; width {args.width}, layers {args.layers}"
        report.print_table(title, ("ms", "ratio", "quartiles", "MB sent by rank 0"), rows)
        results = report.circumstances("axes")
        sizes = {name: getattr(args, name) for name in ("width", "layers", "context", "batch", "microbatches")}
        results |= {"configuration": sizes, "ranks": 4, "backend": dist.get_backend(), "threads": 1}
        results |= {"rounds": args.rounds, "dropped_rounds": args.dropped, "steps": found}
        report.write_json(args.results / "axes.json", results)


def label(name: tuple[Any, ...]) -> str:
    sizes = [f"{axis} {size}" for axis, size in zip(example.AXES, name) if size > 1]
    return ", ".join([*sizes, *name[4:]])


def initial(args: Namespace) -> Any:
    return fs.tree_map(torch.Tensor.float, example.initial(args.width, args.layers, args.context, 0))


def program(params: Any, axes: example.Axes, args: Namespace, jitted: bool) -> Callable[[], torch.Tensor]:
    step = partial(example.train_step, axes=axes, args=args)
    step = fs.jit(step, donate_argnums=0) if jitted else step
    state = fs.TrainState.create(params, example.optimizer(args))
    tokens = torch.randint(
        example.VOCABULARY, (args.batch, args.context + 1), generator=torch.Generator().manual_seed(0)
    )
    rows, times = axes["shard"], axes["cp"]
    x, y = (
        part.chunk(rows.size)[fs.axis_index(rows)].chunk(times.size, 1)[fs.axis_index(times)]
        for part in (tokens[:, :-1], tokens[:, 1:])
    )

    def run() -> torch.Tensor:
        nonlocal state
        state, loss = step(state, x=x, y=y)
        return loss

    return run


def on_mesh(args: Namespace, sizes: tuple[int, ...], jitted: bool) -> Callable[[], torch.Tensor]:
    mesh = fs.init_mesh(dict(zip(example.AXES, sizes)), device="cpu")
    axes = {name: fs.axis_of(mesh, name) for name in example.AXES}
    args = Namespace(**vars(args) | {"schedule": "1f1b" if sizes[0] > 1 else "gpipe"})
    return program(fs.shard(initial(args), example.strategy(mesh, axes)), axes, args, jitted)


def alone(args: Namespace) -> Callable[[], torch.Tensor]:
    """A step of rank 0, for whose loss the others wait."""
    axes = {name: fs.Axis(name, 1, "") for name in example.AXES}
    run = program(initial(args), axes, Namespace(**vars(args) | {"schedule": "gpipe"}), False)

    def step() -> torch.Tensor:
        loss = run() if dist.get_rank() == 0 else torch.zeros(())
        dist.broadcast(loss, 0)
        return loss

    return step


def bytes_of(program: Callable[[], torch.Tensor]) -> dict[str, float]:
    """Count the bytes that a step sends over each axis, but for losses, norms and messages."""
    program()
    with fs.comm.record() as record:
        program()
    sent: Counter[str] = Counter()
    for entry in record:
        sent[entry.axis] += 0 if entry.scalar else entry.sent
    return {axis: sent[axis] for axis in example.AXES if sent[axis]}


def parse_args() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"width": 256, "layers": 4, "context": 128, "batch": 16, "microbatches": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count")
    parser.add_argument("--dropped", type=int, default=3, help="rounds before them")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
