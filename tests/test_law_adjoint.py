"""Law 2: scatter is the transpose of gather, and collectives are each other's, to every order and in both modes."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

import fshard as fs
from fshard.shard import local_piece
from fshard.testing import RankError, assert_trees_close, check_adjoint, spmd
from tests.trees import CASTS, FLOATING, STRATEGIES, WORLD_SIZES, assert_same_bits, meshes, normal, one_axis, uneven


def shapes(tree):
    return [tuple(leaf.shape) for leaf in fs.tree_leaves(tree)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scatter_is_the_transpose_of_gather(strategy, world_size):
    def program():
        transform = STRATEGIES[strategy](meshes())
        for make in FLOATING.values():
            check_adjoint(transform, shapes(make()))

    spmd(program, world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("strategy", CASTS)
def test_casts_are_linear_on_values_that_they_keep(strategy, world_size):
    """Leaves of bfloat16 lose nothing on the way in, and gradients of bfloat16 nothing on the way out."""
    spmd(lambda: check_adjoint(CASTS[strategy](meshes()), shapes(uneven()), dtype=torch.bfloat16), world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scatter_grads_is_what_autograd_makes_of_gather(strategy, world_size):
    def program():
        params = fs.shard(uneven(), STRATEGIES[strategy](meshes()))
        draw = normal(fs.comm.rank(fs.axis_of(one_axis())))
        cotangents = fs.tree_map(lambda full: draw(*full.shape), uneven())
        (pulled_back,) = vjp(fs.gather, params)[1](cotangents)
        scattered = fs.scatter_grads(cotangents, like=params, reduce="sum")
        assert_same_bits(fs.tree_leaves(pulled_back), fs.tree_leaves(scattered))

    spmd(program, world_size)


@dataclass(frozen=True)
class Scale(fs.ShardTransform):
    """Multiplies matrices by one number on the way in and by another on the way out, which is right if they agree."""

    gather_by: float
    scatter_by: float

    def gather(self, leaves, specs):
        return [leaf * self.gather_by if len(spec.shape) == 2 else leaf for leaf, spec in zip(leaves, specs)]

    def scatter(self, grads, specs):
        return [grad * self.scatter_by if len(spec.shape) == 2 else grad for grad, spec in zip(grads, specs)]


@dataclass(frozen=True)
class ForgetSum(fs.ShardTransform):
    """fully_shard, but each rank keeps its piece of its own gradient of matrices, not of the sum."""

    inner: fs.ShardTransform

    @property
    def axes(self):
        return self.inner.axes

    def layout(self, spec):
        return self.inner.layout(spec)

    def gather(self, leaves, specs):
        return self.inner.gather(leaves, specs)

    def scatter(self, grads, specs):
        sums = self.inner.scatter(grads, specs)
        return [
            local_piece(grad, spec) if len(spec.shape) == 2 else total for grad, total, spec in zip(grads, sums, specs)
        ]


VECTOR_MATRIX_NUMBER = [(5,), (5, 3), ()]


def products_of_wrong_leaves(make_transform, world_size):
    """What check_adjoint says of each wrong leaf: its path, both inner products and how far apart they are."""
    with pytest.raises(RankError) as caught:
        spmd(lambda: check_adjoint(make_transform(one_axis()), VECTOR_MATRIX_NUMBER), world_size)
    error = caught.value.__cause__
    assert isinstance(error, AssertionError)
    number = r"(-?[0-9.e+-]+)"
    line = rf"  (\S+): found <gather\(x\), y> = {number} and <x, scatter\(y\)> = {number}, apart by {number}, needed"
    return [(path, *map(float, numbers)) for path, *numbers in re.findall(line, str(error))]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_right_transform_of_a_users_own_passes(world_size):
    spmd(lambda: check_adjoint(fs.compose(Scale(3.0, 3.0), fs.zero2(one_axis())), VECTOR_MATRIX_NUMBER), world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_wrong_factor_is_found_with_leaf_and_amount(world_size):
    wrong = products_of_wrong_leaves(lambda mesh: fs.compose(Scale(3.0, 2.0), fs.zero2(mesh)), world_size)
    [(path, left, right, apart)] = wrong
    assert path == "[1]"
    assert right == pytest.approx(left * 2 / 3, rel=1e-12)
    assert apart == pytest.approx(abs(left - right), rel=5e-3)


@pytest.mark.parametrize("strategy", (fs.ddp, partial(fs.zero2, min_shard_elements=0)))
@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_a_forgotten_sum_is_found_with_leaf_and_amount(strategy, world_size):
    [(path, left, right, apart)] = products_of_wrong_leaves(lambda mesh: ForgetSum(strategy(mesh)), world_size)
    assert path == "[1]"
    assert apart == pytest.approx(abs(left - right), rel=5e-3)


class Collective(NamedTuple):
    """A collective, its transpose, and the shapes that its input and output have on each rank of some."""

    run: Callable
    transpose: Callable
    given: Callable[[int], tuple[int, ...]]
    result: Callable[[int], tuple[int, ...]]


def same(_):
    return (4, 3)


COLLECTIVES = {
    "psum": Collective(fs.psum, fs.psum, same, same),
    "pmean": Collective(fs.pmean, fs.pmean, same, same),
    "pvary": Collective(fs.pvary, fs.psum_invariant, same, same),
    "psum_invariant": Collective(fs.psum_invariant, fs.pvary, same, same),
    "all_gather": Collective(fs.all_gather, fs.reduce_scatter, same, lambda n: (4 * n, 3)),
    "reduce_scatter": Collective(fs.reduce_scatter, fs.all_gather, lambda n: (4 * n, 3), same),
    "all_gather of dim 1": Collective(
        partial(fs.all_gather, dim=1), partial(fs.reduce_scatter, dim=1), same, lambda n: (4, 3 * n)
    ),
    "reduce_scatter of dim 1": Collective(
        partial(fs.reduce_scatter, dim=1), partial(fs.all_gather, dim=1), lambda n: (4, 3 * n), same
    ),
}

# What these take or give agrees between ranks, so that an inner product counts it once.
INVARIANT_INPUT, INVARIANT_OUTPUT = ("pvary",), ("psum_invariant",)


class Operands(NamedTuple):
    """A collective and its transpose over this rank's axis; an input, a tangent of it and a cotangent of the output."""

    run: Callable
    transpose: Callable
    x: torch.Tensor
    t: torch.Tensor
    y: torch.Tensor


