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


def run(gpu, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    gpu.main()


def test_flops_are_those_of_a_forward_and_a_backward(gpu):
    configuration = gpu.Configuration(width=64, layers=2, batch=3, time=16)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        configuration.module()(*configuration.tokens(0)).backward()
    assert gpu.flops_of(configuration) == counter.get_total_flops()


def test_layers_of_gpt_3_fill_the_memory(gpu):
    for gibibytes, layers in ((16, 1), (64, 1), (80, 2), (139, 4), (192, 6)):
        assert gpu.fitted(gpu.WIDE, gibibytes * 2**30) == gpu.WIDE._replace(layers=layers)


def test_peaks_are_known_by_names_of_devices(gpu):
    found = {name: gpu.peak_of(name) for name in ("NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "emu")}
    assert list(found.values()) == [756e12, 989e12, 989e12, None]


def test_systems_are_those_that_ranks_and_device_allow(gpu):
    alone = {"plain", "plain-compiled"}
    captured = {name for name in gpu.SYSTEMS if name.endswith("captured")}
    assert set(gpu.names("cuda", 1)) == set(gpu.SYSTEMS)
    assert set(gpu.names("cuda", 2)) == set(gpu.SYSTEMS) - alone
    assert set(gpu.names("xpu", 2)) == set(gpu.SYSTEMS) - alone - captured != set(gpu.SYSTEMS) - alone


def test_without_an_accelerator_it_says_what_it_needs(gpu, monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    run(gpu, monkeypatch, "--configurations", "d2048-L24-B8-T2048", "--peak", "989")
    assert "expected an accelerator that torch finds, got none; it needs one for each rank" in capsys.readouterr().out


def test_unknown_systems_are_refused(gpu, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(gpu, monkeypatch, "--systems", "fsdp2,fsdp3")
    assert "no system is called fsdp3; there are plain, " in capsys.readouterr().err


def test_results_are_written(gpu, monkeypatch, tmp_path):
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.accelerator, name, lambda: None)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: 3 * 2**30)
    monkeypatch.setattr(gpu, "mean_over_ranks", torch.Tensor.item)
    losses = iter(range(5))
    samples = gpu.measure(lambda: torch.tensor(float(next(losses))), dropped=2, rounds=3)
    assert samples.losses == [2, 3, 4]
    assert all(host <= whole for host, whole in zip(samples.host_seconds, samples.seconds))

    configuration = gpu.Configuration.parse("d64-L2-B1-T16")
    args = argparse.Namespace(rounds=3, dropped=2, results=tmp_path)
    accelerator = {"name": "one", "ranks": 1, "peak": 1e12}
    gpu.write(args, configuration, accelerator, {"fsdp2": samples._replace(seconds=[1.0, 2.0, 4.0]), "ddp": None})
    found = json.loads((tmp_path / "gpu-d64-L2-B1-T16-1.json").read_text())
    assert found["systems"]["ddp"] is None
    assert found["systems"]["fsdp2"]["mfu"] == gpu.flops_of(configuration) / 2e12
    assert found["systems"]["fsdp2"]["peak_bytes"] == 3 * 2**30
    assert found["hardware"]["accelerator"] == accelerator
