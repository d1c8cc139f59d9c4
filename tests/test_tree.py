"""Leaves, specs and the trees that hold them."""

import copy
import operator
import pickle
from collections import OrderedDict
from dataclasses import FrozenInstanceError, replace
from functools import partial

import optree
import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap
from torch.utils import _pytree as pytree

import fshard as fs
from tests.ranks import world_of
from tests.trees import Layer, assert_same_bits

SHARD, TENSOR = fs.Axis("shard", 3, "group 0"), fs.Axis("tensor", 2, "group 1")


def spec(shape, *splits):
    """A spec with dims split over axes one after another."""
    result = fs.Spec(shape)
    for axis, dim in splits:
        result = result.split(axis, dim)
    return result


def test_axes_of_the_dims_of_a_spec():
    made = spec((7, 4), (SHARD, 0), (TENSOR, 0))
    assert [made.split_axes(dim) for dim in (0, 1)] == [(SHARD, TENSOR), ()]
    partition = fs.P("shard", None, ("shard", "tensor"))
    assert [partition.names(dim) for dim in range(4)] == [("shard",), (), ("shard", "tensor"), ()]
    placed = spec((5, 3), (SHARD, 0)).on(TENSOR).on(TENSOR)
    assert (placed.axes, placed.partition_axes(), placed.dim_of(TENSOR)) == ((SHARD, TENSOR), (SHARD,), None)


def test_descriptions_are_values():
    """Equal, hashed and pickled by their parts; specs are keys of caches and travel between processes."""
    base = spec((5, 3), (SHARD, 0))
    for value in (fs.P("shard", ("a", "b")), SHARD, base):
        again = pickle.loads(pickle.dumps(value))
        assert type(again) is type(value)
        assert again == value == copy.deepcopy(value)
        assert len({value, again}) == 1
    parts = {"shape": (5, 4), "partition": fs.P(), "axes": (TENSOR,), "frozen": True, "transform": fs.cast()}
    assert len({base, *(replace(base, **{name: part}) for name, part in parts.items())}) == 6


def test_specs_of_another_process_are_found_in_dicts(workers):
    """Each process hashes texts in its own way, so no hash may be sent with a spec."""

    def program():
        made = replace(spec((5, 3), (SHARD, 0)), transform=fs.cast())
        assert made.exact in {made.exact: made.local_shape}
        assert made in {made}
        return hash("text"), pickle.dumps((made, made.exact))

    (other_hash, sent), _ = workers(2).run(program)
    assert other_hash != hash("text"), "unset PYTHONHASHSEED, which makes texts hash alike in all processes"
    base = replace(spec((5, 3), (SHARD, 0)), transform=fs.cast())
    keys = {base: 1, base.exact: 2}
    received, exact = pickle.loads(sent)
    assert (received, exact) == (base, base.exact)
    assert (keys[received], keys[exact], keys[received.exact]) == (1, 2, 2)


LEAF = fs.Sharded(torch.arange(6.0).view(2, 3), spec((5, 3), (SHARD, 0)))


NO_TENSOR = (
    *(float, torch.relu, torch.ones(2, 2).copy_),
    *(lambda leaf: leaf[0], lambda leaf: leaf + 1, lambda leaf: leaf < 1, lambda leaf: -leaf),
    *(lambda leaf: leaf @ torch.ones(2, 2), lambda leaf: torch.ones(2, 2) @ leaf, lambda leaf: 2 * leaf),
    *(lambda leaf: F.linear(torch.ones(2, 2), leaf), lambda leaf: torch.stack([leaf])),
    lambda leaf: operator.setitem(leaf, 0, 1.0),
)


