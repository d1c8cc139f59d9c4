"""The peak of a graph against what a process that runs it has allocated, by the malloc counter of the benchmarks."""

import gc
import json
import os
import platform
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import fshard as fs
from tests.jit.steps import adamw, train_step
from tests.unit_models import filled

ROOT = Path(__file__).parents[2]
BENCHMARKS = str(ROOT / "benchmarks")
WIDTH, HEADS, LAYERS, TIME = 384, 6, 3, 128
LARGE, SMALL = 4, 1
TOLERANCE = 0.05


class Row(NamedTuple):
    """What is measured.

    Attributes:
        strategy: Name of the strategy.
        donated: Whether the state is donated.
        activations: "kept" from the forward; or computed again by a "checkpoint" of torch or by fs."remat".
        batch: Sequences; with many activations dominate, with one what collectives work on, and the state.
    """

    strategy: str
    donated: bool
    activations: str = "kept"
    batch: int = LARGE


class Block(nn.Module):
    """A transformer layer, large enough for tensors to dominate."""

    def __init__(self, checkpointed=False):
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


def prepared(row, mesh):
    """The parameters of a row and the loss of them."""
    strategy = getattr(fs, row.strategy)(mesh)
    if row.activations == "remat":
        block = filled(Block(), None)

        def run(params, x):
            return functional_call(block, fs.gather(params), (x,))

        def loss(params, x):
            for layer in params:
                x = fs.remat(run)(layer, x)
            return x.square().mean()

        return fs.shard([dict(block.named_parameters()) for _ in range(LAYERS)], strategy), loss
    blocks = nn.Sequential(*(Block(row.activations == "checkpoint") for _ in range(LAYERS)))
    model = fs.functionalize(filled(blocks, None), Block)
    return model.init(strategy), lambda params, x: model.apply(params, x).square().mean()


def measured(row, mesh, memory):
    """Bytes that a call takes beyond its arguments, and those that the graph tells."""
    params, loss = prepared(row, mesh)
    step, state = train_step(loss, adamw()), fs.TrainState.create(params, adamw())
    del params
    jitted = fs.jit(step, donate_argnums=0 if row.donated else ())
    x = torch.randn(row.batch, TIME, WIDTH)
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
    found = [measured(Row(*row), mesh, meter.meter()) for row in rows]
    Path(results, f"{mesh.get_rank()}.json").write_text(json.dumps(found))


ACTIVATIONS = ("kept", "checkpoint", "remat")
ALL = {
    (ranks, strategy): [Row(strategy, *row) for row in product((True, False), ACTIVATIONS, (LARGE, SMALL))]
    for ranks, strategy in product((1, 2, 3), ("zero3", "zero2", "ddp"))
}
CHOSEN = {
    2: [
        Row("zero3", True, "checkpoint"),
        Row("zero3", True, "remat"),
        Row("zero2", True, "kept"),
        Row("ddp", False, batch=SMALL),
    ],
    # More rows travel than between two, from memory that is held for it.
    3: [Row("zero3", True, batch=SMALL)],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, rows",
    [
        *(
            pytest.param(ranks, rows, id=f"{ranks} ranks", marks=pytest.mark.slow if ranks > 2 else ())
            for ranks, rows in CHOSEN.items()
        ),
        *(pytest.param(key[0], rows, id=f"{key}", marks=pytest.mark.slow) for key, rows in ALL.items()),
    ],
)
def test_peak_is_what_the_malloc_counter_measures(ranks, rows, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import meter

    counter = meter.build_counter(tmp_path)
    if counter.library is None:
        pytest.skip(counter.reason)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    path = os.pathsep.join([BENCHMARKS, *sys.path])
    environment = counter.environment() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [*torchrun, "-m", "tests.jit.test_peak_bytes", json.dumps(rows), tmp_path]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    wrong = [
        f"{row}, rank {rank}: measured {bytes_measured}, predicted {predicted}"
        for rank, found in enumerate(results)
        for row, (bytes_measured, predicted) in zip(rows, found, strict=True)
        if abs(predicted - bytes_measured) > TOLERANCE * bytes_measured
    ]
    assert not wrong, "\n".join(wrong)


# Of a process whose jitted steps free memory and take it again.
STEPS = """
import resource
import torch
import fshard as fs

torch.set_num_threads(1)
params = [torch.randn(256, 256) for _ in range(16)]
x = torch.randn(1024, 256)

def loss(params):
    out = x
    for w in params:
        out = (out @ w).tanh()
    return out.square().mean()

def step(params):
    grads = torch.func.grad(loss)(params)
    return [w - 0.1 * g for w, g in zip(params, grads)]

step = fs.jit(step, donate_argnums=0)
for _ in range(3):
    params = step(params)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    params = step(params)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)
"""
# A step takes 17 MiB, 4,352 pages, beyond its arguments.
PAGES = 400


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
def test_steps_are_not_handed_new_pages():
    """Memory that a jitted step frees stays with the process."""
    out = subprocess.run(
        [sys.executable, "-c", STEPS], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert int(out.stdout) < PAGES, out.stdout


if __name__ == "__main__":
    work(json.loads(sys.argv[1]), sys.argv[2])
