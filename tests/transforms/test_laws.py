"""Compositions, masks and strategies keep the laws, and send what their layouts need."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import _compat
from fshard.testing import assert_trees_close, spmd
from fshard.tree import flatten
from tests.ranks import my_rank, on_ranks
from tests.transforms.feedback import feedback
from tests.transforms.laws import SGD, assert_laws, gradients
from tests.trees import WORLD_SIZES, Meshes, assert_same_bits, meshes, nested, normal, one_axis, two_axes
from tests.unit_models import Block, Language, filled, near, tokens

BFLOAT16, WEIGHTS = torch.bfloat16, ("*.weight", "*scale")


def odd(name, leaf):
    """A mask that selects some leaves of every tree."""
    return len(name) % 2 == 1


def plain(on):
    return fs.fully_shard(on.line)


def inner_first(on):
    """Sums over the inner axis first."""
    return fs.compose(fs.fully_shard(on.grid["replicate"]), fs.fully_shard(on.grid["shard"]))


def strategy_by_leaf(on):
    """Some leaves are split over both axes, the others over the inner one alone."""
    outer = on.grid["replicate"]
    by_leaf = fs.masked(fs.fully_shard(outer), odd, otherwise=fs.replicate(outer))
    return fs.compose(by_leaf, fs.zero3(on.grid, min_shard_elements=0))


def mask_in_a_mask(on):
    inner = fs.masked(fs.masked(plain(on), odd, fs.replicate(on.line)), "*")
    return fs.compose(fs.offload("cpu"), inner, fs.cast())


# A transform, and a plain one whose sums have the same order.
EXACT: dict[str, tuple[Callable[[Meshes], fs.ShardTransform], Callable[[Meshes], fs.ShardTransform]]] = {
    "one dim or another": (lambda on: fs.masked(plain(on), odd, fs.fully_shard(on.line, dim=-1)), plain),
    "mask in a mask, of a composition": (mask_in_a_mask, plain),
    "offload": (lambda on: fs.compose(fs.offload("cpu"), fs.zero3(on.line, min_shard_elements=6)), plain),
    "two strategies of leaves": (strategy_by_leaf, inner_first),
    "hsdp of the last dim": (lambda on: fs.hybrid_shard(on.grid, dim=-1, min_shard_elements=6), inner_first),
}


@pytest.mark.rows(3)
@pytest.mark.parametrize("name", EXACT)
@on_ranks(*WORLD_SIZES)
def test_laws_and_gradients(name):
    on = meshes()
    make, make_plain = EXACT[name]
    transform = make(on)
    assert_laws(transform)
    assert_same_bits(gradients(transform), gradients(make_plain(on)))


@on_ranks(4)
def test_a_module_with_units_by_everything_at_once(world_size):
    """The engine's gradients and states are those of the verbs."""
    mesh, batch = two_axes(world_size), tokens(world_size)[my_rank()]
    by_name = fs.masked(feedback(mesh["shard"]), WEIGHTS, otherwise=fs.fully_shard(mesh["shard"]))
    layout = fs.compose(fs.replicate(mesh["replicate"]), by_name)
    model = fs.functionalize(filled(Language(hidden=(13, 11))), (Block, nn.Linear))
    params = model.init(fs.compose(fs.offload("cpu"), fs.zero3(mesh, layout=layout, bucket_bytes=3000)))
    loss, start = lambda p: model.apply(p, *batch), fs.transform_state(params)
    _, grads, state = fs.value_and_grad(loss, transform_state=start)(params)
    full = torch.func.grad(loss)(fs.gather(params))
    expected, other = fs.scatter_grads(full, like=params, transform_state=start)
    # Gradients may differ in the last bits, and an element between two steps go to either: none does here.
    assert_trees_close(fs.unshard(grads), fs.unshard(expected), **near(expected))
    assert_trees_close(fs.tree_leaves(state), fs.tree_leaves(other), **near(other))


# Trees, a mask of the leaves that are split, and what leaves are split over in their order.
SPLIT, WHOLE = fs.P("shard"), fs.P()
RESHARDED = [
    (nested(), "*.weight", [SPLIT, SPLIT, WHOLE, WHOLE]),
    # The state of a parameter whose name ends like another one's is laid out as the parameter.
    ({"head": {"w": torch.ones(4)}, "w": torch.ones(4)}, "head.*", [SPLIT, WHOLE]),
]


@on_ranks(2)
def test_a_state_is_resharded_by_the_names_of_its_parameters():
    mesh = one_axis()
    for full, mask, partitions in RESHARDED:
        state = fs.TrainState.create(fs.shard(full, fs.ddp(mesh)), SGD)
        state = fs.update(SGD, state, fs.tree_map(torch.cos, state.params))
        moved = fs.reshard(state, fs.masked(fs.fully_shard(mesh), mask, otherwise=fs.replicate(mesh)))
        for tree in (moved.params, moved.opt_state.slots["momentum_buffer"]):
            leaves = [leaf for leaf in flatten(tree).leaves if leaf is not None]
            assert [leaf.spec.partition for leaf in leaves] == partitions
        assert_same_bits(fs.unshard(moved), fs.unshard(state))


