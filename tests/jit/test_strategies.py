"""A jitted step is the eager one, bit for bit, by the same collectives: over strategies, modules and functions."""

import pytest
import torch
from torch import nn

import fshard as fs
from tests.jit.steps import STEPS, WORLDS, assert_on_ranks, trained
from tests.ranks import my_rank, world_of
from tests.trees import one_axis, two_axes
from tests.unit_models import HIDDEN, LENGTH, SEQUENCES, VOCABULARY, Block, Language, filled, zero3

EVERY = {"min_shard_elements": 0, "merge_bytes": 0}


def token_batches():
    generator = torch.Generator().manual_seed(1 + my_rank())
    return [(torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=generator),) for _ in range(STEPS)]


def grid():
    return two_axes(one_axis().size())


def quantized(**options):
    def make():
        mesh = one_axis()
        layout = fs.quantize(mesh, block=64, min_shard_elements=20, **options)
        return fs.zero3(mesh, layout=layout, merge_bytes=3000)

    return make


STRATEGIES = {
    "zero3": lambda: zero3()(one_axis()),
    "zero3 without prefetch": lambda: zero3(prefetch=0)(one_axis()),
    "zero3, two ahead, some kept": lambda: zero3(prefetch=2, regather=("*1*", "*head*"))(one_axis()),
    "zero3 that keeps": lambda: zero3(regather=False)(one_axis()),
    "zero3 of merged units": lambda: fs.zero3(one_axis(), min_shard_elements=50, merge_bytes=3000),
    "zero3 in mixed precision": lambda: zero3(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )(one_axis()),
    "zero2": lambda: fs.zero2(one_axis(), min_shard_elements=0),
    "zero1": lambda: fs.zero1(one_axis(), min_shard_elements=0),
    "ddp": lambda: fs.ddp(one_axis()),
    "hsdp": lambda: fs.hsdp(grid(), **EVERY),
    "quantize": quantized(),
    "quantize with error feedback": quantized(scatter=True),
    "bucket": lambda: fs.zero3(one_axis(), layout=fs.bucket(fs.fully_shard(one_axis()), 3000), merge_bytes=0),
    "offload": lambda: fs.zero3(one_axis(), layout=fs.compose(fs.offload("cpu"), fs.fully_shard(one_axis()))),
}
RULES = {"blocks": Block, "blocks and layers": (Block, nn.Linear), "every module": nn.Module}
DTYPES = {"zero3 in mixed precision": torch.float32}


def language(strategy):
    return filled(Language(hidden=(13, HIDDEN)), DTYPES.get(strategy, torch.float64))


def of_units(module, strategy, rule):
    def make():
        model = fs.functionalize(module, RULES[rule])
        return trained(model.apply, model.init(STRATEGIES[strategy]()), token_batches())

    return make


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_modules_with_units(strategy, rule, world_size, workers):
    assert_on_ranks(of_units(language(strategy), strategy, rule), world_of(world_size, workers))
