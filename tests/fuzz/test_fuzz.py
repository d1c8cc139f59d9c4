"""A fixed hundred of the sampler's programs, and that a wrong number or error is a failure."""

import pytest

from tests.fuzz.plan import Plan, draw
from tests.fuzz.render import render
from tests.fuzz.run import Result, report, run

SEEDS = range(100)


@pytest.mark.rows(1)
@pytest.mark.parametrize("first", SEEDS[::5])
def test_programs(first, workers):
    """Of plain torch, torch DDP and every strategy, at one world size each; one in four jitted."""
    failures = []
    for seed in range(first, first + 5):
        source = render(draw(seed))
        result = run(source, f"program {seed}", workers(2))
        if result.failed:
            failures.append(report(seed, source, result))
    assert not failures, "\n\n".join(failures)


def test_a_wrong_number_and_an_error_that_no_feature_allows_are_failures():
    source = render(Plan())
    assert run(source, "right").failed == ""
    wrong = source.replace("fs.from_torch(torch.optim.SGD, lr=0.1)", "fs.sgd(0.1 + 1e-9)")
    assert "wrong numbers without an error" in run(wrong, "wrong").failed
    raising = source.replace("def optimizer():", "def optimizer():\n    raise ValueError('no')\n\n")
    assert "an error that no feature of the program allows: ValueError: no" in run(raising, "an error").failed
    allowed = run(raising.replace("REFUSALS = []", "REFUSALS = ['no']"), "allowed")
    assert allowed == Result(6, ("ddp", "zero1", "zero2", "zero3", "zero3 kept", "hsdp"))
