"""Time to trace and compile a train step of fs.zero3, and the size of its graph, over the number of layers.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 benchmarks/compile.py
    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 benchmarks/compile.py --backends graph --layers 4,8

The GPT is of width 512 with batches of 4 x 256. What is timed is the first call, less a later one.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import report
import torch
from gpt import SEED, Block, Configuration

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
    seconds = []
    for _ in range(1 + LATER_CALLS):
        start = time.perf_counter()
        state, _ = jitted(state, *batch)
        seconds.append(time.perf_counter() - start)
    later = statistics.median(seconds[1:])
    return {"seconds": seconds[0] - later, "step_seconds": later, "operators": operators}


def write(args: argparse.Namespace, ranks: int, found: dict[str, dict[str, Any]]) -> None:
    results = report.circumstances("compile")
    results |= {"configuration": args.configuration._asdict(), "ranks": ranks, "threads": 1, "cases": found}
    rows = {
        name: [f"{case['seconds']:.2f}", f"{case['step_seconds']:.2f}", str(case["operators"])]
        for name, case in found.items()
    }
    report.print_table("Trace and compile", ("seconds", "s of a step", "operators"), rows)
    report.write_json(args.results / "compile.json", results)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configuration", type=Configuration.parse, default="d512-L8-B4-T256")
    parser.add_argument("--layers", type=lambda text: [*map(int, text.split(","))], default=[4, 8, 16, 32])
    parser.add_argument("--backends", type=lambda text: text.split(","), default=["graph"])
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
