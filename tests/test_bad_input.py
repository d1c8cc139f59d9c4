"""What verbs refuse on every rank, before they communicate: meshes, trees, modules, gradients, states, arguments."""

import math
import threading
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fshard as fs
from tests.bad_input import Row, assert_all_refused, loss, setup, text_of

ones = torch.ones


def on_world(error, call, *issued):
    return Row(error, lambda world: (world,), call, error, issued)


# Meshes and transforms.


def mesh_of(shape, device="cpu"):
    return lambda _: fs.init_mesh(shape, device=device)


SIZES = "shape to be a mapping from names of axes to positive whole sizes, one of which may be -1"
PRODUCT = "init_mesh: expected shape to have sizes whose product is 2, the number of ranks, got"
NO_AXIS = "mesh: expected axis to be one of ('shard',), got 'data'; name it in init_mesh or pass another"
NO_MESH = "mesh: expected a DeviceMesh or an Axis, got a str; make one by fs.init_mesh"
NO_DEVICE = "init_mesh: expected device to be one of ['cpu'], which torch finds here, got 'tpu'"
NO_DTYPE = "cast: expected gather to be a floating torch.dtype such as torch.bfloat16, or None, got torch.int8"
SETUP = [
    *(on_world(f"{PRODUCT} {shape}", mesh_of(shape)) for shape in ({"replicate": 3, "shard": -1}, {"shard": 1})),
    *(on_world(f"init_mesh: expected {SIZES}, got {shape}", mesh_of(shape)) for shape in ({"a": 0, "b": -1}, {})),
    on_world(NO_DEVICE, mesh_of({"shard": -1}, device="tpu")),
    on_world(NO_AXIS, lambda w: fs.zero2(w.mesh, "data")),
    on_world(NO_MESH, lambda _: fs.fully_shard("shard")),
    on_world(NO_DTYPE, lambda _: fs.cast(gather=torch.int8)),
]

# Trees.

FIT = "\nTo fix: pass full tensors whose shapes fit the strategy."
GONE = fs.Spec((5, 3), fs.P("shard"), (fs.Axis("shard", 2, "gone"),))


@dataclass
class Layer:
    w: object


REGISTER = (
    "To fix: write @fs.register_dataclass above the declaration of Layer, or put its tensors in a dict or a NamedTuple."
)
HIDDEN = "is a Layer, which contains Sharded leaves but is not a pytree\n" + REGISTER


def hiding(world):
    return {"m": Layer([world.params["a"]]), "config": Layer(3)}


