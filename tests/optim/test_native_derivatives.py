"""sgd, adam, adamw, lamb and lars under torch.func: derivatives of full trees, equal to those of shards, and vmap."""

import pytest
import torch

import fshard as fs
from fshard.testing import assert_trees_close
from tests.optim.test_native import EPS, LAYOUTS, OURS, SHAPES, STEPS, number, run, tree
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, meshes, one_axis

ELEMENTS = 15 + 7 + 1 + 1


def learned(case, updates, grad_of, outer):
    """The loss after some updates as a function of parameters and the optimizer's numbers."""

    def loss(params, numbers):
        tx = OURS[case][0](**numbers)
        state = tx.init(params)
        for step in range(1, updates + 1):
            params, state = tx.update(grad_of(params, step), state, params)
        return outer(params)

    return loss


def inner_loss(full, step):
    target = tree(step)
    return sum((target[name] * leaf).sin().sum() + (leaf**2).sum() for name, leaf in full.items())


def dense(case, updates):
    return learned(case, updates, torch.func.grad(inner_loss), lambda params: inner_loss(params, STEPS))


@pytest.mark.rows(1)
@pytest.mark.parametrize("updates", (1, 2))
@pytest.mark.parametrize("case", OURS)
def test_derivatives_of_full_trees(case, updates):
    full = {name: leaf for name, leaf in tree(0).items() if leaf.numel()}
    numbers = fs.tree_map(number, OURS[case][1])
    keys, names, flat = list(full), list(numbers), fs.tree_leaves(numbers)

    def loss(*values):
        params, rest = dict(zip(keys, values)), list(values[len(keys) :])
        return dense(case, updates)(params, fs.tree_map(lambda _: rest.pop(0), numbers))

    leaves = [leaf.clone().requires_grad_() for leaf in [*full.values(), *flat]]
    assert len(names) <= len(flat)
    # Central differences: steps of 1e-5 leave 1e-10 of a third derivative, and rounding 1e-16 / 1e-5 of the loss,
    # some 100 each at most.
    assert torch.autograd.gradcheck(loss, leaves, eps=1e-5, atol=1e-8, rtol=1e-7)


@pytest.mark.rows(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("case", OURS)
def test_derivatives_of_shards_are_those_of_full_trees(case, world_size, layout):
    full, numbers = tree(0), fs.tree_map(number, OURS[case][1])
    expected = torch.func.grad(dense(case, 2), argnums=(0, 1))(full, numbers)
    largest = max(leaf.abs().max().item() for leaf in fs.tree_leaves(expected) if leaf.numel())
    rank = torch.distributed.get_rank()
    share = (1 + rank) / sum(range(1, world_size + 1))
    params = fs.shard(full, LAYOUTS[layout](meshes()))

    def local(params, step):
        return fs.objective(share * inner_loss(fs.gather(params), step), params, reduce="sum")

    loss = learned(case, 2, torch.func.grad(local), lambda params: local(params, STEPS))
    found, found_numbers = torch.func.grad(loss, argnums=(0, 1))(params, numbers)
    # Two updates and three losses, each with sums over the elements and the ranks and some 16 roundings more.
    atol = 2 * 5 * (ELEMENTS + world_size + 16) * EPS * largest
    assert_trees_close(fs.unshard(found), expected[0], rtol=0.0, atol=atol)
    assert_trees_close(found_numbers, expected[1], rtol=0.0, atol=atol)


@pytest.mark.parametrize("weight_decay", (0.0, 0.1))
@pytest.mark.parametrize("case", OURS)
def test_second_derivatives_are_finite_where_gradients_are_zero(case, weight_decay):
    ours, hyper = OURS[case]
    hyper = hyper | ({"eps": 0.0 if case == "lars" else 1e-8} if "eps" in hyper else {})
    tx = ours(**hyper | {"weight_decay": weight_decay})

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
        assert torch.func.jacrev(torch.func.jacrev(loss))(param).isfinite().all()


@pytest.mark.parametrize("case", OURS)
def test_vmap_over_learning_rates(case):
    ours, hyper = OURS[case]
    rates = number([0.0, 0.1, 0.5])

    trees = [tree(seed) for seed in range(STEPS + 1)]

    def trained(lr):
        return run(ours(**hyper | {"lr": lr}), make=lambda seed: trees[seed])[0]

    each = [trained(rate) for rate in rates]
    expected = {name: torch.stack([params[name] for params in each]) for name in SHAPES}
    found = torch.func.vmap(trained)(rates)
    if case not in ("lamb", "lars"):
        assert_same_bits(found, expected)
        return
    # A norm of several copies at once sums up to 15 squares in another order, and takes a root, for leaves and steps; a
    # step is no longer than a leaf, 8 at most, times the rate; momentum adds up to five of them.
    assert_trees_close(found, expected, rtol=STEPS * EPS, atol=STEPS * 2 * 2 * (15 + 1) * EPS * 0.5 * 8)


@on_ranks(2, 3)
def test_adafactor_learns_its_rate_and_decay_on_shards(world_size):
    numbers = {"lr": number(0.05), "weight_decay": number(0.3)}
    full, grads = ({name: leaf for name, leaf in tree(seed).items() if leaf.numel()} for seed in (0, 1))

    def loss(numbers, params, grads, close):
        tx = fs.adafactor(**numbers)
        return close(tx.update(grads, tx.init(params), params)[0])

    def squares(params):
        return sum((leaf**2).sum() for leaf in params.values())

    expected = torch.func.grad(lambda n: loss(n, full, grads, squares))(numbers)
    strategy = fs.zero2(one_axis(), min_shard_elements=0)
    params, shards = fs.shard(full, strategy), fs.shard(grads, strategy)

    def close(new):
        return fs.objective(squares(fs.gather(new)), params)

    found = torch.func.grad(lambda n: loss(n, params, shards, close))(numbers)
    # Sums over all elements in another order, of terms that the largest derivative bounds.
    largest = max(value.abs().item() for value in expected.values())
    assert_trees_close(found, expected, rtol=0.0, atol=5 * (ELEMENTS + world_size + 16) * EPS * largest)
