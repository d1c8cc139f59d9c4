"""The benchmark of accelerators, as far as none is needed."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

# torch's ZeroRedundancyOptimizer warns of what it imports.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    # Examples have modules of the same names.
    names = [path.stem for path in BENCHMARKS.glob("*.py")]
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield importlib.import_module("gpu")
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(others)


def test_results_are_written(gpu, monkeypatch, tmp_path):
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.accelerator, name, lambda: None)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: 3 * 2**30)
    monkeypatch.setattr(gpu, "mean_over_ranks", torch.Tensor.item)
    losses = iter(range(5))
    samples = gpu.measure(lambda: torch.tensor(float(next(losses))), dropped=2, rounds=3)
    assert samples.losses == [2, 3, 4]
    configuration = gpu.Configuration.parse("d64-L2-B1-T16")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        configuration.module()(*configuration.tokens(0)).backward()
    assert gpu.flops_of(configuration) == counter.get_total_flops()
    args = argparse.Namespace(rounds=3, dropped=2, results=tmp_path)
    accelerator = {"name": "one", "ranks": 1, "peak": 1e12}
    gpu.write(args, configuration, accelerator, {"fsdp2": samples._replace(seconds=[1.0, 2.0, 4.0]), "ddp": None})
    found = json.loads((tmp_path / "gpu-d64-L2-B1-T16-1.json").read_text())
    assert found["systems"]["ddp"] is None
    assert found["systems"]["fsdp2"]["mfu"] == gpu.flops_of(configuration) / 2e12
    assert found["systems"]["fsdp2"]["peak_bytes"] == 3 * 2**30
    assert found["hardware"]["accelerator"] == accelerator
