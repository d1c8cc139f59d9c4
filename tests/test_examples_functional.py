"""The examples of what functions of sharded parameters can do run as a user runs them, and print what they promise."""

import ast
import math
import re
import sys

import pytest

import fshard as fs
from tests.test_processes import ROOT, TORCHRUN, run

LAUNCHERS = pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        pytest.param((sys.executable,), 1, id="alone"),
        pytest.param((*TORCHRUN, 2), 2, id="torchrun", marks=pytest.mark.slow),
    ],
)
SHORT = ("dp_sgd", "maml", "ensemble", "hessian")
PNG = b"\x89PNG"


def numbers(pattern, out):
    """The numbers that a pattern's groups match, row by row."""
    return [tuple(map(float, row if isinstance(row, tuple) else (row,))) for row in re.findall(pattern, out)]


def difference(out):
    ((found,),) = numbers(r"largest difference .*: (\S+e[-+]\d+)", out)
    return found


@pytest.mark.slow
@LAUNCHERS
def test_dp_sgd(launcher, ranks):
    out = run(*launcher, ROOT / "examples/dp_sgd.py", "--steps", 25)
    assert difference(out) < 1e-14
    spent = [epsilon for (epsilon,) in numbers(r"epsilon (\S+) ", out)]
    assert len(spent) == 5
    assert spent == sorted(spent)
    accuracies = [percent for (percent,) in numbers(r"(\S+)% of held-out digits are right", out)]
    assert accuracies[-2] > 50
    assert accuracies[-1] > accuracies[-2]


def test_epsilon_of_a_gaussian_without_sampling(monkeypatch):
    """Its closed form, 1 / (2 s^2) + sqrt(2 log(1 / delta)) / s, minimal over all orders and not whole ones alone."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    from dp_sgd import DELTA, epsilon

    for noise in (5.0, 10.0):
        closed = 1 / (2 * noise**2) + (-2 * math.log(DELTA)) ** 0.5 / noise
        assert epsilon(1 - 1e-12, noise, 1) == pytest.approx(closed, rel=1e-3)
    assert epsilon(0.01, 1.0, 100) < epsilon(0.1, 1.0, 100) < epsilon(0.1, 1.0, 200)
    assert epsilon(0.1, 2.0, 100) < epsilon(0.1, 1.0, 100)


@pytest.mark.slow
@LAUNCHERS
def test_maml(launcher, ranks, tmp_path):
    plot = tmp_path / "maml.png"
    out = run(*launcher, ROOT / "examples/maml.py", "--steps", 60, "--tasks", 10, "--plot", plot)
    assert difference(out) < 1e-12
    without, learned = numbers(r"(?:steps|MAML) {2,}(\S+) +(\S+) +(\S+)", out)
    assert learned[0] > learned[1] > learned[2]
    assert learned[2] < without[2]
    assert plot.read_bytes().startswith(PNG)


@pytest.mark.slow
@LAUNCHERS
def test_ensemble(launcher, ranks, tmp_path):
    plot = tmp_path / "ensemble.png"
    out = run(*launcher, ROOT / "examples/ensemble.py", "--members", 3, "--steps", 40, "--plot", plot)
    assert difference(out) < 1e-12
    one, three = numbers(r"a step of \d: (\d+) collectives, (\d+) kB", out)
    assert one[0] == three[0]
    assert (three[1] > 2.9 * one[1] > 0) if ranks > 1 else (one == three == (0, 0))
    right, wrong, nines = (median for (median,) in numbers(r"median disagreement (\S+)", out))
    assert right < min(wrong, nines)
    assert plot.read_bytes().startswith(PNG)


@pytest.mark.slow
@LAUNCHERS
def test_hessian(launcher, ranks, tmp_path):
    plot = tmp_path / "hessian.png"
    out = run(*launcher, ROOT / "examples/hessian.py", "--steps", 10, "--every", 5, "--images", 100, "--plot", plot)
    assert difference(out) < 1e-12
    rows = numbers(r"step +(\d+), largest eigenvalues: (\S+) (\S+) (\S+)", out)
    assert [row[0] for row in rows] == [0, 5, 10]
    assert all(first > second > third > 0 for _, first, second, third in rows)
    assert plot.read_bytes().startswith(PNG)


@pytest.mark.slow
@LAUNCHERS
def test_custom_transform(launcher, ranks, tmp_path):
    plot = tmp_path / "custom.png"
    sizes = ("--steps", 3, "--width", 32, "--layers", 1, "--context", 16, "--batch", 2)
    out = run(*launcher, ROOT / "examples/custom_transform.py", *sizes, "--plot", plot)
    assert "step 3 with its scatter forgotten: check_adjoint: scatter is not gather's transpose" in out
    before, after = out.split("of each rank")
    checks = numbers(r"(?m)^([1-5]) .*?" + r" {2,}([-+.e\d]+)" * 4 + "$", before)
    assert [row[0] for row in checks] == [1, 2, 3, 4, 5]
    # Exact steps are off by nothing, and gradients as int8 cost less than a fifth of float64's.
    assert checks[0][3:] == checks[2][3:] == (0, 0)
    assert ranks == 1 or checks[4][2] < checks[0][2] / 5
    trained = numbers(r"(?m)^(?:fs\.fully_shard|[1-5] \D.*?)" + r" {2,}([0-9.]+)" * 5 + "$", after)
    losses, sent = ([row[i] for row in trained] for i in (0, 1))
    assert len(trained) == 6
    assert losses[0] == losses[1] == losses[3]
    assert all(4.0 < loss < 6.0 for loss in losses)
    if ranks > 1:
        assert sent[0] == sent[1] == sent[3] > sent[2] > sent[4] > sent[5]
    assert plot.read_bytes().startswith(PNG)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "replicas", "shards"),
    [((sys.executable,), 1, 1), ((*TORCHRUN, 2), 2, 1), ((*TORCHRUN, 4), 2, 2), ((*TORCHRUN, 4), 4, 1)],
)
def test_diloco(launcher, replicas, shards):
    """The program itself asserts the bytes that it prints."""
    out = run(*launcher, ROOT / "examples/diloco.py", "--shard", shards, "--rounds", 3)
    assert difference(out) < 1e-12
    ((inner, outer),) = numbers(r"'replica': (\d+) bytes in 15 inner steps, (\S+) bytes in 3 outer steps", out)
    assert inner == 0
    assert (outer > 0) == (replicas > 1)
    ((first, last),) = numbers(r"loss (\S+), after 15 steps (\S+)", out)
    assert last < first


@pytest.mark.parametrize("name", [*SHORT, "custom_transform"])
def test_example_is_short_and_uses_public_names_alone(name):
    text = (ROOT / f"examples/{name}.py").read_text()
    assert len(text.splitlines()) < 120 or name not in SHORT
    assert re.findall(".*import.*fshard.*|.*fshard.*import.*", text) == ["import fshard as fs"]
    attributes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    assert not [node.attr for node in attributes if node.attr.startswith("_")]
    rooms = {"fs": fs.__all__, "fs.comm": fs.comm.__all__, "fs.testing": fs.testing.__all__}
    for room, public in rooms.items():
        assert {node.attr for node in attributes if ast.unparse(node.value) == room} <= set(public)
    assert name == "custom_transform" or "FSDP2 cannot do this" in ast.get_docstring(ast.parse(text))
