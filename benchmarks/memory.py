"""Peak memory of a train step above the process's idle, for fshard and for torch's own ways to train.

    python benchmarks/memory.py
    python benchmarks/memory.py --configuration d512-L8-B4-T256 --systems ddp,fsdp2,fshard-zero3

Each system runs in processes of its own, so that none disturbs another. A small C library, compiled here and loaded
before the C library's allocator, counts what they allocate; where that cannot be done, resident memory is measured
instead, and table and JSON say so. Idle is a process with everything imported and its ranks connected, but no model:
the peak, over the steps after the first, is that of parameters, gradients, optimizer state, activations and buffers.

For fshard-zero3 the bound stands next to the peak: stored shards of parameters and optimizer state, sharded gradients,
activations, the two largest units, and the bytes that may be in flight. Activations are measured in one process of
plain PyTorch: whenever a gradient is complete, the peak since the one before, minus the parameters and the gradients
there are by then; the most of these counts. The bound adds up what need not be largest at one moment. The tighter one
takes gradients and activations at the one moment when the two together are most.

For jitted systems, such as fshard-zero3-graph, the most bytes that their graph holds at a time stand next to what was
measured: the peak above what is held between steps, which for a jitted system includes what tracing has imported.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import meter
import report
import torch
import torch.distributed as dist
from gpt import SEED, Block, Configuration
from rivals import ADAMW, SYSTEMS, make, total_bytes
from torch import nn

import fshard as fs
from fshard.tree import ReshardPolicy

DEFAULT_SYSTEMS = "ddp,fsdp1,fsdp2,fsdp2-fine,fshard-ddp,fshard-zero2,fshard-zero3"
BOUNDED = "fshard-zero3"
ACTIVATIONS = "activations"
JITTED = {"fshard-ddp-graph": fs.ddp, "fshard-zero2-graph": fs.zero2, "fshard-zero3-graph": fs.zero3}
MIB = 2**20


class Moment(NamedTuple):
    """Memory up to the moment when one more gradient was complete: activations, and full gradients by then."""

    activations: int
    gradients: int


def main() -> None:
    args = parse_args()
    if args.worker:
        work(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        counter = meter.build_counter(Path(folder))
        measured = {name: launch(name, args.ranks, args, counter, Path(folder)) for name in args.systems}
        bound = None
        if BOUNDED in measured:
            plain = launch(ACTIVATIONS, 1, args, counter, Path(folder))[0]
            bound = bound_of(args, measured[BOUNDED], [Moment(*moment) for moment in plain["moments"]])
    write(args, counter.reason, measured, bound)


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
    if args.worker == ACTIVATIONS:
        found["moments"] = moments(args.configuration, memory)
    else:
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
        if args.worker in JITTED:
            del system
            found["predicted"] = peak_of_graph(JITTED[args.worker](mesh), args.configuration, mesh.get_rank())
    (args.results / f"{mesh.get_rank()}.json").write_text(json.dumps(found))


def peak_of_graph(strategy: fs.ShardTransform, configuration: Configuration, rank: int) -> int:
    """The most bytes that a donated step of a jitted system holds beyond its arguments, as its graph tells."""
    with torch.device("meta"):
        model = fs.functionalize(configuration.module(), units=Block)
    tx = fs.from_torch(torch.optim.AdamW, **ADAMW)
    state = fs.TrainState.create(model.init(strategy, seed=SEED), tx)

    def train_step(state: fs.TrainState, *batch: torch.Tensor) -> tuple[fs.TrainState, torch.Tensor]:
        loss, grads = fs.value_and_grad(model.apply)(state.params, *batch)
        return fs.update(tx, state, grads), loss

    jitted = fs.jit(train_step, donate_argnums=0)
    return fs.make_graph(jitted)(state, *configuration.tokens(rank)).peak_bytes()


def moments(configuration: Configuration, memory: meter.Meter) -> list[Moment]:
    """Follow one forward and backward of plain PyTorch, gradient by gradient."""
    module, batch = configuration.module(), configuration.tokens(rank=0)
    module(*batch).backward()
    module.zero_grad()
    idle = memory.current()
    found: list[Moment] = []

    def completed(parameter: torch.Tensor) -> None:
        gradients = found[-1].gradients if found else 0
        gradients += parameter.nbytes
        found.append(Moment(memory.peak() - idle - gradients, gradients))
        memory.reset()

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(completed)
    memory.reset()
    module(*batch).backward()
    return found


def bound_of(args: argparse.Namespace, ranks: list[Any], moments: list[Moment]) -> dict[str, Any]:
    """What ZeRO-3 cannot need more than, part by part, in bytes."""
    with torch.device("meta"):
        module = args.configuration.module()
    stored = max((rank["stored"] for rank in ranks), key=lambda stored: sum(stored.values()))
    kept = stored["parameters"] / total_bytes(module.parameters())
    at_once = max(moments, key=lambda moment: moment.activations + kept * moment.gradients)
    always = {"parameter shards": stored["parameters"], "optimizer state shards": stored["optimizer"]}
    passing = {"two largest units": sum(unit_bytes(module)[-2:]), "in flight": ReshardPolicy().ahead_bytes}
    apart = {"gradient shards": stored["parameters"], "activations": max(moment.activations for moment in moments)}
    together = {"gradient shards": round(kept * at_once.gradients), "activations": at_once.activations}
    parts, tighter = always | apart | passing, always | together | passing
    return {"parts": parts, "bound": sum(parts.values()), "tighter_parts": tighter, "tighter": sum(tighter.values())}


def unit_bytes(module: nn.Module) -> list[int]:
    """Bytes of each unit, in growing order: the blocks, and what other modules own."""
    blocks = [block for block in module.modules() if isinstance(block, Block)]
    inside = {parameter for block in blocks for parameter in block.parameters()}
    others = (set(owner.parameters(recurse=False)) - inside for owner in module.modules())
    return sorted(total_bytes(unit) for unit in (*(block.parameters() for block in blocks), *others))


def write(args: argparse.Namespace, reason: str, measured: Mapping[str, list[Any]], bound: Any) -> None:
    configuration = args.configuration
    measure = next(iter(measured.values()))[0]["measure"]
    results = report.circumstances("memory")
    results |= {
        "configuration": {"name": configuration.name, **configuration._asdict()},
        **{"ranks": args.ranks, "backend": "gloo", "threads": 1, "steps": args.steps},
        **{"measure": measure, "fallback_reason": reason or None, "unit": "bytes above idle"},
        **{"systems": measured, "bound": bound and {"system": BOUNDED, **bound}},
    }
    peaks = {name: max(rank["peak"] for rank in ranks) for name, ranks in measured.items()}
    rows = {name: [mib(peaks[name]), *map(mib, others(ranks))] for name, ranks in measured.items()}
    columns = ("peak", "between steps", "stored", "making and first step")
    title = f"Memory above idle, MiB, largest of {args.ranks} ranks, {configuration.name}; by {measure}"
    report.print_table(title + (f", because {reason}" if reason else ""), columns, rows)
    graphs = {name: ranks for name, ranks in measured.items() if name in JITTED}
    if graphs:
        compared = {name: against_graph(ranks) for name, ranks in graphs.items()}
        report.print_table("Peak above that between steps, MiB", ("measured", "by the graph", "ratio"), compared)
    marks = []
    if bound:
        parts = {name: [mib(size), mib(bound["tighter_parts"][name])] for name, size in bound["parts"].items()}
        parts |= {"bound": [mib(bound["bound"]), mib(bound["tighter"])], "measured peak": [mib(peaks[BOUNDED])] * 2}
        parts["measured / bound"] = [f"{peaks[BOUNDED] / bound[kind]:.3f}" for kind in ("bound", "tighter")]
        report.print_table(f"Bound of {BOUNDED}, MiB", ("each at its most", "at one moment"), parts)
        marks = [report.Mark(bound["bound"] / MIB, f"bound of {BOUNDED}")]
        marks.append(report.Mark(bound["tighter"] / MIB, "the same at one moment"))
    file = args.results / f"memory-{configuration.name}.json"
    report.write_json(file, results)
    bars = {name: peak / MIB for name, peak in peaks.items()}
    title = f"Peak memory of a train step, {configuration.name}, {args.ranks} ranks"
    report.write_bars(file.with_suffix(".png"), title, f"MiB above idle, by {measure}", bars, marks, digits=0)


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
    parser.add_argument("--configuration", type=Configuration.parse, default="d1024-L8-B1-T256")
    parser.add_argument("--systems", type=lambda names: names.split(","), default=DEFAULT_SYSTEMS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="steps measured after the first")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.systems) - set(SYSTEMS):
        parser.error(f"no system is called {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    return args


if __name__ == "__main__":
    main()
