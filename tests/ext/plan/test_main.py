"""Estimates by extrapolation against all layers, and the command line: tables, factories and arguments."""

import re
import resource

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fshard.ext.plan.__main__ import main
from fshard.ext.plan.models import Workload, describe_units, estimate, find_blocks, make_workload, prepare_step
from fshard.extend import sockets_of_mesh
from tests.ext.plan.models import Masked

HERE = "tests.ext.plan.test_main"


class Feed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))


class Layer(nn.TransformerEncoderLayer):
    """A layer that computes its activations again in the backward."""

    def __init__(self):
        super().__init__(1024, 8, 4096, 0.0, batch_first=True)

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Layers(nn.Module):
    """Layers in a ModuleDict, called by their names, and a scalar loss."""

    def __init__(self, make_layer, count):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): make_layer() for i in range(count)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x.square().mean()


def masked(layers=2):
    return Masked(layers), torch.zeros(2, 64)


def of_dict():
    return Layers(Feed, 6), torch.zeros(2, 256)


def of_two():
    return Layers(Feed, 2), torch.zeros(2, 256)


def run(factory, *more):
    return main(["--model", f"{HERE}:{factory}", "--world-size", "4", *more])


# Small gradients of several layers share a collective: at either end of the model one more or less may be begun. What
# is held and waited for at the ends is no more than half a layer's.
DEPTH = 9
SHARED, EXTRAPOLATED = 2, 1 / 2 / DEPTH


@pytest.mark.slow
def test_extrapolation_is_the_full_depth():
    def make(count):
        with torch.device("meta"):
            return Layers(Layer, count)

    workload = Workload(make, (torch.zeros(2, 128, 1024),), Layer, DEPTH)
    for strategy in ("zero2", "zero3", "hsdp"):
        mesh = {"replicate": 2, "shard": 8} if strategy == "hsdp" else {"shard": 16}
        part, full = (estimate(workload, strategy, mesh, full_depth=whole) for whole in (False, True))
        assert (part.sent, part.flops) == (full.sent, full.flops)
        assert part.collectives == pytest.approx(full.collectives, abs=SHARED)
        assert part.peak.total == pytest.approx(full.peak.total, rel=EXTRAPOLATED)
        assert part.seconds == pytest.approx(full.seconds, rel=EXTRAPOLATED)


def test_the_cheapest_that_fits_is_told(capsys):
    """Buffers of a constructor need no values."""
    links = ("--link", "shard=5", "replicate=9")
    assert run("masked", "--memory", "1", "--strategy", "zero2", "hsdp", "--node", "2", *links) == 0
    out = capsys.readouterr().out
    assert "link of shard 5 GB/s, link of replicate 9 GB/s" in out.splitlines()[0]
    row = r"^(\w+) +(\d+|\d+ x \d+) +[\d.]+ kB +[\d.]+ kB +\d+ .* (\S+)$"
    *rows, best = re.findall(row, out, re.MULTILINE)
    assert [row[:2] for row in rows] == [("zero2", "4"), ("hsdp", "2 x 2")]
    assert best == min(rows, key=lambda row: float(row[2]))
    # Three connections to the store, and for hsdp two axes of two ranks beside torch's group of all four.
    sockets = [int(line.split()[-2]) for line in out.splitlines() if line.startswith(("zero2", "hsdp"))]
    assert sockets[:2] == [sockets_of_mesh([4], sends_itself=True), sockets_of_mesh([2, 2], sends_itself=True)]
    assert "`ulimit -Hn`" not in out
    assert "the cheapest that fits 1.0 GB, by the time that is estimated from these rates:" in out
    assert run("masked", "--memory", "1e-6", "--strategy", "zero2") == 1
    assert "none fits 1e-06 GB: the least is" in capsys.readouterr().out


