"""What a user starts from a shell, python -m fshard too, ends well and says what it should."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fshard.__main__ import main

ROOT = Path(__file__).parents[1]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node")

# Keeps its mesh to the end, as programs do, and exits right after large collectives.
TRAINS_AND_ENDS = """
import sys, torch, fshard as fs
torch.set_num_threads(1)
mesh = fs.init_mesh({"shard": -1}, device="cpu")
if "ddp" in sys.argv:
    holds_the_group_for_good = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
params = fs.shard({"w": torch.ones(700, 999), "b": torch.ones(5)}, fs.zero2(mesh))
for _ in range(10):
    loss, grads = fs.value_and_grad(lambda p: fs.gather(p)["w"].sum() + fs.gather(p)["b"].sum())(params)
"""


def run(*command, timeout=120, environment=None, **options):
    """Run a command with options by name, and variables of its own, and return what it printed."""
    named = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = [str(part) for part in (*command, *named)]
    variables = os.environ | (environment or {})
    result = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=timeout)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def run_script(*command, **variables):
    """Run a script that imports tests and this package, on one thread."""
    run(*command, timeout=560, environment={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables)


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["mesh", "ddp"])
def test_ranks_exit_with_zero(tmp_path, kept):
    """A race at the interpreter's end aborted one run in three to six, where something kept the process group."""
    script = tmp_path / "script.py"
    script.write_text(TRAINS_AND_ENDS)
    run(*TORCHRUN, 2, script, kept)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_demo_learns_and_equals_ddp(tmp_path):
    out = run(*TORCHRUN, 2, ROOT / "examples/ddp_parity.py", "--plot", tmp_path / "curves.png", timeout=500)
    # In nats per byte; frequencies of single bytes give 3.2, of pairs 2.4.
    assert float(re.search(r"held-out loss +([0-9.]+)", out)[1]) < 2.4
    assert "largest difference from DDP: 0 in a loss, 0 in a parameter, over 360 steps" in out


def test_a_self_test_that_fails_is_reported(capsys, monkeypatch):
    def wrong():
        raise AssertionError("the leaf ['w'] differs")

    monkeypatch.setattr("fshard.__main__.self_test", wrong)
    assert main() == 1
    assert "failed: AssertionError: the leaf ['w'] differs" in capsys.readouterr().out


@pytest.mark.slow
def test_the_self_test_passes():
    out = run(sys.executable, "-m", "fshard")
    rows = dict(re.findall(r"^(\S+) +(.*)$", out, re.MULTILINE))
    assert rows["fshard"] == "0.1.0"
    assert rows["torch"].startswith(torch.__version__.partition("+")[0])
    assert "gloo" in rows["backends"]
    assert rows["python"].endswith(f"on {platform.platform()} ({sys.executable})")
    assert "accelerators" in rows
    assert rows["self-test"] == "passed: 5 steps of zero3 on 2 processes equal those of one"


# Its second rank is killed in the third step, or raises an error there.
FAILS_IN_A_STEP = """
import os, signal, sys
import torch, fshard as fs
from torch.distributed.elastic.multiprocessing.errors import record

def main():
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    params = fs.shard({"w": torch.ones(4)}, fs.zero3(mesh, min_shard_elements=0))

    def loss_fn(params):
        full = fs.gather(params)["w"]
        if step == 2 and mesh.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return full.sum()

    for step in range(4):
        fs.value_and_grad(loss_fn)(params)

(record(main) if "record" in sys.argv else main)()
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", "record"])
def test_the_survivor_under_torchrun_names_the_rank_that_was_killed(tmp_path, way):
    """Although torchrun ends it within a tenth of a second: on standard error, and in torchrun's own summary."""
    script = tmp_path / "script.py"
    script.write_text(FAILS_IN_A_STEP)
    done = subprocess.run([*TORCHRUN, "2", script, way], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    printed, separator, summary = done.stderr.partition("script.py FAILED")
    assert separator
    for text in (printed, summary):
        assert re.search(r"CollectiveError: (rank 0 lost the connection to )?rank 1(\.| was killed)", text), done.stderr
        assert "  rank 0, this one, was in reduce_scatter number" in text, done.stderr
