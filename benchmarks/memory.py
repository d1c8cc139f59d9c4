"""Peak memory of a train step above the process's idle, for fshard and for torch's own ways to train.

    python benchmarks/memory.py
    python benchmarks/memory.py --configuration d512-L8-B4-T256 --systems ddp,fsdp2,fshard-zero3
    python benchmarks/memory.py --configuration llama
    python benchmarks/memory.py --configuration mixtral
    python benchmarks/memory.py --configuration mixtral --measured

Llama and Mixtral are models of transformers (architectures.py). --measured bounds and draws what was measured before.

Each system runs in processes of its own, so that none disturbs another. A small C library, compiled here and loaded
before the C library's allocator, counts what they allocate; where that cannot be done, resident memory is measured
instead, and table and JSON say so. Idle is a process with everything imported and its ranks connected, but no model:
the peak, over the steps after the first, is that of parameters, gradients, optimizer state, activations and buffers.

Next to each peak stands a bound, below which no step of the same operators can run (bound.py): the arguments of the
step, and the largest operator.

For jitted systems, such as fshard-zero3-graph, the most bytes that their graph holds at a time stand next to what was
measured: the peak above what is held between steps, which for a jitted system includes what tracing has imported.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import meter
import report
import torch
import torch.distributed as dist
from architectures import Configured, parse
from bound import bounds_of
from rivals import SYSTEMS, make

import fshard as fs

DEFAULT_SYSTEMS = "ddp,fsdp2,fsdp2-fine,fshard-ddp,fshard-zero2,fshard-zero3,fshard-zero2-graph,fshard-zero3-graph"
MIB = 2**20


def main() -> None:
    args = parse_args()
    if args.worker:
        work(args)
        return
    file = args.results / f"memory-{args.configuration.name}.json"
    if args.measured:
        results = json.loads(file.read_text())
        results["bounds"] = describe_bounds(results["systems"], args.configuration, results["ranks"])
        show(file, results)
        return
    with tempfile.TemporaryDirectory() as folder:
        counter = meter.build_counter(Path(folder))
        measured = {name: launch(name, args.ranks, args, counter, Path(folder)) for name in args.systems}
    show(file, collect(args, counter.reason, measured))


def describe_bounds(systems: Iterable[str], configuration: Configured, ranks: int) -> dict[str, dict[str, Any]]:
    """The bounds of systems and their parts, as results hold them."""
    bounds = bounds_of(systems, configuration, ranks)
    return {name: {**bound._asdict(), "bound": bound.total} for name, bound in bounds.items()}


def launch(name: str, ranks: int, args: argparse.Namespace, counter: meter.Counter, folder: Path) -> list[Any]:
    """Measure a system in processes of its own; returns what each rank found."""
    output = folder / name
    output.mkdir()
    print(f"Measuring {name}", flush=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    arguments = ["--worker", name, "--results", output, "--configuration", args.configuration.name]
    command = [*torchrun, __file__, *arguments, f"--steps={args.steps}"]
    environment = counter.environment() | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"memory.py: {name} failed\n{done.stderr}")
    return [json.loads((output / f"{rank}.json").read_text()) for rank in range(ranks)]


def work(args: argparse.Namespace) -> None:
    """What runs in each measured process."""
    torch.set_num_threads(1)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    # Connects the ranks, and lets kernels take what they keep.
    dist.all_reduce(torch.ones(2, 2) @ torch.ones(2, 2))
    gc.collect()
    memory = meter.meter()
    found: dict[str, Any] = {"measure": memory.name}
    memory.reset()
    found["idle"] = idle = memory.current()
    system = make(args.worker, args.configuration, mesh)
    system.step()
    found["making_and_first_step"] = memory.peak() - idle
    gc.collect()
    memory.reset()
    found["between_steps"] = memory.current() - idle
    for _ in range(args.steps):
        system.step()
    found |= {"peak": memory.peak() - idle, "stored": system.stored()._asdict()}
    if system.graph:
        found["predicted"] = system.graph().peak_bytes()
    (args.results / f"{mesh.get_rank()}.json").write_text(json.dumps(found))


def collect(args: argparse.Namespace, reason: str, measured: Mapping[str, list[Any]]) -> dict[str, Any]:
    """The results of a run, with its circumstances and the bounds."""
    configuration = args.configuration
    measure = next(iter(measured.values()))[0]["measure"]
    results = report.circumstances("memory")
    return results | {
        "configuration": {"name": configuration.name, **configuration._asdict()},
        **{"ranks": args.ranks, "backend": "gloo", "threads": 1, "steps": args.steps},
        **{"measure": measure, "fallback_reason": reason or None, "unit": "bytes above idle"},
        **{"systems": measured, "bounds": describe_bounds(measured, configuration, args.ranks)},
    }


def show(file: Path, results: Mapping[str, Any]) -> None:
    """Print tables, write results to a file, and draw them beside it."""
    name, ranks, reason = results["configuration"]["name"], results["ranks"], results["fallback_reason"]
    measured, bounds, measure = results["systems"], results["bounds"], results["measure"]
    peaks = {system: max(rank["peak"] for rank in of_ranks) for system, of_ranks in measured.items()}
    rows = {system: [mib(peaks[system]), *map(mib, others(of_ranks))] for system, of_ranks in measured.items()}
    columns = ("peak", "between steps", "stored", "making and first step")
    title = f"Memory above idle, MiB, largest of {ranks} ranks, {name}; by {measure}"
    report.print_table(title + (f", because {reason}" if reason else ""), columns, rows)
    graphs = {system: of_ranks for system, of_ranks in measured.items() if "predicted" in of_ranks[0]}
    if graphs:
        compared = {system: against_graph(of_ranks) for system, of_ranks in graphs.items()}
        report.print_table("Peak above that between steps, MiB", ("measured", "by the graph", "ratio"), compared)
    rows = {system: against_bound(peaks[system], parts) for system, parts in bounds.items()}
    columns = ("parameters", "optimizer state", "largest operator", "bound", "peak", "peak / bound")
    report.print_table("Below which no step can run, MiB", columns, rows)
    report.write_json(file, results)
    bars = {system: peak / MIB for system, peak in peaks.items()}
    sums = {system: parts["bound"] / MIB for system, parts in bounds.items()}
    title = f"Peak memory of a train step, {name}, {ranks} ranks"
    unit = f"MiB above idle, by {measure}: peak (filled) and its lower bound (hatched)"
    report.write_bars(file.with_suffix(".png"), title, unit, bars, bounds=sums)


def against_bound(peak: int, parts: Mapping[str, Any]) -> list[str]:
    """The parts of a bound, the bound, the peak, and how many times the bound that is."""
    sizes = [parts[key] for key in ("parameters", "optimizer_state", "largest_operator", "bound")]
    return [*map(mib, (*sizes, peak)), f"{peak / parts['bound']:.3f}"]


def others(ranks: list[Any]) -> list[int]:
    stored = max(sum(rank["stored"].values()) for rank in ranks)
    return [max(rank["between_steps"] for rank in ranks), stored, max(rank["making_and_first_step"] for rank in ranks)]


def against_graph(ranks: list[Any]) -> list[str]:
    """What steps took at most, what the graph tells of it, and how many times that is."""
    rank = max(ranks, key=lambda rank: rank["peak"] - rank["between_steps"])
    taken = rank["peak"] - rank["between_steps"]
    return [mib(taken), mib(rank["predicted"]), f"{rank['predicted'] / taken:.3f}"]


def mib(size: float) -> str:
    return f"{size / MIB:.1f}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configuration", type=parse, default="d1024-L8-B1-T256")
    parser.add_argument("--systems", type=lambda names: names.split(","), default=DEFAULT_SYSTEMS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="steps measured after the first")
    parser.add_argument("--measured", action="store_true", help="bound and draw the results that are there")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.systems) - set(SYSTEMS):
        parser.error(f"no system is called {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    return args


if __name__ == "__main__":
    main()
