"""Times and peak memory of fs.update, donated and not, next to the step of the torch optimizer that it runs.

    OMP_NUM_THREADS=1 python benchmarks/update.py
    OMP_NUM_THREADS=1 python benchmarks/update.py --cases 1000x64 --optimizers adamw-fused --rounds 101

One process. fshard's parameters are sharded by fs.zero2; the stateful torch optimizer has tensors of the same local
shapes, and the same gradients; its time is that of step() and zero_grad(), because an update leaves no gradients behind
either. Ratios are medians over rounds of the ratio to the torch optimizer in the same round.

Peak memory is what a step allocates beyond what is there between steps, in another process, in which a small C library
counts allocations; where that cannot be compiled and loaded, resident memory is measured, and table and JSON say so.
"""

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import meter
import report
import torch

import fshard as fs

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw-fused": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    "adamw-foreach": (torch.optim.AdamW, {"lr": 1e-3, "foreach": True}),
    "sgd-fused": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "fused": True}),
    "sgd-foreach": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "foreach": True}),
}
REFERENCE = "torch"
MIB = 2**20


class Case(NamedTuple):
    """Square matrices of float32."""

    leaves: int
    width: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        return cls(*map(int, text.split("x")))

    @property
    def name(self) -> str:
        return f"{self.leaves}x{self.width}"


class Step(NamedTuple):
    """What autograd does before a step, which is not timed, and the step."""

    prepare: Callable[[], None]
    run: Callable[[], None]


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    if args.worker:
        args.worker.write_text(json.dumps(peaks(args, mesh)))
        return
    with tempfile.TemporaryDirectory() as folder:
        counter = meter.build_counter(Path(folder))
        output = Path(folder) / "peaks.json"
        command = [sys.executable, *sys.argv, "--worker", output]
        subprocess.run(command, env=counter.environment(), check=True)
        memory = json.loads(output.read_text())
    write(args, counter.reason, times(args, mesh), memory)


def systems(name: str, case: Case, mesh: Any) -> dict[str, Callable[[], Step]]:
    """What makes the steps that are compared."""
    cls, hyper = OPTIMIZERS[name]
    strategy = fs.zero2(mesh)
    draw = torch.Generator().manual_seed(0)
    full = {f"{i:04}": torch.randn(case.width, case.width, generator=draw) for i in range(case.leaves)}
    grads = fs.shard(fs.tree_map(torch.cos, full), strategy)

    def stateful() -> Step:
        tensors = [torch.nn.Parameter(tensor.clone()) for tensor in fs.tree_leaves(fs.shard(full, strategy))]
        optimizer = cls(tensors, **hyper)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        def give() -> None:
            for tensor, grad in zip(tensors, fs.tree_leaves(grads)):
                tensor.grad = grad

        return Step(give, step)

    def pure(donate: bool) -> Step:
        tx = fs.from_torch(cls, **hyper)
        params = fs.shard(fs.tree_map(torch.clone, full), strategy)
        # In the specs of the parameters, as value_and_grad makes them.
        own = fs.tree_map(lambda _, grad: grad, params, grads)
        state = fs.TrainState.create(params, tx)

        def step() -> None:
            nonlocal state
            state = fs.update(tx, state, own, donate=donate)

        return Step(lambda: None, step)

    return {REFERENCE: stateful, "fshard donated": lambda: pure(True), "fshard": lambda: pure(False)}


def times(args: argparse.Namespace, mesh: Any) -> dict[str, dict[str, list[float]]]:
    """Seconds of every system in every round that counts, in an order that changes from round to round."""
    found = {}
    for name, case in args.pairs:
        steps = {system: make() for system, make in systems(name, case, mesh).items()}
        seconds: dict[str, list[float]] = {system: [] for system in steps}
        for number in range(args.dropped + args.rounds):
            if number == args.dropped:
                # Otherwise the objects of all systems would be walked in the time of whichever runs.
                gc.collect()
                gc.freeze()
            for system in random.Random(number).sample(list(steps), len(steps)):
                steps[system].prepare()
                start = time.perf_counter()
                steps[system].run()
                if number >= args.dropped:
                    seconds[system].append(time.perf_counter() - start)
        gc.unfreeze()
        found[f"{name} {case.name}"] = seconds
    return found


