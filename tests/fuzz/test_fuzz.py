"""A fixed hundred of the sampler's programs, and that a wrong number is a failure."""

import pytest

import fshard as fs
from tests.fuzz import sampler
from tests.fuzz.sampler import Part, Plan, check, draw

SEEDS = range(100)


@pytest.mark.rows(1)
@pytest.mark.parametrize("first", SEEDS[::5])
def test_programs(first):
    """Of plain torch and every strategy, at one world size each; one in four jitted."""
    for seed in range(first, first + 5):
        try:
            check(draw(seed))
        except Exception as error:
            raise AssertionError(f"in {draw(seed)}") from error


def test_a_wrong_number_is_a_failure(monkeypatch):
    check(Plan())
    cls, hyper, _ = sampler.OPTIMIZERS["SGD"]
    monkeypatch.setitem(sampler.OPTIMIZERS, "SGD", (cls, hyper, fs.sgd(0.1 * (1 + 2**-24))))
    with pytest.raises(AssertionError, match=r"ddp: wrong numbers without an error\n  step 0: params 0\.w differs"):
        check(Plan())


def test_a_tied_weight_in_a_checkpoint_that_some_ranks_skip():
    """The backward gathers for the unit that it comes to, and not for another that holds the weight."""
    check(
        Plan(parts=(Part(), Part(wrap="checkpoint", when="other ranks", tied=True)), strategies=("zero3", "zero3 late"))
    )
