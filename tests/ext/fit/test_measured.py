"""Steps within a budget against what their processes have allocated, by the malloc counter of the benchmarks."""

import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fshard as fs
from tests.trees import assert_same_bits

ROOT = Path(__file__).parents[3]
BENCHMARKS = str(ROOT / "benchmarks")
MODEL = "d256-L3-B4-T128-V512"
# Of what is held between the least budget and none: where budgets are.
PARTS = (0.0, 0.4, 0.8)
TOLERANCE = 1.02


def make_step(strategy, mesh, passes=()):
    """A train step of a GPT, its state and a batch."""
    import gpt

    configuration = gpt.Configuration.parse(MODEL)
    model = fs.functionalize(configuration.module(), gpt.Block)
    tx = fs.from_torch(torch.optim.AdamW, lr=1e-3, fused=True)
    state = fs.TrainState.create(model.init(getattr(fs, strategy)(mesh)), tx)

    def step(state, *batch):
        loss, grads = fs.value_and_grad(model.apply)(state.params, *batch)
        return fs.update(tx, state, grads, donate=True), loss

    return fs.jit(step, donate_argnums=0, passes=passes), state, configuration.tokens(mesh.get_rank())


def measure(strategy, mesh, memory, passes=()):
    """The bytes that the second call takes at most beyond its arguments, and the tensors that both calls return."""
    step, state, batch = make_step(strategy, mesh, passes)
    state, first_loss = step(state, *batch)
    gc.collect()
    memory.reset()
    before = memory.current()
    state, loss = step(state, *batch)
    peak = memory.peak() - before
    leaves = fs.tree_leaves((state, first_loss, loss))
    tensors = [leaf.local if isinstance(leaf, fs.Sharded) else leaf for leaf in leaves]
    return peak, [tensor for tensor in tensors if tensor is not None]


def compare(strategy, mesh, memory):
    """For each budget the bytes that it leaves beyond the arguments, and those that were measured."""
    step, state, batch = make_step(strategy, mesh)
    graph = fs.make_graph(step)(state, *batch)
    arguments = sum(graph.memory.always_held.values())
    _, expected = measure(strategy, mesh, memory)
    tight, *_ = make_step(strategy, mesh, (fs.fit(1),))
    with pytest.raises(ValueError, match="at least") as refused:
        fs.make_graph(tight)(state, *batch)
    least = int(re.search(r"at least (\d+) bytes", str(refused.value))[1]) - arguments
    rows = []
    for part in PARTS:
        budget = round(least + (graph.peak_bytes() - least) * part)
        peak, tensors = measure(strategy, mesh, memory, (fs.fit(arguments + budget),))
        assert_same_bits(tensors, expected)
        rows.append((budget, peak))
    return rows


def work(strategies, results):
    """What runs on each rank."""
    import meter

    torch.set_num_threads(1)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    rows = [compare(strategy, mesh, meter.meter()) for strategy in strategies]
    Path(results, f"{mesh.get_rank()}.json").write_text(json.dumps(rows))


STRATEGIES = ("zero3", "zero2")


@pytest.mark.slow
def test_processes_allocate_no_more_than_their_budget(tmp_path, monkeypatch):
    """Two of them, with the bits of a step without a budget."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import meter

    counter = meter.build_counter(tmp_path)
    if counter.library is None:
        pytest.skip(counter.reason)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    path = os.pathsep.join([BENCHMARKS, *sys.path])
    environment = counter.environment() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [*torchrun, "-m", "tests.ext.fit.test_measured", json.dumps(STRATEGIES), tmp_path]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        measures = json.loads((tmp_path / f"{rank}.json").read_text())
        for strategy, rows in zip(STRATEGIES, measures, strict=True):
            for budget, peak in rows:
                assert peak <= TOLERANCE * budget, (strategy, rank)


if __name__ == "__main__":
    work(json.loads(sys.argv[1]), sys.argv[2])
