"""The examples run as a user runs them, and print what they promise."""

import json
import math
import re
import subprocess
import sys
import tomllib

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from fshard.rounding import tolerance
from tests.test_guide import GUIDE
from tests.test_processes import ROOT, TORCHRUN, run

sys.path.append(str(ROOT / "examples"))
import installed
import progress_bar
import throughput
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


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def loop(monkeypatch, capsys):
    """Take steps of a second each behind a progress bar, and return what is printed."""

    def run(shown=True):
        clock = Clock()
        monkeypatch.setattr("tqdm.std.time", clock)
        bar = progress_bar.progress(range(36), "training", shown=shown)
        for step in bar:
            clock.now += 1
            bar.set_postfix_str(f"loss {step}", refresh=False)
        assert clock.now == 100 + 36
        return capsys.readouterr().err

    return run


def test_a_log_has_a_line_of_progress_in_ten_seconds_and_a_terminal_one_line(loop, monkeypatch):
    printed = loop()
    assert "\r" not in printed
    assert re.findall(r"^training: .* (\d+)/36 ", printed, re.MULTILINE) == ["0", "10", "20", "30", "36"]
    assert "loss 35" in printed.splitlines()[-1]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    printed = loop()
    assert printed.count("\n") == 1
    assert printed.count("\r") >= 36


def test_progress_is_shown_where_it_should_be(loop, monkeypatch):
    assert loop(shown=False) == ""
    monkeypatch.setattr(progress_bar, "tqdm", None)
    assert loop() == ""


def test_only_a_package_of_the_extras_is_answered_by_a_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SystemExit) as ended, installed.installed_by(installed.MODELS):
        import peft.tuners  # noqa: F401
    assert ended.value.code == "pip install -e '.[models,examples]'"
    with pytest.raises(ModuleNotFoundError, match="misspelled"), installed.installed_by(installed.MODELS):
        import misspelled  # noqa: F401


# Runs each script with the packages of extras hidden; prints the text with which it ends, or that it parses arguments.
WITHOUT_EXTRAS = """
import argparse, json, runpy, sys
sys.path.insert(0, "examples")
import installed
class Parsed(BaseException): pass
def stop(*args, **kwargs):
    raise Parsed
sys.modules |= dict.fromkeys({*installed.PACKAGES, "tqdm"})
parse = argparse.ArgumentParser.parse_args
for path, stops in json.load(sys.stdin):
    argparse.ArgumentParser.parse_args = stop if stops else parse
    sys.argv = [path]
    try:
        runpy.run_path(path, run_name="__main__")
    except Parsed:
        print("parses")
    except SystemExit as error:
        print(error.code)
"""


