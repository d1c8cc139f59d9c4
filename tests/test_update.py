"""update, chain and TrainState: verb 4 and the value it makes."""

import copy
import gc
import pickle
import subprocess
import sys
import weakref

import optree
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils import _pytree as torch_pytree

import fshard as fs
from fshard import _compat
from fshard.tree import flatten
from tests.forked_programs import ROOT
from tests.ranks import on_ranks
from tests.trees import STRATEGIES, assert_same_bits, assorted, meshes, normal, one_axis

ADAMW, DESCENT = fs.from_torch(torch.optim.AdamW, lr=0.1), fs.from_torch(torch.optim.SGD, lr=1.0)


def changing(change):
    """A transformation of gradients, whose state is how often it ran."""

    def update(grads, state, params):
        return fs.tree_map(change, grads, params), state + 1

    return fs.GradientTransformation(lambda params: 0, update)


PLUS_ONE, TWICE = changing(lambda grad, _: grad + 1), changing(lambda grad, _: 2 * grad)
PLUS_HALF = changing(lambda grad, param: grad + param / 2)


def test_chain_runs_left_to_right():
    """Flat or nested, and each part sees the parameters."""
    for parts, gradient in (
        ((), 3.0),
        ((PLUS_ONE, TWICE), 8.0),
        ((TWICE, PLUS_ONE), 7.0),
        ((PLUS_HALF, PLUS_ONE), 9.0),
    ):
        for tx in (fs.chain(*parts, DESCENT), fs.chain(fs.chain(*parts[:1]), fs.chain(*parts[1:], DESCENT))):
            params = {"w": torch.tensor([10.0])}
            params, state = tx.update({"w": torch.tensor([3.0])}, tx.init(params), params)
            assert params["w"].item() == 10.0 - gradient
            assert fs.tree_leaves(state)[: len(parts)] == [1] * len(parts)


def check_what_a_chain_holds():
    grads, params, alive = [{"w": torch.tensor([3.0])}], {"w": torch.tensor([10.0])}, []
    given = weakref.ref(grads[0]["w"])
    look = fs.GradientTransformation(lambda params: (), lambda grads, *_: alive.append(given()) or (grads, ()))
    tx = fs.chain(PLUS_ONE, look, DESCENT)
    tx.update(grads.pop(), tx.init(params), params)
    assert alive == [None]


def test_a_chain_holds_no_gradients_that_it_has_changed():
    """They would take as much memory as the parameters, until the optimizer has run.

    In a process of its own: late in a run of all tests on torch 2.14 something else of the process still held them.
    """
    program = "from tests.test_update import check_what_a_chain_holds as check; check()"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def test_a_state_of_another_chain_is_refused():
    pair, params = fs.chain(PLUS_ONE, TWICE), {"w": torch.ones(())}
    for state, got in (((0,), "one of 1"), ((0, 0, 0), "one of 3"), (params, "a dict")):
        text = f"chain: expected a state of 2 transformations, got {got}; pass the state that init of this chain made"
        with pytest.raises(ValueError, match=f"^{text}$"):
            pair.update(params, state, params)


def train_state(strategy):
    params = fs.shard(assorted(), strategy)
    return fs.TrainState.create(params, ADAMW, buffers={"mean": normal()(3)}, key=torch.arange(2))


def specs(tree):
    return [getattr(leaf, "spec", None) for leaf in flatten(tree).leaves]


@on_ranks(2)
def test_update_makes_the_next_state():
    for make in STRATEGIES.values():
        state = train_state(make(meshes()))
        grads, before = fs.tree_map(torch.cos, state.params), copy.deepcopy(state)
        new = fs.update(ADAMW, state, grads)
        expected = ADAMW.update(grads, state.opt_state, state.params)
        assert_same_bits(fs.tree_leaves((new.params, new.opt_state)), fs.tree_leaves(expected))
        assert_same_bits([state.step, new.step], [torch.tensor(0), torch.tensor(1)])
        assert new.buffers is state.buffers
        assert new.key is state.key
        assert_same_bits(fs.tree_leaves(state), fs.tree_leaves(before))


