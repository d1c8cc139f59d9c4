"""The benchmarks of accelerators and of a slow link, as far as neither is needed, and the bound of peaks."""

import argparse
import importlib
import json
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

# torch's ZeroRedundancyOptimizer warns of what it imports.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
H100 = "NVIDIA H100 80GB HBM3"


@contextmanager
def benchmark(name):
    """A benchmark's module, beside whose modules there are none of examples, which have the same names."""
    names = [path.stem for path in BENCHMARKS.glob("*.py")]
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(others)


@pytest.fixture
def gpu():
    with benchmark("gpu") as module:
        yield module


@pytest.mark.slow
def test_results_are_written(gpu, monkeypatch, tmp_path, capsys):
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.accelerator, name, lambda: None)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: 3 * 2**30)
    monkeypatch.setattr(gpu, "mean_over_ranks", torch.Tensor.item)
    losses = iter(range(5))
    samples = gpu.measure(lambda: torch.tensor(float(next(losses))), dropped=2, rounds=3)
    assert samples.losses == [2, 3, 4]
    configuration = gpu.Configuration.parse("d64-L1-B1-T16")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        configuration.module()(*configuration.tokens(0)).backward()
    assert gpu.flops_of(configuration) == counter.get_total_flops()
    args = argparse.Namespace(rounds=3, dropped=2, results=tmp_path)
    accelerator = {"name": "one", "ranks": 1, "peak": 1e12}
    plan = sys.modules["predict"].predicted(configuration, "zero3", {"shard": 4}, gpu.chip_of(H100))
    measured = {"fsdp2": samples._replace(seconds=[1.0, 2.0, 4.0]), "ddp": None, "fshard-zero3": samples}
    gpu.write(args, configuration, accelerator, measured, plan)
    assert f" {1e3 * plan['seconds']:.1f} " in capsys.readouterr().out.partition("fshard-zero3")[2]
    results = json.loads((tmp_path / "gpu-d64-L1-B1-T16-1.json").read_text())
    assert results["systems"]["fsdp2"]["mfu"] == gpu.flops_of(configuration) / 2e12
    assert results["systems"]["fsdp2"]["peak_bytes"] == 3 * 2**30
    assert (results["systems"]["ddp"], results["hardware"]["accelerator"]) == (None, accelerator)
    numbers = [parameter.numel() for parameter in configuration.module().parameters()]
    small = sum(number for number in numbers if number < 1024)
    # The one unit stays till its backward: gathered in bfloat16, reduced in float32.
    assert results["predicted"]["bytes_sent"]["shard"] == 3 / 4 * ((2 + 4) * (sum(numbers) - small) + 2 * 4 * small)


def test_links_are_as_fast_as_what_they_cross(gpu):
    chip = gpu.chip_of(H100)
    for sizes, rates in (({"replicate": 8, "shard": 8}, (40e9, 360e9)), ({"replicate": 2, "shard": 32}, (40e9, 320e9))):
        assert tuple(sys.modules["predict"].rates_of(chip, sizes).link.values()) == rates[::-1]
    assert sys.modules["predict"].predicted(None, "zero3", {"shard": 8}, gpu.chip_of("NVIDIA H100 PCIe")) is None


# What reaches another host without having to: `fs.zero3` may gather units again that are still there.
AT_MOST = {"fshard-zero3-axes", "fshard-policies", "fshard-waiting", "fshard-started"}
EQUAL_BITS = {
    *("fshard-each", "fsdp2-each", "fshard-zero3-axes", "fshard-regather-axis", "fshard-policies"),
    *("fshard-waiting", "fshard-started"),
}


def check_formulas(rows):
    assert {name for name, values in rows.items() if values["has_equal_bits"]} == EQUAL_BITS & set(rows)
    assert all(values["part_of_bound"] < 1 for values in rows.values())
    counted = {name: values for name, values in rows.items() if values["formula_bytes"]}
    assert {name for name, values in counted.items() if not values["formula_is_exact"]} == AT_MOST
    for name, values in counted.items():
        assert values["recorded_bytes"] <= values["formula_bytes"], name
        assert not values["formula_is_exact"] or values["recorded_bytes"] == values["formula_bytes"], name
    # Blocks that stay are not gathered again, and a gather that starts ahead is not sent twice.
    assert rows["fshard-policies"]["recorded_bytes"] < rows["fshard-zero3-axes"]["recorded_bytes"]
    assert rows["fshard-started"]["recorded_bytes"] == rows["fshard-waiting"]["recorded_bytes"]


RESULTS = BENCHMARKS / "results"


def measured_memory():
    """The results of each configuration whose peaks were measured."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("memory-*.json"))]


def test_no_measured_peak_is_below_its_bound():
    for results in measured_memory():
        assert set(results["bounds"]) == set(results["systems"])
        for name, ranks in results["systems"].items():
            for rank in ranks:
                assert rank["peak"] >= results["bounds"][name]["bound"], (results["configuration"]["name"], name)


def test_a_bound_is_arguments_and_the_largest_operator():
    """By hand, for a model whose logits are larger than all else."""
    with benchmark("bound") as bound:
        configuration = sys.modules["architectures"].parse("d64-L1-B4-T32-V4096")
        bounds = bound.bounds_of(["plain", "fshard-zero3-graph", "fsdp2-compiled"], configuration, ranks=2)
    with torch.device("meta"):
        stored = sum(parameter.nbytes for parameter in configuration.module().parameters())
    logits = 4 * (4 * 32 * 4096)
    assert set(bounds) == {"plain", "fshard-zero3-graph"}
    assert bounds["plain"][:2] == (stored, 2 * stored)
    assert bounds["fshard-zero3-graph"][:2] == (stored // 2, stored)
    for least in bounds.values():
        assert least.operator == "aten._log_softmax_backward_data.default"
        assert least.largest_operator == 3 * logits
        assert least.total == sum(least[:3])
