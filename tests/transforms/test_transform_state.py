"""The state of transforms: threaded through the verbs, kept and moved, what cannot carry one, and error feedback."""

import io
import math
from functools import partial

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.shard import local_piece
from fshard.testing import assert_trees_close
from tests.bad_input import Row, assert_all_refused
from tests.ranks import my_rank, on_ranks
from tests.test_law_purity import unchanged
from tests.transforms.laws import FROZEN, SGD, every_kind, grid, shard_kinds
from tests.transforms.rounding import full_tree, grads_of, joined, pieces, rounded
from tests.trees import WORLD_SIZES, assert_same_bits, every_bit, normal, one_axis, two_axes
from tests.unit_models import filled

ROWS = 4


def full_params():
    draw = normal()
    return {"w": draw(5, 3), "b": [draw(3)], "fixed": draw(2), "none": None}


def make_params(mesh, **options):
    transform = fs.quantize(mesh, gather=False, scatter=True, block=4, **options)
    return fs.shard(full_params(), transform, frozen=lambda path: "fixed" in path)


def loss(params, x):
    full = fs.gather(params)
    return torch.tanh(x @ full["w"] + full["b"][0]).square().sum()


def microbatches(count):
    draw = normal(my_rank() + 1)
    return [draw(ROWS, 5) for _ in range(count)]


@on_ranks(1, 2, 3, 4)
def test_accumulate_hands_the_state_from_microbatch_to_microbatch():
    params, batches = make_params(one_axis()), microbatches(3)
    state = fs.transform_state(params)
    with unchanged(params, state):
        _, grads, after = fs.accumulate(loss, reduce="sum", communicate="each", transform_state=state)(params, batches)
    expected, last = None, state
    for batch in batches:
        _, part, last = fs.value_and_grad(loss, reduce="sum", transform_state=last)(params, batch)
        expected = part if expected is None else fs.tree_map(torch.add, expected, part)
    assert_same_bits(fs.tree_leaves((grads, after)), fs.tree_leaves((expected, last)))
    _, grads, after = fs.accumulate(loss, reduce="sum", communicate="once", transform_state=state)(params, batches)
    full = fs.gather(params)
    local = [torch.func.grad(loss)({k: full[k] for k in ("w", "b")}, batch) for batch in batches]
    total = fs.tree_map(lambda a, b, c: a + b + c, *local) | {"fixed": None, "none": None}
    expected = fs.scatter_grads(total, like=params, reduce="sum", transform_state=state)
    assert_same_bits(fs.tree_leaves((grads, after)), fs.tree_leaves(expected))


def step_of(state, x, donate=False):
    _, grads, after = fs.value_and_grad(loss, transform_state=state.transform_state)(state.params, x)
    return fs.update(SGD, state, grads, donate=donate, transform_state=after)


@pytest.mark.parametrize("donate", (False, True))
@on_ranks(2)
def test_a_train_state_holds_it(donate):
    (x,) = microbatches(1)
    first = fs.TrainState.create(make_params(one_axis()), SGD)
    assert_same_bits(fs.tree_leaves(first.transform_state), fs.tree_leaves(fs.transform_state(first.params)))
    assert not any(row.any() for row in fs.tree_leaves(first.transform_state))
    assert [first.transform_state[name] for name in ("fixed", "none")] == [None, None]
    second = step_of(first, x)
    third = step_of(second, x)
    again = step_of(step_of(fs.TrainState.create(make_params(one_axis()), SGD), x, donate), x, donate)
    assert_same_bits(fs.tree_leaves(again), fs.tree_leaves(third))
    assert not fs.unshard(second.transform_state)["w"].equal(fs.unshard(third.transform_state)["w"])
    # Where update is given none, the state stays what it was.
    kept = fs.update(SGD, second, fs.tree_map(torch.zeros_like, trained(second.params)))
    assert_same_bits(fs.tree_leaves(kept.transform_state), fs.tree_leaves(second.transform_state))


def trained(params):
    return {**params, "fixed": None}


