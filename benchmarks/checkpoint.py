"""Times to save and restore, and how long an asynchronous save holds up the steps, next to torch's own checkpoints.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 benchmarks/checkpoint.py
    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 benchmarks/checkpoint.py --megabytes 64 --rounds 3

A state of float32 matrices, sharded over the ranks; torch.distributed.checkpoint gets the same tensors as DTensors. All
systems are interleaved in each round, shuffled, each writes to a new directory, with what was written before on the
disk (sync). A save ends when its files are on the disk (fsync), with torch's file system writer by its default; torch's
Hugging Face writer has no such thing. fshard computes and compares checksums, torch does not. Times are those of the
slowest rank; ratios are medians over rounds of the ratio to torch's file system writer in the same round. A restore
reads what was just written, from the page cache; torch's reads into tensors that are there.

An asynchronous save is timed until it returns. Both copy the state aside before.
"""

import argparse
import contextlib
import gc
import logging
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import report
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import fshard as fs

REFERENCE = "torch file system"
MB = 10**6
WIDTH = 1000


class System(NamedTuple):
    """What saves to a new directory and what restores from it; what starts to save and returns what waits for it."""

    save: Callable[[Path], Any]
    restore: Callable[[Path], Any]
    start: Callable[[Path], Callable[[], Any]] | None


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    results: dict[str, Any] = {}
    for megabytes in args.megabytes:
        systems = systems_of(mesh, megabytes)
        order = random.Random(0)
        rounds = []
        for _ in range(args.rounds + 1):
            shuffled = order.sample(list(systems), len(systems))
            rounds.append(measure({name: systems[name] for name in shuffled}, args.directory))
        rounds = [
            {what: {name: r[what][name] for name in systems if name in r[what]} for what in r} for r in rounds[1:]
        ]
        results[str(megabytes)] = {what: summary(what, rounds) for what in rounds[0]}
        if mesh.get_rank() == 0:
            show(megabytes, results[str(megabytes)])
    if mesh.get_rank() == 0:
        settings = {"ranks": mesh.size(), "rounds": args.rounds, "reference": REFERENCE}
        report.write_json(args.json, report.circumstances("checkpoint") | settings | {"megabytes": results})


def systems_of(mesh: Any, megabytes: int) -> dict[str, System]:
    leaves = max(1, megabytes * MB // (4 * WIDTH * WIDTH))
    generator = torch.Generator().manual_seed(0)
    full = {f"w{i}": torch.randn(WIDTH, WIDTH, generator=generator) for i in range(leaves)}
    state = fs.shard(full, fs.zero2(mesh))
    like = fs.tree_map(torch.zeros_like, state)
    tensors, into = (fs.to_dtensor(tree, mesh) for tree in (state, like))
    # The threads of torch's asynchronous saves communicate.
    group = dist.new_group()

    def hugging_face(directory: Path) -> dcp.HuggingFaceStorageWriter:
        return dcp.HuggingFaceStorageWriter(str(directory), save_distributed=True)

    return {
        "fshard": System(
            lambda directory: fs.checkpoint.save(directory, state, step=1),
            lambda directory: fs.checkpoint.restore(directory, like),
            lambda directory: fs.checkpoint.save(directory, state, step=1, asynchronous=True).wait,
        ),
        REFERENCE: System(
            lambda directory: dcp.save(tensors, storage_writer=dcp.FileSystemWriter(directory)),
            lambda directory: dcp.load(into, storage_reader=dcp.FileSystemReader(directory)),
            lambda directory: (
                dcp.async_save(tensors, storage_writer=dcp.FileSystemWriter(directory), process_group=group).result
            ),
        ),
        "torch Hugging Face": System(
            lambda directory: dcp.save(tensors, storage_writer=hugging_face(directory)),
            lambda directory: dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(str(directory))),
            None,
        ),
    }


def measure(systems: dict[str, System], where: Path | None) -> dict[str, dict[str, float]]:
    """One round: for each measure the seconds of each system, those of the slowest rank."""
    out: dict[str, dict[str, float]] = {"save": {}, "restore": {}, "stall": {}}
    for name, system in systems.items():
        with shared_directory(where) as directory:
            out["save"][name], _ = timed(system.save, directory)
            out["restore"][name], _ = timed(system.restore, directory)
        if system.start is not None:
            with shared_directory(where) as directory:
                out["stall"][name], wait = timed(system.start, directory)
                wait()
    return out


@contextlib.contextmanager
def shared_directory(where: Path | None) -> Iterator[Path]:
    """A new directory that all ranks know."""
    names = [tempfile.mkdtemp(dir=where) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    yield Path(names[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(names[0])


def timed(run: Callable[[Path], Any], directory: Path) -> tuple[float, Any]:
    gc.collect()
    os.sync()
    dist.barrier()
    start = time.perf_counter()
    result = run(directory)
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item(), result


def summary(what: str, rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians of seconds and of their ratio to the reference, stalls also to fshard's own save."""
    out = {}
    for name in rounds[0][what]:
        seconds = [round_[what][name] for round_ in rounds]
        out[name] = {
            "seconds": statistics.median(seconds),
            "ratio": statistics.median(s / r[what][REFERENCE] for s, r in zip(seconds, rounds)),
        }
        if what == "stall":
            own = REFERENCE if name == REFERENCE else "fshard"
            out[name]["of_save"] = statistics.median(s / r["save"][own] for s, r in zip(seconds, rounds))
    return out


def show(megabytes: int, results: dict[str, Any]) -> None:
    for what, systems in results.items():
        rows = {}
        for name, figures in systems.items():
            rate = f"{megabytes / 1000 / figures['seconds']:.2f}"
            share = f"{100 * figures['of_save']:.1f}%" if "of_save" in figures else ""
            rows[name] = (f"{1000 * figures['seconds']:.1f}", rate, f"{figures['ratio']:.2f}", share)
        report.print_table(f"{megabytes} MB: {what}", ("ms", "GB/s", "ratio", "of its save"), rows)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the file system to be measured; a temporary one by default")
    parser.add_argument("--json", type=Path, default=report.RESULTS / "checkpoint.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
