"""Compositions of quantize with other transforms: they train near one process in both spellings."""

import pytest

import fshard as fs
from tests.ranks import on_ranks
from tests.transforms import test_compositions as core
from tests.transforms.test_compositions import BFLOAT16, FLOAT32, WEIGHTS


def int8(axis, **options):
    return fs.quantize(axis, scatter=True, block=8, **options)


LOSSY = {
    "hsdp of int8": lambda on: fs.zero3(on, layout=fs.compose(fs.replicate(on["replicate"]), fs.quantize(on["shard"]))),
    "hsdp of int8 sums, cast": lambda on: fs.zero3(
        on,
        layout=fs.compose(fs.replicate(on["replicate"]), int8(on["shard"])),
        param_dtype=BFLOAT16,
        reduce_dtype=FLOAT32,
    ),
    "int8 behind a sum": lambda on: fs.compose(fs.replicate(on["replicate"]), int8(on["shard"])),
    "int8 by name": lambda on: fs.compose(
        fs.replicate(on["replicate"]), fs.masked(int8(on["shard"]), WEIGHTS, otherwise=fs.fully_shard(on["shard"]))
    ),
    "int8 over the inner axis": lambda on: fs.compose(fs.fully_shard(on["replicate"]), int8(on["shard"])),
    "int8 over the outer axis": lambda on: fs.compose(int8(on["replicate"]), fs.fully_shard(on["shard"], dim=-1)),
    "int8 over both": lambda on: fs.compose(int8(on["replicate"]), int8(on["shard"], error_feedback=False)),
}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", (1, 2, 3, 4, 8))
def test_lossy_compositions_are_near_one_process(world_size):
    compositions = core.few(LOSSY, world_size, list(LOSSY)[1:5])
    core.check_lossy_compositions_are_near_one_process(world_size, compositions)


@on_ranks(2, 4)
def test_a_module_with_units_by_everything_at_once(world_size):
    core.check_a_module_with_units_by_everything_at_once(int8, world_size)


@on_ranks("2 processes")
def test_processes():
    return core.check_processes(LOSSY["hsdp of int8 sums, cast"])