def test_a_launch_that_opens_too_many_files_is_told_below_its_row(monkeypatch, capsys):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (512, 1024))
    arguments = ["--model", f"{HERE}:masked", "--world-size", "4", "4096", "--strategy", "zero2", "--memory", "1"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    (number,) = [i for i, line in enumerate(lines) if "`ulimit -Hn`" in line]
    assert lines[number - 1].split()[:2] == ["zero2", "4096"]
    assert f"let each rank open {int(lines[number - 1].split()[-2]) + 100} files" in lines[number]


def test_a_factory_of_one_depth_is_traced_whole():
    workload = make_workload(f"{HERE}:masked")
    assert (workload.layers, workload.units) == (2, None)
    assert prepare_step(workload, "zero3")[1].params["layers.0.weight"].spec.reshard.bucket_bytes == 48_000_000


class Stage(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.blocks = nn.ModuleList(Feed() for _ in range(count))


# A container, which torchtitan's Llama has as its layers, the names of its blocks, and how they are printed.
BLOCKS = {
    "list": (nn.ModuleList([Feed(), Feed()]), ["layers.0", "layers.1"], "layers.* (2 Feed)"),
    "dict": (nn.ModuleDict({"a": Feed(), "b": Feed()}), ["layers.a", "layers.b"], "layers.* (2 Feed)"),
    "with others": (nn.Sequential(nn.Linear(3, 3), Feed(), Feed(), nn.ReLU()), ["layers.1", "layers.2"], None),
    "nested": (
        nn.ModuleList([nn.ModuleDict({"x": Feed()}), nn.Sequential(Feed())]),
        ["layers.0.x", "layers.1.0"],
        "layers.*.* (2 Feed)",
    ),
    "stages": (
        nn.ModuleList([Stage(1), Stage(2)]),
        ["layers.0", "layers.1", "layers.1.blocks.0", "layers.1.blocks.1"],
        "layers.* (2 Stage), layers.*.blocks.* (2 Feed)",
    ),
    "single": (nn.ModuleList([nn.Linear(3, 3)]), [], None),
    "no parameters": (nn.Sequential(nn.ReLU(), nn.ReLU()), [], None),
}


def test_blocks_are_found_in_any_container():
    for container, names, text in BLOCKS.values():
        module = nn.Module()
        module.embedding, module.layers = nn.Embedding(7, 256), container
        assert sorted(block.path for block in find_blocks(module)) == names
        if text is not None:
            assert describe_units(Workload(lambda _, module=module: module, (), None, None)) == f"units: {text}"


def test_units_are_printed_and_may_be_named(capsys):
    for arguments, text in (([], "layers.* (2 Feed)"), (["--units", "layers.0", "100000"], "['layers.0', 100000]")):
        assert run("of_two", "--strategy", "zero2", *arguments) == 0
        assert capsys.readouterr().out.splitlines()[1] == f"units: {text}"


def test_layers_of_a_dict_are_gathered_one_by_one():
    """As one unit they would all be held at once, under zero3 as under zero2."""
    workload = make_workload(f"{HERE}:of_dict")

    def peak(workload, strategy, **options):
        return estimate(workload, strategy, {"shard": 4}, **options).peak.total

    at_once = peak(workload._replace(units=""), "zero3", bucket_bytes=0)
    assert peak(workload, "zero3", bucket_bytes=0) < 0.7 * min(at_once, peak(workload, "zero2"))


BAD = (
    ("functionalize: units='blocks.*' matches no submodule.", ["--units", "blocks.*"]),
    (
        "plan: model must be package:factory, a function that can be imported, and 'no_such:factory' cannot: ",
        ["--model", "no_such:factory"],
    ),
    ("plan: expected model math:pi to be a function, got a float", ["--model", "math:pi"]),
    *(
        (f"plan: model must be package:factory, a function that can be imported, and {name!r}", ["--model", name])
        for name in (":factory", ".models:factory")
    ),
    (f"plan: expected {HERE}:Feed to return (module, batch), where module(*batch)", ["--model", f"{HERE}:Feed"]),
    (
        "plan: world size must be a multiple of hsdp's 3 ranks a node, and 4 is not.",
        ["--strategy", "hsdp", "--node", "3"],
    ),
    ("plan: expected link of shard to be a number above 0, got None", ["--link", "tp=1"]),
    ("argument --strategy: invalid choice: 'zero4'", ["--strategy", "zero4"]),
)


def test_bad_arguments_are_refused_before_anything_is_printed(capsys):
    for text, arguments in BAD:
        try:
            code = run("masked", *arguments)
        except SystemExit as error:
            code = error.code
        printed = capsys.readouterr()
        assert (code, printed.out) == (2, "")
        assert text in printed.err
