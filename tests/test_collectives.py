"""Collectives: each other's transposes, in both modes and to any order; operands they refuse."""

import re
from functools import partial

import pytest
import torch
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

import fshard as fs
from tests.ranks import on_ranks
from tests.trees import WORLD_SIZES, assert_same_bits, one_axis, two_axes


def around(tree, axis, back=False, closed=True):
    pairs = [(rank, (rank + 1) % axis.size) for rank in range(axis.size if closed else axis.size - 1)]
    return fs.ppermute(tree, axis, [pair[::-1] for pair in pairs] if back else pairs)


def sizes(axis, back=False):
    """What this rank sends to others and gets from them: as many rows on all ranks, in other pieces."""
    this = fs.axis_index(axis)
    sent = [(rank - this) % axis.size + 1 for rank in range(axis.size)]
    received = [(this - rank) % axis.size + 1 for rank in range(axis.size)]
    return (received, sent) if back else (sent, received)


def ragged(tree, axis, back=False):
    return fs.ragged_all_to_all(tree, axis, *sizes(axis, back))


def rows_of_all(n):
    return (n * (n + 1) // 2, 3)


def at_root(tree, axis, root):
    return fs.tree_map(lambda x: x if fs.axis_index(axis) == root else torch.zeros_like(x), tree)


def own_columns(tree, axis):
    """This rank's columns of what agrees."""
    return fs.tree_map(lambda x: x.chunk(axis.size, dim=1)[fs.axis_index(axis)], tree)


# A collective, its transpose, and the shapes that its input and output have on each rank of some.
SAME, WIDE = (lambda n: (4, 3)), (lambda n: (4, 3 * n))
COLLECTIVES = {
    "psum": (fs.psum, fs.psum, SAME, SAME),
    "pmean": (fs.pmean, fs.pmean, SAME, SAME),
    "pcast": (partial(fs.pcast, to="varying"), fs.psum_invariant, SAME, SAME),
    "psum_invariant": (fs.psum_invariant, partial(fs.pcast, to="varying"), SAME, SAME),
    "all_gather of dim 1": (partial(fs.all_gather, dim=1), partial(fs.reduce_scatter, dim=1), SAME, WIDE),
    "all_gather_invariant": (partial(fs.all_gather_invariant, dim=1), own_columns, SAME, WIDE),
    "reduce_scatter of dim 1": (partial(fs.reduce_scatter, dim=1), partial(fs.all_gather, dim=1), WIDE, SAME),
    "ppermute around": (around, partial(around, back=True), SAME, SAME),
    "ppermute along": (partial(around, closed=False), partial(around, closed=False, back=True), SAME, SAME),
    "all_to_all": (
        partial(fs.all_to_all, split_dim=0, concat_dim=1),
        partial(fs.all_to_all, split_dim=1, concat_dim=0),
        lambda n: (2 * n, 3),
        lambda n: (2, 3 * n),
    ),
    "ragged_all_to_all": (ragged, partial(ragged, back=True), rows_of_all, rows_of_all),
    "broadcast": (partial(fs.broadcast, root=0), partial(at_root, root=0), SAME, SAME),
}

# What these take or give agrees between ranks.
INVARIANT_INPUT, INVARIANT_OUTPUT = ("pcast",), ("psum_invariant", "broadcast", "all_gather_invariant")


def operands(name):
    """A collective and its transpose over this rank's axis; an input, a tangent of it and a cotangent of the output.

    Small multiples of the number of ranks, whose sums, products and means are exact in any order.
    """
    axis = fs.axis_of(one_axis())
    run, transpose, input_shape, output_shape = COLLECTIVES[name]

    def draw(seed, shape, agrees):
        generator = torch.Generator().manual_seed(seed if agrees else seed + fs.axis_index(axis))
        return torch.randint(-8, 8, shape(axis.size), generator=generator).double() * axis.size

    x, t = (draw(seed, input_shape, agrees=name in INVARIANT_INPUT) for seed in (0, 100))
    y = draw(200, output_shape, agrees=name in INVARIANT_OUTPUT)
    return partial(run, axis=axis), partial(transpose, axis=axis), x, t, y


@pytest.mark.rows(1)
@on_ranks(*WORLD_SIZES)
def test_backward_is_the_transpose_and_forward_the_map_itself():
    """To the second order, and vmap is a loop."""
    for run, transpose, x, t, y in map(operands, COLLECTIVES):
        out, pull_back = vjp(run, x)
        assert_same_bits(out, run(x))
        assert_same_bits(pull_back(y), (transpose(y),))
        assert_same_bits(jvp(run, (x,), (t,)), (run(x), run(t)))
        # One column of the transpose for each row of the map, by vmap over reverse and over forward mode.
        assert_same_bits(jacrev(run)(x), jacfwd(transpose)(y).permute(2, 3, 0, 1))
        batch = [x, t, x * t, x - t, -x]
        looped = torch.stack([run(example) for example in batch])
        for dim in (0, 1, 2):
            assert_same_bits(vmap(run, in_dims=dim)(torch.stack(batch, dim)), looped)
        pairs = vmap(run, in_dims=((0, None),))((torch.stack(batch), x))
        assert_same_bits(pairs, (looped, run(x).expand_as(looped)))
        # The Hessian of sum(y run(x)^3) maps t to transpose(6 y run(x) run(t)).
        gradient = grad(lambda x, run=run, y=y: (y * run(x) ** 3).sum())
        assert_same_bits(gradient(x), transpose(3 * y * run(x) ** 2))
        expected = transpose(6 * y * run(x) * run(t))
        assert_same_bits(jvp(gradient, (x,), (t,))[1], expected)
        assert_same_bits(grad(lambda x, f=gradient, t=t: (f(x) * t).sum())(x), expected)


@on_ranks(2)
def test_a_sum_of_leaves_keeps_their_specs():
    """Over an axis that no leaf is laid out on, such as that of replicas which train apart."""
    mesh = two_axes(2)
    params = fs.shard({"w": torch.ones(24, 2), "none": None}, fs.zero2(mesh["shard"], min_shard_elements=0))
    summed = fs.psum(params, fs.axis_of(mesh, "replicate"))
    assert summed["w"].spec is params["w"].spec
    assert summed["w"].local.eq(2).all()


@on_ranks(3)
def test_a_sum_of_bools_counts_them():
    axis = fs.axis_of(one_axis())
    is_first = torch.tensor([fs.axis_index(axis) == 0, True])
    counts = torch.tensor([1, 3])
    for total in (
        fs.psum(is_first, axis),
        fs.psum_invariant(is_first, axis),
        fs.reduce_scatter(is_first.repeat(3), axis),
    ):
        assert_same_bits(total, counts)
    assert_same_bits(fs.pmean({"a": is_first}, axis), {"a": counts / 3})


X = torch.ones(2)
TENSOR = "expected a tensor, got a float"
DIM = "expected a tensor with a dim {}, counted from the front, got a float32 Tensor of shape (2,)"
SIZES = (
    "must each be a list of 2 ints, 0 or more. Convert a tensor of counts with .tolist(). In a graph, use all_to_all"
)
KEPT = "of 'shard', sends itself 2 rows by send_sizes and gets 0 by recv_sizes. Make these two entries equal."
UNEQUAL = "cannot be cut into equal pieces for the 2 ranks of 'shard'. Pad it to a multiple of 2, and cut"
# A collective, what it is called with, and part of its error.
REFUSED = (
    *((f, {"a": X, "b": 1.0}, (), f"  ['b']: {TENSOR}\n") for f in (fs.psum, fs.pmax, fs.broadcast)),
    (fs.all_gather, {"a": torch.ones(2, 2), "b": X}, (1,), f"  ['b']: {DIM.format(1)}\nTo fix: pass such"),
    (fs.reduce_scatter, {"b": X}, (-1,), DIM.format(-1)),
    (fs.all_to_all, {"b": X}, (0, 1), DIM.format(1)),
    *((fs.ragged_all_to_all, X, sizes, SIZES) for sizes in ((X, (1, 1)), ((1, 1), (3, -1)), ((1, 1), (True, 1)))),
    (fs.ragged_all_to_all, X, ((2, 2), (0, 0)), KEPT),
    (fs.reduce_scatter, torch.ones(3), (), f"reduce_scatter: dim 0 of a tensor of shape (3,) {UNEQUAL}"),
    (fs.all_to_all, torch.ones(2, 5), (1, 0), f"all_to_all: dim 1 of a tensor of shape (2, 5) {UNEQUAL}"),
    (fs.pmax, X.clone().requires_grad_(), (), "pmax has no derivative, and one of these tensors requires a gradient."),
)


@on_ranks(2)
def test_bad_operands_are_refused():
    axis = fs.axis_of(one_axis())
    for call, operand, arguments, text in REFUSED:
        with pytest.raises(ValueError, match=re.escape(text)):
            call(operand, axis, *arguments)
    with pytest.raises(ValueError, match="pcast: expected axis to be an Axis, got a str; take it from a mesh by fs"):
        fs.pcast(X, "shard", to="varying")
    with pytest.raises(ValueError, match=r"""^pcast: to='reduced' is not supported; the only cast is to="varying"\."""):
        fs.pcast(X, axis, to="reduced")
