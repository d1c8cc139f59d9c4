"""Laws 4 and 9: nothing changes its inputs, steps repeat their bits, and what is kept of a state outlives donation."""

from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch.func import grad

import fshard as fs
from fshard import _compat
from fshard.testing import assert_trees_close
from tests.ranks import BrokenError, my_rank, on_ranks
from tests.tolerance import within
from tests.trees import CASTS, STRATEGIES, as_bytes, assert_same_bits, assorted, meshes, normal, one_axis, tensors

WORLD_SIZES = (1, 2, 3)
ALL_STRATEGIES = STRATEGIES | CASTS

TX = fs.chain(fs.clip_by_global_norm(0.1), fs.from_torch(torch.optim.AdamW, lr=0.1, weight_decay=0.1))


@contextmanager
def unchanged(*trees):
    """Assert that no tensor of some trees was written to: not one bit differs, and no write was counted."""
    before = [(tensor, as_bytes(tensor), _compat.version(tensor)) for tensor in tensors(trees)]
    assert before
    yield
    for tensor, bits, version in before:
        assert as_bytes(tensor).equal(bits)
        assert _compat.version(tensor) == version


class Given(NamedTuple):
    """What verbs are called with on one rank."""

    full: Any
    state: fs.TrainState
    batch: torch.Tensor


def given(strategy):
    on, full = meshes(), assorted()
    params = fs.shard(full, ALL_STRATEGIES[strategy](on), frozen="*row*")
    state = fs.TrainState.create(params, TX, buffers={"mean": normal(1)(3)}, key=torch.arange(2))
    batch = normal(2 + fs.comm.rank(fs.axis_of(on.line)))(4, 5)
    # The second step's state has moments that are not zero.
    return Given(full, train_step(state, batch)[0], batch)


def loss_fn(params, batch):
    full = fs.gather(params)
    return torch.tanh(batch.to(full["w"].dtype) @ full["w"] * full["scalar"]).sum() + full["row"].sum()


def train_step(state, batch):
    loss, grads = fs.value_and_grad(loss_fn)(state.params, batch)
    return fs.update(TX, state, grads), loss


def four_verbs(g):
    full = fs.gather(g.state.params)
    nothing = {"nothing": full.pop("nothing")}
    grads = grad(lambda p: loss_fn(p, g.batch))(full)
    return fs.update(TX, g.state, fs.scatter_grads(grads | nothing, like=g.state.params))


def reduced_by(collective):
    return lambda g: collective(fs.tree_leaves(g.state.params), fs.axis_of(one_axis()))


# Each is called with what `given` returns and calls one verb, or a few together.
VERBS = {
    "shard": lambda g: fs.shard(g.full, g.state.params["w"].spec.transform),
    "unshard": lambda g: fs.unshard(g.state),
    "reshard": lambda g: fs.reshard(g.state, fs.zero2(one_axis(), min_shard_elements=0)),
    "gather": lambda g: fs.gather(g.state.params),
    "objective": lambda g: fs.objective(g.batch.sum(), like=g.state.params),
    "value_and_grad": lambda g: fs.value_and_grad(loss_fn)(g.state.params, g.batch),
    "psum": reduced_by(fs.psum),
    "pmean": reduced_by(fs.pmean),
    "psum_invariant": reduced_by(fs.psum_invariant),
    "pcast": reduced_by(partial(fs.pcast, to="varying")),
    "all_gather": lambda g: fs.all_gather(g.batch, fs.axis_of(one_axis())),
    "reduce_scatter": lambda g: fs.reduce_scatter(g.batch.expand(6, 4, 5), fs.axis_of(one_axis())),
    "sync_buffers": lambda g: fs.sync_buffers(g.state.buffers, like=g.state.params, by="mean"),
    "train_step": lambda g: train_step(g.state, g.batch),
    "four verbs": four_verbs,
}

# Strategies that are tried with all verbs, and the verbs that are tried with all strategies.
IN_FULL = ("zero2 of every leaf", "hsdp")
MOST = ("shard", "unshard", "train_step", "four verbs")


@pytest.mark.rows(1)
@on_ranks(*WORLD_SIZES)
def test_verbs_leave_their_inputs_alone_and_repeat_their_bits():
    for strategy in ALL_STRATEGIES:
        g = given(strategy)
        for name in VERBS if strategy in IN_FULL else MOST:
            verb = VERBS[name]
            with unchanged(g):
                first = verb(g)
                assert_same_bits(fs.tree_leaves(verb(g)), fs.tree_leaves(first))


def fail(*_):
    raise BrokenError


def fails_in_backward(state, batch):
    def loss(params):
        value = loss_fn(params, batch)
        value.register_hook(fail)
        return value

    fs.value_and_grad(loss)(state.params)


def fails_in_a_later_gradient_transformation(state, batch):
    late = fs.chain(fs.clip_by_global_norm(0.1), fs.GradientTransformation(lambda params: (), fail), TX)
    _, grads = fs.value_and_grad(loss_fn)(state.params, batch)
    fs.update(late, state._replace(opt_state=((), (), state.opt_state)), grads)


