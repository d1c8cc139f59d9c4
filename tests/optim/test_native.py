"""sgd, adam and adamw: the arithmetic of torch, full or sharded, and its derivatives."""

import itertools

import pytest
import torch
from torch import optim

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.trees import STRATEGIES, assert_same_bits, meshes, normal

STEPS = 5
EPS = torch.finfo(torch.float64).eps
SHAPES = {"w": (5, 3), "vector": (7,), "one": (1,), "scalar": (), "empty": (0, 3)}
LAYOUTS = {name: STRATEGIES[name] for name in ("ddp", "zero2 of every leaf", "last dim", "hsdp", "two dims")} | {
    "some whole": lambda on: fs.zero2(on.line, min_shard_elements=10)
}


def tree(seed, dtype=torch.float64, shapes=SHAPES):
    """Of seed 0 the parameters, of k the gradients of step k."""
    draw = normal(seed)
    return {name: draw(*shape, dtype=dtype) for name, shape in shapes.items()}


def as_chain(state):
    """The states of an optimizer's parts, and of theirs."""
    return [part for parts in state for part in as_chain(parts)] if type(state) is tuple else [state]


def run(tx, place=lambda full: full, make=tree):
    params = place(make(0))
    state = tx.init(params)
    for step in range(1, STEPS + 1):
        params, state = tx.update(place(make(step)), state, params)
    counts = [part.updates for part in as_chain(state) if hasattr(part, "updates")]
    assert counts
    assert all(count.item() == STEPS and count.dtype == torch.int64 for count in counts)
    return params, state


SGD = fs.sgd, optim.SGD
MOMENTUM, BETAS = {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}

AGAINST_TORCH = {
    "sgd": (*SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "sgd dampening": (*SGD, MOMENTUM | {"dampening": 0.5, "weight_decay": 0.1}),
    "sgd nesterov": (*SGD, MOMENTUM | {"nesterov": True, "weight_decay": 0.1}),
    "adam betas": (fs.adam, optim.Adam, BETAS | {"weight_decay": 0.1}),
    "adamw betas": (fs.adamw, optim.AdamW, BETAS | {"weight_decay": 0.1}),
}
SCHEDULES = {
    "numbers": lambda count: 0.1 * 0.5 ** int(count),
    "tensors": lambda count: 0.05 * count.double(),
}


def with_torch(cls, hyper, rate, make):
    params = {name: torch.nn.Parameter(value) for name, value in make(0).items()}
    optimizer = cls(list(params.values()), **hyper)
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = float(rate(torch.tensor(step - 1)))
        for name, grad in make(step).items():
            params[name].grad = grad
        optimizer.step()
    return {name: param.detach() for name, param in params.items()}


@pytest.mark.parametrize("case", AGAINST_TORCH)
def test_full_trees_follow_torch(case):
    ours, cls, hyper = AGAINST_TORCH[case]
    complex_ones = [lambda seed: {"w": torch.view_as_complex(normal(seed)(5, 3, 2))}] * case.startswith("sgd")
    for make, rate in itertools.product((tree, *complex_ones), SCHEDULES.values()):
        params, _ = run(ours(**hyper | {"lr": rate}), make=make)
        # A step rounds the parameter; its change, below 1, comes of some 8 roundings.
        assert_trees_close(params, with_torch(cls, hyper, rate, make), rtol=STEPS * EPS, atol=STEPS * 8 * EPS)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


OURS = {
    "sgd": (fs.sgd, {"lr": 0.3, "weight_decay": 0.1}),
    "sgd momentum": (fs.sgd, {"lr": 0.3, "momentum": 0.7, "dampening": 0.2, "weight_decay": 0.1}),
    "adam": (fs.adam, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 0.1, "weight_decay": 0.1}),
    "adamw": (fs.adamw, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 0.1, "weight_decay": 0.1}),
}


def dtypes_of(params, state):
    """The dtypes of parameters and of what an optimizer keeps of their size, without its counts of updates."""
    return {leaf.dtype for leaf in fs.tree_leaves((params, state)) if leaf.dtype != torch.int64}


@pytest.mark.parametrize("case", OURS)
def test_leaves_keep_their_dtype(case):
    """A schedule from torch gives float64, which must not widen a leaf of shape (); nor do gradients narrow one."""
    ours, hyper = OURS[case]
    for lr in (0.1, number(0.1), SCHEDULES["tensors"]):
        params, state = run(ours(**hyper | {"lr": lr}), make=lambda seed: tree(seed, torch.bfloat16))
        assert dtypes_of(params, state) == {torch.bfloat16}
    params, grads, tx = tree(0, torch.float32), tree(1, torch.bfloat16), ours(**hyper)
    new, state = tx.update(grads, tx.init(params), params)
    assert dtypes_of(new, state) == {torch.float32}


