"""Train steps on accelerators as `fs.plan` predicts them from published figures, never measured.

    python benchmarks/predict.py

traces Llama 2 at two depths and goes on from there to 7 billion parameters on 8 devices, and 70 on 64. The results hold
all assumptions; `gpu.py` prints the same prediction for its configurations beside what it measures.
"""

import argparse
import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import llama
import report
import torch

from fshard.ext.plan import Rates
from fshard.ext.plan.models import ADDED_LAYERS, MIN_LAYERS, Workload, estimate


class Chip(NamedTuple):
    """Published figures of a device; None for those that were not looked up.

    Attributes:
        flops: Dense bfloat16 FLOPs a second in matrix products.
        memory: Bytes a second to and from its own memory.
        link: Bytes a second to others of its node, each way.
    """

    flops: float
    memory: float | None = None
    link: float | None = None


# By a part of the device's name, the more particular first; from the makers' data sheets.
CHIPS = {
    "B200": Chip(2250e12, 8e12, 900e9),
    "H100 PCIe": Chip(756e12),
    "H100 NVL": Chip(835e12),
    "H100": Chip(989e12, 3.35e12, 450e9),
    "GH200": Chip(989e12),
    "H200 NVL": Chip(835e12),
    "H200": Chip(989e12, 4.8e12, 450e9),
    "H800": Chip(989e12),
    "A100": Chip(312e12),
    "A800": Chip(312e12),
    "L40S": Chip(362e12),
    "A10G": Chip(70e12),
    "L4": Chip(121e12),
    "MI300X": Chip(1307e12),
}
# Devices of a node, and bytes a second of each one's adapter to other nodes: 400 Gb/s.
NODE = 8
ADAPTER = 50e9
# The shares of published rates that are reached, and the seconds until a collective has begun.
OF_FLOPS = 0.72
OF_MEMORY = 0.9
OF_LINKS = 0.8
LATENCY = 20e-6
DEVICE = "H100"
MIXED: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
ASSUMPTIONS = {
    "peaks": "NVIDIA H100 SXM data sheet: 989 TFLOP/s dense bfloat16, 3.35 TB/s HBM3, NVLink 900 GB/s both ways",
    "products": f"{OF_FLOPS} of the peak; the best shape of stas00/ml-engineering's table has 0.803 (794.5 TFLOP/s)",
    "attention": f"all positions at that rate, as long as the causal half takes at {OF_FLOPS / 2:g} of the peak",
    "other operators": f"one by one, as eager and the graph backend run them, at {OF_MEMORY} of the memory's rate",
    "NVLink": f"{OF_LINKS} of 450 GB/s; NVIDIA/nccl-tests issues 212 and 309: 370 GB/s of an H100",
    "InfiniBand": f"{OF_LINKS} of 50 GB/s for each device; NVIDIA/nccl-tests issue 290: 46 to 48 GB/s",
    "rings": "over nodes they use the adapters of all their devices in a node, as NCCL's channels do",
    "collectives": f"begin after {LATENCY * 1e6:g} us, one after another on an axis, and slow no other operator",
    "axes": "each has a link of its own; on 2 x 32 both share adapters, which adds the time of one axis at most",
    "depth": f"{MIN_LAYERS} and {MIN_LAYERS + ADDED_LAYERS} layers are traced, others add as much as those between",
    "memory": "of tensors when operators run one by one, without what the allocator and the backend take",
    "host": "launches ahead of the device all the time, and no rank is late",
    "dtypes": "gathers in bfloat16, reductions in float32, parameters and AdamW's averages in float32",
    "norms": "layer norms in the place of RMS norms, each one operator",
    "batches": "sequences of 4096 tokens; checkpoints compute each block's forward again, but for its last product",
    "update": "AdamW reads and writes parameters, gradients and averages once, though gradients are only read",
    "MFU": "6 FLOPs a weight of matrices and token, 12 * layers * width * time a token for attention; no recomputation",
}
SEVEN = llama.Sizes(batch=2, checkpointed=False)
SEVENTY = SEVEN._replace(width=8192, layers=80, heads=64, kv_heads=8, hidden=28672, batch=1, checkpointed=True)
# Twice so many bytes are gathered ahead, and reduced at a time: more than a unit of this model.
LARGE = {"bucket_bytes": 500_000_000}


class Case(NamedTuple):
    """A model, its strategy with options, and ranks on each axis."""

    model: llama.Sizes
    strategy: str
    mesh: dict[str, int]
    options: dict[str, Any]


