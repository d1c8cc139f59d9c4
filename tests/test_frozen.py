"""shard and reshard with `frozen=`: which leaves take no gradient, and what a state keeps of them."""

import torch

import fshard as fs
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, normal, one_axis

FULL = {"blocks": [{"weight": normal()(5, 3), "bias": normal()(3)}] * 2, "head": normal()(2, 3)}
MASKS = ("blocks.*.weight", ("blocks.0.weight", "blocks.[!0].?eight"), lambda name, x: x.dim() == 2 and name != "head")


@on_ranks(2)
def test_masks_say_which_leaves_are_frozen():
    for mask in MASKS:
        params = fs.shard(FULL, fs.zero3(one_axis(), min_shard_elements=0), frozen=mask)
        state = fs.TrainState.create(fs.shard(FULL, fs.ddp(one_axis())), fs.ema(fs.adamw(0.1), 0.9))
        state = fs.reshard(state, fs.zero3(one_axis()), frozen=mask)
        for tree in (params, state.params, state.opt_state.average, state.opt_state.inner[0].mean):
            flat = fs.tree.flatten(tree)
            assert [leaf.spec.frozen for leaf in flat.leaves] == [name.endswith("weight") for name in flat.names]
        thawed = fs.reshard(params, fs.ddp(one_axis()), frozen=())
        assert not any(leaf.spec.frozen for leaf in fs.tree.flatten(thawed).leaves)


@on_ranks(2)
def test_fine_tuning_by_stages_is_torch_s():
    """The second stage trains more leaves; the first one's keep their moments, count and average."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()
    draw, x = normal(), normal(3)(4, 3)
    module.load_state_dict({name: draw(*value.shape) for name, value in module.state_dict().items()})
    module[0].requires_grad_(False)
    strategy = fs.zero3(one_axis(), min_shard_elements=0)
    tx = fs.ema(fs.from_torch(torch.optim.AdamW, lr=lambda count: 0.1 / (1 + count.double()), foreach=False), 0.9)
    model = fs.functionalize(module)
    state = fs.TrainState.create(fs.shard(dict(module.named_parameters()), strategy), tx)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, foreach=False)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))
    for stage in range(3):
        module[0].requires_grad_(stage == 1)
        if stage:
            state = fs.reshard(state, strategy, frozen="0.*" if stage == 2 else ())
        for _ in range(3):
            _, grads = fs.value_and_grad(lambda p: model.apply(p, x).square().mean())(state.params)
            state = fs.update(tx, state, grads)
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
            rate.step()
        expected = {name: parameter.detach() for name, parameter in module.named_parameters()}
        assert_same_bits(fs.unshard(state.params), expected)
    assert int(state.opt_state.inner.slots["step"]["0.weight"]) == 3


@on_ranks(2)
def test_leaves_of_one_name_are_frozen_by_their_shapes():
    """The keys of two leaves may give the same name, and a mask may tell them apart."""
    for full in ({1: normal()(5), "1": normal()(5, 3)}, {"a.b": normal()(5), "a": {"b": normal()(5, 3)}}):
        params = fs.shard(full, fs.fully_shard(one_axis()), frozen=lambda name, leaf: leaf.dim() == 1)
        assert [leaf.spec.frozen for leaf in fs.tree.flatten(params).leaves] == [
            leaf.dim() == 1 for leaf in fs.tree_leaves(full)
        ]