def test_make_examples_runs_every_program_with_the_extras_that_it_needs():
    """But for the one that needs Ray, which starts ranks by itself."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (listed,) = re.findall(r"^EXAMPLES := (.*)$", makefile, re.MULTILINE)
    (stamp,) = re.findall(r"^examples: (\S+)$", makefile, re.MULTILINE)
    (installs,) = re.findall(rf"^{stamp}: EXTRAS := (\S+)$", makefile, re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed_extras = set(installs.split(","))
    for name in installs.split(","):
        for nested in re.findall(r"fshard\[(.*?)\]", " ".join(extras[name])):
            installed_extras |= set(nested.split(","))

    rows = re.findall(r"^\| (.*?) \|.*\| `\.(.*?)` \|$", GUIDE.read_text(), re.MULTILINE)
    programs = {name for row, _ in rows for name in re.findall(r"`(\w+)\.py`", row)}
    needed = {name for _, install in rows for name in re.findall(r"\w+", install)}
    assert set(listed.split()) == programs
    assert needed <= installed_extras


@pytest.mark.slow
def test_without_its_extras_a_program_prints_the_command_that_installs_them():
    """As the guide says: programs whose column has the package alone need no extras to start."""
    ends = {
        "`.`": "parses",
        "`.[examples]`": installed.EXAMPLES,
        "`.[models,examples]`": installed.MODELS,
        "`.[embeddings]`": installed.MODELS,
        '`"ray[train]"`': installed.RAY,
    }
    expected = {}
    for programs, install in re.findall(r"^\| (.*?) \|.*\| (.*?) \|$", GUIDE.read_text(), re.MULTILINE):
        if install in ends:
            expected |= dict.fromkeys(re.findall(r"`(\w+\.py)`", programs), ends[install])
    programs = {path.name for path in (ROOT / "examples").glob("*.py") if "__main__" in path.read_text()}
    assert set(expected) == programs
    scripts = [(f"examples/{name}", end == "parses") for name, end in expected.items()]
    command = [sys.executable, "-c", WITHOUT_EXTRAS]
    result = subprocess.run(command, cwd=ROOT, input=json.dumps(scripts), capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr
    assert dict(zip(expected, result.stdout.splitlines(), strict=True)) == expected


def test_throughput_leaves_the_first_step_out(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    meter = throughput.Meter(tokens=1000)
    assert math.isnan(meter.tokens_a_second())
    for seconds in (50, 2, 3):
        clock.now += seconds
        meter.end_step()
    assert meter.seconds_a_step() == 2.5
    assert meter.tokens_a_second() == 400
    assert throughput.mfu(flops=5e12, seconds=2.5, peak=8e12) == 0.25


def test_parameters_and_flops_of_a_step():
    """A product's forward has 2 FLOPs for each weight and row, and so has the gradient of its weight."""
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    params = fs.shard({"w": torch.ones(5, 7), "b": torch.ones(7)}, fs.zero3(mesh, min_shard_elements=0))
    assert throughput.count_parameters(params) == 5 * 7 + 7

    def loss_fn(params, x):
        full = fs.gather(params)
        return (x @ full["w"] + full["b"]).sum()

    def step(params, x):
        return fs.value_and_grad(loss_fn)(params, x)

    assert throughput.flops_of_a_step(step, params, torch.ones(3, 5), mesh=mesh) == 2 * 2 * 3 * 5 * 7


@launched
def test_train_gpt_ends_with_its_throughput(launcher, ranks, tmp_path):
    options = ("--steps", 6, "--sample", 4)
    program = ROOT / "examples/train_gpt.py"
    width, layers, context = 64, 2, 64
    parameters = sum(parameter.numel() for parameter in train_gpt.GPT(width, layers, 2, context).parameters())
    *_, last = run(*launcher, program, *options, "--directory", tmp_path / "plain").splitlines()
    assert re.fullmatch(rf"{parameters:,} parameters, [\d,]+ tokens/s", last)
    # Six for each weight of a product and token. Two products of attention, and four of their backward, to which fused
    # attention adds one: 14 times the width of each layer for each pair of tokens.
    weights = layers * 12 * width**2 + 256 * width
    tokens = 24 * context / ranks
    flops = tokens * (6 * weights + 14 * layers * width * context)
    peak = 0.01
    for name, more in {"all": (), "remat": ("--remat",)}.items():
        options_of_run = (*options, *more, "--peak-tflops", peak, "--directory", tmp_path / name)
        *_, last = run(*launcher, program, *options_of_run).splitlines()
        pattern = rf"{parameters:,} parameters, ([\d,]+) tokens/s, MFU (\S+)% \((\S+) FLOPs of a rank in a step\)"
        rate, share, printed = re.fullmatch(pattern, last).groups()
        assert printed == f"{flops:.4g}"
        # The rate is rounded to a whole number.
        lowest, highest = (float(rate.replace(",", "")) + rounded for rounded in (-0.5, 0.5))
        percent = 100 * flops / (24 * context) / (peak * 1e12)
        assert float(f"{lowest * percent:.2f}") <= float(share) <= float(f"{highest * percent:.2f}")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("precision", ("float32", "bfloat16"))
def test_train_gpt_has_the_same_bits_on_other_numbers_of_ranks(precision, tmp_path):
    """With dropout; a run that has stopped goes on from its last checkpoint, and takes the steps behind it again."""
    options = {"steps": 24, "save-every": 4, "sample": 4, "reduction-order": "tree", "precision": precision}

    def train(name, ranks, *more):
        program = ROOT / "examples/train_gpt.py"
        run(*TORCHRUN, ranks, program, "--directory", tmp_path / name, *more, timeout=240, **options)
        return [line.split()[:2] for line in (tmp_path / name / "losses.txt").read_text().splitlines()]

    expected = train("alone", 1)
    for ranks, steps in ((4, 7), (2, 13), (8, 18), (1, 24)):
        moved = train("moved", ranks, "--stop-at", steps)
    assert [step for step, _ in moved] == [str(step) for step in range(24)]
    assert moved == expected
    files = (sorted((tmp_path / name).glob("checkpoints/step-*/*0.safetensors"))[-1] for name in ("moved", "alone"))
    assert len({file.read_bytes() for file in files}) == 1


