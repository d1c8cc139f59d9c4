"""Bad operands: what the differentiable collectives refuse, before they communicate."""

import torch

import fshard as fs
from tests.bad_input import Row, assert_all_refused, rows_of

AXIS = "take it from a mesh by fs.axis_of"
SIZES = "to be 2 whole numbers of 0 or more, one for each rank"
PAIRS = "ppermute: expected perm to be pairs (source, destination) of coordinates from 0 to 1"
FALL_OFF = "leave out pairs that fall off the end of the axis"
SUMS = [fs.psum, fs.pmean, fs.pvary, fs.psum_invariant, fs.pmax, fs.broadcast]
ALONG_A_DIM = [fs.all_gather, fs.reduce_scatter]


def to_all(tree, axis, split_dim=0, concat_dim=0):
    return fs.all_to_all(tree, axis, split_dim, concat_dim)


def rows_to_all(tree, axis, send=(1, 1), receive=(1, 1)):
    return fs.ragged_all_to_all(tree, axis, send, receive)


def ring(tree, axis, perm=((0, 1), (1, 0))):
    return fs.ppermute(tree, axis, perm)


MOVES = {"all_to_all": to_all, "ragged_all_to_all": rows_to_all, "ppermute": ring}
COLLECTIVES = {verb.__name__: verb for verb in SUMS + ALONG_A_DIM} | MOVES
ROWS = [
    Row(
        f"{name} over a name",
        lambda _: (torch.ones(2), "shard"),
        verb,
        f"{name}: expected axis to be an Axis, got a str; {AXIS}",
    )
    for name, verb in COLLECTIVES.items()
]
ROWS += [
    Row(
        f"{verb.__name__} of a number",
        lambda world: ({"a": torch.ones(2), "b": 1.0}, fs.axis_of(world.mesh)),
        verb,
        f"{verb.__name__} over 'shard': leaves do not fit\n"
        "  ['b']: expected a tensor, got a float\n"
        "To fix: pass tensors.",
    )
    for verb in SUMS
]
ROWS += [
    Row(
        f"{verb.__name__} along dim {dim}",
        lambda world, dim=dim: ({"a": torch.ones(2, 2, 2), "b": torch.ones(2)}, fs.axis_of(world.mesh), dim),
        verb,
        f"{verb.__name__} over 'shard': leaves do not fit\n{lines}To fix: pass tensors of more dims, or another dim.",
    )
    for verb in ALONG_A_DIM
    for dim, lines in [
        (1, "  ['b']: expected a tensor with a dim 1, counted from the front, got a float32 Tensor of shape (2,)\n"),
        (
            -1,
            "  ['a']: expected a tensor with a dim -1, counted from the front, got a float32 Tensor of shape (2, "
            "2, 2)\n"
            "  ['b']: expected a tensor with a dim -1, counted from the front, got a float32 Tensor of shape (2,)\n",
        ),
    ]
]
ROWS += [
    *(
        Row(
            f"{name} of a dim {dim} that does not divide",
            lambda world, dim=dim: ({"a": torch.ones(2, 4), "b": torch.ones(3, 5)}, fs.axis_of(world.mesh), dim),
            COLLECTIVES[name],
            f"{name} over 'shard': dims do not divide\n"
            f"  ['b']: expected a multiple of 2, got size {size} of dim {dim}\n"
            "To fix: pad the dim.",
        )
        for name in ("reduce_scatter", "all_to_all")
        for dim, size in enumerate((3, 5))
    ),
    Row(
        "all_to_all to a dim that is none",
        lambda world: (torch.ones(2), fs.axis_of(world.mesh), 0, 1),
        to_all,
        "all_to_all over 'shard': leaves do not fit\n"
        "  (root): expected a tensor with a dim 1, counted from the front, got a float32 Tensor of shape (2,)\n"
        "To fix: pass tensors of more dims, or another dim.",
    ),
    Row(
        "ragged_all_to_all of other rows",
        lambda world: ({"x": torch.ones(2), "y": torch.ones(3)}, fs.axis_of(world.mesh)),
        rows_to_all,
        "ragged_all_to_all over 'shard': leaves do not fit\n"
        "  ['y']: expected 2 rows, the sum of send_sizes, got 3 rows\n"
        "To fix: sort and count rows by their destination.",
    ),
    *rows_of(
        "ragged_all_to_all by the sizes {}",
        lambda world, sizes: rows_to_all(torch.ones(2), fs.axis_of(world.mesh), *sizes),
        [
            (
                (torch.ones(2), (1, 1)),
                f"ragged_all_to_all: expected send_sizes {SIZES}, got a float32 Tensor of shape (2,); call .tolist() "
                "of a tensor of counts",
            ),
            (((2,), (1, 1)), f"ragged_all_to_all: expected send_sizes {SIZES}, got [2]"),
            (((1, 1), (3, -1)), f"ragged_all_to_all: expected recv_sizes {SIZES}, got [3, -1]"),
        ],
    ),
    *rows_of(
        "ppermute by {}",
        lambda world, perm: ring(torch.ones(2), fs.axis_of(world.mesh), perm),
        [
            ([(0, 1), (1, 2)], f"{PAIRS}, got [(0, 1), (1, 2)]; {FALL_OFF}"),
            ([0, 1], f"{PAIRS}, got [0, 1]; {FALL_OFF}"),
            (
                [(0, 1), (1, 1)],
                "ppermute: expected perm to have each source and each destination once, got [(0, 1), (1, 1)]",
            ),
        ],
    ),
    Row(
        "broadcast from a rank that is none",
        lambda world: (torch.ones(2), fs.axis_of(world.mesh), 2),
        fs.broadcast,
        "broadcast: expected root to be a coordinate from 0 to 1, got 2",
    ),
    Row(
        "pmax of what is differentiated",
        lambda world: (torch.ones(2, requires_grad=True), fs.axis_of(world.mesh)),
        fs.pmax,
        "pmax: expected tensors without derivatives, got one that is differentiated; pass tensor.detach(); a shift of "
        "exponents by their largest needs no derivative",
    ),
    Row(
        "sync_buffers of a number",
        lambda world: ({"count": 3}, world.params),
        fs.sync_buffers,
        "sync_buffers over 'shard': leaves do not fit\n"
        "  ['count']: expected a tensor, got an int\n"
        "To fix: pass tensors.",
    ),
    Row(
        "sync_buffers by another word",
        lambda world: ({"m": torch.ones(2)}, world.params, "max"),
        fs.sync_buffers,
        'sync_buffers: expected by to be "rank0" or "mean", got \'max\'',
    ),
]


def test_bad_operands_are_refused():
    assert_all_refused(ROWS)
