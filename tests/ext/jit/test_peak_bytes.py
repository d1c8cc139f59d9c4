"""The peak of a graph against what a process that runs it has allocated, by the malloc counter of the benchmarks."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from tests.jit.steps import adamw, train_step
from tests.unit_models import filled

ROOT = Path(__file__).parents[3]
BENCHMARKS = str(ROOT / "benchmarks")
WIDTH, HEADS, LAYERS, TIME = 384, 6, 3, 128
# What allocators round up, and the buffers of a process that no graph has.
TOLERANCE = 0.05


def measured(strategy, donated, checkpointed, batch, mesh, memory):
    """Bytes that a call takes beyond its arguments, and those that the graph tells."""
    import gpt

    class Layer(gpt.Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False) if checkpointed else super().forward(x)

    layers = nn.Sequential(*(Layer(WIDTH, HEADS) for _ in range(LAYERS)))
    model = fs.functionalize(filled(layers, None), Layer)
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
    measures = [measured(*row, mesh, meter.meter()) for row in rows]
    Path(results, f"{mesh.get_rank()}.json").write_text(json.dumps(measures))


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
    command = [*torchrun, "-m", "tests.ext.jit.test_peak_bytes", json.dumps(ROWS), tmp_path]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        measures = json.loads((tmp_path / f"{rank}.json").read_text())
        for row, (bytes_measured, predicted) in zip(ROWS, measures, strict=True):
            assert predicted == pytest.approx(bytes_measured, rel=TOLERANCE), (row, rank)


if __name__ == "__main__":
    work(json.loads(sys.argv[1]), sys.argv[2])
