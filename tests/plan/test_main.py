"""The command line: what it says of a factory, of its arguments and of what it planned."""

import re

import pytest
import torch
from torch import nn

from fshard.plan import Options, Rates, Workload, workload_of
from fshard.plan.__main__ import about, main
from fshard.plan.models import GPTS
from fshard.plan.sweep import prepared

HERE = "tests.plan.test_main"
RATES = "rates: 400 TFLOP/s, memory 2500 GB/s, link 40 GB/s, latency 20 us"


class Masked(nn.Module):
    """Has buffers that its constructor makes, and writes to one."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
        self.register_buffer("mask", torch.ones(64, 64).tril(), persistent=False)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return (self.layers(x) @ self.mask).square().mean()


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


BAD = {
    "a batch that does not fit": (
        ["--model", f"{HERE}:one_too_many"],
        f"plan: expected {HERE}:one_too_many to return (module, batch), where module(*batch) is the loss, got a "
        "batch of 2 for the forward of a Masked (too many positional arguments)",
    ),
    "a factory with arguments": (
        ["--model", f"{HERE}:needs_width"],
        f"plan: expected {HERE}:needs_width to take no arguments without defaults, missing a required argument: "
        "'width'",
    ),
    "a link": (
        ["--link", "shard=fast"],
        "plan: expected --link to be GB/s, or those of each axis, as replicate=40,shard=400, got 'shard=fast'",
    ),
    "a link too few": (["--link", "tp=1"], "plan: expected link of shard to be a number above 0, got None"),
    "no rate": (["--tflops", "0"], "plan: expected flops to be a number above 0, got 0.0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_before_anything_is_printed(name, capsys):
    changes, text = BAD[name]
    assert run("masked", *changes) == 2
    found = capsys.readouterr()
    assert (found.out, found.err.strip()) == ("", text)


def test_help_says_what_a_factory_returns_and_the_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "returns (module, batch), where module(*batch) is the loss" in out
    assert ", ".join(GPTS) in out
    # But for the two that are required and the switch.
    assert out.count("(default: ") == 12
    assert "None" not in out
