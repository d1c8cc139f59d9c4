"""Several ranks that share the one device, against the processor's numbers."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import fshard as fs
from stages import ROOT, Findings, Place, reported

PROGRAM = ROOT / "benchmarks/quarter_hour.py"


def two_ranks(place: Place) -> Findings:
    """The programs on two ranks, which send through processors."""
    yield from on_ranks(place, 2)


def four_ranks(place: Place) -> Findings:
    """The programs on four ranks, which send through processors."""
    yield from on_ranks(place, 4)


def direct(place: Place) -> Findings:
    """The programs on two ranks with collectives of the device's own backend, an NCCL of 2.30 or newer."""
    variables = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    if place.nccl:
        variables["LD_PRELOAD"] = str(place.nccl)
    yield from on_ranks(place, 2, stage="direct_programs", variables=variables)


def on_ranks(place: Place, number: int, stage: str = "programs", variables: dict[str, str] | None = None) -> Findings:
    """Start ranks that share the device; yield what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(number))
        command = [*torchrun, str(PROGRAM), "--stage", stage, "--device", place.device, "--output", folder]
        if place.library:
            command += ["--library", str(place.library)]
        environment = os.environ | {"EMU_DEVICES": "1", "OMP_NUM_THREADS": "2"} | (variables or {})
        done = subprocess.run(command, cwd=ROOT, env=environment)
        file = Path(folder, "found.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for row in rows:
        row.pop("stage")
        yield row
    yield {"name": "exit code", "passed": done.returncode == 0 and bool(rows), "code": done.returncode}


def direct_programs(place: Place) -> Findings:
    """On each rank of torchrun: the programs, with a process group of the device's own backend."""
    backend = dist.get_default_backend_for_device(place.device)
    torch.accelerator.set_device_index(0)
    dist.init_process_group(f"cpu:gloo,{place.device}:{backend}")
    yield from programs(place)
    dist.destroy_process_group()


def programs(place: Place) -> Findings:
    """On each rank of torchrun: the programs of tests/accelerator, against the processor's numbers."""
    from tests.accelerator import programs

    fs.init_mesh({"shard": -1}, device=place.device)
    for name, program in programs.PROGRAMS.items():
        with reported(name) as row:
            expected = programs.leaves_of(program.run("cpu"))
            results = programs.leaves_of(program.run(place.device))
            difference = 0.0
            for result, reference in zip(results, expected, strict=True):
                if result.numel():
                    error = (result.double() - reference.double()).abs().max()
                    scale = max(1.0, reference.double().abs().max())
                    difference = max(difference, float(error / scale))
            row["passed"] = difference <= program.tolerance
            row["difference"] = difference
        if dist.get_rank() == 0:
            yield row
