"""A fixed hundred of the sampler's programs, and that the sampler finds what it is for."""

import math

import pytest

from tests.fuzz.kinds import KINDS
from tests.fuzz.plan import DTYPES, HOOKS, OPTIMIZERS, WHENS, WRAPS, Block, Plan, draw, smaller
from tests.fuzz.render import render
from tests.fuzz.run import Process, Result, report, run, shrink

SEEDS = range(100)


@pytest.mark.rows(1)
@pytest.mark.parametrize("first", SEEDS[::5])
def test_programs(first, workers):
    """Of plain torch, torch DDP and every strategy, at one world size each; one in four jitted."""
    failures = []
    for plan in map(draw, range(first, first + 5)):
        result = run(render(plan), f"program {plan.seed}", lambda: workers(2))
        if result.failed:
            failures.append(report(*shrink(plan, result, run, seconds=60)))
    assert not failures, "\n\n".join(failures)


def test_the_hundred_have_every_feature():
    plans = [draw(seed) for seed in SEEDS]
    have = frozenset().union(*(plan.features() for plan in plans))
    kinds = {feature for kind in KINDS.values() for feature in kind.feature.split()}
    hooks = {f"hook {hook}" for hook in HOOKS if hook}
    others = {"accumulate", "ragged", "empty", "raises", "jit", "donate"}
    others |= {"around", "tie", "frozen", "keeps", "tree"}
    worlds = {f"world {w}" for w in (1, 2, 3, 4)}
    wanted = kinds | hooks | others | worlds | {*DTYPES, *WRAPS, *WHENS, *OPTIMIZERS} - {"none", "always"}
    assert sorted(wanted - have) == []
    assert sum("jit" in plan.features() for plan in plans) >= 20


def wrong(source, name="wrong"):
    """A program whose sharded side takes other steps."""
    return run(source.replace("fs.from_torch(torch.optim.SGD, lr=0.1)", "fs.sgd(0.1 + 1e-9)"), name)


def test_a_wrong_number_is_found_and_its_program_shrunk():
    plan = Plan(seed=7, blocks=(Block("mT"), Block("tanh_", wrap="checkpoint")), reduce="sum", ragged="ragged")
    result = wrong(render(plan))
    assert "wrong numbers without an error" in result.failed
    least, found = shrink(plan, result, wrong, seconds=math.inf)
    assert least == Plan(seed=7, world=1, steps=1, only="ddp")
    assert "ddp, 1 ranks: wrong numbers without an error\n  step 0: params.block0.w differs by" in report(least, found)


def test_an_error_passes_only_where_a_feature_allows_it():
    source = render(Plan()).replace("def optimizer():", "def optimizer():\n    raise ValueError('no')\n\n")
    assert "an error that no feature of the program allows: ValueError: no" in run(source, "an error").failed
    allowed = run(source.replace("REFUSALS = []", "REFUSALS = ['no']"), "allowed")
    assert allowed == Result(6, ("ddp", "zero1", "zero2", "zero3", "zero3 kept", "hsdp"))
    end = "        history.append(found)\n    return history"
    source = render(Plan()).replace(end, "        history.append(found)\n    return history if r else 1 / 0")
    assert "only ranks [0] refuse" in run(source, "one rank").failed


def test_smaller_plans_are_valid_programs():
    for seed in range(20):
        for plan in smaller(draw(seed)):
            compile(render(plan), "smaller", "exec")


@pytest.mark.slow
def test_programs_that_hang_or_abort_are_named():
    process = Process(seconds=60)
    try:
        assert process.run(render(Plan(world=1, steps=1)), "good") == Result(5)
        process.seconds = 5
        assert process.run("import threading; threading.Event().wait()", "hangs").failed == "hung for 5 s"
        process.seconds = 60
        assert process.run("import os; os.abort()", "aborts").failed == "aborted with exit code -6"
        assert process.run(render(Plan(world=1, steps=1)), "good") == Result(5)
    finally:
        process.close()
