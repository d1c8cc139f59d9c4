"""Count the kernels, waits and bytes of one step of each strategy, on the device "emu" of `tests/accelerator`.

    python benchmarks/rehearsal.py

No accelerator is needed, and nothing here is an accelerator's time: "emu" has an accelerator's rules, and runs its
operators on the processor. Counted are, of one step on rank 0, by the device's log:

- kernels: operators that a stream runs. Views do not count, a fused optimizer counts once for each list of leaves, and
  attention as the several operators that torch runs where a device has no kernel for it.
- waits of the host for the device, and copies between them that carry anything.
- streams that run kernels, and events that one stream waits for; those of the backend of collectives are its own.
- collectives, and the bytes that each kind sends, as `fs.comm.record` counts them; scalars are not among the bytes.

Host milliseconds are the processor's time of the main thread, autograd's nodes included and the operators' own work
left out: what a step costs the host that runs this, but for a driver's part of a launch. Parameters are gathered in
bfloat16, gradients reduced in float32, and every block is a unit, as in a large model. Plain PyTorch on one process
stands beside, for the same model in float32.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import report
import rivals
import torch
from gpt import Configuration
from predict import MIXED

import fshard as fs

ROOT = Path(__file__).parents[1]
# Each strategy's ranks; plain PyTorch has one.
STRATEGIES = {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2, "hsdp": 4}
# Steps before the one that counts, the first of which traces; those that are timed.
DROPPED = 3
ROUNDS = 9


def main() -> None:
    args = parse_args()
    sys.path.append(str(ROOT))
    from tests.accelerator import emu

    if args.library:
        work(args, emu.load(args.library))
        return
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        library, file = emu.build(Path(folder)), Path(folder, "found.json")
        for ranks in (1, 2, 4):
            torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks))
            options = ("--library", library, "--results", file, "--configuration", args.configuration.name)
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            subprocess.run([*torchrun, __file__, *map(str, options)], check=True, env=environment, timeout=600)
            found |= json.loads(file.read_text())
    results = report.circumstances("rehearsal") | {"accelerator": "emu, of tests/accelerator, on the processor"}
    configuration = {"name": args.configuration.name, **args.configuration._asdict()}
    results |= {"configuration": configuration, "ranks": [1, 2, 4], "systems": found}
    columns = ("kernels", "host ms", "waits", "copies", "streams", "events", "kB sent by collectives")
    report.print_table(f"One step, {args.configuration.name}", columns, {name: cells(v) for name, v in found.items()})
    report.write_json(args.results / "rehearsal.json", results)


def work(args: argparse.Namespace, emu: Any) -> None:
    """Count the steps that are for this number of ranks; on rank 0 write what was found."""
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    mesh = fs.init_mesh({"replicate": 2, "shard": -1} if ranks == 4 else {"shard": -1}, device="emu")
    systems: dict[str, rivals.Maker] = {"plain": rivals.plain} if ranks == 1 else {}
    for name in (name for name, needed in STRATEGIES.items() if needed == ranks):
        strategy = partial(getattr(fs, name), bucket_bytes=0, **MIXED)
        systems |= {name: rivals.fshard(strategy), f"{name}, jitted": rivals.fshard(strategy, "graph")}
    found = {name: counted(maker, args.configuration, mesh, emu) for name, maker in systems.items()}
    if mesh.get_rank() == 0:
        args.results.write_text(json.dumps({name: {"ranks": ranks, **values} for name, values in found.items()}))


def counted(maker: rivals.Maker, configuration: Configuration, mesh: Any, emu: Any) -> dict[str, Any]:
    """Count what a step does on the device, and time its host."""
    x, y = (tokens.to("emu") for tokens in configuration.tokens(mesh.get_rank()))
    with torch.device("emu"):
        step = maker(configuration, mesh, (x, y)).step
    # One thread runs all nodes of autograd, and so its time is the host's.
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(DROPPED):
            step()
        emu.take_events()
        with fs.comm.record() as record:
            step()
        events, seconds = [event.split() for event in emu.take_events()], []
        for _ in range(ROUNDS):
            start = time.thread_time() - emu.busy_seconds()
            step()
            seconds.append(time.thread_time() - emu.busy_seconds() - start)
            emu.take_events()
    kinds = Counter(event[0] for event in events)
    sent = Counter[str]()
    for entry in record:
        sent[f"{entry.op} over {entry.axis}"] += 0 if entry.scalar else entry.sent
    return {
        "kernels": kinds["run"],
        "host_seconds": statistics.median(seconds),
        "waits": Counter(" ".join(event[1:]) for event in events if event[0] == "sync"),
        "copies": sum(event[0] == "to" and event[2] != "0" for event in events),
        "streams": len({event[-1] for event in events if event[0] == "run"}),
        "events": kinds["order"],
        "collectives": Counter(f"{entry.op} over {entry.axis}" for entry in record),
        "bytes_sent": sent,
    }


def cells(values: Mapping[str, Any]) -> list[str]:
    sent = [f"{values['collectives'][op]} {op} {size / 1e3:.0f}" for op, size in values["bytes_sent"].items()]
    numbers = [values["kernels"], f"{1e3 * values['host_seconds']:.1f}", sum(values["waits"].values())]
    return [*map(str, numbers), *(str(values[key]) for key in ("copies", "streams", "events")), ", ".join(sent) or "-"]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configuration", type=Configuration.parse, default="d64-L4-B2-T32-V256")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    parser.add_argument("--library", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
