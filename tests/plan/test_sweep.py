"""Extrapolation over depth against all layers, the cheapest that fits, and the command line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fshard.plan import Options, cheapest, estimate, sweep, workload_of
from fshard.plan.__main__ import main
from fshard.plan.models import GPT, Block, Workload
from fshard.plan.sweep import STRATEGIES

ROOT = Path(__file__).parents[2]
DEEP = 9


def make(layers):
    with torch.device("meta"):
        return GPT(width=1024, layers=layers, heads=8, vocabulary=512, context=128)


TOKENS = torch.zeros(2, 128, dtype=torch.int64)
WORKLOAD = Workload("test", make, (TOKENS, TOKENS), Block, DEEP)
SHALLOW = WORKLOAD._replace(layers=2)


class Scaled(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))

    def forward(self, x):
        return self.layers(x).square().mean()


def factory(layers=6):
    return Scaled(layers), torch.zeros(2, 64)


def broken():
    return Scaled(2)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", (False, True))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_extrapolation_is_the_full_depth(strategy, checkpointed):
    mesh = {"replicate": 2, "shard": 8} if strategy == "hsdp" else {"shard": 16}
    options = Options(strategy, checkpointed=checkpointed)
    found, full = (estimate(WORKLOAD, options, mesh, full_depth=whole) for whole in (False, True))
    assert (found.bytes_sent, found.flops) == (full.bytes_sent, full.flops)
    # Small gradients of several layers share a collective.
    assert found.collectives == pytest.approx(full.collectives, rel=0.05)
    assert full.traced
    assert not found.traced
    assert found.peak.total == pytest.approx(full.peak.total, rel=0.02)
    assert found.seconds == pytest.approx(full.seconds, rel=0.05)


@pytest.mark.slow
def test_a_sweep_finds_the_cheapest_that_fits():
    rows = list(sweep(SHALLOW, world_sizes=(8, 16), strategies=("ddp", "hsdp"), regather=(True,)))
    assert len(rows) == 8
    memory = sorted(row.peak.total for row in rows)[4]
    best = cheapest(rows, memory)
    assert best.peak.total <= memory
    assert best.seconds == min(row.seconds for row in rows if row.peak.total <= memory)
    assert cheapest(rows, "1kB") is None


@pytest.mark.slow
def test_units_and_regathering_are_options():
    kept, dropped = sweep(
        SHALLOW, world_sizes=(16,), strategies=("zero3",), regather=(False, True), checkpointed=(False,)
    )
    assert kept.bytes_sent < dropped.bytes_sent
    assert kept.peak.gathered > dropped.peak.gathered
    merged = SHALLOW._replace(units="*")
    (whole,) = sweep(merged, world_sizes=(16,), strategies=("zero3",), regather=(True,), checkpointed=(False,))
    assert whole.peak.total != dropped.peak.total


@pytest.mark.slow
@pytest.mark.parametrize("name, ranks, at_most", [("gpt-175b", 4096, 13.2e9), ("gpt-1t", 4096, 50e9)])
def test_large_models_are_planned(name, ranks, at_most):
    options = Options("zero3", param_dtype=torch.bfloat16, checkpointed=True)
    assert 0.9 * at_most < estimate(workload_of(name), options, {"shard": ranks}).peak.total < at_most


@pytest.mark.slow
def test_the_command_line(capsys):
    arguments = ["--model", "tests.plan.test_sweep:factory", "--world-size", "4", "--activations", "kept"]
    assert main([*arguments, "--strategy", "zero2,zero3", "--memory", "1MB"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[2].startswith("strategy ")
    assert re.search(r"^zero2 +4 +kept +yes +\d+\.\d\d kB", out, re.MULTILINE)
    assert "the cheapest that fits 1MB, by the time that is estimated from these rates:" in out
    assert "optimizer state" in out
    assert main([*arguments, "--memory", "1kB"]) == 1
    assert "none fits 1kB: the least is" in capsys.readouterr().out


@pytest.mark.slow
def test_the_package_runs():
    command = [sys.executable, "-m", "fshard.plan", "--model", "tests.plan.test_sweep:factory", "--world-size", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert "the cheapest that fits 80GB" in done.stdout


ARGUMENTS = ["--model", "gpt-125m", "--world-size", "4"]
BAD = {
    "a model": (
        ["--model", "gpt-9b"],
        "plan: expected model to be one of gpt-125m, gpt-1.3b, gpt-13b, gpt-175b, gpt-1t, or package:factory, a "
        "function that can be imported, got 'gpt-9b': no such model",
    ),
    "a module": (
        ["--model", "no_such:factory"],
        "plan: expected model to be one of gpt-125m, gpt-1.3b, gpt-13b, gpt-175b, gpt-1t, or package:factory, a "
        "function that can be imported, got 'no_such:factory': No module named 'no_such'",
    ),
    "what a factory returns": (
        ["--model", "tests.plan.test_sweep:broken"],
        "plan: expected tests.plan.test_sweep:broken to return (module, batch), where module(*batch) is the loss, "
        "got a Scaled",
    ),
    "memory": (
        ["--memory", "80"],
        "plan: expected memory to be a number of bytes, 0 or more, or a text such as 80GB or 500 MiB, got '80'",
    ),
    "a strategy": (
        ["--strategy", "zero4"],
        "plan: expected strategy to be one of ddp, zero1, zero2, zero3, hsdp, got 'zero4'",
    ),
    "ranks": (
        ["--world-size", "0"],
        "plan: expected --world-size to be whole numbers of ranks from 1, by commas, got '0'",
    ),
    "a node": (
        ["--strategy", "hsdp", "--node", "3"],
        "plan: expected world size to be a multiple of hsdp's 3 ranks a node, got 4; pass another",
    ),
    "a choice": (["--activations", "lost"], "plan: expected --activations to be one of kept, again, got 'lost'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name, capsys):
    changes, text = BAD[name]
    assert main([*ARGUMENTS, *changes]) == 2
    assert capsys.readouterr().err.strip() == text


def test_a_factory_of_one_depth_is_traced_whole():
    workload = workload_of("tests.plan.test_sweep:factory")
    assert workload.layers == 6
    assert workload.units is nn.Linear
