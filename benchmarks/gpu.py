"""Train steps on accelerators: model FLOPs over the peak, peak memory and the host's time, one system after another.

On one device, or one rank for each under torchrun:

    python benchmarks/gpu.py
    torchrun --standalone --nproc_per_node 8 benchmarks/gpu.py --configurations d2048-L24-B8-T2048 --peak 989

By default a model of width 2048, and one with layers of GPT-3 175B (width 12288), as many as the memory holds of the
system that takes most. Parameters, gradients and AdamW's averages are float32; matrices are multiplied in bfloat16.

MFU is 6 FLOPs for each weight of a matrix and token, and 12 * layers * width * time for each token's attention to all
positions, over the time of the slowest part of a step and the peak; what is computed again does not count. The host's
time is that until all of a step is launched. Losses stand beside them, so that a reader sees that all train. Beside a
time and an MFU that are measured stand those that `fs.plan` predicts, by the figures and assumptions of `predict.py`.

Without an accelerator it says so and exits with 0.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import report
import rivals
import torch
from predict import MIXED, Chip, chip_of, flops_of, predicted_apart
from rivals import Batch, Maker, System
from rounds import mean_over_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from trained_gpt import Configuration

import fshard as fs

WIDE = Configuration(width=12288, layers=0, batch=1, time=2048)
# Bytes of a parameter whole: its value, gradient, two averages and a copy in bfloat16. Of a token's activations in a
# layer, in widths: those that autograd saves, in bfloat16.
BYTES_OF_PARAMETER, BYTES_OF_ACTIVATIONS = 18, 40

# Systems that run the operators of the plan one by one.
PLANNED = ("fshard-zero3", "fshard-zero3-graph", "fshard-zero3-graph-captured")


class Samples(NamedTuple):
    """Of the rounds that count: wall time and the host's share on rank 0, and the mean loss over ranks; and memory.

    Attributes:
        seconds: Until the device is done.
        host_seconds: Until the step returns.
        losses: Mean over ranks.
        peak_bytes: Allocated on rank 0 at most.
    """

    seconds: list[float]
    host_seconds: list[float]
    losses: list[float]
    peak_bytes: int


def main() -> None:
    args = parse_args()
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        print(
            "gpu.py: expected an accelerator that torch finds, got none; it needs one for each rank, from 32 GiB of "
            "memory for d2048-L12-B4-T2048, and a torch that was built for it"
        )
        return
    mesh = fs.init_mesh({"shard": -1}, device=device.type)
    name = torch.get_device_module(device.type).get_device_name()
    chip = chip_of(name)
    if args.peak:
        flops = args.peak * 1e12
        chip = chip._replace(flops=flops) if chip else Chip(flops)
    configurations = args.configurations
    if configurations is None:
        _, memory = torch.accelerator.get_memory_info()
        configurations = [Configuration(2048, 12, 4, 2048), fitted(WIDE, args.memory_fraction * memory)]
    for configuration in configurations:
        plan = None
        if mesh.get_rank() == 0:
            plan = predicted_apart(configuration, "zero3", {"shard": mesh.size()}, chip)
        found: dict[str, Any] = {}
        for system in args.systems or names(device.type, mesh.size()):
            found[system] = attempt(system, configuration, mesh, args.dropped, args.rounds)
            # The next system needs the memory.
            gc.collect()
            torch.accelerator.empty_cache()
        if mesh.get_rank() == 0:
            accelerator = {"name": name, "ranks": mesh.size(), "peak": chip and chip.flops}
            write(args, configuration, accelerator, found, plan)


def fitted(configuration: Configuration, memory: float) -> Configuration:
    """Give a configuration as many layers, one at least, as fit into memory where nothing is sharded."""

    def needed(layers: int) -> float:
        activations = BYTES_OF_ACTIVATIONS * configuration.width * configuration.batch * configuration.time * layers
        with torch.device("meta"):
            parameters = sum(p.numel() for p in configuration._replace(layers=layers).module().parameters())
        return BYTES_OF_PARAMETER * parameters + activations

    first = needed(1)
    more = max(0, int((memory - first) / (needed(2) - first)))
    return configuration._replace(layers=1 + more)


def zero3(mesh: DeviceMesh) -> fs.ShardTransform:
    return fs.zero3(mesh, **MIXED)


def plain_compiled(configuration: Configuration, mesh: DeviceMesh, batch: Batch) -> System:
    module = configuration.module()
    module.compile()
    return rivals.torch_system(module, rivals.adamw(module), batch)


def autocast(maker: Maker) -> Maker:
    """Multiply matrices in bfloat16, where a system has no such setting of its own."""

    def wrapped(configuration: Configuration, mesh: DeviceMesh, batch: Batch) -> System:
        system = maker(configuration, mesh, batch)

        def step() -> torch.Tensor:
            with torch.autocast(mesh.device_type, torch.bfloat16):
                return system.step()

        return system._replace(step=step)

    return wrapped


def captured(maker: Maker, steps: int = 3) -> Maker:
    """Capture a step as a CUDA graph: its donated state stays where it is."""

    def wrapped(configuration: Configuration, mesh: DeviceMesh, batch: Batch) -> System:
        system = maker(configuration, mesh, batch)
        # The first steps compile, and start communicators, which a capture cannot.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(steps):
                system.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = system.step()

        def step() -> torch.Tensor:
            graph.replay()
            return loss

        return system._replace(step=step)

    return wrapped


POLICY = MixedPrecisionPolicy(**MIXED)
SYSTEMS: dict[str, Maker] = {
    "plain": autocast(rivals.plain),
    "plain-compiled": autocast(plain_compiled),
    "ddp": autocast(rivals.ddp),
    "fsdp2": rivals.fsdp2(mp_policy=POLICY),
    "fsdp2-compiled": rivals.fsdp2(compiled=True, mp_policy=POLICY),
    "fshard-zero3": rivals.fshard(zero3),
    "fshard-zero3-graph": rivals.fshard(zero3, "graph"),
    "fshard-zero3-inductor": rivals.fshard(zero3, "inductor"),
    "fshard-zero3-graph-captured": captured(rivals.fshard(zero3, "graph", capturable=True)),
    "fshard-zero3-inductor-captured": captured(rivals.fshard(zero3, "inductor", capturable=True)),
}


def names(device: str, ranks: int) -> list[str]:
    """Systems to measure: PyTorch alone on one rank only, and CUDA graphs on CUDA only."""
    alone, captures = ("plain", "plain-compiled"), "captured"
    return [
        name
        for name in SYSTEMS
        if (ranks == 1 or name not in alone) and (device == "cuda" or not name.endswith(captures))
    ]


def attempt(name: str, configuration: Configuration, mesh: DeviceMesh, dropped: int, rounds: int) -> Samples | None:
    """Measure a system; None where it does not fit into memory."""
    try:
        return measure(make(name, configuration, mesh).step, dropped, rounds)
    except torch.OutOfMemoryError as error:
        print(f"{name}: {error}")
        return None


def make(name: str, configuration: Configuration, mesh: DeviceMesh) -> System:
    """Make a system on the mesh's device."""
    x, y = (tokens.to(mesh.device_type) for tokens in configuration.tokens(mesh.get_rank()))
    with torch.device(mesh.device_type):
        return SYSTEMS[name](configuration, mesh, (x, y))


