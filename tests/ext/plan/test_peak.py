"""The planned peak against what processes that run the step have allocated, by the malloc counter of the benchmarks."""

import gc
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

import fshard as fs
from tests.ext.plan.models import STRATEGIES, Case, prepared, sizes_of

ROOT = Path(__file__).parents[3]
BENCHMARKS = str(ROOT / "benchmarks")
RANKS = 2
TOLERANCE = 0.05
ACTIVATIONS = ("kept", "checkpoint", "remat")
# Width, layers, batch, time: with many tokens activations dominate, with few what belongs to the state.
SIZES = ((384, 3, 4, 128), (384, 3, 1, 128), (512, 2, 1, 64))
ROWS = list(product(ACTIVATIONS, SIZES, (True, False)))
ALL = {
    strategy: [Case(strategy, activations, *size, donated) for activations, size, donated in ROWS]
    for strategy in STRATEGIES
}
CHOSEN = [
    Case("zero3", "checkpoint", *SIZES[0]),
    Case("zero3", "remat", *SIZES[1], donated=False),
    Case("ddp", "kept", *SIZES[2]),
]


def planned(case: Case, rank: int) -> int:
    """In this process alone, from a state of one rank."""
    step, *args = prepared(case, fs.init_mesh(dict.fromkeys(sizes_of(case.strategy, 1), 1), device="cpu"))
    mesh = sizes_of(case.strategy, RANKS)
    return fs.plan(step, *args, mesh=mesh, rank=rank, backend="gloo").peak_bytes


def measured(case: Case, memory) -> int:
    """What a call takes, with state and batch."""
    step, state, x = prepared(case, fs.init_mesh(sizes_of(case.strategy, RANKS), device="cpu"))
    # The first call traces.
    state, _ = step(state, x)
    gc.collect()
    memory.reset()
    out = step(state, x)
    peak = memory.peak()
    del state, x, out
    gc.collect()
    return peak - memory.current()


def work(cases, results):
    """What runs on each rank."""
    import meter

    torch.set_num_threads(1)
    fs.init_mesh({"shard": -1}, device="cpu")
    found = [measured(Case(*case), meter.meter()) for case in cases]
    Path(results, f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize("cases", (CHOSEN, *ALL.values()), ids=("chosen", *ALL))
def test_peak_is_what_the_malloc_counter_measures(cases, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import meter

    counter = meter.build_counter(tmp_path)
    if counter.library is None:
        pytest.skip(counter.reason)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    path = os.pathsep.join([BENCHMARKS, *sys.path])
    environment = counter.environment() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [*torchrun, "-m", "tests.ext.plan.test_peak", json.dumps(cases), tmp_path]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        rows = [(case, planned(case, rank), nbytes) for case, nbytes in zip(cases, found, strict=True)]
        table = "\n".join(f"{p / 1e6:8.2f} {m / 1e6:8.2f} {p / m - 1:+.3f} {case}" for case, p, m in rows)
        print(table)
        assert all(abs(planned - nbytes) <= TOLERANCE * nbytes for _, planned, nbytes in rows), f"rank {rank}\n{table}"


if __name__ == "__main__":
    work(json.loads(sys.argv[1]), sys.argv[2])