VERBS_OF_TREES = {
    "unshard": lambda w, tree: fs.unshard(tree),
    "reshard": lambda w, tree: fs.reshard(tree, fs.ddp(w.mesh)),
    "value_and_grad": lambda w, tree: fs.value_and_grad(lambda p: fs.gather(p["m"].w[0]).sum())(tree),
}
TREES = [
    on_world(
        "shard: leaves cannot be sharded\n  ['m']: expected a plain full tensor, got a Layer\n" + REGISTER,
        lambda w: fs.shard({"a": ones(2), "m": Layer(ones(2))}, w.zero2),
        "shard",
    ),
    *(
        on_world(f"{verb}: shards do not match their specs\n  ['m']: {HIDDEN}", lambda w, call=call: call(w, hiding(w)))
        for verb, call in VERBS_OF_TREES.items()
    ),
    on_world(
        "gather: leaves are no tensors\n  ['m']: expected a Sharded leaf or a tensor, got a Layer\n" + REGISTER,
        lambda w: fs.gather({"m": hiding(w)["m"]}),
    ),
    on_world(
        "shard: leaves cannot be sharded\n"
        "  ['n'][0]: expected a plain full tensor, got an int\n"
        "  ['s']: expected a plain full tensor, got a str" + FIT,
        lambda w: fs.shard({"a": ones(2), "n": [3, None], "s": "x"}, w.zero2),
        "shard",
    ),
    on_world(
        "shard: leaves cannot be sharded\n"
        "  ['w']: expected a tensor without history, such as leaf.detach(), got a result whose gradient would end here"
        + FIT,
        lambda w: fs.shard({"w": 2 * ones(2).requires_grad_()}, w.zero2),
        "shard",
    ),
    on_world(
        "shard: leaves cannot be sharded\n"
        "  ['b'][0]: expected a dim 1 to split over 'shard', got shape (4,)\n"
        "  ['b'][1]: expected a dim 1 to split over 'shard', got shape ()" + FIT,
        lambda w: fs.shard({"a": ones(4, 2), "b": [ones(4), ones(())]}, fs.fully_shard(w.mesh, dim=1)),
        "shard",
    ),
    on_world(
        "gather: shards do not match their specs\n"
        "  ['a']: expected a local tensor of shape (3, 3), got a float32 Tensor of shape (1, 3) as local tensor\n"
        "  ['b'][0]: expected a local tensor of shape (2,), got a float32 Tensor of shape (1,) as local tensor\n"
        "To fix: return tensors of the shard's shape from functions that you map over a tree.",
        lambda w: fs.gather(fs.tree_map(lambda x: x[:1], w.params)),
    ),
    setup(
        "a frozen leaf that was computed from trained ones",
        lambda base, params: fs.value_and_grad(
            lambda p: fs.gather({"a": replace(base["a"], local=base["a"].local + p["a"].local)})["a"].sum()
        )(params),
        "gather: leaves cannot be gathered\n"
        "  ['a']: its spec is frozen, but it is a computed tensor that requires a gradient\n"
        "To fix: make leaves with fs.shard or fs.reshard. For a frozen leaf, detach it or use the trained leaf's spec.",
        lambda w: fs.shard(w.full, w.zero2, frozen="*"),
        lambda w: w.params,
    ),
    on_world(
        "gather: leaves live on a mesh that this process is not part of\n"
        "  ['a']: axis 'shard' of 2 ranks in group 'gone' is not available here\n"
        "To fix: shard the tree on a mesh of this process, and after destroy_process_group call fs.init_mesh again.",
        lambda w: fs.gather({"a": replace(w.params["a"], spec=GONE)}),
    ),
]

# Modules.


LINEAR, NORM = fs.functionalize(nn.Linear(3, 2)), fs.functionalize(nn.BatchNorm1d(3))
MODULES = [
    on_world(
        "apply: params: trees differ in structure\n"
        "  ['scale']: expected nothing, got a float32 Tensor of shape (2,)\n"
        "  ['bias']: missing\n"
        "To fix: pass what this model's init returned, before the inputs.",
        lambda w: LINEAR.apply({"weight": ones(2, 3), "scale": ones(2)}, ones(4, 3)),
    ),
    on_world(
        "apply: params: trees differ in structure\n"
        "  (root): expected nothing, got a float32 Tensor of shape (4, 3)\n"
        "  ['bias']: missing\n"
        "  ['weight']: missing\n"
        "To fix: pass what this model's init returned, before the inputs.",
        lambda w: LINEAR.apply(ones(4, 3)),
    ),
    on_world(
        "apply: the shapes of params differ from the module's\n"
        "  ['bias']: expected shape (2,), got shape (1,)\n"
        "To fix: pass the parameters that this model's init returned.",
        lambda w: LINEAR.apply({"weight": ones(2, 3), "bias": ones(1)}, ones(4, 3)),
    ),
    Row(
        "buffers that would be lost",
        lambda world: (NORM.init(world.zero2), ones(4, 3)),
        NORM.apply,
        "apply: the module updated buffers ['num_batches_tracked'], and the updates would be lost. Pass buffers= and "
        "keep the returned buffers, or use model.eval(). If each forward computes them anew, pass "
        "buffers=model.buffers.",
        ("gather",),
    ),
]

# Losses, gradients and states.


def differentiated(error, change, **keywords):
    """A local loss that is not what value_and_grad takes."""
    call = fs.value_and_grad(lambda p: change(loss(p)), **keywords)
    return on_world(f"value_and_grad: {error}", lambda w: call(w.params), "gather")


def on_two_meshes(world):
    other = fs.init_mesh({"data": -1, "unit": 1}, device="cpu")
    return {"a": world.params["a"], "b": [fs.shard(world.full["b"][0], fs.ddp(other, "data"))]}


