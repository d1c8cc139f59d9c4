"""The benchmarks of accelerators and of a slow link, as far as neither is needed, and the bound of peaks."""

import argparse
import importlib
import json
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fshard.testing import spmd
from tests.ranks import on_ranks

# torch's ZeroRedundancyOptimizer warns of what it imports.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
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


@pytest.mark.slow
def test_a_rank_of_several_plans_in_a_process_of_its_own(gpu, monkeypatch):
    arguments = gpu.Configuration.parse("d64-L1-B1-T16"), "zero3", {"shard": 4}, gpu.chip_of(H100)
    plan = sys.modules["predict"].predicted(*arguments)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert gpu.predicted_apart(*arguments) == plan


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


def measure_slow_link(slow_link):
    """Take a step of all systems, without the hosts, the link and its counters, and no batch is late."""
    slow_link.hosts.counters = lambda: (0, 0)
    slow_link.wait_for_batch = lambda seconds: None
    # Nobody looks at the memory, and a collection takes longer than a step.
    slow_link.gc = SimpleNamespace(collect=lambda: None)
    args = argparse.Namespace(configuration=slow_link.Configuration.parse("d64-L2-B1-T16-V64"), dropped=0, rounds=1)
    results = slow_link.measure(args, slow_link.meter.meter())
    return {name: values for group in results["groups"].values() for name, values in group.items()}


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


@pytest.mark.slow
def test_bytes_over_a_slow_link_follow_formulas(monkeypatch):
    """Those of fshard's systems, whose ranks are simulated."""
    with benchmark("slow_link") as slow_link:
        for title, systems in slow_link.GROUPS.items():
            ours = {name: system for name, system in systems.items() if name.startswith("fshard")}
            monkeypatch.setitem(slow_link.GROUPS, title, ours)
        for rows in spmd(partial(measure_slow_link, slow_link), 4):
            check_formulas(rows)


@pytest.mark.slow
@on_ranks("4 processes", timeout=120.0)
def test_all_systems_over_a_slow_link_take_a_step():
    with benchmark("slow_link") as slow_link:
        check_formulas(measure_slow_link(slow_link))


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


@pytest.mark.slow
def test_bounds_of_results_are_those_of_today():
    pytest.importorskip("transformers")
    with benchmark("memory") as memory:
        for results in measured_memory():
            configuration = memory.parse(results["configuration"]["name"])
            bounds = memory.describe_bounds(results["systems"], configuration, results["ranks"])
            assert bounds == results["bounds"], configuration.name


def small_peaks():
    """Of each step of the rehearsal and of the slow link: its model, its peak, and over how many ranks it is split."""
    rehearsal, slow_link = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("rehearsal", "slow_link"))
    for name, values in rehearsal["systems"].items():
        kind = name.removesuffix(", jitted")
        ranks = {"plain": 1, "hsdp": 4}.get(kind, 8)
        yield rehearsal["configuration"]["name"], values["peak_bytes"], ranks, "zero3" if kind == "hsdp" else kind
    for title, systems in slow_link["groups"].items():
        # With microbatches, each host has a replica.
        ranks = 2 if title == "four microbatches" else 4
        for values in systems.values():
            yield slow_link["configuration"]["name"], values["peak_bytes"], ranks, "zero3"


@pytest.mark.slow
def test_peaks_without_a_printed_bound_are_above_theirs():
    cases = list(small_peaks())
    assert len(cases) == 26
    with benchmark("bound") as bound:
        parse = sys.modules["architectures"].parse
        for name, ranks in {(name, ranks) for name, _, ranks, _ in cases}:
            peaks = [(kind, peak) for case, peak, of_ranks, kind in cases if (case, of_ranks) == (name, ranks)]
            bounds = bound.bounds_of({kind for kind, _ in peaks}, parse(name), ranks)
            for kind, peak in peaks:
                assert peak >= bounds[kind].total, (name, kind)


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


@pytest.mark.slow
def test_a_small_model_is_measured_at_all_budgets():
    with benchmark("fit") as fit:
        args = argparse.Namespace(small=True, rounds=1, peers=["fsdp2", "fsdp2-checkpointed"])
        results = fit.measure_model("gpt", args)
    rows = results["rows"]
    budgets = [row for row in rows.values() if row.get("budget")]
    assert len(budgets) == 10
    assert set(rows) > {"whole", "checkpointed", "fsdp2", "fsdp2-checkpointed"}
    assert all(row["has_equal_bits"] for name, row in rows.items() if not name.startswith("fsdp2"))
    assert all(row["predicted"] <= row["budget"] for row in budgets)
    assert [row["copies"] > 0 for row in (budgets[0], budgets[-1])] == [False, True]
    assert all(row["peak"] >= results["bound"]["bound"] and row["ratio"] > 0 for row in rows.values())