@pytest.mark.rows(1)
@on_ranks(2, 3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_is_whole_after_an_exception(strategy):
    """No bit of it differs, and the next step is the one that would have been made without the exception."""
    g = given(strategy)
    expected = train_step(g.state, g.batch)
    for step in (fails_in_backward, fails_in_a_later_gradient_transformation):
        with unchanged(g):
            with pytest.raises(BrokenError):
                step(g.state, g.batch)
            assert_same_bits(fs.unshard(train_step(g.state, g.batch)), fs.unshard(expected))


ADAMW = fs.from_torch(torch.optim.AdamW, lr=0.1, fused=True)


def started(strategy):
    full = {"w": normal()(6, 4), "b": normal(1)(4), "frozen": normal(2)(3), "scalar": normal(3)()}
    return fs.TrainState.create(fs.shard(full, strategy(meshes().line), frozen="*frozen*"), ADAMW)


def predict(full, x):
    return torch.tanh(x @ full["w"] + full["b"]) * full["scalar"] + full["frozen"].sum()


def distil(params, teacher, x):
    return (predict(fs.gather(params), x) - predict(teacher, x)).square().sum()


def step_of(form):
    def step(state, teacher, x):
        value, grads = fs.value_and_grad(distil)(state.params, teacher, x)
        return fs.update(ADAMW, state, grads, donate=form == "donated"), value

    return fs.jit(step, donate_argnums=0) if form == "jitted, donated" else step


def kept_of(state):
    """All that a program could keep: values that were gathered, and views of them."""
    gathered = fs.gather(state.params)
    # Leaves that are plain tensors are the state itself.
    slots = [leaf for leaf in fs.tree_leaves(fs.unshard(state.opt_state)) if leaf.dim()]
    return gathered, fs.unshard(state.params), slots, {"row": gathered["w"][0], "conjugate": gathered["b"].conj()}


def train_towards_snapshots(strategy, form):
    """Train towards a snapshot of the parameters, another one taken in the middle; what was kept has its bits."""
    state, step, kept, copies, values = started(strategy), step_of(form), [], [], []
    for n in range(3):
        if n in (0, 2):
            kept.append(kept_of(state))
            copies.append(fs.tree_map(torch.clone, kept[-1]))
        teacher = kept[-1][0]
        state, value = step(state, teacher, normal(7 + my_rank())(5, 6))
        values.append(value)
    assert_same_bits(fs.tree_leaves(kept), fs.tree_leaves(copies))
    return fs.tree_leaves((fs.unshard(state), values))


@on_ranks(2)
def test_what_was_kept_has_its_bits_after_donated_steps():
    """As in a program that donates nothing."""
    for strategy in (fs.ddp, fs.zero1, fs.zero3):
        expected = train_towards_snapshots(strategy, "kept")
        for form in ("donated", "jitted, donated"):
            assert_same_bits(train_towards_snapshots(strategy, form), expected)


def places(state):
    return [tensor.data_ptr() for tensor in fs.tree_leaves((state.params, state.opt_state.slots)) if tensor.dim()]


@on_ranks(2)
def test_a_state_that_nobody_shares_stays_where_it_is():
    """A copy is made once, while somebody shares it, and of no other leaf under jit."""
    for form, strategy in product(("donated", "jitted, donated"), (fs.ddp, fs.zero3)):
        state, step, x = started(strategy), step_of(form), normal(7)(5, 6)
        teacher, before = fs.tree_map(torch.clone, fs.gather(state.params)), places(state)
        for _ in range(2):
            state, _ = step(state, teacher, x)
        assert places(state) == before
        kept = fs.gather({"w": state.params["w"]})["w"]
        copy, is_shared = kept.clone(), kept.data_ptr() in before
        for _ in range(3):
            state, _ = step(state, teacher, x)
            assert sum(a != b for a, b in zip(places(state), before)) == is_shared
        assert kept.equal(copy)
        before = places(state)
        del kept
        state, _ = step(state, teacher, x)
        assert places(state) == before


@on_ranks(1, 2)
def test_full_tensors_of_a_call_now_over_are_refused_and_detached_ones_are_constants(world_size):
    x, earlier = normal(7)(5, 6), []

    def first(params):
        earlier.append(fs.gather(params))
        return (x @ earlier[-1]["w"] + earlier[-1]["b"]).square().sum()

    def second(params, kept):
        full = fs.tree_map(lambda a, b: a + 2 * b.sin(), fs.gather(params), kept)
        return (x @ full["w"] + full["b"]).square().sum()

    # Autograd comes to the leaves of one unit together, and otherwise to one of them first.
    text = (
        r"^{}: the loss uses full tensors of (\['b'\]|\['w'\]|\['b'\], \['w'\]) from an earlier call, "
        r"which no longer receive gradients\. Gather inside each call, or use full\.detach\(\) for a constant\."
    )
    for strategy in (fs.ddp, fs.zero1, fs.zero3):
        params = fs.shard({"w": normal()(6, 4), "b": normal(1)(4)}, strategy(one_axis()))
        fs.value_and_grad(first)(params)
        with pytest.raises(ValueError, match=text.format("value_and_grad")):
            fs.value_and_grad(second)(params, earlier[-1])
        with pytest.raises(ValueError, match=text.format("accumulate")):
            fs.accumulate(second)(params, [earlier[-1]])
        constants = fs.tree_map(torch.Tensor.detach, earlier[-1])
        value, _ = fs.value_and_grad(second)(params, constants)
        expected = second(fs.unshard(params), constants)
        # One term for each rank, of equal ones.
        assert_trees_close(value, expected, **within(expected, terms=world_size))
