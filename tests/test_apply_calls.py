"""apply under any call: nested, overlapping, failed, in evaluation, and under function transforms."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn.functional import dropout, mse_loss

import fshard as fs
from fshard.testing import assert_trees_close
from tests.modules import EPS, EVERY_LEAF, ROWS, build
from tests.ranks import on_ranks
from tests.trees import STRATEGIES, assert_same_bits, meshes, normal, one_axis


class Twice(nn.Module):
    """Calls a model inside its own call, on parameters of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.depth = 0

    def forward(self, x, inner=None):
        return self.linear(x if inner is None else inner(x)) + self.linear.bias


def test_a_model_inside_itself():
    module = Twice().double()
    model = fs.functionalize(module)
    draw, strategy = normal(), fs.zero2(one_axis(), min_shard_elements=0)
    outer, inner = (fs.shard({"linear.weight": draw(3, 3), "linear.bias": draw(3)}, strategy) for _ in range(2))
    x = draw(5, 3)

    def dense(outer, inner):
        y = x @ inner["linear.weight"].T + 2 * inner["linear.bias"]
        return y @ outer["linear.weight"].T + 2 * outer["linear.bias"]

    def nested(outer, inner):
        return model.apply(outer, x, inner=lambda x: model.apply(inner, x))

    full = fs.unshard(outer), fs.unshard(inner)
    torch.testing.assert_close(nested(outer, inner), dense(*full), rtol=16 * EPS, atol=64 * EPS)
    found = torch.func.grad(lambda pair: nested(*pair).square().sum())((outer, inner))
    expected = torch.func.grad(lambda pair: dense(*pair).square().sum())(full)
    # Sums of up to 5 * 3 products of numbers up to 100.
    assert_trees_close(fs.unshard(found), expected, rtol=0.0, atol=15 * 3 * EPS * 100)


class Meeting(nn.Module):
    """Waits inside its forward until all calls have come, so that they surely overlap."""

    def __init__(self, barrier):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.wait = barrier.wait

    def forward(self, x):
        half = x @ self.linear.weight.T
        self.wait()
        return half + self.linear.bias

    def __deepcopy__(self, memo):
        again = Meeting.__new__(Meeting)
        nn.Module.__init__(again)
        again.linear, again.wait = copy.deepcopy(self.linear, memo), self.wait
        return again


def test_calls_that_overlap_do_not_mix():
    calls, rounds = 4, 3
    model = fs.functionalize(Meeting(threading.Barrier(calls, timeout=30)).double())
    draw = normal()
    params = [{"linear.weight": draw(3, 3), "linear.bias": draw(3)} for _ in range(calls)]
    outputs = [[] for _ in range(calls)]

    def call(i):
        for _ in range(rounds):
            outputs[i].append(model.apply(params[i], ROWS))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(calls):
        assert_same_bits(outputs[i], [ROWS @ params[i]["linear.weight"].T + params[i]["linear.bias"]] * rounds)


def test_a_model_is_copied_after_calls_as_before():
    """Its weightless copies have values in calls alone, and do not travel."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    model, params, x = fs.functionalize(module), dict(module.named_parameters()), torch.ones(2, 3)
    before = model.apply(params, x)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(again.apply(params, x), before)


def test_a_failed_call_leaves_the_model_whole():
    module, args, _ = build("perceptron")
    model = fs.functionalize(module)
    params = dict(module.named_parameters())
    expected = model.apply(params, *args)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model.apply(params, torch.ones(2, 5, dtype=torch.float64))
        assert_same_bits(model.apply(params, *args), expected)


def test_dropout_draws_from_the_ambient_generator():
    module = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5)).double()
    trained, evaluated = fs.functionalize(module), fs.functionalize(copy.deepcopy(module).eval())
    params = trained.init(fs.ddp(one_axis()))
    linear = evaluated.apply(params, ROWS)
    outputs = []
    for seed in (0, 0, 1):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            outputs.append(trained.apply(params, ROWS))
            torch.manual_seed(seed)
            assert_same_bits(outputs[-1], dropout(linear, 0.5, training=True))
    assert_same_bits(outputs[0], outputs[1])
    assert not outputs[0].equal(outputs[2])


def dense_and_sharded():
    """A perceptron as a function of full parameters, and the model with the same ones sharded."""
    module, _, _ = build("perceptron")
    full = {path: parameter.detach() for path, parameter in module.named_parameters()}
    model = fs.functionalize(module)

    def dense(params, x):
        return functional_call(copy.deepcopy(module), params, (x,))

    return dense, model, full


# Sums of 33 products a layer, of numbers up to 10, through two layers and a norm.
TRANSFORM_ATOL = 2 * 33 * EPS * 10


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("strategy", ("ddp", EVERY_LEAF, "last dim"))
def test_function_transforms(strategy):
    dense, model, full = dense_and_sharded()
    draw = normal(3)
    tangent = {path: draw(*leaf.shape) for path, leaf in full.items()}
    batch, target = draw(4, 6, 3), draw(6, 5)

    def loss(run, params, x):
        return mse_loss(run(params, x), target)

    def results(run, params, directions):
        return {
            "vmap": vmap(lambda x: run(params, x))(batch),
            "jvp": jvp(lambda p: run(p, ROWS), (params,), (directions,)),
            "jvp of inputs": jvp(lambda x: run(params, x), (ROWS,), (batch[0],)),
            "vmap of grad of inputs": vmap(grad(lambda x: loss(run, params, x)))(batch),
            "jacrev of inputs": jacrev(lambda x: run(params, x))(ROWS[0]),
        }

    expected = results(dense, full, tangent) | {"grad": grad(lambda p: loss(dense, p, ROWS))(full)}

    transform = STRATEGIES[strategy](meshes())
    params, directions = fs.shard(full, transform), fs.shard(tangent, transform)
    found = results(model.apply, params, directions) | {
        "grad": fs.unshard(grad(lambda p: fs.objective(loss(model.apply, p, ROWS), like=p))(params))
    }
    assert_trees_close(found, expected, rtol=0.0, atol=TRANSFORM_ATOL)
