"""Memory of ring attention in processes beside torch's own in one, by the malloc counter of the benchmarks."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fshard as fs

ROOT = Path(__file__).parents[3]
BENCHMARKS = str(ROOT / "benchmarks")
HEADS, HEAD = 8, 64


def attended(time, attention):
    """The result and the gradients of some float32 sequence."""
    q, k, v, cotangent = (torch.randn(1, HEADS, time, HEAD) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    return torch.autograd.grad(out, leaves, cotangent)


def work(results, times, order):
    """What runs on each rank: bytes above what the process held before the inputs were made, for each time."""
    import meter

    torch.set_num_threads(1)
    axis = fs.axis_of(fs.init_mesh({"cp": -1}, device="cpu"))

    def ring(q, k, v):
        return fs.ring_attention(q, k, v, axis, order=order)

    def torchs(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    memory, found = meter.meter(), []
    attention = torchs if axis.size == 1 else ring
    # The first call takes what stays, such as connections and workspaces of libraries.
    attended(times[0] // 4, attention)
    for time in times:
        gc.collect()
        memory.reset()
        before = memory.current()
        attended(time // axis.size, attention)
        found.append(memory.peak() - before)
    Path(results, f"{axis.size}-{fs.axis_index(axis)}.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize("order", ("contiguous", "zigzag"))
def test_four_ranks_hold_less_than_half(order, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import meter

    counter = meter.build_counter(tmp_path)
    if counter.library is None:
        pytest.skip(counter.reason)
    environment = counter.environment() | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([BENCHMARKS, *sys.path]),
    }
    times = [8192, 16384]

    def most(ranks, times):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command = [*torchrun, "-m", "tests.ext.parallel.test_attention_peak", tmp_path, json.dumps(times), order]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = [json.loads((tmp_path / f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)]
        return [max(row) for row in zip(*rows, strict=True)]

    (one,), (ring, twice) = most(1, times[:1]), most(4, times)
    print(f"{order}: one process {one}, four {ring} ({ring / one:.3f}), of twice the time {twice} ({twice / ring:.3f})")
    assert ring <= 0.45 * one
    assert twice <= 2 * ring


if __name__ == "__main__":
    work(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