def measure(step: Callable[[], torch.Tensor], dropped: int, rounds: int, memory: Any = torch.accelerator) -> Samples:
    """Run a step again and again; the device is idle before each.

    Args:
        step: Returns a loss.
        dropped: Rounds before those that count.
        rounds: Rounds that count.
        memory: Has torch.accelerator's functions that count memory.
    """
    seconds, host_seconds, losses = [], [], []
    for number in range(dropped + rounds):
        if number == dropped:
            gc.collect()
            memory.reset_peak_memory_stats()
        torch.accelerator.synchronize()
        start = time.perf_counter()
        loss = step()
        host = time.perf_counter() - start
        torch.accelerator.synchronize()
        end = time.perf_counter() - start
        # Ranks wait for each other here.
        mean = mean_over_ranks(loss.float())
        if number >= dropped:
            for values, value in zip((seconds, host_seconds, losses), (end, host, mean)):
                values.append(value)
    return Samples(seconds, host_seconds, losses, memory.max_memory_allocated())


def summary(samples: Samples, flops: float, peak: float | None) -> dict[str, Any]:
    """Medians over rounds, and the share of the peak where it is known."""
    seconds = statistics.median(samples.seconds)
    return {
        "median_seconds": seconds,
        "median_host_seconds": statistics.median(samples.host_seconds),
        "flops_per_second": flops / seconds,
        "mfu": flops / seconds / peak if peak else None,
        **samples._asdict(),
    }


