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
from tests.ext import test_architectures as architectures

pytestmark = architectures.pytestmark
ROOT = Path(__file__).parents[3]
BENCHMARKS = str(ROOT / "benchmarks")
# What allocators round up, and what a step keeps in small blocks.
TOLERANCE = 0.02
# On a CPU, convolutions lay their arguments out anew in memory of their own, which no graph has.
SCRATCH = 0.25
# In the place of the sizes of CASES, with which small blocks of an allocator would be a large part.
LARGER = {
    **{"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, "num_key_value_heads": 2},
    **{"n_embd": 192, "n_head": 6, "rotary_dim": 32, "d_model": 192, "d_kv": 32, "d_ff": 512, "num_heads": 6},
    **{"q_lora_rank": 48, "kv_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32},
    **{"moe_intermediate_size": 16, "embedding_size": 32, "hidden_sizes": [64, 128], "vocab_size": 768},
    **{"n_positions": 96, "max_position_embeddings": 96},
}
# Each token has weights of its experts for itself, and heads of DeepSeek share no keys.
SIZES = {"mixtral": {"intermediate_size": 16}, "deepseek": {"num_key_value_heads": 6}}
SEQUENCES, LENGTH = 4, 96
# Units as small as these would be gathered together.
STRATEGIES = {
    "zero3": lambda mesh: fs.zero3(mesh, bucket_bytes=0),
    "zero2": fs.zero2,
    "hsdp": lambda mesh: fs.hsdp(mesh, bucket_bytes=0),
    "ddp": fs.ddp,
}


def enlarge(config):
    return {
        name: enlarge(value) if isinstance(value, dict) else LARGER.get(name, value) for name, value in config.items()
    }


def make_case(name, strategy, mesh):
    """A jitted step of an architecture with its arguments; the state is donated."""
    case = architectures.CASES[name]
    case = case._replace(config=enlarge(case.config) | SIZES.get(name, {}))
    state, step = architectures.begun(case.build(torch.float64), STRATEGIES[strategy](mesh))
    batches, *_ = case.batches(SEQUENCES, LENGTH)
    return fs.jit(step, donate_argnums=0), state, batches[mesh.get_rank() % len(batches)]


def measure(name, strategy, share, mesh, memory):
    """The most bytes that a call holds, arguments included, and what the report predicts.

    The budget is this share of the way from the arguments to the peak without a budget; None for no budget.
    """
    jitted, state, batch = make_case(name, strategy, mesh)
    predicted = jitted.memory(state, batch).after
    if share is not None:
        budget = predicted.arguments + int(share * (predicted.peak - predicted.arguments))
        jitted.passes = (fs.fit(budget),)
        predicted = jitted.memory(state, batch).after
        assert predicted.peak <= budget
    # The first call traces.
    state, *_ = jitted(state, batch)
    gc.collect()
    memory.reset()
    before = memory.current()
    jitted(state, batch)
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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_predicted_peak_of_every_architecture_is_the_measured_one(strategy, tmp_path, monkeypatch):
    rows = [(name, strategy, None) for name in architectures.CASES]
    assert find_misses(rows, 4 if strategy == "hsdp" else 2, tmp_path, monkeypatch) == {}


def test_the_predicted_peak_within_a_budget_is_the_measured_one(tmp_path, monkeypatch):
    rows = [("gptj", "zero3", share) for share in (0.75, 0.6)]
    assert find_misses(rows, 2, tmp_path, monkeypatch) == {}


if __name__ == "__main__":
    work(json.loads(sys.argv[1]), sys.argv[2])
