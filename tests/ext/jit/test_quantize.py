"""A jitted step on leaves that travel as int8 is the eager one."""

from itertools import product

import pytest

import fshard as fs
from tests.jit.steps import WORLDS, assert_on_ranks
from tests.jit.test_features import RULES, language_for, of_units
from tests.jit.test_functions import REDUCTIONS, SPELLINGS
from tests.ranks import world_of
from tests.trees import one_axis


def quantized(**options):
    def make():
        mesh = one_axis()
        layout = fs.quantize(mesh, block=64, min_shard_elements=20, **options)
        return fs.zero3(mesh, layout=layout, merge_bytes=3000)

    return make


STRATEGIES = {"quantize": quantized(), "quantize with error feedback": quantized(scatter=True)}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_modules_with_units(strategy, rule, world_size, workers):
    assert_on_ranks(of_units(language_for(strategy), STRATEGIES[strategy], rule), world_of(world_size, workers))


def int8(on):
    return fs.quantize(on.line, scatter=True, block=8)


@pytest.mark.rows(1)
@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("spelling, reduce", [r for r in product(SPELLINGS, REDUCTIONS) if r != ("verbs", "weighted")])
def test_layouts(spelling, reduce, world_size):
    assert_on_ranks(SPELLINGS[spelling](int8, reduce), world_size)
