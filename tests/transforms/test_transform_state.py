"""The state of transforms: threaded through the verbs, kept and moved, and what cannot carry one."""

import pytest
import torch

import fshard as fs
from fshard.shard import local_piece
from fshard.tree import flatten, is_sharded
from tests.bad_input import Row, assert_all_refused
from tests.ranks import my_rank, on_ranks
from tests.test_law_purity import unchanged
from tests.transforms.feedback import feedback
from tests.transforms.laws import FROZEN, SGD, shard_kinds, squares
from tests.trees import WORLD_SIZES, assert_same_bits, normal, one_axis, two_axes


def full_params():
    draw = normal()
    return {"w": draw(5, 3), "b": [draw(3)], "fixed": draw(2), "none": None}


def make_params(make, mesh):
    return fs.shard(full_params(), make(mesh), frozen="*fixed*")


def loss(params, x):
    full = fs.gather(params)
    return torch.tanh(x @ full["w"] + full["b"][0]).square().sum()


def microbatches(count):
    draw = normal(my_rank() + 1)
    return [draw(4, 5) for _ in range(count)]


NOT_TRAINED = {"fixed": None, "none": None}


def added(trees):
    total, *others = trees
    for tree in others:
        total = fs.tree_map(torch.add, total, tree)
    return total


def assert_same_leaves(actual, expected):
    assert_same_bits(fs.tree_leaves(actual), fs.tree_leaves(expected))


def check_accumulate_hands_the_state_from_microbatch_to_microbatch(make):
    params, batches = make_params(make, one_axis()), microbatches(3)
    state = fs.transform_state(params)
    with unchanged(params, state):
        _, grads, after = fs.accumulate(loss, reduce="sum", communicate="each", transform_state=state)(params, batches)
    parts, last = [], state
    for batch in batches:
        _, part, last = fs.value_and_grad(loss, reduce="sum", transform_state=last)(params, batch)
        parts.append(part)
    assert_same_leaves((grads, after), (added(parts), last))
    _, grads, after = fs.accumulate(loss, reduce="sum", communicate="once", transform_state=state)(params, batches)
    full = fs.gather(params)
    trained = {name: full[name] for name in ("w", "b")}
    local = added([torch.func.grad(loss)(trained, batch) for batch in batches])
    expected = fs.scatter_grads(local | NOT_TRAINED, like=params, reduce="sum", transform_state=state)
    assert_same_leaves((grads, after), expected)


@pytest.mark.rows(1)
@on_ranks(1, 2, 3)
def test_accumulate_hands_the_state_from_microbatch_to_microbatch():
    check_accumulate_hands_the_state_from_microbatch_to_microbatch(feedback)


def step_of(state, x, donate=False):
    _, grads, after = fs.value_and_grad(loss, transform_state=state.transform_state)(state.params, x)
    return fs.update(SGD, state, grads, donate=donate, transform_state=after)


def check_a_train_state_holds_it(make, donate):
    (x,) = microbatches(1)
    first, other = (fs.TrainState.create(make_params(make, one_axis()), SGD) for _ in range(2))
    assert_same_leaves(first.transform_state, fs.transform_state(first.params))
    assert not any(row.any() for row in fs.tree_leaves(first.transform_state))
    assert [first.transform_state[name] for name in ("fixed", "none")] == [None, None]
    second = step_of(first, x)
    third = step_of(second, x)
    assert_same_leaves(step_of(step_of(other, x, donate), x, donate), third)
    assert not fs.unshard(second.transform_state)["w"].equal(fs.unshard(third.transform_state)["w"])
    # Where update is given none, the state stays what it was.
    kept = fs.update(SGD, second, fs.tree_map(torch.zeros_like, {**second.params, "fixed": None}))
    assert_same_leaves(kept.transform_state, second.transform_state)


@on_ranks(2)
def test_a_train_state_holds_it():
    check_a_train_state_holds_it(feedback, donate=False)
    check_a_train_state_holds_it(feedback, donate=True)


def check_each_rank_has_its_piece_of_the_full_state(make, world_size):
    mesh, (x,) = two_axes(world_size), microbatches(1)
    inner, outer = make(mesh["shard"]), make(mesh["replicate"])
    for transform in (inner, fs.compose(fs.replicate(mesh["replicate"]), inner), fs.compose(outer, inner)):
        params = fs.shard(full_params(), transform, frozen="*fixed*")
        state = step_of(fs.TrainState.create(params, SGD), x)
        rows = filter(is_sharded, flatten(state.transform_state).leaves)
        for row, full in zip(rows, fs.tree_leaves(fs.unshard(state.transform_state)), strict=True):
            assert full.shape[0] == row.spec.shape[0]
            assert_same_bits(local_piece(full, row.spec), row.local)


@on_ranks(4)
def test_each_rank_has_its_piece_of_the_full_state(world_size):
    """On one axis and on two."""
    check_each_rank_has_its_piece_of_the_full_state(feedback, world_size)


