"""The examples that train models of other libraries run as a user runs them."""

import re
import sys

import pytest

from tests.test_processes import ROOT, TORCHRUN, run

pytestmark = pytest.mark.slow

LAUNCHERS = pytest.mark.parametrize("launcher", [(sys.executable,), (*TORCHRUN, 2)], ids=["alone", "torchrun"])


@LAUNCHERS
@pytest.mark.parametrize("statistics", ["mean", "rank0"])
def test_resnet_learns_and_is_exported(tmp_path, launcher, statistics):
    pytest.importorskip("transformers")
    options = ("--steps", 60, "--statistics", statistics, "--directory", tmp_path)
    out = run(*launcher, ROOT / "examples/resnet.py", *options)
    right, images = re.search(r"(\d+) of (\d+) test images right", out).groups()
    assert int(images) == 360
    assert int(right) > 300
    assert f"{tmp_path / 'model'}: from_pretrained gives the logits of the sharded model" in out


@LAUNCHERS
def test_diffusion_learns_and_draws(tmp_path, launcher):
    pytest.importorskip("diffusers")
    options = ("--steps", 60, "--times", 20, "--decay", 0.9, "--directory", tmp_path)
    out = run(*launcher, ROOT / "examples/diffusion.py", *options)
    before, after = map(float, re.search(r"held-out loss (\S+) before, (\S+) after", out).groups())
    assert after < 0.6 < before
    assert (tmp_path / "samples.png").read_bytes().startswith(b"\x89PNG")