@pytest.mark.rows(1)
@on_ranks(2, 4)
def test_it_survives_a_round_trip_and_training_goes_on_with_the_same_bits(world_size):
    """To full tensors and back, on one axis and on two, and through a file."""
    mesh, (x,) = two_axes(world_size), microbatches(1)
    inner = fs.quantize(mesh["shard"], gather=False, scatter=True, block=4)
    outer = fs.quantize(mesh["replicate"], gather=False, scatter=True, block=4)
    for transform in (inner, fs.compose(fs.replicate(mesh["replicate"]), inner), fs.compose(outer, inner)):
        params = fs.shard(full_params(), transform, frozen=lambda path: "fixed" in path)
        state = step_of(fs.TrainState.create(params, SGD), x)
        rows, whole = state.transform_state, fs.unshard(state.transform_state)
        pairs = zip(sharded_leaves(rows), fs.tree_leaves(whole), strict=True)
        for row, full in pairs:
            assert full.shape[0] == row.spec.shape[0]
            assert_same_bits(local_piece(full, row.spec), row.local)
        file = io.BytesIO()
        torch.save(fs.tree_leaves(state), file)
        file.seek(0)
        loaded = fs.tree_map(partial(next_of, iter(torch.load(file))), state)
        assert_same_bits(fs.tree_leaves(step_of(loaded, x)), fs.tree_leaves(step_of(state, x)))


def next_of(leaves, _):
    return next(leaves)


def sharded_leaves(tree):
    if isinstance(tree, fs.Sharded):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    # In the order of tree_leaves, which sorts keys.
    children = [tree[key] for key in sorted(tree)] if isinstance(tree, dict) else children
    return [leaf for child in children for leaf in sharded_leaves(child)]


@on_ranks(2)
def test_without_a_stateful_transform_there_is_none():
    for transform in (fs.zero2(one_axis()), fs.quantize(one_axis(), scatter=True, error_feedback=False)):
        params, (x,) = fs.shard({"w": normal()(5, 3), "b": [normal()(3)]}, transform), microbatches(1)
        assert fs.transform_state(params) is None
        value, grads, state = fs.value_and_grad(loss, transform_state=None)(params, x)
        assert state is None
        assert_same_bits(fs.tree_leaves((value, grads)), fs.tree_leaves(fs.value_and_grad(loss)(params, x)))
        found, state = fs.scatter_grads(fs.gather(params), like=params, transform_state=None)
        assert state is None
        assert_same_bits(fs.tree_leaves(found), fs.tree_leaves(fs.scatter_grads(fs.gather(params), like=params)))


@on_ranks("2 processes")
def test_processes():
    (x,) = microbatches(1)
    state = fs.TrainState.create(make_params(one_axis()), SGD)
    for _ in range(3):
        state = step_of(state, x)
    return every_bit(fs.unshard(state))


@on_ranks(2)
def test_a_module_trains_with_it_by_units():
    """Two steps, each rank's own batch; the tree of a model's parameters is that of its state."""
    model = fs.functionalize(filled(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))), nn.Linear)
    layout = fs.quantize(one_axis(), scatter=True, block=4)
    state = fs.TrainState.create(model.init(fs.zero3(one_axis(), layout=layout, merge_bytes=0)), SGD)
    assert list(state.transform_state) == list(state.params)
    (x,), last = microbatches(1), None
    for _ in range(2):
        run = fs.value_and_grad(lambda p: model.apply(p, x).square().mean(), transform_state=state.transform_state)
        value, grads, after = run(state.params)
        state = fs.update(SGD, state, grads, transform_state=after)
        assert last is None or value < last
        last = value


class Made:
    """What bad calls are made with, on one rank."""

    def __init__(self, mesh):
        self.params, (self.x,) = make_params(mesh), microbatches(1)
        self.state = fs.transform_state(self.params)
        self.like = {name: self.params[name] for name in ("w", "b")}
        self.full = {"w": normal()(5, 3), "b": [normal()(3)], "fixed": None, "none": None}


REMEDY = "pass transform_state=, first as fs.transform_state(params) makes it, then as this verb returns it"
NEEDED = "leaves that are Sharded over ['shard'], a row for each rank"


OWN = "expected leaves that have a transform, got state of a transform, this rank's own"


def missing(verb):
    lines = (f"  ['{name}']: expected that of its transform, got no state" for name in ("b'][0", "w"))
    return "\n".join([f"{verb}: transforms need their state", *lines]).replace("0']", "0]") + f"\nTo fix: {REMEDY}."


def unfit(verb, *lines):
    return "\n".join([f"{verb}: transform_state does not fit the parameters", *lines, f"To fix: {REMEDY}."])


def scatter(made, state):
    return fs.scatter_grads(made.full, like=made.params, transform_state=state)


def differentiate(made, state):
    return fs.value_and_grad(loss, transform_state=state)(made.params, made.x)


def derived(made):
    def merging(params, x):
        w = fs.Sharded(params["w"].local * 2, params["w"].spec)
        return loss({**params, "w": w}, x)

    return fs.value_and_grad(merging, transform_state=made.state)(made.params, made.x)


def row(name, call, error, issued=()):
    return Row(name, lambda world: (Made(world.mesh),), call, error, issued)