@on_ranks(2)
def test_without_a_stateful_transform_there_is_none():
    params, (x,) = fs.shard({"w": normal()(5, 3), "b": [normal()(3)]}, fs.zero2(one_axis())), microbatches(1)
    assert fs.transform_state(params) is None
    *results, state = fs.value_and_grad(loss, transform_state=None)(params, x)
    assert state is None
    assert_same_leaves(results, fs.value_and_grad(loss)(params, x))
    assert fs.scatter_grads(fs.gather(params), like=params, transform_state=None)[1] is None


def full_grads():
    return {"w": normal()(5, 3), "b": [normal()(3)], **NOT_TRAINED}


def scatter_without_a_state(params):
    return fs.scatter_grads(full_grads(), like=params)


def scatter_with_a_state_for_a_frozen_leaf(params):
    state = fs.transform_state(params)
    return fs.scatter_grads(full_grads(), like=params, transform_state=state | {"fixed": state["w"]})


def differentiate_by_a_derived_leaf(params):
    (x,) = microbatches(1)
    doubled = lambda p, x: loss({**p, "w": fs.tree_map(lambda w: w * 2, p["w"])}, x)  # noqa: E731
    return fs.value_and_grad(doubled, transform_state=fs.transform_state(params))(params, x)


def reshard_a_train_state(params):
    return fs.reshard(fs.TrainState.create(params, SGD), params["w"].spec.transform)


REMEDY = (
    "pass transform_state=fs.transform_state(params) in the first step, and the state that the previous call returned "
    "afterwards"
)
STAYS = "expected parameters or the state of an optimizer, got the state of a transform, which cannot be resharded"
CARRIED = (
    "fs.gather: this strategy keeps a state between steps, which autograd cannot pass on. Use fs.value_and_grad "
    "outside of vmap and of other derivatives, or differentiate by gathered parameters and call "
    "fs.scatter_grads(..., transform_state=...)."
)


class CountsInPython(fs.Wrapped):
    def init(self, grad):
        return {"left": torch.zeros_like(grad), "calls": 0}

    def scatter(self, grads, specs, states):
        return self.inner.scatter(grads, specs), states


def unfit(verb, *lines):
    return "\n".join([f"{verb}: transform_state does not fit the parameters", *lines, f"To fix: {REMEDY}."])


def bad_rows(make, w, b):
    """Bad calls with a transform, whose states of the leaves w and b have these shapes."""
    of_w, of_b = (f"rows of {(2, *shape)} split by P('shard')" for shape in (w, b))
    errors = {
        scatter_without_a_state: unfit(
            "scatter_grads", f"  ['b'][0]: expected {of_b}, got None", f"  ['w']: expected {of_w}, got None"
        ),
        scatter_with_a_state_for_a_frozen_leaf: unfit("scatter_grads", f"  ['fixed']: expected None, got {of_w}"),
        differentiate_by_a_derived_leaf: CARRIED,
        reshard_a_train_state: (
            f"reshard: leaves do not fit\n  .transform_state['b'][0]: {STAYS}\n  .transform_state['w']: {STAYS}\n"
            "To fix: leave the state of a transform out, and call fs.transform_state on the resharded parameters."
        ),
    }
    arguments = lambda world: (make_params(make, world.mesh),)  # noqa: E731
    return [Row(call.__name__, arguments, call, error) for call, error in errors.items()]


def test_bad_input_is_refused():
    number = Row(
        "a state with a number",
        lambda world: (make_params(lambda mesh: CountsInPython(fs.fully_shard(mesh)), world.mesh),),
        fs.transform_state,
        "CountsInPython: expected tensors in the states of init and scatter, got an int",
    )
    assert_all_refused([*bad_rows(feedback, (5, 3), (3,)), number])


def check_the_engine_and_the_verbs_make_the_same_gradients_and_states(layout, stateless=False):
    """Of every kind of leaf, step by step; or a layout whose scatter needs no state."""
    for transform in (layout, fs.zero3(one_axis(), layout=layout, bucket_bytes=0)):
        params = shard_kinds(transform)
        states = [fs.transform_state(params)] * 2
        assert [states[0][name] is None for name in (*FROZEN, "float32")] == [True, True, stateless]
        for _ in range(3):
            with unchanged(params, states):
                _, grads, engine = fs.value_and_grad(squares, transform_state=states[0])(params)
                full = {name: leaf for name, leaf in fs.gather(params).items() if name not in FROZEN}
                local = {**torch.func.grad(squares)(full), **dict.fromkeys(FROZEN)}
                expected, verbs = fs.scatter_grads(local, like=params, transform_state=states[1])
            assert_same_leaves((grads, engine), (expected, verbs))
            assert stateless or any(row.any() for row in fs.tree_leaves(engine))
            states = [engine, verbs]


@pytest.mark.rows(1)
@on_ranks(*WORLD_SIZES[:-1])
def test_the_engine_and_the_verbs_make_the_same_gradients_and_states():
    check_the_engine_and_the_verbs_make_the_same_gradients_and_states(feedback(one_axis()))
