"""shard and reshard with `frozen=`: which leaves take no gradient, and what a state keeps of them."""

import pytest
import torch

import fshard as fs
from tests.ranks import on_ranks
from tests.trees import normal, one_axis

SHAPES = {"blocks": [{"weight": (5, 3), "bias": (3,)}, {"weight": (4, 4), "bias": (4,)}], "head": (2, 3)}


def full():
    return _drawn(SHAPES, normal())


def _drawn(shapes, draw):
    if isinstance(shapes, dict):
        return {name: _drawn(each, draw) for name, each in shapes.items()}
    return [_drawn(each, draw) for each in shapes] if isinstance(shapes, list) else draw(*shapes)


MASKS = {
    "a pattern": "blocks.*.weight",
    "patterns": ("blocks.0.weight", "blocks.1.weight"),
    "a function of name and leaf": lambda name, leaf: leaf.dim() == 2 and name != "head",
}


@on_ranks(2)
def test_masks_say_which_leaves_are_frozen():
    expected = {"blocks": [{"weight": True, "bias": False}] * 2, "head": False}
    for name, mask in MASKS.items():
        params = fs.shard(full(), fs.zero3(one_axis(), min_shard_elements=0), frozen=mask)
        assert frozen_in(params) == expected, name
        for none in ((), []):
            assert not any(fs.tree_leaves(frozen_in(fs.reshard(params, fs.ddp(one_axis()), frozen=none)))), name
        trained = fs.shard(full(), fs.ddp(one_axis()))
        state = fs.TrainState.create(trained, fs.ema(fs.adamw(0.1), 0.9))
        state = fs.reshard(state, fs.zero3(one_axis()), frozen=mask)
        for tree in (state.params, state.opt_state.average, state.opt_state.inner[0].mean):
            assert frozen_in(tree) == expected, name


def frozen_in(tree):
    leaves, treedef = fs.tree.flatten(tree).leaves, fs.tree.flatten(tree).treedef
    return fs.tree.unflatten(treedef, [leaf.spec.frozen for leaf in leaves])


def test_frozen_is_a_mask_that_matches_a_leaf():
    with pytest.raises(ValueError, match=r"shard: the mask 'blocks\.7\.\*' matches no leaf of blocks\.0\.bias"):
        fs.shard(full(), fs.ddp(one_axis()), frozen="blocks.7.*")
    with pytest.raises(ValueError, match=r"shard: expected frozen to be a glob pattern .*, got an int"):
        fs.shard(full(), fs.ddp(one_axis()), frozen=3)
    params = fs.shard(full(), fs.ddp(one_axis()))
    with pytest.raises(ValueError, match=r"reshard: expected frozen to be a glob pattern .*, got a dict"):
        fs.reshard(params, fs.ddp(one_axis()), frozen={"blocks": True})


@pytest.mark.parametrize("jitted", (False, True))
@on_ranks(2)
def test_fine_tuning_by_stages_is_torch_s(jitted):
    """The second stage trains more leaves; the first one's keep their moments, count and average."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()
    draw = normal()
    module.load_state_dict({name: draw(*value.shape) for name, value in module.state_dict().items()})
    x = normal(3)(4, 3)
    module[0].requires_grad_(False)
    strategy = fs.zero3(one_axis(), min_shard_elements=0)
    tx = fs.ema(fs.from_torch(torch.optim.AdamW, lr=lambda count: 0.1 / (1 + count.double()), foreach=False), 0.9)
    model = fs.functionalize(module)
    state = fs.TrainState.create(fs.shard(dict(module.named_parameters()), strategy), tx)

    def step(state):
        _, grads = fs.value_and_grad(lambda p: model.apply(p, x).square().mean())(state.params)
        return fs.update(tx, state, grads)

    step = fs.jit(step) if jitted else step
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, foreach=False)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))
    for stage in range(3):
        module[0].requires_grad_(stage == 1)
        if stage:
            state = fs.reshard(state, strategy, frozen="0.*" if stage == 2 else ())
        for _ in range(3):
            state = step(state)
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
            rate.step()
        torch.testing.assert_close(
            fs.unshard(state.params), {k: v.detach() for k, v in module.named_parameters()}, rtol=1e-12, atol=1e-12
        )
    assert int(state.step) == 9
    assert int(state.opt_state.inner.slots["step"]["0.weight"]) == 3
