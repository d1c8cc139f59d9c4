"""Transforms that change no value: the laws, and the gradients and training of the plain ones, bit for bit."""

from collections.abc import Callable

import pytest
from torch import nn

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.test_law_ddp import bound, one_process
from tests.transforms.laws import assert_laws, gradients, trained
from tests.trees import WORLD_SIZES, Meshes, assert_same_bits, every_bit, meshes, two_axes
from tests.unit_models import Block, Language, assert_one_process, filled, tokens


def odd(name, leaf):
    """A mask that selects some leaves of every tree."""
    return len(name) % 2 == 1


def offloaded(strategy):
    return fs.compose(fs.offload("cpu"), strategy)


def plain(on):
    return fs.fully_shard(on.line)


def nested(on):
    """Sums over the inner axis first."""
    return fs.compose(fs.fully_shard(on.grid["replicate"]), fs.fully_shard(on.grid["shard"]))


Pair = tuple[fs.ShardTransform, fs.ShardTransform | None]

# A transform, and a plain one whose sums have the same order, if there is one.
EXACT: dict[str, Callable[[Meshes], Pair]] = {
    "split or whole": lambda on: (fs.masked(plain(on), odd, fs.replicate(on.line)), plain(on)),
    "one dim or another": lambda on: (fs.masked(plain(on), odd, fs.fully_shard(on.line, dim=-1)), plain(on)),
    "mask of strategies": lambda on: (
        fs.masked(fs.zero3(on.line, min_shard_elements=0), odd, otherwise=fs.ddp(on.line)),
        plain(on),
    ),
    "mask in a mask": lambda on: (
        fs.masked(fs.masked(plain(on), "*", fs.replicate(on.line)), "*", otherwise=fs.fully_shard(on.line, dim=-1)),
        plain(on),
    ),
    "mask in a composition": lambda on: (
        fs.compose(fs.offload("cpu"), fs.masked(plain(on), odd, fs.replicate(on.line)), fs.cast()),
        plain(on),
    ),
    "offload": lambda on: (offloaded(plain(on)), plain(on)),
    "offload of zero3": lambda on: (offloaded(fs.zero3(on.line, min_shard_elements=6)), plain(on)),
    "hybrid_shard": lambda on: (fs.hybrid_shard(on.grid), nested(on)),
    "hybrid_shard of the last dim": lambda on: (fs.hybrid_shard(on.grid, dim=-1), nested(on)),
    "hsdp": lambda on: (fs.hsdp(on.grid, min_shard_elements=0), nested(on)),
    "hybrid_shard, small leaves whole": lambda on: (fs.hybrid_shard(on.grid, min_shard_elements=6), None),
    "hybrid_shard, axes turned around": lambda on: (fs.hybrid_shard(on.grid, "replicate", "shard"), None),
}


@pytest.mark.rows(6)
@pytest.mark.parametrize("name", EXACT)
@on_ranks(*WORLD_SIZES)
def test_laws_and_gradients(name, world_size):
    on = meshes()
    transform, same = EXACT[name](on)
    assert_laws(transform)
    if same is not None:
        expected = gradients(same)
        assert_same_bits(gradients(transform), expected)
        if same == nested(on) and world_size < 4:
            assert_same_bits(expected, gradients(plain(on)))


def one_node(on):
    return fs.init_mesh({"replicate": 1, "shard": -1}, device="cpu")


TRAINED: dict[str, Callable[[Meshes], Pair]] = {
    "mask of strategies": lambda on: (
        fs.masked(fs.zero3(on.line, min_shard_elements=0), "*.weight", otherwise=fs.ddp(on.line)),
        fs.zero2(on.line),
    ),
    "one dim or another": lambda on: (EXACT["one dim or another"](on)[0], fs.zero2(on.line)),
    "offload": lambda on: (offloaded(fs.zero3(on.line, min_shard_elements=6)), plain(on)),
    "hsdp": lambda on: (fs.hsdp(on.grid, min_shard_elements=0), fs.hybrid_shard(on.grid)),
    "hsdp in one node": lambda on: (fs.hsdp(one_node(on), min_shard_elements=0), fs.ddp(on.line)),
}


@pytest.mark.rows(4)
@pytest.mark.parametrize("name", TRAINED)
@on_ranks(*WORLD_SIZES, "2 processes")
def test_training_is_that_of_the_plain_transform_and_of_one_process(name):
    transform, same = TRAINED[name](meshes())
    runs = [trained(transform, reduce=reduce) for reduce in (("mean", "weighted") if name == "hsdp" else ("mean",))]
    assert_same_bits(runs[0], trained(same))
    assert_trees_close(runs, [one_process("SGD")] * len(runs), rtol=0, atol=bound("SGD"))
    return every_bit(runs)


def zero3(mesh, **options):
    return fs.zero3(mesh, min_shard_elements=0, **options)


def hsdp(mesh, **options):
    return fs.hsdp(two_axes(mesh.size()), min_shard_elements=0, **options)


OF_UNITS = {
    "by name": lambda mesh: fs.masked(zero3(mesh, merge_bytes=0), ("*.weight", "*scale"), otherwise=fs.ddp(mesh)),
    "offload": lambda mesh: offloaded(zero3(mesh, merge_bytes=0)),
    "hsdp, units apart": lambda mesh: hsdp(mesh, merge_bytes=0),
    "hsdp, units merged": hsdp,
    "hsdp, units kept": lambda mesh: hsdp(mesh, regather=False),
}


@pytest.mark.rows(4)
@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
@pytest.mark.parametrize("name", OF_UNITS)
def test_modules_with_units(name, world_size):
    module, strategies = filled(Language(hidden=(13, 11))), {name: OF_UNITS[name]}
    assert_one_process(module, tokens(world_size), (Block, nn.Linear), strategies, again=True)
