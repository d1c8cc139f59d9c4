"""Time and memory of fs.replay, fs.verify and fs.diff, in eager steps of the same model.

    OMP_NUM_THREADS=1 python benchmarks/replay.py
    OMP_NUM_THREADS=1 python benchmarks/replay.py --configuration d64-L2-B2-T32 --rounds 2

Two processes train a GPT with fs.zero3. In each round every process takes an eager step, a jitted one, traces the step
with fs.make_graph, and calls the three tools, in an order that changes from round to round. A tool traces the step each
time, so its time contains that of a trace; both are shown, and the time without a trace. fs.diff compares the step with
itself. Ratios are medians over rounds of the ratio to the eager step of the same round.

Peak memory is what a call allocates beyond what is there before it, of the rank with most. A small C library counts
allocations; where it cannot be compiled and loaded, resident memory is measured instead, and table and JSON say so.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import meter
import report
import torch
import torch.distributed as dist
from trained_gpt import Configuration

import fshard as fs

RANKS = 2
REFERENCE = "eager step"
TRACE = "trace"
# These trace the step before they run it, the last one twice.
TRACES = {"fs.replay": 1, "fs.verify": 1, "fs.diff": 2}
MIB = 2**20

Call = Callable[[], object]


def main() -> None:
    args = parse_args()
    if args.worker:
        args.worker.mkdir(exist_ok=True)
        work(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        counter = meter.build_counter(Path(folder))
        ranks = launch(args, counter, Path(folder) / "ranks")
    write(args, counter.reason, ranks)


def launch(args: argparse.Namespace, counter: meter.Counter, folder: Path) -> list[Any]:
    """Measure in processes of their own; returns what each rank has measured."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    arguments = ["--worker", folder, "--configuration", args.configuration.name, f"--rounds={args.rounds}"]
    environment = counter.environment() | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, __file__, *arguments], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"replay.py: a rank failed\n{done.stderr}")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def work(args: argparse.Namespace) -> None:
    """What runs in each measured process."""
    torch.set_num_threads(1)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    calls = make_calls(args.configuration, mesh)
    memory = meter.meter()
    peaks = {name: measure_peak(memory, call) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(args.rounds):
        for name in random.Random(number).sample(list(calls), len(calls)):
            dist.barrier()
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
    results = {"measure": memory.name, "peaks": peaks, "seconds": seconds}
    (args.worker / f"{mesh.get_rank()}.json").write_text(json.dumps(results))


def make_calls(configuration: Configuration, mesh: Any) -> dict[str, Call]:
    """What is measured, by its name."""
    model = fs.functionalize(configuration.module(), units=configuration.block)
    tx = fs.chain(fs.clip_by_global_norm(1.0), fs.adamw(1e-3))
    state = fs.TrainState.create(model.init(fs.zero3(mesh)), tx)
    batch = configuration.tokens(mesh.get_rank())

    def step(state: Any, batch: Any) -> Any:
        loss, grads = fs.value_and_grad(lambda params: model.apply(params, *batch))(state.params)
        return fs.update(tx, state, grads), loss

    jitted = fs.jit(step)
    trace = fs.make_graph(step)
    return {
        REFERENCE: lambda: step(state, batch),
        "jitted step": lambda: jitted(state, batch),
        TRACE: lambda: trace(state, batch),
        "fs.replay": lambda: expect_none(fs.replay(step, state, batch)),
        "fs.verify": lambda: expect_none(fs.verify(step, state, batch)),
        "fs.diff": lambda: fs.diff(step, step, state, batch),
    }


def expect_none(finding: object) -> None:
    if finding is not None:
        raise AssertionError(f"the step is right, but was reported:\n{finding}")


def measure_peak(memory: meter.Meter, call: Call) -> int:
    """Bytes that the second call takes beyond what is there before it; the first imports and traces."""
    call()
    gc.collect()
    memory.reset()
    held = memory.current()
    call()
    return memory.peak() - held


def summarize(ranks: Sequence[Any], name: str) -> dict[str, Any]:
    """Times of a call on the slower rank, and its peak."""
    seconds, steps, traces = (slowest(ranks, each) for each in (name, REFERENCE, TRACE))
    results = {
        "median_seconds": statistics.median(seconds),
        "ratio": statistics.median(a / b for a, b in zip(seconds, steps, strict=True)),
        "peak_bytes": max(rank["peaks"][name] for rank in ranks),
        "seconds": seconds,
    }
    if name in TRACES:
        parts = zip(seconds, traces, steps, strict=True)
        results["ratio_without_trace"] = statistics.median((a - TRACES[name] * b) / c for a, b, c in parts)
    return results


def slowest(ranks: Sequence[Any], name: str) -> list[float]:
    return [max(pair) for pair in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]


def write(args: argparse.Namespace, reason: str, ranks: Sequence[Any]) -> None:
    measured: dict[str, Mapping[str, Any]] = {name: summarize(ranks, name) for name in ranks[0]["seconds"]}
    measure = ranks[0]["measure"]
    results = report.circumstances("replay")
    results |= {
        "configuration": {"name": args.configuration.name, **args.configuration._asdict()},
        "ranks": RANKS,
        "backend": "gloo",
        "threads": 1,
        "rounds": args.rounds,
        "reference": REFERENCE,
        "measure": measure,
        "fallback_reason": reason or None,
        "calls": measured,
    }
    rows = {}
    for name, values in measured.items():
        without = f"{values['ratio_without_trace']:.2f}" if "ratio_without_trace" in values else ""
        peak = f"{values['peak_bytes'] / MIB:.1f}"
        rows[name] = [f"{values['median_seconds']:.3f}", f"{values['ratio']:.2f}", without, peak]
    because = f", because {reason}" if reason else ""
    title = f"{args.configuration.name}, {RANKS} processes; {REFERENCE} = 1; peak by {measure}{because}"
    report.print_table(title, ("s", "ratio", "without trace", "peak MiB"), rows)
    report.write_json(args.results / f"replay-{args.configuration.name}.json", results)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configuration", type=Configuration.parse, default="d512-L8-B4-T256")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