def test_a_leaf_of_the_least_size_is_split():
    strategy = fs.fully_shard(fs.Axis("shard", 2, "0"), min_shard_elements=6)
    partitions = [strategy.layout(fs.Spec((elements,))).partition for elements in (5, 6)]
    assert partitions == [fs.P(), fs.P("shard")]


def test_a_mask_in_a_strategy_leaves_the_dtypes_of_models():
    strategy = fs.compose(fs.zero3(one_axis(), param_dtype=BFLOAT16), fs.masked(fs.cast(scatter=torch.float32), "w"))
    params = fs.shard({"w": torch.ones(2), "b": torch.ones(2)}, strategy)
    assert [leaf.spec.model_dtypes.inputs for leaf in params.values()] == [BFLOAT16, BFLOAT16]


@on_ranks(3)
def test_masks_see_full_shapes_and_leaves_move_the_bytes_of_their_transforms():
    mesh = one_axis()
    wide = fs.masked(fs.fully_shard(mesh), lambda _, leaf: leaf.shape[:1] == (2,), otherwise=fs.replicate(mesh))
    full = {"few": normal()(2, 6), "many": normal()(9, 6)}
    drawn = fs.functionalize(nn.Linear(7, 2, bias=False, device="meta")).init(wide, seed=0)
    params = fs.reshard(fs.shard(full, fs.zero3(mesh, min_shard_elements=0)), wide)
    partitions = [leaf.spec.partition for leaf in (params | drawn).values()]
    assert partitions == [fs.P("shard"), fs.P(), fs.P("shard")]
    with fs.comm.record() as record:
        fs.gather(params)
        fs.scatter_grads(full, like=params)
    # Two rows are filled up to three.
    sent = [(entry.op, entry.axis, entry.label, entry.tensors, entry.bytes) for entry in record if not entry.scalar]
    assert sorted(sent) == [
        ("all_gather", "shard", "gather", 1, 3 * 6 * 8),
        ("all_reduce", "shard", "scatter", 1, 9 * 6 * 8),
        ("reduce_scatter", "shard", "scatter", 1, 3 * 6 * 8),
    ]


BUCKET_BYTES = {"host": 16 * 1024 * 1024, "accelerator": 48_000_000}


@pytest.mark.parametrize("kind", BUCKET_BYTES)
def test_messages_are_sized_by_the_kind_of_backend(kind, monkeypatch):
    monkeypatch.setattr(_compat, "served_accelerators", lambda name: [kind] if kind == "accelerator" else [])

    def program():
        for strategy in (fs.ddp, fs.zero2, fs.zero3):
            assert strategy(one_axis()).reshard.bucket_bytes == BUCKET_BYTES[kind]
        assert fs.zero3(one_axis(), bucket_bytes=7).reshard.bucket_bytes == 7

    spmd(program, 2)


@on_ranks(4)
def test_strategies_lay_leaves_out():
    mesh, full = two_axes(4), {"w": normal()(8, 6)}
    for make in (fs.zero1, fs.zero2, fs.zero3):
        leaf = fs.shard(full, make(mesh, axis=("shard", "replicate"), min_shard_elements=0))["w"]
        assert leaf.spec.partition == fs.P(("shard", "replicate"))
        # The first axis is the major one.
        place = 2 * fs.axis_index(fs.axis_of(mesh, "shard")) + fs.axis_index(fs.axis_of(mesh, "replicate"))
        assert_same_bits(leaf.local, full["w"].chunk(4)[place])
    parts = fs.replicate(mesh["replicate"]), fs.fully_shard(mesh["shard"], dim=1, min_shard_elements=3)
    assert fs.hybrid_shard(mesh, dim=1, min_shard_elements=3) == fs.compose(*parts)
    leaf = fs.shard(full, fs.hsdp(mesh, min_shard_elements=0, prefetch=3))["w"]
    assert (leaf.spec.partition, leaf.spec.reshard.prefetch) == (fs.P("shard"), 3)
    assert fs.hsdp(mesh) == fs.zero3(mesh, layout=fs.hybrid_shard(mesh, min_shard_elements=1024))
    # A gather is under way once it has started, or nothing would be gathered ahead.
    with fs.comm.record() as record:
        finish = leaf.spec.transform.start_gather([leaf.local], [leaf.spec])
        started = len(record)
        finish()
    assert (started, len(record)) == (1, 1)


def test_without_an_accelerator_offload_is_to_the_processor(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert fs.offload() == fs.offload("cpu") == fs.offload(torch.device("cpu"))
