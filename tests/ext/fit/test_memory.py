"""The peak that a report predicts against what a process has allocated, by the malloc counter of the benchmarks."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fshard as fs
from tests.ext.fit.architectures import ARCHITECTURES
from tests.jit.steps import adamw, train_step

ROOT = Path(__file__).parents[3]
BENCHMARKS = str(ROOT / "benchmarks")
# What allocators round up, and what a step keeps in small blocks.
TOLERANCE = 0.02
# On a CPU, convolutions lay their arguments out anew in memory of their own, which no graph has.
SCRATCH = 0.25
# Units as small as these would be gathered together.
STRATEGIES = {
    "zero3": lambda mesh: fs.zero3(mesh, bucket_bytes=0),
    "zero2": fs.zero2,
    "hsdp": lambda mesh: fs.hsdp(mesh, bucket_bytes=0),
    "ddp": fs.ddp,
}


def make_case(name, strategy, mesh):
    """A jitted step of an architecture with its arguments; the state is donated."""
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = fs.functionalize(architecture.build(), units=architecture.unit)
    step = train_step(lambda params, *batch: model.apply(params, *batch), adamw())
    state = fs.TrainState.create(model.init(STRATEGIES[strategy](mesh)), adamw())
    return fs.jit(step, donate_argnums=0), state, architecture.make_batch(mesh.get_rank())


def measure(name, strategy, share, mesh, memory):
    """The most bytes that a call holds, arguments included, and what the report predicts.

    The budget is this share of the way from the arguments to the peak without a budget; None for no budget.
    """
    jitted, state, batch = make_case(name, strategy, mesh)
    predicted = jitted.memory(state, *batch).after
    if share is not None:
        budget = predicted.arguments + int(share * (predicted.peak - predicted.arguments))
        jitted.passes = (fs.fit(budget),)
        predicted = jitted.memory(state, *batch).after
        assert predicted.peak <= budget
    # The first call traces.
    state, _ = jitted(state, *batch)
    gc.collect()
    memory.reset()
    before = memory.current()
    jitted(state, *batch)
    return predicted.arguments + memory.peak() - before, predicted.peak, predicted.arguments


def work(rows, results):
    """What runs on each rank."""
    import meter

    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    measures = []
    for name, strategy, share in rows:
        shape = {"replicate": 2, "shard": ranks // 2} if strategy == "hsdp" else {"shard": ranks}
        mesh = fs.init_mesh(shape, device="cpu")
        measures.append(measure(name, strategy, share, mesh, meter.meter()))
    Path(results, f"{mesh.get_rank()}.json").write_text(json.dumps(measures))


def find_misses(rows, ranks, folder, monkeypatch):
    """The rows and ranks whose prediction is wrong, each with the bytes measured and predicted."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import meter

    counter = meter.build_counter(folder)
    if counter.library is None:
        pytest.skip(counter.reason)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    path = os.pathsep.join([BENCHMARKS, *sys.path])
    environment = counter.environment() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [*torchrun, "-m", "tests.ext.fit.test_memory", json.dumps(rows), folder]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    misses = {}
    for rank in range(ranks):
        measures = json.loads((folder / f"{rank}.json").read_text())
        for (name, strategy, share), (measured, predicted, _) in zip(rows, measures, strict=True):
            most = SCRATCH if name == "resnet" else TOLERANCE
            if not 1 - TOLERANCE <= measured / predicted <= 1 + most:
                misses[name, strategy, share, rank] = (measured, predicted)
    return misses


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_predicted_peak_of_every_architecture_is_the_measured_one(strategy, tmp_path, monkeypatch):
    rows = [(name, strategy, None) for name in ARCHITECTURES]
    assert find_misses(rows, 4 if strategy == "hsdp" else 2, tmp_path, monkeypatch) == {}


@pytest.mark.slow
def test_the_predicted_peak_within_a_budget_is_the_measured_one(tmp_path, monkeypatch):
    rows = [("gptj", "zero3", share) for share in (0.75, 0.6)]
    assert find_misses(rows, 2, tmp_path, monkeypatch) == {}


if __name__ == "__main__":
    work(json.loads(sys.argv[1]), sys.argv[2])
