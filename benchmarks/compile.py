"""Time to trace and compile a train step of fs.zero3, to load its graph, and the graph's size, by number of layers.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 benchmarks/compile.py
    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 benchmarks/compile.py --backends graph --layers 4,8

The GPT is of width 256 with batches of 1 x 64. What is timed is the first call, less a later one: of the function, and
for the backend "graph" of what `fs.load_graph` reads.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch
from trained_gpt import SEED, Block, Configuration

import fshard as fs

LATER_CALLS = 3


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    found: dict[str, dict[str, Any]] = {}
    for backend in args.backends:
        for layers in args.layers:
            found[f"{backend}, {layers} layers"] = measured(args.configuration._replace(layers=layers), mesh, backend)
    if mesh.get_rank() == 0:
        write(args, mesh.size(), found)


def measured(configuration: Configuration, mesh: Any, backend: str) -> dict[str, Any]:
    """Seconds of the first call less those of a later one, and the operators of the graph."""
    with torch.device("meta"):
        module = configuration.module()
    model = fs.functionalize(module, units=Block)
    tx = fs.from_torch(torch.optim.AdamW, lr=1e-3, fused=True)
    state = fs.TrainState.create(model.init(fs.zero3(mesh), seed=SEED), tx)
    batch = configuration.tokens(mesh.get_rank())

    def step(state: fs.TrainState, *batch: torch.Tensor) -> tuple[fs.TrainState, torch.Tensor]:
        loss, grads = fs.value_and_grad(model.apply)(state.params, *batch)
        return fs.update(tx, state, grads), loss

    operators = len(fs.make_graph(step)(state, *batch).moments)
    jitted = fs.jit(step, donate_argnums=0, backend=backend)
    found: dict[str, Any] = {"operators": operators, "load_seconds": None}
    state, found["seconds"], found["step_seconds"] = timed(jitted, state, batch)
    if backend == "graph":
        with tempfile.TemporaryDirectory() as directory:
            fs.save_graph(directory, jitted, state, *batch)
            _, found["load_seconds"], _ = timed(fs.load_graph(directory), state, batch)
    return found


def timed(step: Callable[..., Any], state: fs.TrainState, batch: Any) -> tuple[fs.TrainState, float, float]:
    """The state after some calls, what the first one takes more than later ones, and what these take."""
    seconds = []
    for _ in range(1 + LATER_CALLS):
        start = time.perf_counter()
        state, _ = step(state, *batch)
        seconds.append(time.perf_counter() - start)
    later = statistics.median(seconds[1:])
    return state, seconds[0] - later, later


def write(args: argparse.Namespace, ranks: int, found: dict[str, dict[str, Any]]) -> None:
    results = report.circumstances("compile")
    results |= {"configuration": args.configuration._asdict(), "ranks": ranks, "threads": 1, "cases": found}
    rows = {
        name: [
            f"{case['seconds']:.2f}",
            "" if case["load_seconds"] is None else f"{case['load_seconds']:.2f}",
            f"{case['step_seconds']:.2f}",
            str(case["operators"]),
        ]
        for name, case in found.items()
    }
    report.print_table("Trace and compile", ("seconds", "s to load", "s of a step", "operators"), rows)
    report.write_json(args.results / "compile.json", results)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configuration", type=Configuration.parse, default="d256-L8-B1-T64")
    parser.add_argument("--layers", type=lambda text: [*map(int, text.split(","))], default=[8, 32, 96])
    parser.add_argument("--backends", type=lambda text: text.split(","), default=["graph"])
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