NO_SUM = (
    "scatter_grads: gradients of these leaves would not be summed\n"
    "  ['b'][0]: expected a transform that sums gradients over ['shard'], or owns pieces there, got one over ['data']\n"
    "To fix: shard the whole tree on these axes (zero3 takes axis=, ddp keeps leaves whole, and own_dim owns pieces "
    "where split_dim would expect one batch for all ranks), or leave others out."
)
FULL = "\nTo fix: pass the gradients of full leaves, as from torch.func.grad at fs.gather(like)."
UNFIT = "update: gradients do not fit the parameters\n"
FROM = "\nTo fix: pass what fs.scatter_grads(grads, like=state.params) or fs.value_and_grad returned."
KEEPS_NUMBERS = fs.Optimizer(lambda params: (), lambda grads, state, params: (params, state))
FLOATING = "the loss must be a floating scalar tensor, got a float32 Tensor of shape (3,)"
AVERAGE = (
    ". Sum or average it over the batch. A function that returns (loss, aux) needs has_aux=True, and one that "
    'returns (sum, count) needs reduce="weighted".'
)
PAIR = 'with reduce="weighted" the loss must be a pair (sum, count), got a float32 Tensor of shape ().'
AUX = "f must return the pair (loss, aux) with has_aux=True, but returned a float32 Tensor of shape ()."
INFERENCE = "cannot differentiate inside torch.inference_mode(). Leave the context, or evaluate with model.apply."
NO_COUNT = "scatter_grads: expected the count to be a real scalar tensor, got an int; torch.tensor makes one"
GRADIENTS = [
    setup("of two meshes", fs.scatter_grads, NO_SUM, lambda w: w.full_grads, on_two_meshes),
    setup(
        "integer",
        fs.value_and_grad(loss),
        "value_and_grad: leaves cannot have gradients\n"
        "  ['i']: expected a floating tensor, got an int64 Tensor of shape (2,)\n"
        "To fix: pass the parameters of model.init. Shard others with frozen=, or keep them out.",
        lambda w: {"a": w.params["a"], "i": fs.shard(torch.arange(4), w.zero2)},
    ),
    on_world(
        "value_and_grad: leaves cannot have gradients\n"
        "  .step: expected a floating tensor, got an int64 Tensor of shape ()\n"
        "To fix: pass the parameters of model.init. Shard others with frozen=, or keep them out.",
        lambda w: fs.value_and_grad(loss)(fs.TrainState.create(w.params, KEEPS_NUMBERS)),
    ),
    on_world(
        "value_and_grad: leaves cannot have gradients\n"
        "  ['s']: expected a floating tensor, got a float\n"
        "To fix: pass the parameters of model.init. Shard others with frozen=, or keep them out.",
        lambda w: fs.value_and_grad(loss)({"a": ones(2), "s": 1.5}),
    ),
    on_world(
        "scatter_grads: gradients do not fit `like`\n"
        "  ['a']: expected a full tensor of shape (5, 3), got a Sharded leaf\n"
        "  ['b'][0]: expected a full tensor of shape (4,), got a float32 Tensor of shape (3, 5)" + FULL,
        lambda w: fs.scatter_grads({"a": w.grads["a"], "b": [ones(3, 5)]}, w.params),
    ),
    on_world(NO_COUNT, lambda w: fs.scatter_grads(w.full_grads, w.params, reduce="weighted", count=3)),
    differentiated(FLOATING + AVERAGE, lambda x: x.expand(3)),
    differentiated(PAIR, lambda x: x, reduce="weighted"),
    differentiated(AUX, lambda x: x, has_aux=True),
    on_world(f"value_and_grad: {INFERENCE}", lambda w: torch.inference_mode()(fs.value_and_grad(loss))(w.params)),
    on_world(
        f"{UNFIT}  ['a']: expected a Sharded leaf, got a float32 Tensor of shape (5, 3)\n"
        "  ['b'][0]: expected a Sharded leaf, got a float32 Tensor of shape (4,)" + FROM,
        lambda w: fs.update(w.tx, w.state, w.full_grads),
    ),
    on_world(
        f"{UNFIT}  ['a']: expected a float32 Tensor of shape (3, 3), got a float32 Tensor of shape (1, 3)\n"
        "  ['b'][0]: expected a float32 Tensor of shape (2,), got a float32 Tensor of shape (1,)" + FROM,
        lambda w: fs.update(w.tx, w.state, fs.tree_map(lambda x: x[:1], w.params)),
    ),
    Row(
        "update by gradients of frozen leaves",
        lambda w: (w.tx, fs.TrainState.create(fs.shard(w.full, w.zero2, frozen="a"), w.tx), w.grads),
        fs.update,
        f"{UNFIT}  ['a']: expected None for a frozen leaf, got a gradient{FROM}",
    ),
    Row(
        "update by gradients of numbers",
        lambda w: (
            KEEPS_NUMBERS,
            fs.TrainState.create({"a": ones(2), "n": 1.5}, KEEPS_NUMBERS),
            {"a": ones(2), "n": 0.5},
        ),
        fs.update,
        f"{UNFIT}  ['n']: expected None for a float, got a gradient{FROM}",
    ),
    on_world(
        "update: expected tx to be an Optimizer, got a GradientTransformation; end the chain with one, such as "
        "fs.from_torch(torch.optim.AdamW, lr=1e-3)",
        lambda w: fs.update(fs.clip_by_global_norm(1.0), w.state, w.grads),
    ),
    setup(
        "an optimizer that looks across elements",
        fs.TrainState.create,
        "from_torch: Muon looks across the elements of a leaf, so it cannot step shards\n"
        "  ['a']: is split over 'shard'\n"
        "To fix: keep leaves whole with fs.ddp, step them with fs.whole, or choose an elementwise optimizer.",
        lambda w: fs.shard({"a": ones(4, 3)}, fs.zero2(w.mesh, min_shard_elements=0)),
        lambda w: fs.from_torch(torch.optim.Muon),
    ),
]


