"""update, chain and TrainState: verb 4 and the value it makes."""

import copy
import pickle

import optree
import pytest
import torch
from torch.utils import _pytree as torch_pytree

import fshard as fs
from fshard.tree import flatten
from tests.ranks import on_ranks
from tests.trees import STRATEGIES, assert_same_bits, assorted, meshes, normal, one_axis

ADAMW = fs.from_torch(torch.optim.AdamW, lr=0.1)


def arithmetic(name, change):
    """A transformation that maps gradients by `change`, and whose state is its name and how often it ran."""

    def init(params):
        return {name: 0}

    def update(grads, state, params):
        return fs.tree_map(change, grads), {name: state[name] + 1}

    return fs.GradientTransformation(init, update)


def plus_one(grad):
    return grad + 1


def twice(grad):
    return 2 * grad


DESCENT = fs.from_torch(torch.optim.SGD, lr=1.0)


@pytest.mark.parametrize(
    "changes, gradient",
    [((), 3.0), ((plus_one,), 4.0), ((plus_one, twice), 8.0), ((twice, plus_one), 7.0), ((twice, twice), 12.0)],
)
def test_chain_runs_left_to_right(changes, gradient):
    parts = [arithmetic(f"{i}", change) for i, change in enumerate(changes)]
    tx = fs.chain(*parts, DESCENT)
    assert isinstance(tx, fs.Optimizer)
    params = {"w": torch.tensor([10.0])}
    state = tx.init(params)
    for step in (1, 2):
        params, state = tx.update({"w": torch.tensor([3.0])}, state, params)
        assert params["w"].item() == 10.0 - step * gradient
        assert state[:-1] == tuple({f"{i}": step} for i in range(len(parts)))
        assert state[-1].updates.item() == step


def test_chain_without_an_optimizer_is_a_transformation():
    inner = fs.chain(arithmetic("a", plus_one), arithmetic("b", twice))
    assert isinstance(inner, fs.GradientTransformation)
    grads, state = inner.update({"w": torch.tensor(3.0)}, inner.init(None), None)
    assert (grads["w"].item(), state) == (8.0, ({"a": 1}, {"b": 1}))
    nothing = fs.chain()
    assert nothing.update("grads", nothing.init(None), None) == ("grads", ())


def test_chains_nest():
    params, grads = {"w": torch.tensor([10.0])}, {"w": torch.tensor([3.0])}
    flat = fs.chain(arithmetic("a", plus_one), arithmetic("b", twice), DESCENT)
    nested = fs.chain(fs.chain(arithmetic("a", plus_one)), fs.chain(arithmetic("b", twice), DESCENT))
    results = [tx.update(grads, tx.init(params), params) for tx in (flat, nested)]
    assert_same_bits(results[0][0], results[1][0])
    assert fs.tree_leaves(results[0][1]) == fs.tree_leaves(results[1][1])


def test_parts_of_a_chain_see_the_parameters():
    decay = fs.GradientTransformation(
        lambda params: (),
        lambda grads, state, params: (fs.tree_map(lambda grad, param: grad + 0.5 * param, grads, params), state),
    )
    params = {"w": torch.tensor([10.0])}
    new, _ = fs.chain(decay, DESCENT).update({"w": torch.tensor([3.0])}, ((), DESCENT.init(params)), params)
    assert new["w"].item() == 10.0 - 8.0


def train_state(strategy, tx=ADAMW):
    params = fs.shard(assorted(), strategy)
    return fs.TrainState.create(params, tx, buffers={"mean": normal()(3)}, key=torch.arange(2))


def test_create():
    params = fs.shard(assorted(), fs.ddp(one_axis()))
    state = fs.TrainState.create(params, ADAMW)
    assert (state.step.dtype, state.step.shape, state.step.item()) == (torch.int64, (), 0)
    assert state.params is params
    assert (state.buffers, state.key) == (None, None)
    assert_same_bits(fs.tree_leaves(state.opt_state), fs.tree_leaves(ADAMW.init(params)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(3)
def test_update_makes_the_next_state(strategy):
    state = train_state(STRATEGIES[strategy](meshes()))
    grads = fs.tree_map(torch.cos, state.params)
    before = copy.deepcopy(state)
    for step in (1, 2, 3):
        new = fs.update(ADAMW, state, grads)
        params, opt_state = ADAMW.update(grads, state.opt_state, state.params)
        assert_same_bits(fs.tree_leaves(new.params), fs.tree_leaves(params))
        assert_same_bits(fs.tree_leaves(new.opt_state), fs.tree_leaves(opt_state))
        assert (new.step.dtype, new.step.item(), new.opt_state.updates.item()) == (torch.int64, step, step)
        assert new.buffers is state.buffers
        assert new.key is state.key
        assert flatten(new).treedef == flatten(state).treedef
        if step == 1:
            assert_same_bits(fs.tree_leaves(state), fs.tree_leaves(before))
        state = new


def specs(tree):
    return [getattr(leaf, "spec", None) for leaf in flatten(tree).leaves]


PYTREES = {
    "fshard": (fs.tree_map, fs.tree_leaves),
    "optree": (optree.tree_map, optree.tree_leaves),
    "torch": (torch_pytree.tree_map, torch_pytree.tree_leaves),
}


@pytest.mark.parametrize("library", PYTREES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_state_is_a_pytree_of_plain_tensors(strategy, library):
    """Its leaves are the shards, and mapping over it keeps what it is: the NamedTuples, the structure, the specs."""
    tree_map, tree_leaves = PYTREES[library]
    state = train_state(STRATEGIES[strategy](meshes()))
    # A None, such as the parameter that is none, is a leaf to torch and none to optree.
    leaves = [leaf for leaf in tree_leaves(state) if leaf is not None]
    assert all(type(leaf) is torch.Tensor for leaf in leaves)
    assert len(leaves) == 1 + 4 + (1 + 3 * 4) + 1 + 1
    doubled = tree_map(lambda leaf: leaf if leaf is None else 2 * leaf, state)
    assert type(doubled) is fs.TrainState
    assert type(doubled.opt_state) is type(state.opt_state)
    assert specs(doubled) == specs(state)
    assert sum(spec is not None for spec in specs(doubled)) == 4 + 2 * 4
    assert_same_bits(fs.tree_leaves(doubled), [2 * leaf for leaf in fs.tree_leaves(state)])


def test_state_can_be_copied_and_pickled():
    state = train_state(fs.zero2(one_axis(), min_shard_elements=0))
    for again in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert_same_bits(fs.tree_leaves(again), fs.tree_leaves(state))
        assert flatten(again).treedef == flatten(state).treedef
        assert specs(again) == specs(state)
