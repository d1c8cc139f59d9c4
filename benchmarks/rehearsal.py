"""Count the kernels, waits, bytes and memory of one step of each strategy, on the device "emu" of `tests/accelerator`.

    python benchmarks/rehearsal.py

No accelerator is needed, and nothing here is an accelerator's time: "emu" has an accelerator's rules, and runs its
operators on the processor. This process is rank 0 of 8 by the backend of `loop_backend.py`, whose collectives are local
copies on a stream of their own. Counted are, of one step, by the device's log and allocator:

- kernels: operators that the stream of the computation runs. Views do not count, a fused optimizer counts once for each
  list of leaves, and attention as the several operators that torch runs where a device has no kernel for it.
- waits of the host for the device, and copies between them that carry anything.
- other streams that run kernels, and events that a stream waits for, without those of the backend.
- the most bytes that tensors hold, the state and the batch included, beside what `fs.plan` says of the jitted step.
- collectives, and the bytes that each kind sends, as `fs.comm.record` counts them; scalars are not among the bytes.

Host milliseconds are the processor's time of the main thread, autograd's nodes included and the operators' own work
left out: what a step costs the host that runs this, but for a driver's part of a launch. Parameters are gathered in
bfloat16, gradients reduced in float32, and every block is a unit, as in a large model. Plain PyTorch on one process
stands beside, for the same model in float32.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import loop_backend
import report
import rivals
import torch
from predict import MIXED
from torch.nn.attention import SDPBackend, sdpa_kernel
from trained_gpt import Configuration

import fshard as fs

ROOT = Path(__file__).parents[1]
RANKS = 8
# Each strategy's mesh.
STRATEGIES = {name: {"shard": RANKS} for name in ("ddp", "zero1", "zero2", "zero3")} | {
    "hsdp": {"replicate": 2, "shard": RANKS // 2}
}
# Steps before the one that counts, the first of which traces; those that are timed.
DROPPED = 3
ROUNDS = 9


def main() -> None:
    args = parse_args()
    sys.path.append(str(ROOT))
    from tests.accelerator import emu

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        device = emu.load(emu.build(Path(folder)))
    loop_backend.start(RANKS, "emu")
    systems = {}
    for name, maker, sizes in list_systems():
        mesh = fs.init_mesh(sizes, device="emu")
        systems[name] = counted(maker, args.configuration, mesh, sizes, device)
    results = report.circumstances("rehearsal") | {"accelerator": "emu, of tests/accelerator, on the processor"}
    configuration = {"name": args.configuration.name, **args.configuration._asdict()}
    results |= {"configuration": configuration, "ranks": [1, RANKS], "systems": systems}
    columns = ("kernels", "host ms", "waits", "copies", "streams", "events", "peak kB", "plan", "kB sent")
    report.print_table(f"One step, {args.configuration.name}", columns, {name: cells(v) for name, v in systems.items()})
    report.write_json(args.results / "rehearsal.json", results)


def list_systems() -> list[tuple[str, rivals.Maker, Mapping[str, int]]]:
    """List the systems with their names and meshes."""
    systems: list[tuple[str, rivals.Maker, Mapping[str, int]]] = [("plain", rivals.plain, {"shard": RANKS})]
    for name, sizes in STRATEGIES.items():
        strategy = partial(getattr(fs, name), bucket_bytes=0, **MIXED)
        systems.append((name, rivals.fshard(strategy), sizes))
        systems.append((f"{name}, jitted", rivals.fshard(strategy, "graph"), sizes))
    return systems


def counted(
    maker: rivals.Maker, configuration: Configuration, mesh: Any, sizes: Mapping[str, int], emu: Any
) -> dict[str, Any]:
    """Count what a step does on the device, and time its host."""
    held_before = emu.allocated_bytes()
    x, y = (tokens.to("emu") for tokens in configuration.tokens(mesh.get_rank()))
    with torch.device("emu"):
        system = maker(configuration, mesh, (x, y))
    step = system.step
    # One thread runs all nodes of autograd, and so its time is the host's.
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(DROPPED):
            step()
        emu.take_events()
        emu.reset_peak()
        with fs.comm.record() as record:
            step()
        peak_bytes = emu.peak_bytes() - held_before
        events, seconds = [event.split() for event in emu.take_events()], []
        for _ in range(ROUNDS):
            start = time.thread_time() - emu.busy_seconds()
            step()
            seconds.append(time.thread_time() - emu.busy_seconds() - start)
            emu.take_events()
    events = [event for event in events if not is_of_backend(event)]
    kinds = Counter(event[0] for event in events)
    sent = Counter[str]()
    for entry in record:
        sent[f"{entry.op} over {entry.axis}"] += 0 if entry.scalar else entry.sent
    return {
        "kernels": kinds["run"],
        "host_seconds": statistics.median(seconds),
        "waits": Counter(" ".join(event[1:]) for event in events if event[0] == "sync"),
        "copies": sum(event[0] == "to" and event[2] != "0" for event in events),
        "streams": len({event[-1] for event in events if event[0] == "run"}) - 1,
        "events": kinds["order"],
        "peak_bytes": peak_bytes,
        "plan": planned(system, sizes),
        "collectives": Counter(f"{entry.op} over {entry.axis}" for entry in record),
        "bytes_sent": sent,
    }


def is_of_backend(event: list[str]) -> bool:
    """Whether an event of the log is about a stream of the collectives' backend."""
    match event:
        case ["run", *_, stream]:
            streams = {stream}
        case ["order", "stream", later, "after", earlier]:
            streams = {later, earlier}
        case _:
            streams = set[str]()
    return not streams.isdisjoint(loop_backend.streams())


def planned(system: rivals.System, sizes: Mapping[str, int]) -> dict[str, Any] | None:
    """What `fs.plan` says of a step, with the operators that attention has on the device; None for plain PyTorch."""
    if system.plan is None:
        return None
    with sdpa_kernel(SDPBackend.MATH):
        plan = system.plan(sizes)
    return {
        "peak_bytes": plan.peak_bytes,
        "bytes_sent": plan.bytes_sent(),
        "collectives": Counter(f"{entry.op} over {entry.axis}" for entry in plan.collectives()),
    }


def cells(values: Mapping[str, Any]) -> list[str]:
    sent = [f"{values['collectives'][op]} {op} {size / 1e3:.0f}" for op, size in values["bytes_sent"].items()]
    numbers = [values["kernels"], f"{1e3 * values['host_seconds']:.1f}", sum(values["waits"].values())]
    counts = [str(values[key]) for key in ("copies", "streams", "events")]
    plan = values["plan"]
    peaks = [f"{values['peak_bytes'] / 1e3:.0f}", "-"]
    if plan is not None:
        peaks[1] = f"{plan['peak_bytes'] / 1e3:.0f} ({plan['peak_bytes'] / values['peak_bytes'] - 1:+.1%})"
    return [*map(str, numbers), *counts, *peaks, ", ".join(sent) or "-"]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configuration", type=Configuration.parse, default="d64-L8-B2-T32-V256")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