def operands(name):
    """Small multiples of the number of ranks, whose sums, products and means are exact in any order."""
    axis, collective = fs.axis_of(one_axis()), COLLECTIVES[name]
    rank = fs.comm.rank(axis)

    def whole(seed, shape):
        drawn = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(seed))
        return drawn.double() * axis.size

    given, result = collective.given(axis.size), collective.result(axis.size)
    varying_in, varying_out = (0 if name in invariant else rank for invariant in (INVARIANT_INPUT, INVARIANT_OUTPUT))
    return Operands(
        partial(collective.run, axis=axis),
        partial(collective.transpose, axis=axis),
        x=whole(varying_in, given),
        t=whole(100 + varying_in, given),
        y=whole(200 + varying_out, result),
    )


def over_collectives(test):
    by_name = pytest.mark.parametrize("name", COLLECTIVES)
    return by_name(pytest.mark.parametrize("world_size", WORLD_SIZES)(test))


@over_collectives
def test_collectives_have_equal_inner_products(name, world_size):
    def program():
        run, transpose, x, _, y = operands(name)
        return (run(x) * y).sum().item(), (x * transpose(y)).sum().item()

    left, right = zip(*spmd(program, world_size))
    assert sum(left[: 1 if name in INVARIANT_OUTPUT else None]) == sum(right[: 1 if name in INVARIANT_INPUT else None])


@over_collectives
def test_backward_is_the_transpose_and_forward_the_map_itself(name, world_size):
    def program():
        run, transpose, x, t, y = operands(name)
        out, pull_back = vjp(run, x)
        assert_same_bits(out, run(x))
        assert_same_bits(pull_back(y), (transpose(y),))
        assert_same_bits(jvp(run, (x,), (t,)), (run(x), run(t)))
        # One column of the transpose for each row of the map, by vmap over reverse and over forward mode.
        assert_same_bits(jacrev(run)(x), jacfwd(transpose)(y).permute(2, 3, 0, 1))

    spmd(program, world_size)