SHORT = {
    "train_gpt": ("--steps", 3, "--sample", 4, "--peak-tflops", 1, "--directory", "."),
    "ddp_parity": ("--steps", 3, "--width", 16, "--layers", 1, "--heads", 2, "--context", 8, "--sample", 4),
    "mnist": ("--epochs", 1, "--hidden", 32, "--directory", "."),
    "unequal_tokens": ("--steps", 2, "--width", 16, "--layers", 1),
    "check_step": ("--width", 16, "--layers", 1, "--break", "gather"),
    "find_the_nan": ("--steps", 16, "--width", 16, "--layers", 1),
    "finetune_lora": ("--steps", 2, "--export", "."),
    "finetune_peft": ("--steps", 2, "--export", "."),
    "resnet": ("--steps", 10, "--directory", "."),
    "diffusion": ("--steps", 2, "--times", 4, "--directory", "."),
    "dp_sgd": ("--steps", 2),
    "maml": ("--steps", 2),
    "ensemble": ("--steps", 2, "--members", 2),
    "hessian": ("--steps", 1),
    "custom_transform": ("--steps", 2),
    "topk": ("--steps", 2),
    "powersgd": ("--steps", 2),
    "sibling": ("--steps", 2),
    "tensor_parallel": ("--steps", 2),
    "four_dimensions": ("--steps", 2),
    "diloco": ("--rounds", 1, "--directory", "."),
    "rl": ("--steps", 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_one_rank_prints(name, tmp_path):
    program = ROOT / f"examples/{name}.py"
    launcher = [*TORCHRUN[:-1], "--log-dir", tmp_path / "logs", "--redirects", "3", TORCHRUN[-1]]
    command = [str(part) for part in (*launcher, 2, program, *SHORT[name])]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr
    first, second = ({log.stem: log.read_text() for log in tmp_path.glob(f"logs/*/*/{rank}/*.log")} for rank in (0, 1))
    assert first["stdout"]
    assert second["stdout"] == ""
    # A bar of progress; other lines are warnings of libraries.
    assert not re.search(r"\d+/\d+ \[", second["stderr"])


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
def test_fit(launcher, ranks, tmp_path):
    sizes = {"width": 64, "layers": 3, "context": 64, "picture": tmp_path / "memory.svg"}
    out = run(*launcher, ROOT / "examples/fit.py", **sizes)
    budgets = numbers(r"no budget +budget (\S+) MB", out)
    rows = numbers(r"most bytes held +(\S+) MB +(\S+) MB", out)
    assert len(budgets) == len(rows) == 3
    for (budget,), (before, after) in zip(budgets, rows, strict=True):
        assert after <= budget < before
    assert out.count("to fit the budget:") == out.count("equal bits") == 3
    assert (tmp_path / "memory.svg").read_text().startswith("<svg")


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
def test_the_nan_is_found(launcher, ranks):
    """A rank reads four records in a step; that with the number 61 is on the last rank."""
    out = run(*launcher, ROOT / "examples/find_the_nan.py", "--steps", 17, "--width", 16, "--layers", 1)
    wrong_step = 61 // (4 * ranks)
    steps = [(int(number), loss) for number, loss in re.findall(r"^ +(\d+)  (\S+)$", out, re.MULTILINE)]
    assert [number for number, _ in steps] == sorted([*range(17), wrong_step])
    assert [number for number, loss in steps if loss == "nan"] == [wrong_step]
    assert f"replay: aten.div made NaN on rank {ranks - 1}\n" in out
    line = r"at: find_the_nan.py:\d+ in mean_of_answers: return \(\(losses \* is_answer\).sum\(-1\) / digits\).mean\(\)"
    assert re.search(line, out)
    # What it was divided by, and what that made.
    assert re.search(r"float32\[4\], 0 to 2\n", out)
    assert re.search(r"value: float32\[4\], .*, 1 NaN", out)


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
    assert out.startswith("Data: the digits of scikit-learn")
    assert ("zero3 is slower here" in out) == (ranks > 1)
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
