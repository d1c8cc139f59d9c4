"""Time and peak memory of making sharded parameters, for fshard and for torch's own ways.

    python benchmarks/init.py
    python benchmarks/init.py --configuration d512-L8-B4-T256 --systems fshard-replay,fsdp2-meta --rounds 9

fshard-replay and fshard-counter draw from a module on the meta device. fsdp2-meta is FSDP2's way: fully_shard of a
module on the meta device, to_empty, and each submodule's reset_parameters on DTensors. The dense ones construct the
module with values on every rank and shard it then. Each system runs in processes of its own, ranks connected and
everything imported; a round makes the parameters anew, after one on a small model. Times are the slowest rank's,
medians over the rounds. Memory is the most that a round allocates beyond what there was before, of any rank, counted as
in memory.py. The bound of fshard-replay is the shards, the largest submodule that draws, and a flag for each of its
elements.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import meter
import report
import torch
import torch.distributed as dist
from rivals import total_bytes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from trained_gpt import SEED, Block, Configuration

import fshard as fs

MIB = 2**20
SMALL = Configuration(64, 1, 1, 16)

# What makes parameters returns all that is to stay.
Maker = Callable[[Configuration, DeviceMesh], Any]


def fshard(mode: str) -> Maker:
    def make(configuration: Configuration, mesh: DeviceMesh) -> Any:
        with torch.device("meta"):
            module = configuration.module()
        return fs.functionalize(module, units=Block).init(fs.zero3(mesh), seed=SEED, mode=mode)

    return make


def fshard_dense(configuration: Configuration, mesh: DeviceMesh) -> Any:
    return fs.functionalize(configuration.module(), units=Block).init(fs.zero3(mesh))


def fsdp2_meta(configuration: Configuration, mesh: DeviceMesh) -> Any:
    with torch.device("meta"):
        module = sharded_by_fsdp2(configuration.module(), mesh)
    module.to_empty(device="cpu")
    torch.manual_seed(SEED)
    for submodule in module.modules():
        if hasattr(submodule, "reset_parameters"):
            submodule.reset_parameters()
    return module


def fsdp2_dense(configuration: Configuration, mesh: DeviceMesh) -> Any:
    return sharded_by_fsdp2(configuration.module(), mesh)


def sharded_by_fsdp2(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for unit in (*module.blocks, module):
        fully_shard(unit, mesh=mesh)
    return module


SYSTEMS: dict[str, Maker] = {
    "fshard-replay": fshard("replay"),
    "fshard-counter": fshard("counter"),
    "fsdp2-meta": fsdp2_meta,
    "fshard-dense": fshard_dense,
    "fsdp2-dense": fsdp2_dense,
}
BOUNDED = "fshard-replay"


def main() -> None:
    args = parse_args()
    if args.worker:
        work(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        counter = meter.build_counter(Path(folder))
        measured = {name: launch(name, args, counter, Path(folder)) for name in args.systems}
    write(args, counter.reason, measured)


def launch(name: str, args: argparse.Namespace, counter: meter.Counter, folder: Path) -> list[Any]:
    """Measure a system in processes of its own; returns what each rank found."""
    output = folder / name
    output.mkdir()
    print(f"Measuring {name}", flush=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}"]
    arguments = ["--worker", name, "--results", output, "--configuration", args.configuration.name]
    command = [*torchrun, __file__, *arguments, f"--rounds={args.rounds}"]
    environment = counter.environment() | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"init.py: {name} failed\n{done.stderr}")
    return [json.loads((output / f"{rank}.json").read_text()) for rank in range(args.ranks)]


def work(args: argparse.Namespace) -> None:
    """What runs in each measured process."""
    # DTensor says of every mesh on the CPU that it may draw other numbers than one process does.
    warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")
    torch.set_num_threads(1)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    memory, make = meter.meter(), SYSTEMS[args.worker]
    make(SMALL, mesh)
    found: dict[str, Any] = {"measure": memory.name, "seconds": [], "peaks": []}
    for _ in range(args.rounds):
        gc.collect()
        dist.barrier()
        memory.reset()
        idle, start = memory.current(), time.perf_counter()
        made = make(args.configuration, mesh)
        found["seconds"].append(time.perf_counter() - start)
        found["peaks"].append(memory.peak() - idle)
        gc.collect()
        found["kept"] = memory.current() - idle
        del made
    (args.results / f"{mesh.get_rank()}.json").write_text(json.dumps(found))


def bound_of(configuration: Configuration, ranks: int) -> dict[str, int]:
    """What replay cannot need more than, part by part, in bytes."""
    with torch.device("meta"):
        module = configuration.module()
    largest = max(total_bytes(submodule.parameters(recurse=False)) for submodule in module.modules())
    flags = max(parameter.numel() for parameter in module.parameters())
    return {"shards": total_bytes(module.parameters()) // ranks, "largest submodule": largest, "flags": flags}


def write(args: argparse.Namespace, reason: str, measured: dict[str, list[Any]]) -> None:
    measure = next(iter(measured.values()))[0]["measure"]
    systems = {
        name: {
            "seconds": statistics.median(map(max, zip(*(rank["seconds"] for rank in ranks)))),
            "peak": max(max(rank["peaks"]) for rank in ranks),
            "kept": max(rank["kept"] for rank in ranks),
            "ranks": ranks,
        }
        for name, ranks in measured.items()
    }
    bound = bound_of(args.configuration, args.ranks)
    results = report.circumstances("init")
    results |= {
        "configuration": {"name": args.configuration.name, **args.configuration._asdict()},
        **{"ranks": args.ranks, "backend": "gloo", "threads": 1, "rounds": args.rounds},
        **{"measure": measure, "fallback_reason": reason or None, "unit": "seconds, and bytes above idle"},
        **{"systems": systems, "bound": {"system": BOUNDED, "parts": bound, "bound": sum(bound.values())}},
    }
    rows = {
        name: [f"{system['seconds']:.2f}", *(f"{system[key] / MIB:.1f}" for key in ("peak", "kept"))]
        for name, system in systems.items()
    }
    rows[f"bound of {BOUNDED}"] = ["", f"{sum(bound.values()) / MIB:.1f}", f"{bound['shards'] / MIB:.1f}"]
    title = f"Making sharded parameters, {args.configuration.name}, {args.ranks} ranks; memory in MiB by {measure}"
    report.print_table(title + (f", because {reason}" if reason else ""), ("seconds", "peak", "kept"), rows)
    report.write_json(args.results / "init.json", results)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configuration", type=Configuration.parse, default="d1024-L8-B1-T256")
    parser.add_argument("--systems", type=lambda names: names.split(","), default=",".join(SYSTEMS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.systems) - set(SYSTEMS):
        parser.error(f"no system is called {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    return args


if __name__ == "__main__":
    main()
