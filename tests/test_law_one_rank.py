"""Law 7: one rank costs nothing: no collectives and no copies."""

from itertools import product

import torch

import fshard as fs
from tests.operators import Operators
from tests.ranks import on_ranks
from tests.trees import CASTS, STRATEGIES, TREES, assorted, meshes, normal, one_axis

TX = fs.chain(fs.clip_by_global_norm(0.1), fs.from_torch(torch.optim.AdamW, lr=0.1))


def loss_fn(params, x):
    full = fs.gather(params)
    out = torch.tanh(x.to(full["w"].dtype) @ full["w"] * full["scalar"])
    return out.sum() + full["row"].sum() + full["empty"].sum()


def params_of(strategy):
    """Full and sharded parameters, without the None that torch.func does not take."""
    full = {name: leaf for name, leaf in assorted().items() if leaf is not None}
    return full, fs.shard(full, strategy(meshes()), frozen="*row*")


@on_ranks(1)
def test_no_collectives():
    axis, x = fs.axis_of(one_axis()), normal(1)(4, 5)
    for strategy in (STRATEGIES | CASTS).values():
        _, params = params_of(strategy)
        state = fs.TrainState.create(params, TX)
        with Operators() as operators, fs.comm.record() as record:
            loss, grads = fs.value_and_grad(loss_fn)(params, x)
            state = fs.update(TX, state, grads)
            full = fs.gather(params)
            grads = fs.scatter_grads(torch.func.grad(loss_fn)(full, x), like=params)
            state = fs.update(TX, state, grads)
            fs.objective((loss, torch.tensor(4)), like=params, reduce="weighted")
            fs.reshard(fs.shard(fs.unshard(state.params), fs.ddp(one_axis())), fs.zero2(one_axis()))
            for collective in (fs.psum, fs.pmean, fs.psum_invariant, fs.all_gather, fs.reduce_scatter):
                collective(x, axis)
            fs.pcast(x, axis, to="varying")
        assert record == []
        assert operators.names
        namespaces = {name.partition(".")[0] for name in operators.names}
        assert namespaces.isdisjoint({"fshard", "c10d", "_c10d_functional"})


@on_ranks(1)
def test_gather_and_unshard_hand_out_the_shards_themselves():
    for strategy, tree in product(STRATEGIES.values(), TREES.values()):
        params = fs.shard(tree(), strategy(meshes()))
        for verb in (fs.gather, fs.unshard):
            with Operators() as operators:
                full = verb(params)
            assert operators.allocating == []
            for shard, tensor in zip(fs.tree_leaves(params), fs.tree_leaves(full), strict=True):
                assert tensor.data_ptr() == shard.data_ptr()


@on_ranks(1)
def test_gradients_make_no_new_memory_that_those_of_full_tensors_do_not():
    x = normal(1)(4, 5)
    for strategy in STRATEGIES.values():
        full, params = params_of(strategy)
        grads = fs.tree_map(torch.clone, full)
        with Operators() as operators:
            fs.scatter_grads(grads, like=params)
        assert operators.allocating == []
        frozen = {"row": full.pop("row")}
        with Operators() as plain:
            torch.func.grad_and_value(lambda p, frozen=frozen: loss_fn(p | frozen, x))(full)
        with Operators() as sharded:
            fs.value_and_grad(loss_fn)(params, x)
        assert sharded.allocating == plain.allocating != []
