"""value_and_grad: law 5, that it is torch.func over gather and objective."""

import pytest
import torch
from torch.func import grad_and_value

import fshard as fs
from fshard.testing import assert_trees_close
from tests.losses import (
    ATOL,
    COUNTS,
    LOSSES,
    REDUCTIONS,
    batch,
    full_params,
    gathering,
    local_loss,
    mine,
    one_process,
    reduced,
    shard,
    specs,
)
from tests.ranks import on_ranks
from tests.trees import STRATEGIES, assert_same_bits, meshes, one_axis

UNUSED = dict.fromkeys(LOSSES, ("a", "b", "empty", "unused")) | {
    "regularised": (),
    "merging after gather": ("empty", "unused"),
    "merging shards": ("empty", "unused"),
}


@pytest.mark.rows(4)
@on_ranks(*COUNTS)
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_it_is_the_reference_and_one_process(name, reduce, world_size):
    f, strategies, dense, plain = LOSSES[name]
    expected = one_process(f, reduce, world_size)
    axis = fs.axis_of(one_axis())
    loss_fn, args = local_loss(f, reduce, axis), mine(batch(), world_size)
    on = meshes()
    for strategy in strategies:
        params = shard(STRATEGIES[strategy](on))
        value, grads = fs.value_and_grad(loss_fn, reduce=reduce)(params, *args)
        assert specs(grads) == specs(params) | dict.fromkeys({"fixed", *UNUSED[name]})
        # torch.func gives zeros to what a loss does not use.
        grads |= {path: fs.tree_map(torch.zeros_like, params[path]) for path in UNUSED[name]}

        # torch.func differentiates with respect to tensors alone.
        fixed = {path: params[path] for path in ("fixed", "none")}
        trained = {path: leaf for path, leaf in params.items() if path not in fixed}
        spellings = {"as it is": lambda p: loss_fn(p | fixed, *args)}  # noqa: B023
        if plain:
            spellings["of gathered"] = lambda p: loss_fn(fs.gather(p | fixed), *args)  # noqa: B023
        for loss_of in spellings.values():
            reference = grad_and_value(lambda p: fs.objective(loss_of(p), like=params, reduce=reduce))(trained)  # noqa: B023
            assert_same_bits(value, reference[1])
            # The reference divides the loss and value_and_grad the gradients, which differs where 1 / 3 is rounded;
            # and of a leaf gathered twice, one adds up the two before the sum over ranks, the other after it.
            rounded = reduce == "mean" and world_size == 3
            exact = not rounded and name != "gathering twice"
            found = fs.tree_leaves({path: leaf for path, leaf in grads.items() if path not in fixed})
            assert_trees_close(found, fs.tree_leaves(reference[0]), rtol=0.0, atol=ATOL, exact=exact)

        if dense is None or strategy in dense:
            assert_trees_close((value, fs.unshard(grads)), expected, rtol=0.0, atol=ATOL)


def test_full_parameters_need_no_mesh():
    full = full_params()
    fixed = {name: full.pop(name) for name in ("fixed", "none")}

    def loss_fn(p):
        return reduced(gathering(p | fixed, *batch(), None), "mean")

    value, grads = fs.value_and_grad(loss_fn)(full)
    expected_grads, expected = grad_and_value(loss_fn)(full)
    assert_same_bits((value, grads), (expected, expected_grads))


@on_ranks(1, 3)
def test_nothing_to_train():
    params = fs.shard({"w": torch.ones(5)}, fs.ddp(one_axis()), frozen=lambda path: True)
    value, grads = fs.value_and_grad(lambda p: fs.gather(p)["w"].sum())(params)
    assert_same_bits(value, torch.tensor(5.0))
    assert grads == {"w": None}


@on_ranks(2)
def test_gradients_have_their_leaf_s_dtype():
    full = {"half": torch.ones(5, 3, dtype=torch.bfloat16), "single": torch.ones(3), "double": torch.ones(3).double()}
    params = fs.shard(full, fs.zero2(one_axis(), min_shard_elements=0))
    loss = fs.value_and_grad(lambda p: sum(leaf.double().sum() for leaf in fs.gather(p).values()))
    assert_same_bits(fs.unshard(loss(params)[1]), fs.tree_map(torch.ones_like, full))
