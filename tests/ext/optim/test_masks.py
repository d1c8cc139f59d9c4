"""partition, masked and freeze: parts of an optimizer for parts of a tree."""

import pytest
import torch
from torch import nn, optim

import fshard as fs
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, one_axis
from tests.unit_models import filled


def gradients(step):
    return {name: (step * value).cos() for name, value in module().items()}


def module():
    made = filled(nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)))
    return {name: param.detach().clone() for name, param in made.named_parameters()}


def is_norm(name, *_):
    return name.startswith("1.")


@on_ranks(1, 3)
def test_groups_are_those_of_torch_bit_for_bit():
    """Weights, biases and a norm that decay and learn each in their own way."""
    params = {name: nn.Parameter(value) for name, value in module().items()}
    norm = [param for name, param in params.items() if is_norm(name)]
    biases = [param for name, param in params.items() if name.endswith("bias") and not is_norm(name)]
    rest = [param for name, param in params.items() if name.endswith("weight") and not is_norm(name)]
    groups = [{"params": norm, "lr": 0.3, "weight_decay": 0.0}, {"params": biases, "lr": 0.2}, {"params": rest}]
    optimizer = optim.AdamW(groups, lr=0.1, weight_decay=0.1)
    strategy = fs.zero2(one_axis(), min_shard_elements=0)
    adamw = lambda **hyper: fs.from_torch(optim.AdamW, **{"lr": 0.1, "weight_decay": 0.1, **hyper})  # noqa: E731
    tx = fs.partition({is_norm: adamw(lr=0.3, weight_decay=0.0), "*bias": adamw(lr=0.2), "*": adamw()})
    state = fs.TrainState.create(fs.shard(module(), strategy), tx)
    for step in (1, 2):
        for name, grad in gradients(step).items():
            params[name].grad = grad
        optimizer.step()
        state = fs.update(tx, state, fs.shard(gradients(step), strategy), donate=step > 1)
    assert_same_bits(fs.unshard(state.params), {name: param.detach() for name, param in params.items()})


def test_frozen_leaves_keep_their_bits_and_have_no_state():
    params = {"a": torch.ones(3), "b": torch.ones(2)}
    tx = fs.freeze(fs.from_torch(optim.AdamW, lr=0.1), "b")
    state = tx.init(params)
    assert [tensor.shape for tensor in fs.tree_leaves(state) if tensor.dim()] == [(3,), (3,)]
    new, _ = tx.update(params, state, params)
    assert (new["b"] is params["b"], new["a"].equal(params["a"])) == (True, False)


def test_masked_passes_the_other_gradients_through():
    grads = {"a": torch.full((3,), 2.0), "b": torch.full((2,), 2.0), "c": None}
    tx = fs.masked(fs.clip_by_value(1.0), ("a", "c"))
    out, state = tx.update(grads, ((), ()), {**grads, "c": torch.ones(1)})
    assert (out["b"] is grads["b"], out["c"], out["a"].tolist(), state) == (True, None, [1.0] * 3, ((), ()))
    with pytest.raises(ValueError, match="longer"):
        tx.update(grads, ((), (), ()), grads)


@on_ranks(3)
def test_leaves_may_be_chosen_by_shapes():
    """As by names; a leaf's shape is that of the full one, also where a rank has none of its rows."""
    strategy, results = fs.zero2(one_axis(), min_shard_elements=0), []
    for mask in (lambda name, leaf: leaf.dim() >= 2, ("0.weight", "2.weight")):
        tx = fs.chain(fs.add_decayed_weights(0.1, mask), fs.freeze(fs.sgd(0.1, momentum=0.9), "1.*"))
        state = fs.TrainState.create(fs.shard(module(), strategy), tx)
        results.append(fs.unshard(fs.update(tx, state, fs.shard(gradients(1), strategy)).params))
    assert_same_bits(*results)