BAD = [
    row("value_and_grad without", lambda m: fs.value_and_grad(loss)(m.params, m.x), missing("value_and_grad")),
    row("value_and_grad with None", lambda m: differentiate(m, None), missing("value_and_grad")),
    row("accumulate without", lambda m: fs.accumulate(loss)(m.params, [m.x]), missing("accumulate")),
    row("scatter_grads without", lambda m: fs.scatter_grads(m.full, like=m.params), missing("scatter_grads")),
    row("scatter_grads with None", lambda m: scatter(m, None), missing("scatter_grads")),
    row(
        "another structure",
        lambda m: scatter(m, {"w": m.state["w"]}),
        f"scatter_grads: expected transform_state to have the structure of the parameters, got leaves ['w']; {REMEDY}",
    ),
    row(
        "a number",
        lambda m: differentiate(m, 0.0),
        "value_and_grad: expected transform_state to have the structure of the parameters, got leaves (root); "
        f"{REMEDY}",
    ),
    row(
        "None for one leaf",
        lambda m: differentiate(m, m.state | {"w": None}),
        unfit("value_and_grad", f"  ['w']: expected {NEEDED}, got None"),
    ),
    row(
        "full rows",
        lambda m: scatter(m, m.state | {"w": torch.zeros(2, 3, 3)}),
        unfit("scatter_grads", f"  ['w']: expected {NEEDED}, got a float32 Tensor of shape (2, 3, 3)"),
    ),
    row(
        "rows of another leaf",
        lambda m: scatter(m, m.state | {"w": m.state["b"][0]}),
        unfit("scatter_grads", "  ['w']: expected rows of shape (2, 3, 3), got rows of shape (2, 2)"),
    ),
    row(
        "a tuple of rows",
        lambda m: scatter(m, m.state | {"w": (m.state["w"],)}),
        unfit("scatter_grads", f"  ['w']: expected {NEEDED}, got a tuple"),
    ),
    row(
        "a state for a frozen leaf",
        lambda m: scatter(m, m.state | {"fixed": m.state["w"]}),
        unfit("scatter_grads", "  ['fixed']: expected None, because its transform has no state, got a Sharded leaf"),
    ),
    Row(
        "a state where none is needed",
        lambda world: (world.full_grads, world.params),
        lambda grads, like: fs.scatter_grads(grads, like=like, transform_state=fs.tree_map(torch.clone, like)),
        unfit(
            "scatter_grads",
            "  ['a']: expected None, because its transform has no state, got a Sharded leaf",
            "  ['b'][0]: expected None, because its transform has no state, got a Sharded leaf",
        ),
    ),
    row(
        "a derived leaf",
        derived,
        "scatter: QuantizeWithFeedback has a state, which autograd cannot carry through fs.gather; differentiate at "
        "gathered parameters and call fs.scatter_grads with transform_state=, or use fs.value_and_grad",
    ),
    row(
        "torch.func.grad through gather",
        lambda m: torch.func.grad(loss)({name: m.params[name] for name in ("w", "b")}, m.x),
        "scatter: QuantizeWithFeedback has a state, which autograd cannot carry through fs.gather; differentiate at "
        "gathered parameters and call fs.scatter_grads with transform_state=, or use fs.value_and_grad",
        ("gather",),
    ),
    row(
        "value_and_grad within torch.func.grad",
        lambda m: torch.func.grad(lambda p: differentiate_at(p, m))({name: m.params[name] for name in ("w", "b")}),
        "scatter: QuantizeWithFeedback has a state, which autograd cannot carry through fs.gather; differentiate at "
        "gathered parameters and call fs.scatter_grads with transform_state=, or use fs.value_and_grad",
        ("gather",),
    ),
    row(
        "reshard of a TrainState",
        lambda m: fs.reshard(fs.TrainState.create(m.params, SGD), m.params["w"].spec.transform),
        "reshard: leaves belong to their ranks\n  .transform_state['b'][0]: "
        + OWN
        + "\n  .transform_state['w']: "
        + OWN
        + "\nTo fix: reshard without it, and make it anew by fs.transform_state.",
    ),
]


def differentiate_at(params, made):
    state = {name: made.state[name] for name in ("w", "b")}
    return fs.value_and_grad(loss, transform_state=state)(params, made.x)[0]


def test_bad_input_is_refused():
    assert_all_refused(BAD)