def test_a_sharded_leaf_is_no_tensor():
    """A number would be of this rank's shard alone."""
    for use in NO_TENSOR:
        with pytest.raises(TypeError, match=r"a Sharded leaf is not a tensor\. Call fs\.gather"):
            use(LEAF)
    for use in (len, list, lambda leaf: torch.optim.AdamW([leaf])):
        with pytest.raises(TypeError):
            use(LEAF)
    with pytest.raises(AttributeError, match=r"^Sharded\.sum: a Sharded leaf is not a tensor\. Call fs\.gather for"):
        LEAF.sum()
    text = r"^Sharded\.full_tensor: a Sharded leaf is not a DTensor\. Use fs\.unshard\(leaf\) for the full tensor, "
    with pytest.raises(AttributeError, match=text):
        LEAF.full_tensor()
    with pytest.raises(AttributeError, match=r"^'Sharded' object has no attribute 'locale'$"):
        LEAF.locale  # noqa: B018
    assert not any(hasattr(LEAF, name) for name in ("sum", "backward", "__array__", "__qualname__"))


def test_attributes_of_a_plain_tensor_are_the_program_s_own():
    """Whatever a program notes on its tensors, as Megatron does, fshard takes them for no leaves of its own."""
    weight, tx = torch.ones(2, 2), fs.sgd(0.5)
    weight.local, weight.donated = "on this node", True
    state = fs.TrainState.create({"weight": weight}, tx)
    for donate in (False, True):
        state = fs.update(tx, state, {"weight": torch.ones(2, 2)}, donate=donate)
        assert state.params["weight"].equal(torch.full((2, 2), 0.0 if donate else 0.5))


def test_sharded_is_an_unchanging_value():
    assert bool(LEAF)
    # An object of its own: comparing values would have to communicate, and on one rank alone it would wait.
    assert {LEAF: 1}[LEAF] == 1
    assert fs.Sharded(LEAF.local, LEAF.spec) != LEAF
    with pytest.raises(FrozenInstanceError):
        LEAF.local = LEAF.local
    assert repr(LEAF) == "Sharded(float32[5, 3], P('shard'), local [2, 3])"
    for again in (copy.copy(LEAF), copy.deepcopy(LEAF), pickle.loads(pickle.dumps(LEAF))):
        assert again.spec == LEAF.spec
        assert again.local.equal(LEAF.local)


def shard_rows_and_columns():
    mesh = fs.init_mesh({"rows": 2, "columns": -1}, device="cpu")
    strategy = fs.compose(fs.fully_shard(mesh["rows"]), fs.fully_shard(mesh["columns"], dim=1))
    return fs.shard({"w": torch.arange(16.0).view(4, 4)}, strategy)


@pytest.mark.parametrize("world_size", [4, "2 processes"])
def test_a_pickled_shard_is_read_by_its_rank_alone(world_size, workers):
    """Another rank would take it for its own shard. Where there is no mesh, any shard may be looked at."""
    world = world_of(world_size, workers)
    pickled = fs.testing.spmd(lambda: pickle.dumps(shard_rows_and_columns()), world)
    corners = [pickle.loads(each)["w"].local[0, 0].item() for each in pickled]
    assert corners == ([0, 2, 8, 10] if world == 4 else [0, 8])

    def read():
        params = shard_rows_and_columns()
        rank = torch.distributed.get_rank()
        for again in (copy.deepcopy(params), pickle.loads(pickled[rank])):
            assert_same_bits(fs.unshard(again), fs.unshard(params))
        with pytest.raises(ValueError, match=r"^Sharded: the rank at ") as refused:
            pickle.loads(pickled[rank ^ 1])
        return f"{refused.value}"

    texts = fs.testing.spmd(read, world)
    # Of the axis that both ranks are on, and of those of the other one alone.
    places = (
        ("{'rows': 0, 'columns': 1}", "{'columns': 0}") if world == 4 else ("{'rows': 1, 'columns': 0}", "{'rows': 0}")
    )
    assert texts[0] == (
        f"Sharded: the rank at {places[0]} pickled its own shard, and the rank at {places[1]} reads it. Save with "
        "fs.checkpoint.save, pickle fs.unshard(params), or let each rank read the file that it wrote."
    )


def test_a_sharded_leaf_tells_the_shape_dtype_and_number_of_elements_of_the_full_tensor():
    assert (LEAF.shape, LEAF.dtype, LEAF.numel()) == (torch.Size([5, 3]), torch.float32, 15)
    scalar = fs.Sharded(torch.ones(1, dtype=torch.int8), spec((), (SHARD, 0)))
    assert (scalar.shape, scalar.dtype, scalar.numel()) == (torch.Size([]), torch.int8, 1)


