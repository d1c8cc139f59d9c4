"""A jitted step is the eager one, bit for bit: strategies, models, functions, spellings, optimizers, unused leaves."""

from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.func import jvp, vmap
from torch.utils.checkpoint import checkpoint

import fshard as fs
from tests.jit.steps import STEPS, Case, adamw, assert_on_ranks, train_step, trained, updating
from tests.optim.test_table import TABLE
from tests.ranks import my_rank, on_ranks, world_of
from tests.test_law_ddp import batches as whole_batches
from tests.test_law_ddp import initial, one_rank_of, row_losses
from tests.transforms.feedback import feedback
from tests.trees import CASTS, STRATEGIES, assert_alike, meshes, normal, one_axis, two_axes
from tests.unit_models import WIDTH, Block, Dropped, Language, filled, tie_head, tokens, zero3


def inputs():
    draw = normal(1 + my_rank())
    return [(draw(2, 4, WIDTH),) for _ in range(STEPS)]


def directly(f, *args):
    return f(*args)


def checkpointed(f, *args):
    return checkpoint(f, *args, use_reentrant=False)


def rematerialized(f, *args):
    return fs.remat(f)(*args)


class Stack(nn.Module):
    """Two blocks, each called by a function; `dropped` gives them dropout, and says whether they are checkpointed."""

    def __init__(self, call=directly, dropped=None):
        super().__init__()
        make = Block if dropped is None else partial(Dropped, checkpointed=dropped)
        self.blocks, self.call = nn.ModuleList(make(hidden) for hidden in (13, 11)), call

    def forward(self, x):
        for block in self.blocks:
            x = self.call(block, x)
        return x.square().mean()


def stack(module, units=Block, call=directly, **options):
    """Make the case of a stack of blocks, each of which is a unit."""
    filled(module)

    def make():
        model = fs.functionalize(module, units)
        return trained(partial(call, model.apply), model.init(zero3(**options)(one_axis())), inputs())

    return make


def language(strategy, change=lambda model: None, dtype=torch.float64, hidden=(13,)):
    """Make the case of a language model by a strategy of a mesh."""
    module = filled(Language(change, hidden), dtype)

    def make():
        model = fs.functionalize(module, (Block, nn.Linear))
        return trained(model.apply, model.init(strategy(one_axis())), tokens(4)[my_rank() :][:1] * STEPS)

    return make


def freeze(model):
    model.blocks[0].requires_grad_(False)
    model.embedding.requires_grad_(False)