# Error feedback: what quantize leaves out of sums is explicit state, and no part of gradients is lost.
def residual(state, params, world_size, axis="shard"):
    """What all ranks together have not sent yet, in full tensors."""
    whole = fs.unshard(state)
    out = {}
    for name, param in params.items():
        (rows,) = fs.tree_leaves(whole[name])
        rows = rows.sum(0)
        out[name] = joined(list(rows), torch.zeros(param.spec.shape, dtype=rows.dtype))
    return out


STEPS = 5


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    "world_size, dtype", [*((size, torch.float64) for size in WORLD_SIZES[1:]), (3, torch.float32)]
)
@on_ranks()
def test_what_is_applied_and_what_is_left_are_all_gradients(world_size, dtype):
    """Over steps, to the rounding of sums; without feedback what is applied is far from them."""
    params = fs.shard(full_tree(dtype), fs.quantize(one_axis(), scatter=True, block=16))
    plain = fs.quantize(one_axis(), scatter=True, block=16, error_feedback=False)
    state, like = fs.transform_state(params), fs.reshard(params, plain)
    applied = lossy = fs.tree_map(torch.zeros_like, full_tree(dtype))
    true, magnitude = applied, applied
    for step in range(STEPS):
        local = grads_of(step, my_rank(), dtype)
        with unchanged(params, state, local):
            grads, new = fs.scatter_grads(local, like=params, reduce="sum", transform_state=state)
            again, same = fs.scatter_grads(local, like=params, reduce="sum", transform_state=state)
        assert_same_bits(fs.tree_leaves((grads, new)), fs.tree_leaves((again, same)))
        state = new
        applied = fs.tree_map(torch.add, applied, fs.unshard(grads))
        lossy = fs.tree_map(torch.add, lossy, fs.unshard(fs.scatter_grads(local, like=like, reduce="sum")))
        for rank in range(world_size):
            grad = grads_of(step, rank, dtype)
            true = fs.tree_map(torch.add, true, grad)
            magnitude = fs.tree_map(lambda m, g: m + g.abs().max() if g.numel() else m, magnitude, grad)
    left = residual(state, params, world_size)
    for name in true:
        # Each step adds, subtracts and sums a few numbers for each rank, none above the magnitudes so far.
        tolerance = 8 * STEPS * world_size * torch.finfo(dtype).eps * magnitude[name]
        assert ((applied[name] + left[name] - true[name]).abs() <= tolerance).all()
    apart = [(lossy[name] - true[name]).abs().max() for name in ("matrix", "vector")]
    assert min(apart) > 1e-3


@on_ranks(2)
def test_gradients_in_bfloat16_leave_a_residual_in_the_stored_dtype():
    """Which rounding to bfloat16 would lose again: what is left is far below a step of the numbers it is left from."""
    layout = fs.quantize(one_axis(), scatter=True, block=16)
    params = fs.shard(full_tree(torch.float32), fs.compose(layout, fs.cast(scatter=torch.bfloat16)))
    state, total = fs.transform_state(params), 0.0
    true = 0.0
    for step in range(20):
        local = {name: g.bfloat16() for name, g in grads_of(step, my_rank(), torch.float32).items()}
        grads, state = fs.scatter_grads(local, like=params, reduce="sum", transform_state=state)
        total = total + fs.unshard(grads)["matrix"]
        true = true + sum(grads_of(step, r, torch.float32)["matrix"].bfloat16().float() for r in range(2))
    assert {row.dtype for row in fs.tree_leaves(state)} == {torch.float32}
    left = residual(state, params, 2)["matrix"]
    tops = max(grads_of(s, r)["matrix"].abs().max() for s in range(20) for r in range(2))
    tolerance = 8 * 20 * 2 * torch.finfo(torch.float32).eps * tops * 2
    assert ((total + left - true).abs() <= tolerance).all()


@pytest.mark.rows(1)
@on_ranks(*WORLD_SIZES[:-1])
def test_the_engine_and_the_verbs_make_the_same_gradients_and_states(world_size):
    """Of every kind of leaf, step by step."""
    # Multiples of parameters that were rounded themselves would lose nothing.
    layout = fs.quantize(one_axis(), gather=False, scatter=True, block=4)
    for transform in (layout, fs.zero3(one_axis(), layout=layout, merge_bytes=0)):
        params = shard_kinds(transform)
        states = [fs.transform_state(params)] * 2
        assert states[0]["fixed"] is None
        assert states[0]["int"] is None
        assert (states[0]["float32"] is None) == (world_size == 1)

        def loss(p):
            full = fs.gather(p)
            trained = [leaf.abs().double() for name, leaf in full.items() if name not in FROZEN]
            return sum((x**2).sum() for x in trained) * (my_rank() + 1)

        for _ in range(3):
            with unchanged(params, states):
                _, found, engine = fs.value_and_grad(loss, transform_state=states[0])(params)
                full = {name: leaf for name, leaf in fs.gather(params).items() if name not in FROZEN}
                local = {**torch.func.grad(loss)(full), **dict.fromkeys(FROZEN)}
                expected, verbs = fs.scatter_grads(local, like=params, transform_state=states[1])
            assert_same_bits(fs.tree_leaves(found), fs.tree_leaves(expected))
            assert_same_bits(fs.tree_leaves(engine), fs.tree_leaves(verbs))
            assert world_size == 1 or any(row.any() for row in fs.tree_leaves(engine))
            states = [engine, verbs]


