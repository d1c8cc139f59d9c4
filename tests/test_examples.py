"""The examples run as a user runs them, and print what they promise."""

import re
import sys

import pytest

from tests.test_processes import ROOT, TORCHRUN, run

SMALL = ("--steps", 3, "--width", 16, "--layers", 1, "--lines", 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "ranks", "strategy"),
    [((sys.executable,), 1, "zero1"), ((*TORCHRUN, 2), 2, "zero3")],
    ids=["alone", "torchrun"],
)
def test_unequal_tokens(launcher, ranks, strategy):
    out = run(*launcher, ROOT / "examples/unequal_tokens.py", *SMALL, "--strategy", strategy)
    means, weighted = (float(re.search(rf"{name} +(\S+)", out)[1]) for name in ("mean of means", "weighted"))
    assert weighted < 1e-5 < 0.02 < means
    rows = [line.split() for line in out.splitlines() if re.match(r" +\d+ ", line)]
    assert [int(row[0]) for row in rows] == [0, 1, 2]
    for _, *counts, loss in rows:
        assert len(counts) == ranks
        assert int(counts[-1]) > 2 * int(counts[0]) or ranks == 1
        assert 4.0 < float(loss) < 6.0