def test_a_chain_of_pieces_is_the_optimizer():
    pieces = fs.chain(fs.scale_by_adam((0.8, 0.9), 1e-3), fs.sgd(0.1))
    params, state = tree(0), pieces.init(tree(0))
    for step in range(1, STEPS + 1):
        params, state = pieces.update(tree(step), state, params)
    assert_same_bits(params, run(fs.adam(0.1, (0.8, 0.9), 1e-3))[0])


ELEMENTS = 15 + 7 + 1 + 1


def learned(row, updates, grad_of, outer):
    """The loss after some updates as a function of parameters and the optimizer's numbers."""

    def loss(params, numbers):
        tx = row[0](**numbers)
        state = tx.init(params)
        for step in range(1, updates + 1):
            params, state = tx.update(grad_of(params, step), state, params)
        return outer(params)

    return loss


def inner_loss(full, step):
    target = tree(step)
    return sum((target[name] * leaf).sin().sum() + (leaf**2).sum() for name, leaf in full.items())


def dense(row, updates):
    return learned(row, updates, torch.func.grad(inner_loss), lambda params: inner_loss(params, STEPS))


@pytest.mark.rows(1)
@pytest.mark.parametrize("updates", (1, 2))
@pytest.mark.parametrize("case", OURS)
def test_derivatives_of_full_trees(case, updates):
    full = {name: leaf for name, leaf in tree(0).items() if leaf.numel()}
    numbers = fs.tree_map(number, OURS[case][1])

    def loss(*values):
        params, rest = dict(zip(full, values)), list(values[len(full) :])
        return dense(OURS[case], updates)(params, fs.tree_map(lambda _: rest.pop(0), numbers))

    leaves = [leaf.clone().requires_grad_() for leaf in [*full.values(), *fs.tree_leaves(numbers)]]
    # Central differences: steps of 1e-5 leave 1e-10 of a third derivative, and rounding 1e-16 / 1e-5 of the loss,
    # some 100 each at most.
    assert torch.autograd.gradcheck(loss, leaves, eps=1e-5, atol=1e-8, rtol=1e-7)


def check_derivatives_of_shards_are_those_of_full_trees(row, world_size, layout):
    full, numbers = tree(0), fs.tree_map(number, row[1])
    expected = torch.func.grad(dense(row, 2), argnums=(0, 1))(full, numbers)
    largest = max(leaf.abs().max().item() for leaf in fs.tree_leaves(expected) if leaf.numel())
    rank = torch.distributed.get_rank()
    share = (1 + rank) / sum(range(1, world_size + 1))
    params = fs.shard(full, LAYOUTS[layout](meshes()))

    def local(params, step):
        return fs.objective(share * inner_loss(fs.gather(params), step), params, reduce="sum")

    loss = learned(row, 2, torch.func.grad(local), lambda params: local(params, STEPS))
    found, found_numbers = torch.func.grad(loss, argnums=(0, 1))(params, numbers)
    # Two updates and three losses, each with sums over the elements and the ranks and some 16 roundings more.
    atol = 2 * 5 * (ELEMENTS + world_size + 16) * EPS * largest
    assert_trees_close(fs.unshard(found), expected[0], rtol=0.0, atol=atol)
    assert_trees_close(found_numbers, expected[1], rtol=0.0, atol=atol)


@pytest.mark.rows(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("case", OURS)
def test_derivatives_of_shards_are_those_of_full_trees(case, world_size, layout):
    check_derivatives_of_shards_are_those_of_full_trees(OURS[case], world_size, layout)


@pytest.mark.rows(2)
@pytest.mark.parametrize("case", OURS)
def test_second_derivatives_are_finite_where_gradients_are_zero(case):
    ours, hyper = OURS[case]
    tx = ours(**hyper | ({"eps": 1e-8} if "eps" in hyper else {}))

    def loss(param):
        params = {"w": param, "idle": 0 * param, "still": param + 2, "used": param + 1}
        state = tx.init(params)
        for _ in range(2):
            grads = {"w": 2 * params["w"], "idle": 0 * param, "still": 0 * param, "used": params["used"].cos()}
            params, state = tx.update(grads, state, params)
        return sum((leaf**2).sum() for leaf in params.values())

    for param in (number([0.0, 0.5, -1.0]), number([0.0, 0.0])):
        assert torch.func.grad(loss)(param).isfinite().all()
        assert torch.func.hessian(loss)(param).isfinite().all()


@pytest.mark.rows(2)
@pytest.mark.parametrize("case", OURS)
def test_vmap_over_learning_rates(case):
    ours, hyper = OURS[case]
    rates, trees = number([0.0, 0.1, 0.5]), [tree(seed) for seed in range(STEPS + 1)]

    def trained(lr):
        return run(ours(**hyper | {"lr": lr}), make=lambda seed: trees[seed])[0]

    each = [trained(rate) for rate in rates]
    expected = {name: torch.stack([params[name] for params in each]) for name in SHAPES}
    assert_same_bits(torch.func.vmap(trained)(rates), expected)
