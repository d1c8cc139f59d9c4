"""update, chain and TrainState: verb 4 and the value it makes."""

import copy
import pickle

import optree
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils import _pytree as torch_pytree

import fshard as fs
from fshard.tree import flatten
from tests.ranks import on_ranks
from tests.trees import STRATEGIES, assert_same_bits, assorted, meshes, normal

ADAMW, DESCENT = fs.from_torch(torch.optim.AdamW, lr=0.1), fs.from_torch(torch.optim.SGD, lr=1.0)


def arithmetic(name, change):
    """A transformation that maps gradients by `change`, and whose state is its name and how often it ran."""

    def update(grads, state, params):
        return fs.tree_map(change, grads, params), {name: state[name] + 1}

    return fs.GradientTransformation(lambda params: {name: 0}, update)


CHANGES = {"+1": lambda grad, _: grad + 1, "*2": lambda grad, _: 2 * grad, "p": lambda grad, param: grad + param / 2}


def test_chain_runs_left_to_right():
    """Flat or nested, and each part sees the parameters."""
    for names, gradient in (((), 3.0), (("+1", "*2"), 8.0), (("*2", "+1"), 7.0), (("p", "+1"), 9.0)):
        parts = [arithmetic(name, CHANGES[name]) for name in names]
        for tx in (fs.chain(*parts, DESCENT), fs.chain(fs.chain(*parts[:1]), fs.chain(*parts[1:], DESCENT))):
            params = {"w": torch.tensor([10.0])}
            params, state = tx.update({"w": torch.tensor([3.0])}, tx.init(params), params)
            assert params["w"].item() == 10.0 - gradient
            assert fs.tree_leaves(state)[: len(parts)] == [1] * len(parts)
    with pytest.raises(ValueError, match="shorter"):
        fs.chain(*map(arithmetic, CHANGES, CHANGES.values())).update({"w": torch.ones(())}, ({"+1": 0},), {"w": None})


def train_state(strategy):
    params = fs.shard(assorted(), strategy)
    return fs.TrainState.create(params, ADAMW, buffers={"mean": normal()(3)}, key=torch.arange(2))


def specs(tree):
    return [getattr(leaf, "spec", None) for leaf in flatten(tree).leaves]


@on_ranks(2)
def test_update_makes_the_next_state():
    """And the state is a pytree of plain tensors, to every library, that can be copied and pickled."""
    for make in STRATEGIES.values():
        state = train_state(make(meshes()))
        grads, before = fs.tree_map(torch.cos, state.params), copy.deepcopy(state)
        new = fs.update(ADAMW, state, grads)
        expected = ADAMW.update(grads, state.opt_state, state.params)
        assert_same_bits(fs.tree_leaves((new.params, new.opt_state)), fs.tree_leaves(expected))
        assert [(s.step.dtype, s.step.shape, s.step.item()) for s in (state, new)] == [
            (torch.int64, (), n) for n in (0, 1)
        ]
        assert (new.buffers is state.buffers, new.key is state.key) == (True, True)
        assert_same_bits(fs.tree_leaves(state), fs.tree_leaves(before))
        for again in (new, before, pickle.loads(pickle.dumps(state))):
            assert (flatten(again).treedef, specs(again)) == (flatten(state).treedef, specs(state))
        for library in (fs, optree, torch_pytree):
            # A None, such as the parameter that is none, is a leaf to torch and none to optree.
            assert {type(leaf) for leaf in library.tree_leaves(state) if leaf is not None} == {torch.Tensor}
            doubled = library.tree_map(lambda leaf: leaf if leaf is None else 2 * leaf, state)
            assert (type(doubled), type(doubled.opt_state)) == (fs.TrainState, type(state.opt_state))
            assert specs(doubled) == specs(state)
            assert_same_bits(fs.tree_leaves(doubled), [2 * leaf for leaf in fs.tree_leaves(state)])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_s_distributed_checkpoint_is_refused_as_it_would_keep_one_rank_s_shards(tmp_path):
    state = fs.TrainState.create({"w": torch.ones(2)}, DESCENT)
    with pytest.raises(dcp.api.CheckpointException, match=r"one rank only\. Save 'state' with fs\.checkpoint\.save"):
        dcp.save({"state": state}, checkpoint_id=tmp_path, no_dist=True)
