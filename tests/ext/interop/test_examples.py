"""The examples that export what from_pretrained reads run as a user runs them."""

import re

import pytest

from tests.test_examples import launched
from tests.test_processes import ROOT, run


@launched
@pytest.mark.parametrize("statistics", ["mean", "rank0"])
def test_resnet_learns_and_is_exported(tmp_path, launcher, ranks, statistics):
    pytest.importorskip("transformers")
    options = ("--steps", 60, "--statistics", statistics, "--directory", tmp_path)
    out = run(*launcher, ROOT / "examples/resnet.py", *options)
    right, images = re.search(r"(\d+) of (\d+) test images right", out).groups()
    assert int(images) == 360
    assert int(right) > 300
    assert f"{tmp_path / 'model'}: from_pretrained gives the logits of the sharded model" in out