@pytest.mark.parametrize("table", (SETUP, TREES, MODULES, GRADIENTS), ids=("setup", "trees", "modules", "gradients"))
def test_bad_input_is_refused(table):
    assert_all_refused(table)


# What the last rank shards, what the others do, and how they differ.
FIRST, SPLIT = " as on the rank at shard=0", "float32[2] of hash {hash} split by P('shard')"
DIFFERENT = [
    ({"a": ones(2), "b": ones(2)}, {"a": ones(2)}, f"['b']: expected nothing{FIRST}, got {SPLIT}"),
    ({"b": torch.tensor([0.0, -0.0])}, {"b": torch.zeros(2)}, f"['b']: expected {SPLIT}{FIRST}, got {SPLIT}"),
    ({"a": nn.Parameter(ones(2), False)}, {"a": ones(2)}, f"['a']: expected {SPLIT}{FIRST}, got frozen {SPLIT}"),
]


def test_every_rank_refuses_what_one_rank_has_differently():
    rows = [
        Row(
            difference,
            lambda w, last=last, others=others: (last if dist.get_rank() == 2 else others, w.zero2),
            fs.shard,
            f"shard: ranks hold different trees\n  {difference} on the rank at shard=2\nTo fix: build the same tree on "
            "every rank from the same seed.",
            ("shard",),
        )
        for last, others, difference in DIFFERENT
    ]
    assert_all_refused(rows, 3)


def test_a_process_that_was_refused_a_mesh_can_make_one():
    with pytest.raises(ValueError, match="sizes whose product is 1"):
        fs.init_mesh({"shard": 3}, device="cpu")
    assert not dist.is_initialized()
    assert (fs.init_mesh({"shard": -1}, device="cpu").size(), dist.get_backend()) == (1, "gloo")


# Arguments of optimizers.

FRACTION = "a number, 0 or more and below 1"
NUMBER = "a finite number, 0 or more"
RATE = f"{NUMBER}, or a function of the number of updates, as of fs.schedules or fs.from_torch_scheduler"
# Optimizers with the names of their rates.
RATES = {fs.sgd: ("momentum",), fs.adam: (), fs.adamw: ("lr", "eps", "weight_decay")}


