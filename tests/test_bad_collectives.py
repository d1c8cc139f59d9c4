"""Bad operands: what the differentiable collectives refuse, before they communicate."""

import torch

import fshard as fs
from tests.bad_input import Row, assert_all_refused

AXIS = "take it from a mesh by fs.axis_of"
COLLECTIVES = [fs.psum, fs.pmean, fs.pvary, fs.psum_invariant, fs.all_gather, fs.reduce_scatter]
ROWS = [
    Row(
        f"{verb.__name__} over a name",
        lambda _: (torch.ones(2), "shard"),
        verb,
        f"{verb.__name__}: expected axis to be an Axis, got a str; {AXIS}",
    )
    for verb in COLLECTIVES
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
    for verb in COLLECTIVES[:4]
]
ROWS += [
    Row(
        f"{verb.__name__} along dim {dim}",
        lambda world, dim=dim: ({"a": torch.ones(2, 2, 2), "b": torch.ones(2)}, fs.axis_of(world.mesh), dim),
        verb,
        f"{verb.__name__} over 'shard': leaves do not fit\n{lines}To fix: pass tensors of more dims, or another dim.",
    )
    for verb in COLLECTIVES[4:]
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
            f"reduce_scatter of a dim {dim} that does not divide",
            lambda world, dim=dim: ({"a": torch.ones(2, 4), "b": torch.ones(3, 5)}, fs.axis_of(world.mesh), dim),
            fs.reduce_scatter,
            "reduce_scatter over 'shard': dims do not divide\n"
            f"  ['b']: expected a multiple of 2, got size {size} of dim {dim}\n"
            "To fix: pad the dim.",
        )
        for dim, size in enumerate((3, 5))
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
