"""Estimates by extrapolation against all layers, and the command line: tables, factories and arguments."""

import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from fshard.ext.plan.__main__ import main
from fshard.ext.plan.models import GPT, GPTS, STRATEGIES, Options, Workload, estimate, prepared, workload_of
from tests.ext.plan.models import Masked
from tests.test_processes import ROOT


def make(layers):
    with torch.device("meta"):
        return GPT(width=1024, layers=layers, heads=8, vocabulary=512, context=128)


TOKENS = torch.zeros(2, 128, dtype=torch.int64)


@pytest.mark.slow
def test_extrapolation_is_the_full_depth():
    workload = Workload(make, (TOKENS, TOKENS), nn.TransformerEncoderLayer, 9)
    for strategy, checkpointed in (*((name, True) for name in STRATEGIES), ("zero3", False)):
        mesh = {"replicate": 2, "shard": 8} if strategy == "hsdp" else {"shard": 16}
        options = Options(strategy, checkpointed=checkpointed)
        found, full = (estimate(workload, options, mesh, full_depth=whole) for whole in (False, True))
        assert (found.bytes_sent, found.flops) == (full.bytes_sent, full.flops)
        # Small gradients of several layers share a collective.
        assert found.collectives == pytest.approx(full.collectives, rel=0.05)
        assert full.traced > found.traced
        assert found.peak.total == pytest.approx(full.peak.total, rel=0.02)
        assert found.seconds == pytest.approx(full.seconds, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name, ranks, at_most", [("gpt-175b", 4096, 13.2e9), ("gpt-1t", 4096, 50e9)])
def test_large_models_are_planned(name, ranks, at_most):
    options = Options("zero3", param_dtype=torch.bfloat16, checkpointed=True)
    assert 0.9 * at_most < estimate(workload_of(name), options, {"shard": ranks}).peak.total < at_most


HERE = "tests.ext.plan.test_main"


def masked(layers=2):
    return Masked(layers), torch.zeros(2, 64)


def dropping():
    module, batch = masked()
    module.layers.append(nn.Dropout(0.5)).append(nn.Linear(64, 64))
    return module, batch


def broken():
    return Masked(2)


def run(factory, *more):
    return main(["--model", f"{HERE}:{factory}", "--world-size", "4", *more])


def rows_of(text):
    row = r"^(\w+) +(\d+|\d+ x \d+) +(kept|again) +(yes|no) +[\d.]+ kB +[\d.]+ kB +\d+ .* (\S+)$"
    return re.findall(row, text, re.MULTILINE)


def test_the_cheapest_that_fits_is_told(capsys):
    """Buffers of a constructor need no values."""
    assert run("masked", "--memory", "1MB", "--activations", "kept") == 0
    out = capsys.readouterr().out
    about = "8,320 parameters, batch of a rank: torch.float32 [2, 64]"
    rates = "rates: 400 TFLOP/s, memory 2500 GB/s, link 40 GB/s, latency 20 us"
    assert out.splitlines()[:2] == [f"{HERE}:masked: {about}", rates]
    assert [row[:4] for row in rows_of(out)] == [("zero3", "4", "kept", "yes")] * 2
    assert "the cheapest that fits 1MB, by the time that is estimated from these rates:" in out
    assert "\n  held at the peak; what is not held then is 0\n    parameters " in out
    assert run("masked", "--memory", "1kB", "--activations", "kept") == 1
    assert "none fits 1kB: the least is" in capsys.readouterr().out


@pytest.mark.slow
def test_a_sweep_has_a_row_for_each_choice(capsys):
    """Dropout needs no key, and units are a pattern."""
    more = ("--strategy", "zero2", "zero3", "hsdp", "--regather", "yes", "no", "--node", "2", "--units", "layers.*")
    assert run("dropping", *more) == 0
    *rows, best = rows_of(capsys.readouterr().out)
    meshes = {"zero2": "4", "zero3": "4", "hsdp": "2 x 2"}
    choices = [(name, again) for name in meshes for again in ("kept", "again")]
    choices = [(*choice, regather) for choice in choices for regather in ("yes", "no")[: 1 + (choice[0] != "zero2")]]
    assert [row[:4] for row in rows] == [(name, meshes[name], again, regather) for name, again, regather in choices]
    assert best in rows
    assert float(best[4]) == min(float(row[4]) for row in rows)


def test_rates_are_set_and_told(capsys):
    seconds = []
    for link in ("0.00005", "50"):
        rates = ("--tflops", "100", "--memory-rate", "1000", "--link", f"shard={link}", "tp=5", "--latency", "1.5")
        assert run("masked", "--activations", "kept", *rates) == 0
        out = capsys.readouterr().out
        told = f"100 TFLOP/s, memory 1000 GB/s, link of shard {float(link):g} GB/s, link of tp 5 GB/s, latency 1.5 us"
        assert out.splitlines()[1] == f"rates: {told}"
        seconds.append(float(rows_of(out)[0][4]))
    assert seconds[0] > 10 * seconds[1]


def test_activations_are_computed_again_by_units():
    text = "plan: expected units that compute activations again, got none; name them, or keep all"
    with pytest.raises(ValueError, match=f"^{text}$"):
        prepared(Workload(lambda layers: Masked(2), (torch.zeros(2, 64),), None, None), Options(checkpointed=True))


@pytest.mark.slow
def test_the_package_runs():
    command = [sys.executable, "-m", "fshard.ext.plan", "--model", f"{HERE}:masked", "--world-size", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the cheapest that fits 80GB" in done.stdout


def test_a_factory_of_one_depth_is_traced_whole():
    workload = workload_of(f"{HERE}:masked")
    assert (workload.layers, workload.units) == (2, nn.Linear)
    assert workload_of(f"{HERE}:dropping").layers is None


NO_MODEL = "plan: expected model to be one of gpt-125m, gpt-1.3b, gpt-13b, gpt-175b, gpt-1t, or package:factory, a"
RETURNS = "to return (module, batch), where module(*batch) is the loss, got"
NBYTES = "plan: expected memory to be a number of bytes, 0 or more, or a text such as 80GB or 500 MiB, got '80'"
BAD = (
    (["--model", "no_such:factory"], f"{NO_MODEL} function that can be imported, got 'no_such:factory': No module"),
    (["--model", f"{HERE}:broken"], f"plan: expected {HERE}:broken {RETURNS} a Masked"),
    (["--memory", "80"], NBYTES),
    (["--strategy", "hsdp", "--node", "3"], "plan: expected world size to be a multiple of hsdp's 3 ranks a node, got"),
    (["--link", "tp=1"], "plan: expected link of shard to be a number above 0, got None"),
    (["--tflops", "0"], "plan: expected flops to be a number above 0, got 0.0"),
    (["--world-size", "0"], "plan: expected mesh to be a mapping from names of axes to whole numbers of ranks from 1"),
    (["--strategy", "zero4"], "argument --strategy: invalid choice: 'zero4'"),
)


def test_bad_arguments_are_refused_before_anything_is_printed(capsys):
    for changes, text in BAD:
        try:
            code = run("masked", *changes)
        except SystemExit as error:
            code = error.code
        found = capsys.readouterr()
        assert (code, found.out) == (2, "")
        assert text in found.err


def test_help_says_what_a_factory_returns_and_the_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "returns (module, batch), where module(*batch) is the loss" in out
    assert ", ".join(GPTS) in out
    assert out.count("(default: ") == 11
    assert "None" not in out