def batch_norm():
    module = nn.Sequential(nn.Linear(WIDTH, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    model, tx = fs.functionalize(filled(module), nn.Linear), adamw()

    def loss(params, x, buffers):
        out, new = model.apply(params, x.flatten(0, 1), buffers=buffers)
        return out.square().mean(), new

    def step(state, x):
        (value, new), grads = fs.value_and_grad(loss, has_aux=True)(state.params, x, state.buffers)
        return fs.update(tx, state._replace(buffers=fs.sync_buffers(new, state.params, "mean")), grads), value

    return Case(step, fs.TrainState.create(model.init(zero3()(one_axis())), tx, buffers=model.buffers), inputs())


def blocks():
    draw = normal()
    return {"blocks": [{"w": draw(5, 5), "b": draw(5)} for _ in range(2)], "head": draw(5)}


def chain(params, x):
    for part in params["blocks"]:
        full = fs.gather(part)
        x = torch.tanh(x @ full["w"] + full["b"])
    return (x @ fs.gather(params["head"])).square().mean()


HALF = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
MODELS = {
    "checkpoint in the model": stack(Stack(checkpointed), nn.Module, prefetch=2),
    "remat in the model": stack(Stack(rematerialized)),
    "checkpoint in units": stack(Stack(dropped=True).eval()),
    "checkpoint of the model": stack(Stack(), call=checkpointed),
    "batch norm, averaged": batch_norm,
    "tied": language(zero3(), tie_head),
    "frozen": language(zero3(), freeze),
    "two ahead, some kept": language(zero3(prefetch=2, regather=("*1*", "*head*")), hidden=(13, 11)),
    "merged units": language(zero3(min_shard_elements=50, bucket_bytes=3000), hidden=(13, 11)),
    "mixed precision": language(zero3(**HALF), dtype=torch.float32),
    "ddp": language(fs.ddp),
    "hsdp": language(lambda mesh: fs.hsdp(two_axes(mesh.size()), min_shard_elements=0, bucket_bytes=0)),
    "feedback": language(lambda mesh: fs.zero3(mesh, layout=feedback(mesh), bucket_bytes=3000)),
    "offload": language(lambda mesh: fs.zero3(mesh, layout=fs.compose(fs.offload("cpu"), fs.fully_shard(mesh)))),
}


@pytest.mark.rows(2)
@pytest.mark.parametrize("world_size", (1, 2, 3, "2 processes"))
@pytest.mark.parametrize("name", MODELS)
def test_models(name, world_size, workers):
    assert_on_ranks(MODELS[name], world_of(world_size, workers))


def clipped(make_layout, reduce):
    """A clipped step of losses; "weighted" spreads rows so that a rank may have none."""

    def loss(params, batch):
        rows = row_losses(fs.tree_map(torch.Tensor.double, fs.gather(params)), batch)
        return (rows.sum(), torch.ones(len(rows)).sum()) if reduce == "weighted" else rows.mean()

    batches = [(one_rank_of(batch, reduce),) for batch in whole_batches()[:STEPS]]
    tx = fs.chain(fs.clip_by_global_norm(0.05), adamw())
    return trained(loss, fs.shard(initial(), make_layout(meshes())), batches, tx, reduce=reduce)


LAYOUTS = STRATEGIES | CASTS | {"feedback": lambda on: feedback(on.line)}


@pytest.mark.rows(1)
@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduce", ("mean", "sum", "weighted"))
def test_layouts(layout, reduce, world_size):
    assert_on_ranks(partial(clipped, LAYOUTS[layout], reduce), world_size)


def accumulated(strategy, communicate, reduce):
    def loss(params, x):
        return (chain(params, x), torch.ones(len(x)).sum()) if reduce == "weighted" else chain(params, x)

    params, draw = fs.shard(blocks(), strategy(one_axis(), min_shard_elements=0)), normal(my_rank())
    batches = [([draw(2, 5) for _ in range(2)],) for _ in range(STEPS)]
    return trained(loss, params, batches, grad=fs.accumulate, communicate=communicate, reduce=reduce)


def verbs():
    params, tx = fs.shard(blocks(), fs.zero3(one_axis(), min_shard_elements=0)), adamw()

    def step(state, x):
        run = torch.func.grad_and_value(lambda full: (x @ full["blocks"][0]["w"] @ full["head"]).sin().mean())
        grads, loss = run(fs.gather(state.params))
        grads = fs.scatter_grads(grads, like=state.params)
        return fs.update(tx, state, grads), fs.objective(loss, like=state.params)

    return Case(step, fs.TrainState.create(params, tx), [(normal(my_rank())(2, 5),)] * STEPS)


def test_accumulation_and_the_verbs():
    assert_on_ranks(verbs, 2)
    assert_on_ranks(partial(accumulated, fs.zero3, "once", "mean"), 2)
    assert_on_ranks(partial(accumulated, fs.zero2, "each", "weighted"), 2)


KEY = torch.tensor(7)


# Threads share the generator that a key seeds.
@pytest.mark.rows(1)
@pytest.mark.parametrize("world_size", (1, pytest.param("2 processes", marks=pytest.mark.slow)))
@pytest.mark.parametrize("call, dropped", [(rematerialized, False), (checkpointed, False), (directly, True)])
def test_random_numbers_of_a_key_are_those_of_eager_code(call, dropped, world_size, workers):
    module = filled(Stack(call, dropped))

    def make():
        model, tx, axis = fs.functionalize(module, Block), adamw(), fs.axis_of(one_axis())

        def step(state, x):
            key = fs.fold_in(fs.fold_in(state.key, state.step), axis)
            value, grads = fs.value_and_grad(lambda p: model.apply(p, x, key=key))(state.params)
            return fs.update(tx, state, grads), value

        return Case(step, fs.TrainState.create(model.init(zero3()(one_axis())), tx, key=KEY), inputs())

    assert_on_ranks(make, world_of(world_size, workers))


def test_a_key_gives_new_masks_each_step_and_leaves_the_generator_alone():
    model, x, before = fs.functionalize(nn.Dropout(0.5)), torch.ones(64), torch.get_rng_state()
    jitted = fs.jit(lambda key, count: model.apply({}, x, key=fs.fold_in(key, count)))
    masks = [jitted(KEY, torch.tensor(count)) for count in (0, 1, 2, 0)]
    assert masks[0].equal(masks[3])
    assert len({tuple(mask.tolist()) for mask in masks}) == 3
    assert masks[0].equal(model.apply({}, x, key=fs.fold_in(KEY, 0)))
    # So does a trace with a number as key.
    fs.jit(lambda x: model.apply({}, x, key=3), backend=lambda graph, inputs: lambda *given: given)(x)
    assert torch.get_rng_state().equal(before)


def of_torch(cls, **options):
    return partial(fs.from_torch, cls, **{"lr": 0.1} | options)


OPTIMIZERS = {name: row.make for name, row in TABLE.items()} | {
    "SGD fused": of_torch(optim.SGD, momentum=0.9, fused=True),
    "Adam fused": of_torch(optim.Adam, fused=True, amsgrad=True),
    "AdamW for loop": of_torch(optim.AdamW, foreach=False, maximize=True),
    **{cls.__name__: of_torch(cls) for cls in (optim.Adadelta, optim.Adamax, optim.Rprop)},
    "AdamW injected": of_torch(optim.AdamW, lr=lambda count: 0.1 * 0.5**count, inject=("lr",), fused=True),
    "AdamW by a scheduler": of_torch(optim.AdamW, lr=lambda count: 0.1 * 0.7 ** count.double()),
}


@pytest.mark.rows(2)
@pytest.mark.parametrize("world_size", (1, 2))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates(name, world_size):
    assert_on_ranks(updating(OPTIMIZERS[name]), world_size)


# Leaves that no rank used, or one alone: ranks agree on them once, when they trace.
UNUSED = {
    "ddp": lambda: fs.from_torch(optim.AdamW, lr=0.1, fused=True),
    "zero2 of every leaf": lambda: fs.chain(fs.clip_by_global_norm(0.5), fs.sgd(0.1, 0.9)),
    "hsdp": lambda: fs.ema(fs.skip_nonfinite(fs.adamw(0.1)), 0.9),
}


def unused(strategy, rows=(2,) * STEPS):
    draw, tx = normal(), UNUSED[strategy]()
    params = fs.shard({name: draw(5, 3) for name in ("all", "one", "none")}, STRATEGIES[strategy](meshes()))

    def loss_of(params, batch):
        full = fs.gather(params)
        loss = (full["all"] * batch).square().mean()
        return loss + full["one"].square().sum() if my_rank() == 1 else loss

    draw = normal(1 + my_rank())
    return Case(train_step(loss_of, tx), fs.TrainState.create(params, tx), [(draw(n, 5, 3),) for n in rows])


@pytest.mark.parametrize(
    "strategy, world_size", [("ddp", 2), ("zero2 of every leaf", 2), pytest.param("hsdp", 4, marks=pytest.mark.slow)]
)
def test_leaves_that_are_not_used(strategy, world_size):
    assert_on_ranks(partial(unused, strategy), world_size)


@on_ranks(2)
def test_a_rank_whose_batch_is_ragged_traces_by_itself():
    """Others run the graph that they have: the leaves are those that were agreed on before."""
    rows = (3, 2, 3) if my_rank() == 0 else (3, 3, 1)
    case = unused("zero2 of every leaf", rows)
    jitted, state, expected = fs.jit(case.step), case.state, case.state
    for (batch,) in case.batches:
        state, value = jitted(state, batch)
        expected, expected_value = case.step(expected, batch)
        assert_alike((state, value), (expected, expected_value))
    assert len(jitted.traces) == 2
    unchanged = [name for name in state.params if state.params[name].local.equal(case.state.params[name].local)]
    assert unchanged == ["none"]


@on_ranks(2)
def test_ranks_that_trace_again_and_use_other_leaves_are_named():
    """Only the first trace asks for the leaves of others, since nobody knows whether all trace again."""
    case, tx = unused("zero2 of every leaf"), UNUSED["zero2 of every leaf"]()

    def step(state, late):
        name = "one" if late and my_rank() else "all"
        value, grads = fs.value_and_grad(lambda p: fs.gather(p)[name].square().sum())(state.params)
        return fs.update(tx, state, grads), value

    jitted = fs.jit(step, static_argnums=1)
    state, _ = jitted(case.state, False)
    with pytest.raises(
        ValueError, match=r"leaves: expected \['all'\] used as on the rank at shard=0, got \['all'\] unused"
    ):
        jitted(state, True)


@on_ranks(2)
def test_make_graph_after_a_call_has_the_leaves_that_ranks_agreed_on():
    case = unused("zero2 of every leaf")
    jitted = fs.jit(case.step)
    jitted(case.state, *case.batches[0])
    state, _ = fs.make_graph(jitted)(case.state, *case.batches[0]).results
    # The loss of one rank alone uses the leaf "one", and all ranks update it.
    assert [name for name, node in state.params.items() if node.op == "call_function"] == ["all", "one"]


@on_ranks(2)
def test_a_rank_whose_backend_failed_does_not_ask_again_for_the_leaves_of_others():
    """Its peers have their programs, and would not answer. A trace counts once its backend has compiled it."""
    failures = [RuntimeError("no compiler")] * my_rank()

    def backend(graph, inputs):
        if failures:
            raise failures.pop()
        return graph

    case = unused("ddp")
    jitted = fs.jit(case.step, backend=backend)
    with pytest.raises(Exception, match="no compiler"):
        jitted(case.state, *case.batches[0])
    assert len(jitted.traces) == 1 - my_rank()
    # On a mesh of its own, because the ranks of the first one have ended their calls.
    again = unused("ddp")
    assert_alike(jitted(again.state, *again.batches[0]), again.step(again.state, *again.batches[0]))


@pytest.mark.parametrize("takes_parameters", (False, True))
@on_ranks(2)
def test_ranks_whose_graphs_send_different_things_are_named_before_anything_is_sent(takes_parameters):
    """The axis is known from the collective alone, or from leaves too, with the device that they are sharded to."""
    axis = fs.axis_of(one_axis())
    params = fs.shard({"w": torch.ones(4, 2)}, fs.zero3(axis)) if takes_parameters else {}
    step = fs.jit(lambda params, x: (params, fs.psum(x[my_rank() :], axis)))
    expected = r"collectives: expected .* 12 bytes as on the rank at shard=0, got .* 8 bytes on the rank at shard=1"
    with (
        fs.comm.record() as record,
        pytest.raises(ValueError, match=rf"^jit: ranks make different calls\n  {expected}"),
    ):
        step(params, torch.ones(3))
    assert all(entry.about.is_comparison for entry in record)


@on_ranks(2)
def test_an_optimizer_may_be_made_and_initialised_inside_the_function():
    """As the inner loop of Reptile does it: the trials of a torch class read values, and are no part of the graph."""
    params = fs.shard({"w": torch.arange(6.0).reshape(3, 2)}, fs.zero3(one_axis(), min_shard_elements=0))

    def adapt(params):
        tx = fs.from_torch(optim.AdamW, lr=0.1)
        state = fs.TrainState.create(params, tx)
        return fs.update(tx, state, params).params

    assert_alike(fs.jit(adapt)(params), adapt(params))


@on_ranks(3)
@pytest.mark.parametrize("is_batched", (False, True))
def test_tangents_of_the_rows_of_a_rank(is_batched):
    """As a network that learns a differential equation takes them, of rows that are a part of a larger tensor."""
    draw = normal()
    params = fs.shard({"w": draw(2, 3)}, fs.zero3(one_axis(), min_shard_elements=0))
    rows = draw(6, 2).tensor_split(3)[my_rank()]

    def loss(params, x):
        full = fs.gather(params)["w"]

        def bend(v):
            slope = lambda x: jvp(lambda x: torch.tanh(x @ full), (x,), (v,))[1]  # noqa: E731
            return jvp(slope, (x,), (v,))[1]

        bent = vmap(bend)(torch.stack([x, 2 * x])) if is_batched else bend(torch.ones_like(x))
        return bent.square().mean()

    step = fs.value_and_grad(loss)
    assert_alike(fs.jit(step)(params, rows), step(params, rows))


def test_a_layer_of_lstm_has_the_bits_of_eager_code():
    """oneDNN makes what the backward reads only where gradients are recorded, which a graph that runs does not."""
    model = fs.functionalize(nn.LSTM(4, 8))
    params = model.init(fs.zero3(one_axis()), seed=0)
    x = normal()(5, 2, 4).float()

    def grad(params):
        return fs.value_and_grad(lambda params: model.apply(params, x)[0].square().mean())(params)

    assert_alike(fs.jit(grad)(params), grad(params))


def test_arguments_of_several_dtypes_in_one_memory_are_measured_where_they_lie():
    """As complex numbers and their parts do. What lies before them is left out."""
    values = torch.zeros(24, dtype=torch.complex64)
    parts = torch.view_as_real(values)
    jitted = fs.jit(lambda x, parts: x.real.sum() + parts.sum())
    together = jitted.memory(values[8:16], parts[8:16]).after.arguments
    assert together == 8 * values.itemsize
    assert jitted.memory(values[8:16], parts[16:24]).after.arguments == 2 * together


def test_an_argument_whose_memory_is_freed_and_that_is_not_read():
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    try:
        result = fs.jit(lambda _, x: x.sin())(freed, torch.ones(3))
    finally:
        # A report of a failure shows the arguments.
        freed.untyped_storage().resize_(16)
    assert_alike(result, torch.ones(3).sin())
