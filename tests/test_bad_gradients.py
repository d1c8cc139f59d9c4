"""Bad losses, gradients and optimizers: what the verbs from the loss to the update refuse, before they communicate."""

from functools import partial

import torch

import fshard as fs
from tests.bad_input import Row, assert_all_refused, loss, make_world
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


REDUCE = 'expected reduce to be "mean", "sum" or "weighted"'
FULL = "\nTo fix: pass the gradients of full leaves, as from torch.func.grad at fs.gather(like)."
PLAIN = (
    "plain leaves among Sharded ones\n"
    "  ['b'][0]: expected a Sharded leaf, as ['a'] is, got a float32 Tensor of shape (4,)\n"
    "To fix: shard the whole tree (fs.ddp keeps leaves whole), or keep other leaves out of the parameters."
)
MESHES = (
    "leaves are reduced over different axes\n"
    "  ['b'][0]: expected ['shard'] of one mesh, as for ['a'], got axes ['data']\n"
    "To fix: shard the tree on one mesh."
)
INTEGER = (
    "leaves cannot take a gradient\n"
    "  ['i']: expected a floating tensor, got an int64 Tensor of shape (2,)\n"
    "To fix: shard these leaves with frozen=, or keep them out of the parameters."
)
CHANGED = (
    "shards do not match their specs\n"
    "  ['a']: expected a local tensor of shape (3, 3), got a local tensor of shape (1, 3)\n"
    "  ['b'][0]: expected a local tensor of shape (2,), got a local tensor of shape (1,)\n"
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
            ("value_and_grad", differentiate, lambda world, params: (params,)),
            ("sync_buffers", fs.sync_buffers, lambda world, params: ({"m": ones(1)}, params)),
        ]
    ),
    *(
        Row(
            f"{verb}: integer leaf", lambda world, rest=rest: rest(with_integer_leaf(world)), call, f"{verb}: {INTEGER}"
        )
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
    Row(
        "scatter_grads: changed shapes of like",
        lambda world: (world.full_grads, fs.tree_map(lambda x: x[:1], world.params)),
        scatter,
        f"scatter_grads of `like`: {CHANGED}",
    ),
    # Gradients that do not fit.
    Row(
        "scatter_grads: sharded gradients",
        lambda world: (world.grads, world.params),
        scatter,
        "scatter_grads: gradients do not fit `like`\n"
        "  ['a']: expected a full tensor of shape (5, 3), got a Sharded leaf\n"
        "  ['b'][0]: expected a full tensor of shape (4,), got a Sharded leaf" + FULL,
    ),
    Row(
        "scatter_grads: arguments swapped",
        lambda world: (world.params, world.full_grads),
        scatter,
        "scatter_grads: gradients do not fit `like`\n"
        "  ['a']: expected a full tensor of shape (5, 3), got a Sharded leaf\n"
        "  ['b'][0]: expected a full tensor of shape (4,), got a Sharded leaf" + FULL,
    ),
    Row(
        "scatter_grads: other shapes",
        lambda world: ({"a": ones(3, 5), "b": [1.0]}, world.params),
        scatter,
        "scatter_grads: gradients do not fit `like`\n"
        "  ['a']: expected a full tensor of shape (5, 3), got a float32 Tensor of shape (3, 5)\n"
        "  ['b'][0]: expected a full tensor of shape (4,), got a float" + FULL,
    ),
    Row(
        "scatter_grads: a gradient of None",
        lambda world: ({"a": ones(5, 3), "n": ones(1)}, {"a": world.params["a"], "n": None}),
        scatter,
        "scatter_grads: gradients do not fit `like`\n  ['n']: expected None, got a float32 Tensor of shape (1,)" + FULL,
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
    *(
        Row(
            f"scatter_grads: reduce={keywords.get('reduce')} and count={keywords.get('count')}",
            lambda world: (world.full_grads, world.params),
            partial(scatter, **keywords),
            f"scatter_grads: {error}",
        )
        for keywords, error in [
            ({"reduce": "avg"}, 'expected "mean", "sum", or "weighted" with count=, got reduce=\'avg\' without count'),
            (
                {"reduce": "weighted"},
                'expected "mean", "sum", or "weighted" with count=, got reduce=\'weighted\' without count',
            ),
            ({"count": scalar(3)}, 'expected "mean", "sum", or "weighted" with count=, got reduce=\'mean\' with count'),
            (
                {"reduce": "weighted", "count": 3},
                "expected count to be a real scalar tensor, got an int; torch.tensor makes one",
            ),
            (
                {"reduce": "weighted", "count": ones(2)},
                "expected count to be a real scalar tensor, got a float32 Tensor of shape (2,); torch.tensor makes one",
            ),
        ]
    ),
]

FLOATING = "expected the loss to be a floating scalar tensor, got"
SUM = "; sum or average over the batch"
# What a local loss must not be: (name, reduce, loss of a number, error).
LOSSES = [
    ("no scalar", "mean", lambda x: x.expand(3), f"{FLOATING} a float32 Tensor of shape (3,){SUM}"),
    ("no tensor", "sum", float, f"{FLOATING} a float{SUM}"),
    ("nothing", "mean", lambda x: None, f"{FLOATING} None{SUM}"),
    ("integer", "mean", lambda x: x.long(), f"{FLOATING} an int64 Tensor of shape (){SUM}"),
    (
        "a pair for mean",
        "mean",
        lambda x: (x, x),
        "expected the loss to be a floating scalar tensor alone, got a tuple; value_and_grad takes (loss, aux) by "
        "has_aux=True",
    ),
    (
        "no count",
        "weighted",
        lambda x: x,
        'expected the loss to be the pair (sum, count) for reduce="weighted", got a float32 Tensor of shape ()',
    ),
    (
        "a count that is no tensor",
        "weighted",
        lambda x: (x, 3),
        "expected the count to be a real scalar tensor, got an int; torch.tensor makes one",
    ),
    (
        "a sum that is no scalar",
        "weighted",
        lambda x: (x[None], x),
        f"expected the sum to be a floating scalar tensor, got a float32 Tensor of shape (1,){SUM}",
    ),
]
ROWS += [
    Row(
        f"objective: {name}",
        lambda world, make=make, reduce=reduce: (make(scalar(2.0)), world.params, reduce),
        fs.objective,
        f"objective: {error}",
    )
    for name, reduce, make, error in LOSSES
]
ROWS += [
    Row(
        f"value_and_grad: {name}",
        lambda world: (world.params,),
        # float() has no rule under torch.func, so the number is taken from a detached tensor.
        partial(
            differentiate, f=lambda p, make=make: make(loss(p) if make is not float else scalar(2.0)), reduce=reduce
        ),
        f"value_and_grad: {error}",
        () if make is float else ("gather",),
    )
    for name, reduce, make, error in LOSSES
]
ROWS += [
    Row(
        "objective: unknown reduce",
        lambda world: (scalar(1.0), world.params, "max"),
        fs.objective,
        f"objective: {REDUCE}, got 'max'",
    ),
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


def test_bad_gradients_are_refused():
    assert_all_refused(ROWS)


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


@on_ranks(2)
def test_integer_leaves_may_be_frozen_and_leaves_may_be_missing():
    world = make_world()
    tree = {"a": world.full["a"], "i": torch.arange(4), "n": None}
    params = fs.shard(tree, world.zero2, frozen=lambda path: path == "['i']")
    tx = fs.from_torch(torch.optim.AdamW, lr=0.1)
    _, grads = fs.value_and_grad(lambda params: loss({"a": params["a"]}))(params)
    assert grads["i"] is grads["n"] is None
    state = fs.update(tx, fs.TrainState.create(params, tx), grads)
    assert_same_bits(fs.unshard(state.params["i"]), tree["i"])
    scattered = fs.scatter_grads({"a": ones(5, 3), "i": None, "n": None}, like=params)
    assert_same_bits(fs.unshard(scattered["a"]), ones(5, 3))
    assert scattered["i"] is scattered["n"] is None
