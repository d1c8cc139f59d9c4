"""Bad losses, gradients, optimizers and states: what the verbs from the loss to the update refuse."""

from functools import partial

import torch
from torch import optim

import fshard as fs
from tests.bad_input import Row, assert_all_refused, loss, make_world, rows_of
from tests.ranks import on_ranks
from tests.trees import assert_same_bits

ones, scalar = torch.ones, torch.tensor


def with_plain_leaf(world):
    return {"a": world.params["a"], "b": [world.full["b"][0]]}


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
WHOLE = (
    "To fix: shard the whole tree on these axes (zero3 takes axis=, and ddp keeps leaves whole), or leave others out."
)
NEEDED = (
    "gradients would stay unsummed\n"
    "  ['b'][0]: expected a transform that sums gradients over ['shard'], or owns pieces there"
)
PLAIN = f"{NEEDED}, got a float32 Tensor of shape (4,)\n{WHOLE}"
MESHES = f"{NEEDED}, got one over ['data']\n{WHOLE}"
INTEGER = (
    "leaves cannot take a gradient\n"
    "  ['i']: expected a floating tensor, got an int64 Tensor of shape (2,)\n"
    "To fix: shard these leaves with frozen=, or keep them out of the parameters."
)
CHANGED = (
    "shards do not match their specs\n"
    "  ['a']: expected a local tensor of shape (3, 3), got a float32 Tensor of shape (1, 3) as local tensor\n"
    "  ['b'][0]: expected a local tensor of shape (2,), got a float32 Tensor of shape (1,) as local tensor\n"
    "To fix: keep a leaf's shape when mapping over it."
)

# Each is refused by every verb that reduces over ranks: (name, parameters, error).
PARAMETERS = [
    ("plain leaves among Sharded ones", with_plain_leaf, PLAIN),
    ("leaves of two meshes", on_two_meshes, MESHES),
]
ROWS = [
    *(
        Row(f"{verb}: {name}", lambda world, make=make, rest=rest: rest(world, make(world)), call, f"{verb}: {error}")
        for name, make, error in PARAMETERS
        for verb, call, rest in [
            ("scatter_grads", scatter, lambda world, params: (world.full_grads, params)),
            ("objective", fs.objective, lambda world, params: (scalar(1.0), params)),
        ]
    ),
    *(
        Row(f"{verb}: integer", lambda world, rest=rest: rest(with_integer_leaf(world)), call, f"{verb}: {INTEGER}")
        for verb, call, rest in [
            ("scatter_grads", scatter, lambda params: ({"a": ones(5, 3), "i": None}, params)),
            ("value_and_grad", differentiate, lambda params: (params,)),
            ("from_torch", lambda tx, params: tx.init(params), lambda p: (fs.from_torch(torch.optim.SGD, lr=1.0), p)),
        ]
    ),
    Row(
        "value_and_grad: leaf that is no tensor",
        lambda _: ({"a": ones(2), "s": 1.5},),
        differentiate,
        "value_and_grad: leaves are no tensors\n"
        "  ['s']: expected a Sharded leaf or a tensor, got a float\n"
        "To fix: keep other values out of the tree.",
    ),
    Row(
        "value_and_grad: changed shapes",
        lambda world: (fs.tree_map(lambda x: x[:1], world.params),),
        differentiate,
        f"value_and_grad: {CHANGED}",
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
    Row(
        "scatter_grads: another tree",
        lambda world: ({"a": ones(5, 3), "c": ones(1)}, world.params),
        scatter,
        "scatter_grads of gradients: trees differ in structure\n"
        "  ['b'][0]: expected a leaf, got nothing\n"
        "  ['c']: expected nothing, got a leaf\n"
        "To fix: pass trees made from the same parameters.",
    ),
    *rows_of(
        "scatter_grads with {}",
        lambda world, keywords: scatter(world.full_grads, world.params, **keywords),
        [
            ({"reduce": "avg"}, f"scatter_grads: {REDUCE}, got 'avg'"),
            ({"reduce": "weighted"}, f"{COUNT}, got None; torch.tensor makes one"),
            ({"count": scalar(3)}, "scatter_grads: expected reduce=\"weighted\" for a count, got 'mean'"),
            ({"reduce": "weighted", "count": 3}, f"{COUNT}, got an int; torch.tensor makes one"),
        ],
    ),
]

FLOATING = "expected the loss to be a floating scalar tensor"
PAIR = 'expected the loss to be the pair (sum, count) for reduce="weighted"'
SUM = "; sum or average over the batch; value_and_grad takes (loss, aux) by has_aux=True"
REAL = "expected the count to be a real scalar tensor, got an int; torch.tensor makes one"
# What a local loss must not be: (name, reduce, loss of a number, error).
LOSSES = [
    ("no scalar", "mean", lambda x: x.expand(3), f"{FLOATING}, got a float32 Tensor of shape (3,){SUM}"),
    ("a pair for mean", "mean", lambda x: (x, x), f"{FLOATING}, got a tuple{SUM}"),
    ("no count", "weighted", lambda x: x, f"{PAIR}, got a float32 Tensor of shape ()"),
    ("a count that is no tensor", "weighted", lambda x: (x, 3), REAL),
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
        "value_and_grad: unknown reduce",
        lambda world: (world.params,),
        partial(differentiate, reduce="max"),
        f"value_and_grad: {REDUCE}, got 'max'",
    ),
    Row(
        "value_and_grad: no aux",
        lambda world: (world.params,),
        partial(differentiate, has_aux=True),
        "value_and_grad: expected f to return the pair (loss, aux) for has_aux=True, got a float32 Tensor of shape ()",
        ("gather",),
    ),
]


