"""The examples run as a user runs them, and print what they promise."""

import json
import math
import re
import sys

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from fshard.rounding import tolerance
from tests.test_processes import ROOT, TORCHRUN, run

sys.path.append(str(ROOT / "examples"))
import train_gpt

LAUNCHERS = {"alone": ((sys.executable,), 1), "torchrun": ((*TORCHRUN, 2), 2)}


def numbers(pattern, out):
    """The numbers that a pattern's groups match, row by row."""
    rows = re.findall(pattern, out)
    return [tuple(map(float, row if isinstance(row, tuple) else [row])) for row in rows]


def launched(test):
    """A slow test of an example, which one process runs and then two."""
    rows = pytest.mark.parametrize(("launcher", "ranks"), LAUNCHERS.values(), ids=LAUNCHERS)
    return pytest.mark.slow(rows(test))


def difference(out):
    ((largest,),) = numbers(r"largest difference .*: (\S+e[-+]\d+)", out)
    return largest


def test_a_gpt_is_evaluated_on_windows_of_all_that_is_held_out():
    """Of a text whose thirds are easier and harder the loss is the mean, and not that of the beginning."""
    text = torch.tensor([1] * 50_000 + [2] * 50_000 + [3] * 50_000)
    guesses = F.one_hot(torch.tensor(1), 256).double()

    class Model:
        def apply(self, params, x):
            return guesses.expand(*x.shape, 256)

    whole = F.cross_entropy(guesses.expand(len(text), 256), text).item()
    # Losses of bytes differ by 1. One window at each of two borders may count for the wrong third.
    assert abs(train_gpt.held_out_loss(Model(), {}, text, context=100) - whole) <= 2 / train_gpt.EVALUATED


@launched
def test_dp_sgd(launcher, ranks):
    out = run(*launcher, ROOT / "examples/dp_sgd.py", "--steps", 25)
    # Five steps of sums over 64 inputs, of parameters that begin below 1 / 8.
    assert difference(out) <= tolerance(torch.float64, terms=64, scale=1 / 8, steps=5)
    spent = numbers(r"epsilon (\S+) ", out)
    assert len(spent) == 5
    assert spent == sorted(spent)
    *_, before, last = numbers(r"(\S+)% of held-out digits are right", out)
    assert last > before > (50,)


@launched
def test_ensemble(launcher, ranks, tmp_path):
    plot = tmp_path / "plot.png"
    steps = 40
    out = run(*launcher, ROOT / "examples/ensemble.py", "--members", 3, "--steps", steps, "--plot", plot)
    assert plot.read_bytes().startswith(b"\x89PNG")
    # Sums over 64 inputs, of parameters that begin below 1 / 8.
    assert difference(out) <= tolerance(torch.float64, terms=64, scale=1 / 8, steps=steps)
    (collectives, kilobytes), (of_three, kilobytes_of_three) = numbers(
        r"a step of \d: (\d+) collectives, (\d+) kB", out
    )
    assert of_three == collectives
    assert kilobytes_of_three > 2.9 * kilobytes > 0 if ranks > 1 else kilobytes_of_three == kilobytes == 0
    (right,), (wrong,), (nines,) = numbers(r"median disagreement (\S+)", out)
    assert right < min(wrong, nines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "replicas", "shards"),
    [((sys.executable,), 1, 1), ((*TORCHRUN, 2), 2, 1), ((*TORCHRUN, 4), 2, 2), ((*TORCHRUN, 4), 4, 1)],
)
def test_diloco(launcher, replicas, shards, tmp_path):
    """The program itself asserts the bytes that it prints; a checkpoint has a row for each replica."""
    sizes = {"batch": 8, "context": 32, "rounds": 3}
    out = run(*launcher, ROOT / "examples/diloco.py", "--shard", shards, "--directory", tmp_path, **sizes)
    names = [f"['inner'].opt_state[1][0].{kind}['head.weight']" for kind in ("mean", "square")]
    rows = json.loads((tmp_path / "step-00000003.0/manifest.json").read_text())["body"]["tensors"]
    assert [rows[name][1][0] for name in names] == [replicas] * 2
    # Losses begin at log(256), and are sums over the bytes of a batch.
    bytes_of_a_batch = sizes["batch"] * sizes["context"]
    assert difference(out) <= tolerance(torch.float64, bytes_of_a_batch, math.log(256), sizes["rounds"])
    ((inner, outer),) = numbers(r"'replica': (\d+) bytes in 15 inner steps, (\S+) bytes in 3 outer steps", out)
    assert inner == 0
    assert (outer > 0) == (replicas > 1)
    ((first, last),) = numbers(r"loss (\S+), after 15 steps (\S+)", out)
    assert last < first


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(sys.executable,), (*TORCHRUN, 2), (*TORCHRUN, 3)])
def test_rl(launcher):
    out = run(*launcher, ROOT / "examples/rl.py", "--steps", 60)
    first, *_, last = map(float, re.search(r"rewards: (.*)", out)[1].split())
    assert first < 0.4 < 0.7 < last
    assert len(launcher) == 1 or difference(out) == 0


@launched
def test_unequal_tokens(launcher, ranks):
    sizes = {"strategy": "zero1" if ranks == 1 else "zero3", "microbatches": 3, "lines": 3}
    sizes |= {"steps": 3, "width": 16, "layers": 1}
    out = run(*launcher, ROOT / "examples/unequal_tokens.py", **sizes)
    means, weighted = (float(re.search(rf"{name} +(\S+)", out)[1]) for name in ("mean of means", "weighted"))
    # Of float32, relative to the gradient, a sum over all lines; a mean of means is off by some hundredths.
    assert weighted <= tolerance(torch.float32, sizes["microbatches"] * sizes["lines"] * ranks) < 0.02 < means
    rows = [line.split() for line in out.splitlines() if re.match(r" +\d+ ", line)]
    assert [int(step) for step, *_ in rows] == [0, 1, 2]
    for _, *counts, loss in rows:
        assert len(counts) == ranks
        assert int(counts[-1]) > 2 * int(counts[0]) or ranks == 1
        assert 4.0 < float(loss) < 6.0


@launched
def test_strategies_agree_to_the_last_image(tmp_path, launcher, ranks):
    options = ("--epochs", 2, "--hidden", 256, "--batch", 32 // ranks, "--directory", tmp_path)
    out = run(*launcher, ROOT / "examples/mnist.py", *options, timeout=200)
    pattern = r"^(\w+) +(\S+) +(\d+) of (\d+) +(\S+) +(\S+) +\S+$"
    names, losses, right, images, kept, peaks = zip(*re.findall(pattern, out, re.MULTILINE), strict=True)
    assert names == ("ddp", "zero1", "zero2", "zero3")
    assert len(set(losses)) == len(set(right)) == 1
    assert "Largest difference of a parameter between checkpoints: 0\n" in out
    # The digits that come with scikit-learn; one of ten is right by chance.
    assert images[0] == "360"
    assert int(right[0]) > 0.7 * 360
    for name, bytes_kept, peak in zip(names, map(float, kept), map(float, peaks)):
        assert fs.checkpoint.latest_step(tmp_path / name) == 2 * (1437 // 32)
        if ranks == 1 or name == "ddp":
            assert bytes_kept == float(kept[0])
        else:
            # Biases and the first convolution stay whole.
            assert 0.5 < bytes_kept / float(kept[0]) < 0.52
            assert peak < float(peaks[0])
    assert (tmp_path / "mnist.png").read_bytes().startswith(b"\x89PNG")
