"""The peak of a graph against what a process that runs it has allocated, by the malloc counter of the benchmarks."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from tests.jit.steps import adamw, train_step
from tests.unit_models import filled

ROOT = Path(__file__).parents[2]
BENCHMARKS = str(ROOT / "benchmarks")
WIDTH, HEADS, LAYERS, TIME = 384, 6, 3, 128
TOLERANCE = 0.05


class Block(nn.Module):
    """A transformer layer, large enough for tensors to dominate."""

    def __init__(self, checkpointed):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.checkpointed = checkpointed

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpointed else self.run(x)

    def run(self, x):  # (batch, time, width)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def measured(strategy, donated, checkpointed, batch, mesh, memory):
    """Bytes that a call takes beyond its arguments, and those that the graph tells."""
    model = fs.functionalize(filled(nn.Sequential(*(Block(checkpointed) for _ in range(LAYERS))), None), Block)
    step = train_step(lambda params, x: model.apply(params, x).square().mean(), adamw())
    state = fs.TrainState.create(model.init(getattr(fs, strategy)(mesh)), adamw())
    jitted, x = fs.jit(step, donate_argnums=0 if donated else ()), torch.randn(batch, TIME, WIDTH)
    predicted = fs.make_graph(jitted)(state, x).peak_bytes()
    # The first call traces.
    state, _ = jitted(state, x)
    gc.collect()
    memory.reset()
    before = memory.current()
    jitted(state, x)
    return memory.peak() - before, predicted


def work(rows, results):
    """What runs on each rank."""
    import meter

    torch.set_num_threads(1)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    found = [measured(*row, mesh, meter.meter()) for row in rows]
    Path(results, f"{mesh.get_rank()}.json").write_text(json.dumps(found))


# Strategies, whether the state is donated, whether layers are checkpointed, and sequences. With many activations
# dominate, with one what collectives work on, and the state.
ROWS = [("zero3", True, True, 4), ("zero2", True, False, 4), ("ddp", False, False, 1)]


@pytest.mark.slow
def test_peak_is_what_the_malloc_counter_measures(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import meter

    counter = meter.build_counter(tmp_path)
    if counter.library is None:
        pytest.skip(counter.reason)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    path = os.pathsep.join([BENCHMARKS, *sys.path])
    environment = counter.environment() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [*torchrun, "-m", "tests.jit.test_peak_bytes", json.dumps(ROWS), tmp_path]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for row, (bytes_measured, predicted) in zip(ROWS, found, strict=True):
            assert predicted == pytest.approx(bytes_measured, rel=TOLERANCE), (row, rank)


if __name__ == "__main__":
    work(json.loads(sys.argv[1]), sys.argv[2])