CASES = {
    "7B, zero3": Case(SEVEN, "zero3", {"shard": 8}, {}),
    "7B, zero3, bucket_bytes 0.5 GB": Case(SEVEN, "zero3", {"shard": 8}, LARGE),
    "7B, zero3, checkpoints, batch 4": Case(SEVEN._replace(batch=4, checkpointed=True), "zero3", {"shard": 8}, {}),
    "70B, zero3": Case(SEVENTY, "zero3", {"shard": 64}, {}),
    "70B, zero3, batch 2": Case(SEVENTY._replace(batch=2), "zero3", {"shard": 64}, {}),
    "70B, hsdp on 2 x 32": Case(SEVENTY, "hsdp", {"replicate": 2, "shard": 32}, {}),
    "70B, hsdp on 8 x 8": Case(SEVENTY, "hsdp", {"replicate": 8, "shard": 8}, {}),
}


def chip_of(name: str) -> Chip | None:
    """Figures of a device by its name; None for one that is not in the table."""
    return next((chip for part, chip in CHIPS.items() if part in name), None)


def flops_of(configuration: Any) -> float:
    """Floating-point operations of a rank's forward and backward, by the formula of `ASSUMPTIONS`."""
    with torch.device("meta"):
        module = configuration.module()
    matrices = sum(layer.weight.numel() for layer in module.modules() if isinstance(layer, torch.nn.Linear))
    attention = 12 * configuration.layers * configuration.width * configuration.time
    return float(configuration.batch * configuration.time * (6.0 * matrices + attention))


def rates_of(chip: Chip, sizes: Mapping[str, int]) -> Rates | None:
    """Rates of a device on a mesh, outermost axis first, whose ranks follow each other in nodes; None if unknown."""
    if chip.memory is None or chip.link is None:
        return None
    links, stride = dict[str, float](), 1
    for name, size in reversed(sizes.items()):
        near = min(size, max(1, NODE // stride))  # ranks of a group in one node
        links[name] = OF_LINKS * (chip.link if near == size else min(chip.link, ADAPTER * near))
        stride *= size
    return Rates(OF_FLOPS * chip.flops, OF_MEMORY * chip.memory, links, LATENCY)


def predicted(
    configuration: Any, strategy: str, sizes: Mapping[str, int], chip: Chip | None, **options: Any
) -> dict[str, Any] | None:
    """Predict the step of a GPT or a Llama; None where figures of the device are not known.

    Args:
        configuration: The model and the batch of a rank.
        strategy: The name of the strategy.
        sizes: Ranks on each axis of the mesh.
        chip: Figures of the device.
        **options: Of the strategy.
    """
    rates = rates_of(chip, sizes) if chip else None
    if chip is None or rates is None:
        return None

    def make(layers: int | None) -> torch.nn.Module:
        with torch.device("meta"):
            module: torch.nn.Module = configuration._replace(layers=layers).module()
        return module

    workload = Workload(make, configuration.tokens(0), type(make(1).blocks[0]), configuration.layers)  # type: ignore
    found = estimate(workload, strategy, sizes, rates, **MIXED | options)
    return {
        "seconds": found.seconds,
        "mfu": flops_of(configuration) / found.seconds / chip.flops,
        "waiting": found.waiting / found.seconds,
        "peak_bytes": found.peak.total,
        "bytes_sent": found.sent,
        "collectives": found.collectives,
        "flops": found.flops,
        "rates": str(rates),
    }


def predicted_apart(*args: Any, **options: Any) -> dict[str, Any] | None:
    """As `predicted`, in a process of its own: a plan needs one that is no rank of several."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=leave_job) as pool:
        return pool.submit(predicted, *args, **options).result()


def leave_job() -> None:
    """Forget the launcher of the process that started this one."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    args = parser.parse_args()
    results = report.circumstances("predicted") | {"measured": False, "device": DEVICE, "ranks": [8, 64]}
    results |= {"assumptions": ASSUMPTIONS, "cases": {}}
    rows = {}
    for name, case in CASES.items():
        found: Any = predicted(case.model, case.strategy, case.mesh, CHIPS[DEVICE], **case.options)
        results["cases"][name] = case._asdict() | {"model": case.model._asdict()} | found
        rows[name] = (
            f"{1e3 * found['seconds']:.0f}",
            f"{found['mfu']:.3f}",
            f"{found['waiting']:.3f}",
            f"{found['peak_bytes'] / 1e9:.1f}",
            " + ".join(f"{sent / 1e9:.1f}" for sent in found["bytes_sent"].values()),
        )
    report.print_table(f"Predicted for {DEVICE}, never measured", ("ms", "MFU", "waiting", "peak GB", "GB sent"), rows)
    report.write_json(args.results / "predicted.json", results)


if __name__ == "__main__":
    main()