@over_collectives
def test_vmap_is_a_loop(name, world_size):
    def program():
        run, _, x, t, _ = operands(name)
        batch = [x, t, x * t, x - t, -x]
        looped = torch.stack([run(example) for example in batch])
        for dim in (0, 1, 2):
            assert_same_bits(vmap(run, in_dims=dim)(torch.stack(batch, dim)), looped)
        pairs = vmap(run, in_dims=((0, None),))((torch.stack(batch), x))
        assert_same_bits(pairs, (looped, run(x).expand_as(looped)))

    spmd(program, world_size)


@over_collectives
def test_second_derivatives(name, world_size):
    """Of sum(y run(x)^3): its Hessian maps t to transpose(6 y run(x) run(t))."""

    def program():
        run, transpose, x, t, y = operands(name)
        gradient = grad(lambda x: (y * run(x) ** 3).sum())
        assert_same_bits(gradient(x), transpose(3 * y * run(x) ** 2))
        expected = transpose(6 * y * run(x) * run(t))
        assert_same_bits(jvp(gradient, (x,), (t,))[1], expected)
        assert_same_bits(grad(lambda x: (gradient(x) * t).sum())(x), expected)

    spmd(program, world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_collectives_take_trees(world_size):
    def program():
        axis = fs.axis_of(one_axis())
        params = fs.shard({"w": torch.ones(24, 2), "none": None}, fs.zero2(one_axis(), min_shard_elements=0))
        tree = (params, [torch.ones(2)])
        summed = fs.psum(tree, axis)
        assert summed[0]["w"].spec is params["w"].spec
        assert_same_bits(fs.tree_leaves(summed), [axis.size * leaf for leaf in fs.tree_leaves(tree)])

    spmd(program, world_size)


def test_reduce_scatter_refuses_dims_that_do_not_divide():
    def program():
        fs.reduce_scatter({"w": torch.ones(4, 5), "b": torch.ones(4, 4)}, fs.axis_of(one_axis()), dim=1)

    with pytest.raises(RankError) as caught:
        spmd(program, 2)
    assert str(caught.value.__cause__) == (
        "reduce_scatter over 'shard': dims do not divide\n"
        "  ['w']: found size 5 of dim 1, needed a multiple of 2\n"
        "To fix: pad the dim."
    )


def dense_loss(params, x):
    return torch.tanh(x @ params["w"] + params["b"]).pow(2).mean() * params["scale"].exp()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_derivatives_through_gather_are_those_of_one_process(strategy, world_size):
    """Of the objective over all ranks: its gradient, Hessian-vector products in both orders, an ensemble by vmap."""
    rows = 24
    draw = normal()
    full = {"w": draw(5, 3), "b": draw(3), "scale": draw()}
    tangent, x = fs.tree_map(lambda t: draw(*t.shape), full), draw(rows, 5)
    # Each derivative is a sum over at most `rows` rows of products of about 5 + 3 factors of magnitude below 10, added
    # in another order than in one process: at worst every term's rounding differs.
    tolerance = dict(rtol=0, atol=10 * rows * 8 * torch.finfo(torch.float64).eps)

    def inner(a, b):
        return sum((x * y).sum() for x, y in zip(fs.tree_leaves(a), fs.tree_leaves(b)))

    def dense(params):
        return dense_loss(params, x)

    def program():
        transform, rank = STRATEGIES[strategy](meshes()), fs.comm.rank(fs.axis_of(one_axis()))
        params, direction = fs.shard(full, transform), fs.shard(tangent, transform)
        mine = x.chunk(world_size)[rank]

        def sharded(params):
            return fs.objective(dense_loss(fs.gather(params), mine), like=params)

        def agree(actual, expected):
            assert_trees_close(fs.unshard(actual), expected, **tolerance)

        agree(grad(sharded)(params), grad(dense)(full))
        product = jvp(grad(dense), (full,), (tangent,))[1]
        agree(jvp(grad(sharded), (params,), (direction,))[1], product)
        # Each rank's <gradient, direction> is a part of the product, which the backward pass adds up.
        agree(grad(lambda p: inner(grad(sharded)(p), direction))(params), product)
        ensemble = vmap(grad(sharded))(fs.tree_map(lambda t: torch.stack([t, 2 * t]), params))
        agree(fs.tree_map(lambda t: t[0], ensemble), grad(dense)(full))
        agree(fs.tree_map(lambda t: t[1], ensemble), grad(dense)(fs.tree_map(lambda t: 2 * t, full)))

    spmd(program, world_size)
