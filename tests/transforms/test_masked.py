"""masked for transforms: each leaf by its name has the transform that is meant for it."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import assert_trees_close, check_adjoint, spmd
from tests.test_law_ddp import bound, one_process
from tests.transforms.laws import SGD, assert_laws, gradients, told, trained
from tests.trees import WORLD_SIZES, Layer, assert_same_bits, normal, one_axis
from tests.unit_models import Block, Language, assert_one_process, filled, tokens


def odd(name):
    """A mask that means some leaves of every tree."""
    return len(name) % 2 == 1


# Layouts that differ by leaf, all of whose sums run over one axis in rank order.
LAYOUTS = {
    "split or whole": lambda mesh: fs.masked(fs.fully_shard(mesh), odd, otherwise=fs.replicate(mesh)),
    "one dim or another": lambda mesh: fs.masked(fs.fully_shard(mesh), odd, otherwise=fs.fully_shard(mesh, dim=-1)),
    "of strategies": lambda mesh: fs.masked(fs.zero3(mesh, min_shard_elements=0), odd, otherwise=fs.ddp(mesh)),
    "in a mask": lambda mesh: fs.masked(
        fs.masked(fs.fully_shard(mesh), "*", fs.replicate(mesh)), "*", otherwise=fs.fully_shard(mesh, dim=-1)
    ),
    "in a composition": lambda mesh: fs.compose(
        fs.offload("cpu"), fs.masked(fs.fully_shard(mesh), odd, fs.replicate(mesh)), fs.cast()
    ),
}


@pytest.mark.rows(1)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_laws_and_gradients(world_size):
    def program():
        expected = gradients(fs.fully_shard(one_axis()))
        for name in LAYOUTS if world_size == 2 else ("split or whole", "in a composition")[world_size // 8 :]:
            transform = LAYOUTS[name](one_axis())
            assert_laws(transform)
            assert_same_bits(gradients(transform), expected)

    spmd(program, world_size)


def test_check_adjoint_takes_each_leafs_transform():
    spmd(lambda: check_adjoint(fs.masked(fs.fully_shard(one_axis()), "0", fs.replicate(one_axis())), [(3,), (4,)]), 2)


@pytest.mark.rows(1)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_training_has_the_bits_of_the_plain_strategy(world_size):
    def program():
        mesh = one_axis()
        by_name = fs.masked(fs.zero3(mesh, min_shard_elements=0), "*.weight", otherwise=fs.ddp(mesh))
        first, *others = [trained(t) for t in (fs.zero2(mesh), by_name, LAYOUTS["one dim or another"](mesh))]
        assert_same_bits(others, [first] * 2)
        return first

    for run in spmd(program, world_size):
        assert_trees_close(run, one_process("SGD"), rtol=0, atol=bound("SGD"))


def test_processes(workers):
    def program():
        plain, masked = trained(fs.ddp(one_axis())), trained(LAYOUTS["of strategies"](one_axis()))
        assert_same_bits(plain, masked)

    spmd(program, workers(2))


def nested():
    draw = normal()
    layers = [Layer(draw(4, 3), draw(3)), Layer(draw(3, 4), None)]
    return OrderedDict(layers=layers, head=({"w": draw(9)},))


MASKS = {
    "a pattern": ("*.weight", ["layers.0.weight", "layers.1.weight"]),
    "patterns": (("layers.1.*", "head*"), ["layers.1.weight", "head.0.w"]),
    "a function": (lambda name: "0" in name, ["layers.0.weight", "layers.0.bias", "head.0.w"]),
    "one name": ("head.0.w", ["head.0.w"]),
    "everything": ("*", ["layers.0.weight", "layers.0.bias", "layers.1.weight", "head.0.w"]),
    "one letter": ("layers.[!1].?ias", ["layers.0.bias"]),
}


@pytest.mark.parametrize("mask", MASKS)
def test_leaves_are_meant_by_their_names(mask):
    mask, names = MASKS[mask]

    def program():
        halves = fs.compose(fs.fully_shard(one_axis()), fs.masked(fs.cast(gather=torch.bfloat16), mask))
        params = fs.shard(nested(), halves)
        full = fs.gather(params)
        leaves = {
            "layers.0.weight": full["layers"][0].weight,
            "layers.0.bias": full["layers"][0].bias,
            "layers.1.weight": full["layers"][1].weight,
            "head.0.w": full["head"][0]["w"],
        }
        assert [name for name, leaf in leaves.items() if leaf.dtype == torch.bfloat16] == names
        assert full["layers"][1].bias is None
        assert_same_bits(fs.unshard(params), nested())

    spmd(program, 2)


def test_a_train_state_is_resharded_by_the_names_of_its_parameters():
    def program():
        mesh = one_axis()
        by_name = fs.masked(fs.fully_shard(mesh), "*.weight", otherwise=fs.replicate(mesh))
        state = fs.TrainState.create(fs.shard(nested(), fs.ddp(mesh)), SGD)
        _, grads = fs.value_and_grad(lambda p: sum((x**2).sum() for x in fs.tree_leaves(fs.gather(p))))(state.params)
        state = fs.update(SGD, state, grads)
        moved = fs.reshard(state, by_name)
        for tree in (moved.params, moved.opt_state.slots["momentum_buffer"]):
            assert tree["layers"][0].weight.spec.partition == fs.P("shard")
            assert tree["layers"][0].bias.spec.partition == fs.P()
            assert tree["head"][0]["w"].spec.partition == fs.P()
        assert_same_bits(fs.unshard(moved), fs.unshard(state))

    spmd(program, 2)


@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_modules_with_units(world_size):
    def by_name(mesh):
        split = fs.zero3(mesh, min_shard_elements=0, merge_bytes=0)
        return fs.masked(split, ("*.weight", "*scale"), otherwise=fs.ddp(mesh))

    assert_one_process(filled(Language()), tokens(world_size), (Block, nn.Linear), {"by name": by_name}, again=True)


def test_bytes_are_those_of_each_leafs_transform():
    """Of 8 * 8 * 8 bytes of a matrix that is split, and 8 * 8 of a vector that is whole."""
    full = {"weight": torch.ones(8, 8, dtype=torch.float64), "bias": torch.ones(8, dtype=torch.float64)}

    def program():
        transform = fs.masked(fs.fully_shard(one_axis()), "weight", otherwise=fs.replicate(one_axis()))
        params = fs.shard(full, transform)
        with fs.comm.record() as record:
            fs.gather(params)
            fs.scatter_grads(full, like=params)
        assert sorted(told(record)) == [
            ("all_gather", "shard", "gather", 1, 512),
            ("all_reduce", "shard", "scatter", 1, 64),
            ("reduce_scatter", "shard", "scatter", 1, 512),
        ]

    spmd(program, 2)


def test_transforms_of_equal_masks_are_equal_and_leaves_share_their_transforms():
    def program():
        mesh = one_axis()
        first, second = (fs.compose(fs.masked(fs.cast(gather=torch.bfloat16), "a*"), fs.ddp(mesh)) for _ in range(2))
        assert first == second
        assert hash(first) == hash(second)
        params = fs.shard({"a1": torch.ones(3), "a2": torch.ones(3), "b": torch.ones(3)}, first)
        assert params["a1"].spec.transform is params["a2"].spec.transform
        assert params["b"].spec.transform == fs.compose(fs.ddp(mesh))

    spmd(program, 2)
