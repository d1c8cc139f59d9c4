"""Bad losses, gradients, optimizers and states: what the verbs from the loss to the update refuse."""

from functools import partial

import torch

import fshard as fs
from tests.bad_input import Row, assert_all_refused, loss, rows_of

ones, scalar = torch.ones, torch.tensor


def on_two_meshes(world):
    return {"a": world.params["a"], "b": [fs.shard(world.full["b"][0], fs.ddp(world.other, "data"))]}


def with_integer_leaf(world):
    return {"a": world.params["a"], "i": fs.shard(torch.arange(4), world.zero2)}


def scatter(grads, like, **keywords):
    return fs.scatter_grads(grads, like, **keywords)


def differentiate(params, f=loss, **keywords):
    return fs.value_and_grad(f, **keywords)(params)


COUNT = "scatter_grads: expected the count to be a real scalar tensor"
REDUCE = 'expected reduce to be "mean", "sum" or "weighted"'
FULL = "\nTo fix: pass the gradients of full leaves, as from torch.func.grad at fs.gather(like)."
MESHES = (
    "gradients would stay unsummed\n"
    "  ['b'][0]: expected a transform that sums gradients over ['shard'], or owns pieces there, got one over ['data']\n"
    "To fix: shard the whole tree on these axes (zero3 takes axis=, and ddp keeps leaves whole), or leave others out."
)
INTEGER = (
    "leaves cannot take a gradient\n"
    "  ['i']: expected a floating tensor, got an int64 Tensor of shape (2,)\n"
    "To fix: shard these leaves with frozen=, or keep them out of the parameters."
)
ROWS = [
    *(
        Row(
            f"{verb}: leaves of two meshes",
            lambda world, rest=rest: rest(world, on_two_meshes(world)),
            call,
            f"{verb}: {MESHES}",
        )
        for verb, call, rest in [
            ("scatter_grads", scatter, lambda world, params: (world.full_grads, params)),
            ("objective", fs.objective, lambda world, params: (scalar(1.0), params)),
        ]
    ),
    Row(
        "value_and_grad: integer",
        lambda world: (with_integer_leaf(world),),
        differentiate,
        f"value_and_grad: {INTEGER}",
    ),
    Row(
        "value_and_grad: leaf that is no tensor",
        lambda _: ({"a": ones(2), "s": 1.5},),
        differentiate,
        "value_and_grad: leaves are no tensors\n"
        "  ['s']: expected a Sharded leaf or a tensor, got a float\n"
        "To fix: keep other values out of the tree.",
    ),
    # Gradients that do not fit.
    Row(
        "scatter_grads: gradients that do not fit",
        lambda world: ({"a": world.grads["a"], "b": [ones(3, 5)]}, world.params),
        scatter,
        "scatter_grads: gradients do not fit `like`\n"
        "  ['a']: expected a full tensor of shape (5, 3), got a Sharded leaf\n"
        "  ['b'][0]: expected a full tensor of shape (4,), got a float32 Tensor of shape (3, 5)" + FULL,
    ),
    *rows_of(
        "scatter_grads with {}",
        lambda world, keywords: scatter(world.full_grads, world.params, **keywords),
        [
            ({"reduce": "avg"}, f"scatter_grads: {REDUCE}, got 'avg'"),
            ({"count": scalar(3)}, "scatter_grads: expected reduce=\"weighted\" for a count, got 'mean'"),
            ({"reduce": "weighted", "count": 3}, f"{COUNT}, got an int; torch.tensor makes one"),
        ],
    ),
]

FLOATING = "expected the loss to be a floating scalar tensor"
PAIR = 'expected the loss to be the pair (sum, count) for reduce="weighted"'
SUM = "; sum or average over the batch; value_and_grad takes (loss, aux) by has_aux=True"
# What a local loss must not be: (name, reduce, loss of a number, error).
LOSSES = [
    ("no scalar", "mean", lambda x: x.expand(3), f"{FLOATING}, got a float32 Tensor of shape (3,){SUM}"),
    ("no count", "weighted", lambda x: x, f"{PAIR}, got a float32 Tensor of shape ()"),
]
ROWS += [
    Row(
        f"value_and_grad: {name}",
        lambda world: (world.params,),
        partial(differentiate, f=lambda p, make=make: make(loss(p)), reduce=reduce),
        f"value_and_grad: {error}",
        ("gather",),
    )
    for name, reduce, make, error in LOSSES
]
ROWS += [
    Row(
        "value_and_grad: no aux",
        lambda world: (world.params,),
        partial(differentiate, has_aux=True),
        "value_and_grad: expected f to return the pair (loss, aux) for has_aux=True, got a float32 Tensor of shape ()",
        ("gather",),
    ),
]


FROM = "\nTo fix: pass what fs.scatter_grads(grads, like=state.params) or fs.value_and_grad returned."


def update_with(name, grads, error):
    return Row(f"update: {name}", lambda world: (world.tx, world.state, grads(world)), fs.update, f"update{error}")


ROWS += [
    update_with(
        "full gradients",
        lambda world: world.full_grads,
        ": gradients do not fit the parameters\n"
        "  ['a']: expected a Sharded leaf, got a float32 Tensor of shape (5, 3)\n"
        "  ['b'][0]: expected a Sharded leaf, got a float32 Tensor of shape (4,)" + FROM,
    ),
    Row(
        "update: gradients of frozen leaves",
        lambda world: (
            world.tx,
            fs.TrainState.create(fs.shard(world.full, world.zero2, frozen="a"), world.tx),
            world.grads,
        ),
        fs.update,
        "update: gradients do not fit the parameters\n  ['a']: expected None for a frozen leaf, got a gradient" + FROM,
    ),
    Row(
        "update by a GradientTransformation",
        lambda world: (fs.clip_by_global_norm(1.0), world.state, world.grads),
        fs.update,
        "update: expected tx to be an Optimizer, got a GradientTransformation; end the chain with one, such as "
        "fs.from_torch",
    ),
    Row(
        "an optimizer that looks across elements",
        lambda world: (
            fs.shard({"a": torch.ones(4, 3), "c": torch.ones(2)}, fs.zero2(world.mesh, min_shard_elements=3)),
            fs.from_torch(torch.optim.Muon),
        ),
        fs.TrainState.create,
        "from_torch: Muon looks across the elements of a leaf\n"
        "  ['a']: expected a whole one, got a leaf that is split\n"
        "To fix: keep leaves whole with fs.ddp, or choose an elementwise optimizer.",
    ),
]


def test_bad_gradients_and_updates_are_refused():
    assert_all_refused(ROWS)