def peaks(args: argparse.Namespace, mesh: Any) -> dict[str, Any]:
    """Bytes that each system's steps allocate beyond what is there between them, and what measured it."""
    memory = meter.meter()
    found: dict[str, Any] = {}
    for name, case in args.pairs:
        found[f"{name} {case.name}"] = sizes = {}
        for system, make in systems(name, case, mesh).items():
            step = make()
            for _ in range(2):
                step.prepare()
                step.run()
            gc.collect()
            memory.reset()
            kept = memory.current()
            for _ in range(3):
                step.prepare()
                step.run()
            sizes[system] = memory.peak() - kept
            del step
            gc.collect()
    return {"measure": memory.name, "peaks": found}


def summary(seconds: Mapping[str, list[float]], system: str) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(seconds[system], seconds[REFERENCE])]
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "median_seconds": statistics.median(seconds[system]),
        **{"ratio": median, "ratio_quartiles": [lower, upper], "seconds": seconds[system]},
    }


def write(
    args: argparse.Namespace, reason: str, samples: Mapping[str, dict[str, list[float]]], memory: Mapping[str, Any]
) -> None:
    results = report.circumstances("update")
    results |= {
        **{"ranks": 1, "threads": args.threads, "reference": REFERENCE},
        **{"rounds": args.rounds, "dropped_rounds": args.dropped, "dtype": "float32"},
        **{"measure": memory["measure"], "fallback_reason": reason or None},
        "optimizers": {name: {"class": cls.__name__, **hyper} for name, (cls, hyper) in OPTIMIZERS.items()},
        "cases": {},
    }
    rows, bars = {}, {}
    for title, seconds in samples.items():
        results["cases"][title] = found = {system: summary(seconds, system) for system in seconds}
        for system, values in found.items():
            values["peak_bytes"] = memory["peaks"][title][system]
            lower, upper = values["ratio_quartiles"]
            rows[f"{title}, {system}"] = [
                f"{1e3 * values['median_seconds']:.2f}",
                f"{values['ratio']:.3f}",
                f"{lower:.3f} to {upper:.3f}",
                f"{values['peak_bytes'] / MIB:.2f}",
            ]
            if system != REFERENCE:
                bars[f"{system}, {title}"] = values["ratio"]
    columns = ("ms", "ratio", "quartiles", "peak MiB")
    because = f", because {reason}" if reason else ""
    report.print_table(f"Update; {REFERENCE} = 1; peak by {memory['measure']}{because}", columns, rows)
    file = args.results / "update.json"
    report.write_json(file, results)
    marks = [report.Mark(1.0, f"{REFERENCE}'s stateful optimizer")]
    report.write_bars(file.with_suffix(".png"), "Time of fs.update", "ratio, lower is better", bars, marks)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = [Case(1000, 64), Case(20, 1024)]
    parser.add_argument("--cases", type=lambda text: [*map(Case.parse, text.split(","))], default=cases)
    parser.add_argument("--optimizers", type=lambda text: text.split(","), default=list(OPTIMIZERS))
    parser.add_argument("--rounds", type=int, default=41, help="rounds that count")
    parser.add_argument("--dropped", type=int, default=3, help="rounds before them")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.optimizers) - set(OPTIMIZERS):
        parser.error(f"no optimizer is called {', '.join(sorted(unknown))}; there are {', '.join(OPTIMIZERS)}")
    args.pairs = [(name, case) for name in args.optimizers for case in args.cases]
    return args


if __name__ == "__main__":
    main()