TREE = {"b": [LEAF, None], "a": Layer(torch.ones(2), (LEAF,)), "c": OrderedDict(z=torch.zeros(1), y=torch.ones(1))}


def test_maps_of_both_pytree_libraries_see_the_local_tensor_and_keep_the_spec():
    for tree_map in (fs.tree_map, optree.tree_map, partial(pytree.tree_map_only, torch.Tensor)):
        mapped = tree_map(torch.neg, TREE)
        for before, after in ((TREE["b"][0], mapped["b"][0]), (TREE["a"].bias[0], mapped["a"].bias[0])):
            assert after.local.equal(-before.local)
            assert after.spec is before.spec
        assert type(mapped["a"]) is Layer
        assert list(mapped["c"]) == ["z", "y"]
        assert mapped["b"][1] is None
    assert [tuple(tensor.shape) for tensor in fs.tree_leaves(TREE)] == [(2,), (2, 3), (2, 3), (1,), (1,)]


def test_map_over_several_trees():
    """Which may have None and scalars beside leaves, such as gradients of unused parameters, and norms."""
    summed = fs.tree_map(torch.add, TREE, fs.tree_map(torch.ones_like, TREE))["b"][0]
    assert (summed.local.tolist(), summed.spec) == ((LEAF.local + 1).tolist(), LEAF.spec)
    kept = fs.tree_map(lambda p, g: p if g is None else p - g, {"w": LEAF, "v": 1.0}, {"w": None, "v": 1.0})
    assert (kept["w"].local is LEAF.local, kept["v"]) == (True, 0.0)
    assert fs.tree_map(torch.add, {"w": None}, {"w": LEAF}) == {"w": None}
    halved = fs.tree_map(torch.div, {"w": LEAF}, {"w": torch.tensor(2.0)})["w"]
    assert (halved.spec, halved.local.tolist()) == (LEAF.spec, (LEAF.local / 2).tolist())


def test_map_over_trees_that_differ_is_refused():
    frozen = fs.Sharded(LEAF.local, replace(LEAF.spec, frozen=True))
    with pytest.raises(ValueError, match=r"specs differ\n  \['w'\]: expected frozen False, got frozen True\n"):
        fs.tree_map(torch.add, {"w": LEAF}, {"w": frozen})
    # A spec's transform is named only if nothing else differs: it is long, and decides the rest.
    for changes, text in (({}, "transform None, got transform 1"), ({"shape": (9,)}, "shape .*, got shape")):
        other = fs.Sharded(LEAF.local, replace(LEAF.spec, transform=1, **changes))
        with pytest.raises(ValueError, match=rf"specs differ\n  \['w'\]: expected {text}"):
            fs.tree_map(torch.add, {"w": LEAF}, {"w": other})
    with pytest.raises(ValueError, match=r"\['w'\]: expected a Sharded leaf with P\(.*\), got a full tensor\nTo fix"):
        fs.tree_map(torch.add, {"w": LEAF}, {"w": torch.zeros(LEAF.shape)})
    with pytest.raises(ValueError, match=r"trees differ in structure\n  \['v'\]: expected nothing, got a Sharded leaf"):
        fs.tree_map(torch.add, {"w": LEAF}, {"w": LEAF, "v": LEAF})


def test_functions_of_torch_func_take_and_return_sharded_leaves():
    batch = fs.Sharded(torch.stack([LEAF.local, 2 * LEAF.local]), LEAF.spec)
    # Inside vmap the leaf has its own shape again; outside, another than its spec says, which nothing minds here.
    doubled = vmap(lambda leaf: fs.tree_map(lambda t: t * 2, leaf))(batch)
    gradient = torch.func.grad(lambda leaf: (leaf.local**2).sum())(LEAF)
    for result, leaf in ((doubled, batch), (gradient, LEAF)):
        assert result.spec is LEAF.spec
        assert result.local.equal(2 * leaf.local)