@pytest.mark.parametrize("differentiate", [torch.func.grad, torch.func.jacfwd])
def test_a_donated_state_is_updated_inside_a_transform_too(differentiate):
    tx = fs.sgd(0.1, momentum=0.9)

    def derive(donate):
        state = fs.TrainState.create({"w": torch.ones(3)}, tx)

        def loss(scale):
            return fs.update(tx, state, {"w": scale * torch.ones(3)}, donate=donate).params["w"].square().sum()

        result = differentiate(loss)(torch.tensor(2.0))
        # The process would end where a report of pytest reads a tensor that ended with its transform.
        is_dead = _compat.is_transformed(state.params["w"])
        assert not is_dead
        return result

    assert_same_bits(derive(donate=True), derive(donate=False))


@on_ranks(2)
def test_a_donated_state_is_taken_over_alone():
    """An update holds nothing of what its parameters were copied from, and the rest of the state stays as it is."""
    state = fs.TrainState.create(
        fs.shard({"w": torch.ones(4)}, fs.zero3(one_axis())), ADAMW, buffers={"b": torch.ones(2)}
    )
    large = torch.ones(4)
    state = state._replace(params=fs.tree_map(lambda tensor: large[: len(tensor)], state.params))
    view = weakref.ref(state.params["w"].local)

    def update_donated(grads, opt_state, params):
        assert view() is None
        return params, opt_state

    tx = fs.Optimizer(ADAMW.init, ADAMW.update, update_donated)
    new = fs.update(tx, state, fs.tree_map(torch.cos, state.params), donate=True)
    assert new.buffers is state.buffers
    assert_same_bits(large, torch.ones(4))


def count_objects_of_an_update(leaves):
    """How many objects the garbage collector counts after an update that were not there before."""
    params = fs.shard({str(i): torch.ones(2) for i in range(leaves)}, fs.zero3(one_axis()))
    state = fs.TrainState.create(params, ADAMW)
    grads = fs.tree_map(torch.ones_like, params)
    # The first update makes what torch keeps.
    state = fs.update(ADAMW, state, grads, donate=True)
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        before, *_ = gc.get_count()
        after = fs.update(ADAMW, state, grads, donate=True)
        now, *_ = gc.get_count()
    finally:
        if was_on:
            gc.enable()
    assert after.step == 2
    return now - before


@on_ranks(1)
def test_a_donated_update_makes_few_objects_for_each_leaf():
    """A new leaf of the parameters, of two averages and of the counts, and nothing for the old ones.

    Python keeps some freed objects for later, which it does not count again: fewer than half a one for each leaf.
    """
    assert round((count_objects_of_an_update(1200) - count_objects_of_an_update(600)) / 600) == 4


@on_ranks(2)
def test_a_donated_tensor_of_a_transform_that_has_ended_is_refused():
    state = fs.TrainState.create(fs.shard({"w": torch.ones(4)}, fs.zero3(one_axis())), ADAMW)
    kept = []
    torch.func.grad(lambda x: (x.sum(), kept.append(x))[0])(torch.ones(4))
    params = {"w": fs.Sharded(kept.pop(), state.params["w"].spec)}
    grads = fs.tree_map(torch.cos, state.params)
    with pytest.raises(ValueError, match="the update is differentiated"):
        fs.update(ADAMW, state._replace(params=params), grads, donate=True)


@on_ranks(2)
def test_a_state_that_does_not_fit_its_specs_is_refused():
    """Of the optimizer too, before anything is donated."""
    state = train_state(fs.zero3(one_axis()))
    grads = fs.tree_map(torch.cos, state.params)
    wrong = state._replace(opt_state=fs.tree_map(lambda tensor: tensor.new_ones(7), state.opt_state))
    with pytest.raises(ValueError, match=r"update: shards do not match their specs\n  .opt_state.slots"):
        fs.update(ADAMW, wrong, grads, donate=True)
    assert_same_bits([fs.update(ADAMW, state, grads).step], [torch.tensor(1)])


@on_ranks(2)
def test_the_state_is_a_pytree_of_plain_tensors():
    """To every library, and it can be copied and pickled."""
    for make in STRATEGIES.values():
        state = train_state(make(meshes()))
        for again in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
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
