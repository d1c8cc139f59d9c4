"""Transforms that change no value: the laws, and the gradients and training of the plain ones, bit for bit."""

from collections.abc import Callable

import pytest
from torch import nn

import fshard as fs
from tests.ranks import on_ranks
from tests.transforms.laws import assert_laws, gradients
from tests.trees import WORLD_SIZES, Meshes, assert_same_bits, meshes, two_axes
from tests.unit_models import Block, Language, assert_one_process, filled, tokens


def odd(name, leaf):
    """A mask that selects some leaves of every tree."""
    return len(name) % 2 == 1


def plain(on):
    return fs.fully_shard(on.line)


def nested(on):
    """Sums over the inner axis first."""
    return fs.compose(fs.fully_shard(on.grid["replicate"]), fs.fully_shard(on.grid["shard"]))


def mixed(on, mask):
    return fs.masked(fs.zero3(on.line, min_shard_elements=0), mask, otherwise=fs.ddp(on.line))


def one_dim_or_another(on):
    return fs.masked(plain(on), odd, fs.fully_shard(on.line, dim=-1))


Pair = tuple[fs.ShardTransform, fs.ShardTransform | None]

# A transform, and a plain one whose sums have the same order, if there is one.
EXACT: dict[str, Callable[[Meshes], Pair]] = {
    "one dim or another": lambda on: (one_dim_or_another(on), plain(on)),
    "mask of strategies": lambda on: (mixed(on, odd), plain(on)),
    "mask in a mask, of a composition": lambda on: (
        fs.compose(fs.offload("cpu"), fs.masked(fs.masked(plain(on), odd, fs.replicate(on.line)), "*"), fs.cast()),
        plain(on),
    ),
    "offload": lambda on: (fs.compose(fs.offload("cpu"), fs.zero3(on.line, min_shard_elements=6)), plain(on)),
    "hsdp of the last dim": lambda on: (fs.hybrid_shard(on.grid, dim=-1), nested(on)),
    "hsdp": lambda on: (fs.hsdp(on.grid, min_shard_elements=0), nested(on)),
    "hybrid_shard, small leaves whole, axes turned around": lambda on: (
        fs.hybrid_shard(on.grid, "replicate", "shard", min_shard_elements=6),
        None,
    ),
}


@pytest.mark.rows(6)
@pytest.mark.parametrize("name", EXACT)
@on_ranks(*WORLD_SIZES)
def test_laws_and_gradients(name):
    on = meshes()
    transform, same = EXACT[name](on)
    assert_laws(transform)
    if same is not None:
        assert_same_bits(gradients(transform), gradients(same))


def hsdp(mesh, **options):
    return fs.hsdp(two_axes(mesh.size()), min_shard_elements=0, **options)


def by_name(mesh):
    split = fs.zero3(mesh, min_shard_elements=0, merge_bytes=0)
    return fs.compose(fs.offload("cpu"), fs.masked(split, ("*.weight", "*scale"), otherwise=fs.ddp(mesh)))


OF_UNITS = {"by name, offloaded": by_name, "hsdp": hsdp, "hsdp, kept": lambda mesh: hsdp(mesh, regather=False)}


@pytest.mark.rows(3)
@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
@pytest.mark.parametrize("name", OF_UNITS)
def test_modules_with_units(name, world_size):
    module, strategies = filled(Language(hidden=(13, 11))), {name: OF_UNITS[name]}
    assert_one_process(module, tokens(world_size), (Block, nn.Linear), strategies, again=True)