def test_rates_out_of_range_are_refused_by_name():
    for make, names in RATES.items():
        for name, value in product(names, (-1e-9, math.nan, "x")):
            text = f"expected {name} to be {RATE if name == 'lr' else NUMBER}, got {value!r}"
            assert text in text_of(partial(make, **{"lr": 0.1, name: value}))
    assert f"expected betas[1] to be {FRACTION}, got 1.0" in text_of(lambda: fs.adamw(0.1, (0.9, 1.0)))
    vector = f"sgd: expected lr to be {RATE}, got a float32 Tensor of shape (2,)"
    assert text_of(lambda: fs.sgd(ones(2))) == vector
    assert text_of(lambda: fs.sgd(ones(1, 1))) == vector.replace("(2,)", "(1, 1)")
    # Classes, which a call makes an instance of, and a scheduler of torch.
    optimizer = torch.optim.SGD([ones(1)], lr=0.1)
    for value in (torch.optim.lr_scheduler.StepLR, torch.optim.SGD, torch.optim.lr_scheduler.StepLR(optimizer, 1)):
        assert text_of(partial(fs.sgd, value)) == f"sgd: expected lr to be {RATE}, got {value!r:.40}"
    finite = "sgd: expected dampening to be a finite number, got"
    assert text_of(lambda: fs.sgd(0.1, 0.9, dampening=math.nan)) == f"{finite} nan"
    assert text_of(lambda: fs.sgd(0.1, 0.9, dampening=ones(2))) == f"{finite} a float32 Tensor of shape (2,)"


def test_the_ends_of_ranges_and_rates_of_every_kind_are_taken():
    tensors = torch.tensor(0.1), torch.tensor(0.1, requires_grad=True), torch.empty((), device="meta")
    for make, lr in product(RATES, (0, 0.0, *tensors, lambda count: 0.1 / (count + 1))):
        make(lr)
    fs.adam(0.1, (0, 0.999))
    fs.sgd(0.1, dampening=-1.0)
    fs.clip_by_norm(1, math.inf)
    fs.ema(fs.sgd(1), 1)
    torch.func.vmap(lambda lr: (fs.sgd(lr), lr)[1])(ones(3))


# What users write into modules and weights.


@pytest.mark.parametrize("method", ("register_hook", "register_post_accumulate_grad_hook"))
def test_hooks_on_parameters_are_refused_by_name(method):
    module = nn.Sequential(nn.Linear(2, 2))
    getattr(module[0].weight, method)(print)
    assert text_of(lambda: fs.functionalize(module)) == (
        f"functionalize: parameters have hooks, which fshard would not call: ['0.weight'] ({method}). Remove them; "
        "change the returned gradients instead, or write a transform with its own scatter."
    )


def linear_with_lock():
    module = nn.Linear(2, 2)
    module.lock = threading.Lock()
    return module


TEXTS = [
    (
        lambda: fs.functionalize(linear_with_lock()),
        "functionalize: copy.deepcopy cannot copy the module: cannot pickle '_thread.lock' object. If it has "
        "weights of torch.nn.utils.weight_norm or prune, run it once under torch.no_grad() before. Keep locks, files "
        "and the like outside of it.",
    ),
    *(
        (
            partial(fs.functionalize, nn.Sequential(lazy)),
            f"functionalize: '0.{name}' has no shape yet. Call the module once on a batch, to make it.",
        )
        for lazy, name in ((nn.LazyLinear(3), "weight"), (nn.LazyBatchNorm1d(affine=False), "running_mean"))
    ),
    (
        lambda: fs.functionalize(nn.Linear),
        "functionalize: module must be an instance of nn.Module, not the class Linear.",
    ),
    (lambda: fs.functionalize(3), "functionalize: module must be an instance of nn.Module, not an int."),
    (
        lambda: LINEAR.init(fs.ddp(fs.init_mesh({"shard": -1}, device="cpu")), mode="counter"),
        "model.init: mode='counter' needs a seed. Pass seed=.",
    ),
]


def test_modules_and_seeds_are_asked_for():
    for call, text in TEXTS:
        assert text_of(call) == text