@on_ranks(2)
def test_whole_and_split_leaves_of_one_mesh_mix():
    world = make_world()
    mixed = {"a": world.params["a"], "b": fs.shard(world.full["b"], fs.ddp(world.mesh))}
    tx = fs.from_torch(torch.optim.SGD, lr=0.1)
    results = []
    for params in (world.params, mixed):
        value, grads = fs.value_and_grad(loss)(params)
        state = fs.update(tx, fs.TrainState.create(params, tx), grads)
        results.append(fs.unshard((value, grads, state.params)))
        assert grads["b"][0].spec == params["b"][0].spec
    assert_same_bits(results[1], results[0])


FROM = "\nTo fix: pass what fs.scatter_grads(grads, like=state.params) or fs.value_and_grad returned."


class Normed(optim.Optimizer):
    """Divides a gradient by its norm along some dims, as trust-ratio methods do."""

    def __init__(self, params, lr=0.1, dim=None):
        super().__init__(params, {"lr": lr, "dim": dim})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad / torch.linalg.vector_norm(p.grad, dim=group["dim"], keepdim=True)


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
    update_with(
        "another tree",
        lambda world: {"a": world.grads["a"], "c": world.grads["a"]},
        " with gradients: trees differ in structure\n"
        "  ['b'][0]: expected a leaf, got nothing\n"
        "  ['c']: expected nothing, got a leaf\n"
        "To fix: pass trees made from the same parameters.",
    ),
    update_with(
        "another dtype",
        lambda world: {"a": fs.tree_map(torch.Tensor.double, world.grads["a"]), "b": world.grads["b"]},
        ": gradients do not fit the parameters\n"
        "  ['a']: expected a float32 Tensor of shape (3, 3), got a float64 Tensor of shape (3, 3)" + FROM,
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
    *(
        Row(
            f"update by {kind}",
            lambda world, tx=tx: (tx, world.state, world.grads),
            fs.update,
            f"update: expected tx to be an Optimizer, got {kind}; end the chain with one, such as fs.from_torch",
        )
        for tx, kind in [(fs.clip_by_global_norm(1.0), "a GradientTransformation"), (optim.AdamW, "a type")]
    ),
]

# Optimizers that look across elements, with hyperparameters under which that may be hard to see.
ACROSS = [
    (optim.Muon, {}),
    (Normed, {"dim": 1}),
]
ROWS += [
    Row(
        f"{cls.__name__} {sorted(hyper)} on sharded leaves",
        lambda world, cls=cls, hyper=hyper: (
            fs.shard(
                {"a": torch.ones(4, 3), "b": torch.ones(2, 2), "c": torch.ones(2)},
                fs.zero2(world.mesh, min_shard_elements=3),
            ),
            fs.from_torch(cls, **hyper),
        ),
        fs.TrainState.create,
        f"from_torch: {cls.__name__} looks across the elements of a leaf\n"
        "  ['a']: expected a whole one, got a leaf that is split\n"
        "  ['b']: expected a whole one, got a leaf that is split\n"
        "To fix: keep leaves whole with fs.ddp, or choose an elementwise optimizer.",
    )
    for cls, hyper in ACROSS
]


def test_bad_gradients_and_updates_are_refused():
    assert_all_refused(ROWS)
