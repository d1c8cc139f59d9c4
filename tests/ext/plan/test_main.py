"""The sweep over strategies against all layers, and the command line: what it says of factories and arguments."""

import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from fshard.ext.plan import Options, Rates, cheapest, estimate, sweep, workload_of
from fshard.ext.plan.__main__ import about, main
from fshard.ext.plan.models import GPT, GPTS, Block, Workload
from fshard.ext.plan.sweep import STRATEGIES, prepared
from tests.ext.plan.models import Masked
from tests.test_processes import ROOT

DEEP = 9


def make(layers):
    with torch.device("meta"):
        return GPT(width=1024, layers=layers, heads=8, vocabulary=512, context=128)


TOKENS = torch.zeros(2, 128, dtype=torch.int64)
WORKLOAD = Workload("test", make, (TOKENS, TOKENS), Block, DEEP)
SHALLOW = WORKLOAD._replace(layers=2)


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


HERE = "tests.ext.plan.test_main"
RATES = "rates: 400 TFLOP/s, memory 2500 GB/s, link 40 GB/s, latency 20 us"


def masked(layers=2):
    return Masked(layers), torch.zeros(2, 64)


def dropping():
    module, batch = masked()
    module.layers.append(nn.Dropout(0.5)).append(nn.Linear(64, 64))
    return module, batch


def one_too_many():
    return Masked(2), (torch.zeros(2, 64), torch.zeros(2))


def needs_width(width):
    return Masked(2), torch.zeros(2, width)


def broken():
    return Masked(2)


def run(factory, *more):
    return main(["--model", f"{HERE}:{factory}", "--world-size", "4", "--activations", "kept", *more])


def test_buffers_of_a_constructor_need_no_values(capsys):
    assert run("masked") == 0
    out = capsys.readouterr().out
    about = "8,320 parameters of float32 (zero3, hsdp: gathered as bfloat16), batch of a rank: float32[2, 64]"
    assert out.splitlines()[:2] == [f"{HERE}:masked: {about}", RATES]
    assert "\n  held at the peak; what is not held then is 0\n    parameters " in out


@pytest.mark.rows(1)
@pytest.mark.parametrize("units", ("layers.*", "layers"))
def test_dropout_needs_no_key_and_units_are_patterns(units, capsys):
    assert main(["--model", f"{HERE}:dropping", "--world-size", "4", "--units", units]) == 0
    rows = re.findall(
        r"^zero3 +4 +(kept|again) +yes +[\d.]+ kB +[\d.]+ kB +\d+ ", capsys.readouterr().out, re.MULTILINE
    )
    # The cheapest once more.
    assert rows[:2] == ["kept", "again"]


def test_activations_are_computed_again_by_units():
    text = "plan: expected units that compute activations again, got none; name them, or keep all"
    with pytest.raises(ValueError, match=f"^{text}$"):
        prepared(Workload("", lambda layers: Masked(2), (torch.zeros(2, 64),), None, None), Options(checkpointed=True))


def test_rates_are_set_and_told(capsys):
    rates = ["--tflops", "100", "--memory-rate", "1000", "--link", "shard=50, replicate=5", "--latency", "1.5"]
    assert run("masked", *rates) == 0
    links = "link of shard 50 GB/s, link of replicate 5 GB/s"
    told = f"rates: 100 TFLOP/s, memory 1000 GB/s, {links}, latency 1.5 us"
    assert capsys.readouterr().out.splitlines()[1] == told


def test_known_models_are_told_with_their_batch():
    told = "gpt-125m: 163,895,808 parameters of float32, batch of a rank: 2 x 2048 tokens"
    assert list(about(workload_of("gpt-125m", 2), "float32", Rates())) == [told, RATES]


def test_slower_links_take_longer(capsys):
    def seconds(link):
        assert run("masked", "--link", link, "--latency", "0") == 0
        return float(re.findall(r"^zero3 .* (\S+)$", capsys.readouterr().out, re.MULTILINE)[0])

    assert seconds("shard=0.001") > 10 * seconds("40")


@pytest.mark.slow
def test_the_cheapest_that_fits_is_told(capsys):
    assert run("masked", "--strategy", "zero2,zero3", "--memory", "1MB") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[2].startswith("strategy ")
    assert re.search(r"^zero2 +4 +kept +yes +\d+\.\d\d kB", out, re.MULTILINE)
    assert "the cheapest that fits 1MB, by the time that is estimated from these rates:" in out
    assert "optimizer state" in out
    assert run("masked", "--memory", "1kB") == 1
    assert "none fits 1kB: the least is" in capsys.readouterr().out


@pytest.mark.slow
def test_the_package_runs():
    command = [sys.executable, "-m", "fshard.ext.plan", "--model", f"{HERE}:masked", "--world-size", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert "the cheapest that fits 80GB" in done.stdout


def test_a_factory_of_one_depth_is_traced_whole():
    workload = workload_of(f"{HERE}:masked")
    assert workload.layers == 2
    assert workload.units is nn.Linear


NO_MODEL = (
    "model to be one of gpt-125m, gpt-1.3b, gpt-13b, gpt-175b, gpt-1t, or package:factory, a function that can be "
    "imported, got "
)
RETURNS = "to return (module, batch), where module(*batch) is the loss, got"
# Arguments, and what follows on "plan: expected".
BAD = {
    "a model": (["--model", "gpt-9b"], f"{NO_MODEL}'gpt-9b': no such model"),
    "a module": (["--model", "no_such:factory"], f"{NO_MODEL}'no_such:factory': No module named 'no_such'"),
    "what a factory returns": (["--model", f"{HERE}:broken"], f"{HERE}:broken {RETURNS} a Masked"),
    "a batch that does not fit": (
        ["--model", f"{HERE}:one_too_many"],
        f"{HERE}:one_too_many {RETURNS} a batch of 2 for the forward of a Masked (too many positional arguments)",
    ),
    "a factory with arguments": (
        ["--model", f"{HERE}:needs_width"],
        f"{HERE}:needs_width to take no arguments without defaults, missing a required argument: 'width'",
    ),
    "memory": (
        ["--memory", "80"],
        "memory to be a number of bytes, 0 or more, or a text such as 80GB or 500 MiB, got '80'",
    ),
    "a strategy": (["--strategy", "zero4"], "strategy to be one of ddp, zero1, zero2, zero3, hsdp, got 'zero4'"),
    "ranks": (["--world-size", "0"], "--world-size to be whole numbers of ranks from 1, by commas, got '0'"),
    "a node": (
        ["--strategy", "hsdp", "--node", "3"],
        "world size to be a multiple of hsdp's 3 ranks a node, got 4; pass another",
    ),
    "a choice": (["--activations", "lost"], "--activations to be one of kept, again, got 'lost'"),
    "a link": (
        ["--link", "shard=fast"],
        "--link to be GB/s, or those of each axis, as replicate=40,shard=400, got 'shard=fast'",
    ),
    "a link too few": (["--link", "tp=1"], "link of shard to be a number above 0, got None"),
    "no rate": (["--tflops", "0"], "flops to be a number above 0, got 0.0"),
}


@pytest.mark.rows(6)
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_before_anything_is_printed(name, capsys):
    changes, text = BAD[name]
    assert run("masked", *changes) == 2
    found = capsys.readouterr()
    assert (found.out, found.err.strip()) == ("", f"plan: expected {text}")


def test_help_says_what_a_factory_returns_and_the_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "returns (module, batch), where module(*batch) is the loss" in out
    assert ", ".join(GPTS) in out
    # But for the two that are required and the switch.
    assert out.count("(default: ") == 12
    assert "None" not in out
