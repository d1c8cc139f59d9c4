"""Times and memory: one rank, rank 0 of 8 by the loop backend, and Inductor."""

import gc
import math
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import gpu
import llama
import loop_backend
import predict
import rivals
import torch
from trained_gpt import Configuration

import fshard as fs
from stages import Findings, Place, reported

# 1.2 billion parameters.
LLAMA = llama.Sizes(
    batch=4, checkpointed=False, time=2048, width=2048, layers=16, heads=16, kv_heads=16, hidden=8192, vocabulary=32000
)
SMALL_LLAMA = LLAMA._replace(batch=1, time=16, width=64, layers=2, heads=2, kv_heads=2, hidden=128, vocabulary=256)
LAYERS_OF_7B = Configuration.parse("d4096-L6-B1-T4096-V32000")
SMALL_LAYERS = Configuration.parse("d64-L4-B1-T16-V256")
RANKS = 8
# Cycles that each collective takes: a millisecond, as 360 MB by NVLink.
LINK = 2_000_000
# Rounds that are dropped, and those that count.
ROUNDS = (3, 6)
# Of several times and peaks: what tells whether a system trains, and how fast.
Row = dict[str, Any]


def model(place: Place) -> Findings:
    """A Llama in bfloat16 on one rank: plain PyTorch, FSDP2, and zero3 eager and jitted."""
    mesh = fs.init_mesh({"shard": -1}, device=place.device)
    yield from systems(place, place.sized(LLAMA, SMALL_LLAMA), mesh, SYSTEMS_OF_MODEL)


def inductor(place: Place) -> Findings:
    """Four layers of it by Inductor, beside the graph; a rehearsal compiles for the processor."""
    mesh = fs.init_mesh({"shard": -1}, device=place.sized(place.device, "cpu"))
    configuration = place.sized(LLAMA._replace(layers=4), SMALL_LLAMA._replace(layers=1))
    yield from systems(place, configuration, mesh, SYSTEMS_OF_INDUCTOR)


SYSTEMS_OF_MODEL = ("plain", "fsdp2", "fshard-zero3", "fshard-zero3-graph")
SYSTEMS_OF_INDUCTOR = ("fshard-zero3-graph", "plain-compiled", "fshard-zero3-inductor")


def systems(place: Place, configuration: Any, mesh: Any, names: tuple[str, ...]) -> Findings:
    """Time systems one after another, and predict the step of zero3."""
    for name in names:
        free_memory(place)
        with reported(name) as row:
            row |= timed(place, made(gpu.SYSTEMS[name], configuration, mesh), configuration)
        yield row
    with reported("predicted") as row:
        row |= predict.predicted(configuration, "zero3", {"shard": 1}, predict.chip_of(place.name())) or {}
        row["passed"] = "seconds" in row
    yield row


def loop(place: Place) -> Findings:
    """One process as rank 0 of 8 by the loop backend: layers of 7B, with and without a link's time, FSDP2 beside."""
    loop_backend.start(RANKS, place.device)
    mesh = fs.init_mesh({"shard": -1}, device=place.device)
    configuration = place.sized(LAYERS_OF_7B, SMALL_LAYERS)
    wide = partial(fs.zero3, bucket_bytes=500_000_000, **predict.MIXED)
    makers = {
        "fsdp2": gpu.SYSTEMS["fsdp2"],
        "zero3": rivals.fshard(gpu.zero3),
        "zero3, jitted": rivals.fshard(gpu.zero3, "graph"),
        "zero3 of wide buckets": rivals.fshard(wide),
        "zero3 of wide buckets, jitted": rivals.fshard(wide, "graph"),
    }
    peaks = {}
    for name, maker in makers.items():
        free_memory(place)
        with reported(name) as row:
            row |= beside_link(place, maker, configuration, mesh)
            peaks[name] = 1e9 * row["peak GB"]
        yield row
    with reported("plan") as row:
        chip = predict.chip_of(place.name())
        plan = predict.predicted_apart(configuration, "zero3", {"shard": RANKS}, chip)
        row |= plan
        row["peak over plan"] = {name: peak / plan["peak_bytes"] for name, peak in peaks.items()}
        row["passed"] = True
    yield row


def beside_link(place: Place, maker: rivals.Maker, configuration: Any, mesh: Any) -> Row:
    """Time a system without a link's time and with it: the difference is exposed."""
    system = made(maker, configuration, mesh)
    row = timed(place, system, configuration)
    started = []

    def count() -> AbstractContextManager[Any]:
        started.append(None)
        return nullcontext()

    loop_backend.SLEEP = LINK
    with loop_backend.replaced(watch=count):
        slow = timed(place, system, configuration)
    loop_backend.SLEEP = 0
    # After each step the mean of losses is sent too.
    row["collectives in a step"] = len(started) / sum(ROUNDS) - 1
    row["ms of the link"] = row["collectives in a step"] * milliseconds_of_link(place)
    row["ms with a link"] = slow["ms"]
    row["exposed ms"] = slow["ms"] - row["ms"]
    row["passed"] = row["passed"] and slow["passed"]
    return row


def milliseconds_of_link(place: Place) -> float:
    """Time what stands for a link in one collective."""
    torch.accelerator.synchronize()
    start = time.perf_counter()
    loop_backend.sleep(place.device, LINK)
    torch.accelerator.synchronize()
    return 1e3 * (time.perf_counter() - start)


def made(maker: rivals.Maker, configuration: Any, mesh: Any) -> rivals.System:
    """Make a system on the mesh's device."""
    x, y = (tokens.to(mesh.device_type) for tokens in configuration.tokens(mesh.get_rank()))
    with torch.device(mesh.device_type):
        return maker(configuration, mesh, (x, y))


def timed(place: Place, system: rivals.System, configuration: Any) -> Row:
    """Time the steps of a system, and count its memory."""
    memory = place.memory()
    samples = gpu.measure(system.step, *ROUNDS, memory=memory)
    chip = predict.chip_of(place.name())
    summary = gpu.summary(samples, predict.flops_of(configuration), chip.flops if chip else None)
    return {
        "passed": all(map(math.isfinite, samples.losses)),
        "ms": 1e3 * summary["median_seconds"],
        "ms of steps": [1e3 * seconds for seconds in samples.seconds],
        "host ms": 1e3 * statistics.median(samples.host_seconds),
        "MFU": summary["mfu"],
        "peak GB": samples.peak_bytes / 1e9,
        "reserved over allocated": memory.max_memory_reserved() / max(1, samples.peak_bytes),
        "losses": samples.losses,
    }


def free_memory(place: Place) -> None:
    """Give the memory of a system before back to the device."""
    gc.collect()
    place.memory().empty_cache()
