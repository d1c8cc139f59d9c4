"""Checkpoints while training goes on, and parameters that are kept on the processor."""

import tempfile
import time
from typing import Any

import torch

import fshard as fs
from stages import Findings, Place, copied, is_equal
from stages.faults import count_pinned, sum_of_squares


def checkpoint(place: Place) -> Findings:
    """An asynchronous save while donated steps go on: it must hold the values of its own step."""
    mesh = fs.init_mesh({"shard": -1}, device=place.device)
    tx = fs.from_torch(torch.optim.AdamW, lr=1e-2, fused=True)
    width = place.sized(2048, 64)
    full = {f"w{i}": torch.randn(width, width, device=place.device) for i in range(8)}

    def step(state: fs.TrainState) -> tuple[fs.TrainState, torch.Tensor]:
        loss, grads = fs.value_and_grad(sum_of_squares)(state.params)
        return fs.update(tx, state, grads), loss

    run = fs.jit(step, donate_argnums=0)
    state = fs.TrainState.create(fs.shard(full, fs.zero3(mesh)), tx)
    state, _ = run(state)
    kept = copied(state)
    with tempfile.TemporaryDirectory() as folder, fs.checkpoint.Manager(folder, keep=2, every=1) as manager:
        torch.accelerator.synchronize()
        start = time.perf_counter()
        manager.save(state)
        blocked = time.perf_counter() - start
        for _ in range(20):
            state, _ = run(state)
        manager.wait()
        restored = manager.restore(like=state)
        yield {"name": "asynchronous save", "passed": is_equal(restored, kept), "blocked ms": 1e3 * blocked}


def offload(place: Place) -> Findings:
    """Offloaded parameters: whether they are pinned, and the GB/s of gathering them."""
    mesh = fs.init_mesh({"shard": -1}, device=place.device)
    width = place.sized(4096, 64)
    full = {f"w{i}": torch.randn(width, width, device=place.device) for i in range(16)}
    layout = fs.compose(fs.offload(place.device), fs.fully_shard(mesh["shard"]))
    params: Any = fs.shard(full, fs.zero3(mesh, layout=layout))
    seconds = []
    for _ in range(4):
        torch.accelerator.synchronize()
        start = time.perf_counter()
        gathered = fs.gather(params)
        torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    equal = is_equal(gathered, full)
    number = count_pinned(params)
    nbytes = sum(tensor.nbytes for tensor in full.values())
    yield {
        "name": "gather of offloaded leaves",
        "passed": equal and (place.is_rehearsal or number == len(full)),
        "equal": equal,
        "on": fs.tree_leaves(params)[0].device.type,
        "pinned": number,
        "of": len(full),
        "GB/s": nbytes / min(seconds) / 1e9,
    }