@on_ranks(4)
def test_each_ranks_rows_are_its_own_and_as_large_as_full_gradients():
    mesh = two_axes(4)
    inner = fs.quantize(mesh["shard"], scatter=True, block=4)
    params = shard_kinds(fs.compose(fs.replicate(mesh["replicate"]), inner))
    state = fs.transform_state(params)
    for name in ("float32", "bfloat16", "scalar", "cube"):
        (_, row), spec = state[name], params[name].spec
        shard = fs.axis_of(mesh, "shard")
        shape = (2, *pieces(every_kind()[name], 2)[0].shape)
        assert (row.local.shape, row.spec.shape) == ((1, *shape), (4, *shape))
        assert row.local.dtype == params[name].local.dtype
        assert row.spec.partition == fs.P(tuple(axis.name for axis in spec.axes))
        assert shard in row.spec.axes


@on_ranks(4)
def test_leaves_that_other_stages_have_made_small_keep_their_feedback():
    """Whether a leaf stays whole goes by its global size: 64 elements here, of which a rank gathers 32."""
    mesh = grid(4)
    rough = fs.quantize(mesh["shard"], scatter=True, block=4, min_shard_elements=40)
    halves = fs.compose(rough, fs.masked(fs.split_dim(mesh["tp"], dim=1), "w"))
    params = fs.shard({"w": normal()(8, 8), "b": normal()(3)}, halves)
    state, rank = fs.transform_state(params), fs.comm.rank(fs.axis_of(mesh, "shard"))
    assert math.prod(params["w"].spec.gathered_shape) == 32
    local = {"w": normal(rank)(8, 4), "b": normal(rank)(3)}
    grads, after = fs.scatter_grads(local, like=params, reduce="sum", transform_state=state)
    sums = sum(joined([rounded(p, 4) for p in pieces(normal(r)(8, 4), 2)], local["w"]) for r in range(2))
    assert_same_bits(fs.unshard(grads)["w"][:, :4], sums)
    assert fs.tree_leaves(after["w"])[0].any()
    assert_same_bits(fs.unshard(grads)["b"], normal(0)(3) + normal(1)(3))
    assert not fs.tree_leaves(after["b"])[0].any()


@pytest.mark.parametrize("feedback", (True, False))
@on_ranks(2)
def test_a_small_signal_next_to_large_noise_arrives_with_feedback_alone(feedback):
    """Ranks' large gradients cancel; the small one is below half a step of them, and is always rounded away.

    A step of the noise is 1000 / 127 on each rank, of which half a one, twice, is all that the state ever keeps back.
    """
    rate, target, steps = 0.05, 3.0, 100
    layout = fs.quantize(one_axis(), gather=False, scatter=True, error_feedback=feedback)
    tx = fs.from_torch(torch.optim.SGD, lr=rate)
    state = fs.TrainState.create(fs.shard({"w": torch.zeros(4)}, layout), tx)
    noise = torch.tensor([1000.0, 0.0, 1000.0, 0.0]) * (1 - 2 * my_rank())

    def loss(p):
        w = fs.gather(p)["w"]
        return (w * noise).sum() + (w[1::2] - target).square().sum() / 2

    for _ in range(steps):
        if feedback:
            _, grads, after = fs.value_and_grad(loss, transform_state=state.transform_state)(state.params)
            state = fs.update(tx, state, grads, transform_state=after)
        else:
            _, grads = fs.value_and_grad(loss)(state.params)
            state = fs.update(tx, state, grads)
    w = fs.unshard(state.params)["w"]
    assert_trees_close(w[::2], torch.zeros(2), rtol=0, atol=rate * 1000 / 127)
    if feedback:
        # What was not applied is in the state, at most half a step, and gradients are taken that far away; on top comes
        # what is left to go.
        apart = rate * 1000 / 127 + target * (1 - rate) ** steps
        assert_trees_close(w[1::2], torch.full((2,), target), rtol=0, atol=apart)
    else:
        assert not w[1::2].any()
