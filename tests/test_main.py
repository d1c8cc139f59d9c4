"""python -m fshard tells versions and devices, and trains on two ranks."""

import re
import sys

import torch

from fshard.__main__ import main
from tests.test_processes import run


def test_versions_and_devices(capsys):
    assert main(["--no-test"]) == 0
    out = capsys.readouterr().out
    rows = dict(re.findall(r"^(\S+) +(.*)$", out, re.MULTILINE))
    assert rows["fshard"] == "0.1.0"
    assert rows["torch"].startswith(torch.__version__.partition("+")[0])
    assert "gloo" in rows["backends"]
    assert {"python", "platform", "processors", "accelerators"} <= set(rows)


def test_the_self_test_passes():
    out = run(sys.executable, "-m", "fshard")
    assert re.search(r"self-test +passed in \d+ s: 5 steps of zero3 on 2 processes equal those of one,", out)


def test_a_self_test_that_fails_is_told(monkeypatch, capsys):
    def wrong():
        raise AssertionError("the leaf ['up'] differs")

    monkeypatch.setattr("fshard.__main__.self_test", wrong)
    assert main([]) == 1
    assert "failed: AssertionError: the leaf ['up'] differs" in capsys.readouterr().out