def write(
    args: argparse.Namespace,
    configuration: Configuration,
    accelerator: dict[str, Any],
    found: dict[str, Samples | None],
    plan: dict[str, Any] | None,
) -> None:
    flops, peak = flops_of(configuration), accelerator["peak"]
    systems = {name: samples and summary(samples, flops, peak) for name, samples in found.items()}
    results = report.circumstances("gpu")
    results["hardware"]["accelerator"] = accelerator
    results |= {
        "configuration": {"name": configuration.name, **configuration._asdict()},
        **{"ranks": accelerator["ranks"], "flops": flops, "rounds": args.rounds, "dropped_rounds": args.dropped},
        "systems": systems,
        "predicted": plan,
    }
    title = f"Train step, {configuration.name}, {accelerator['name']}, ranks: {accelerator['ranks']}"
    columns = ("ms", "predicted", "MFU", "predicted", "TFLOP/s", "host ms", "peak GiB", "loss")
    rows = {name: cells(values, plan if name in PLANNED else None) for name, values in systems.items()}
    report.print_table(title, columns, rows)
    report.write_json(args.results / f"gpu-{configuration.name}-{accelerator['ranks']}.json", results)


def cells(values: dict[str, Any] | None, plan: dict[str, Any] | None) -> Sequence[str]:
    """Write the figures of a system, and of its plan beside them; dashes for what is not known."""
    ms, mfu = (f"{1e3 * plan['seconds']:.1f}", f"{plan['mfu']:.3f}") if plan else ("-", "-")
    if values is None:
        return ("does not fit", ms, "-", mfu, *4 * ("-",))
    return (
        *(f"{1e3 * values['median_seconds']:.1f}", ms),
        *("-" if values["mfu"] is None else f"{values['mfu']:.3f}", mfu),
        f"{values['flops_per_second'] / 1e12:.1f}",
        f"{1e3 * values['median_host_seconds']:.1f}",
        f"{values['peak_bytes'] / 2**30:.2f}",
        f"{values['losses'][-1]:.3f}",
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--configurations",
        type=lambda given: [Configuration.parse(name) for name in given.split(",")],
        help="such as d2048-L12-B4-T2048, several with commas; by default the two above",
    )
    parser.add_argument("--systems", type=lambda given: given.split(","), help=f"of {','.join(SYSTEMS)}")
    parser.add_argument("--peak", type=float, help="TFLOP/s of a device in bfloat16; by default by its name")
    parser.add_argument("--memory-fraction", type=float, default=0.8, help="of the device's memory, for width 12288")
    parser.add_argument("--rounds", type=int, default=20, help="rounds that count")
    parser.add_argument("--dropped", type=int, default=5, help="rounds before them")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    args = parser.parse_args()
    if unknown := set(args.systems or ()) - set(SYSTEMS):
        parser.error(f"no system is called {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    return args


if __name__ == "__main__":
    main()
