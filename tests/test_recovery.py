"""States after a failure: a lost one is refused, and training goes on from the same step on all ranks."""

import collections
import gc
import os
import re
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import fshard as fs
from fshard import comm
from tests.faults import BadSampleError, Hook, axis_of_all, breaks, outcome, outcome_of
from tests.ranks import my_rank, on_ranks
from tests.trees import assert_same_bits

LAYERS = [f"w{n}" for n in range(6)]
ADAMW = fs.from_torch(torch.optim.AdamW, lr=0.1)
X = torch.ones(2, 4)
LOST = "was donated to an earlier call, so it is empty now"
RESTORE = "To fix: use what that call returned, or do not donate them. If it failed, restore the last checkpoint."
DIFFERENT_STEPS = "update: ranks hold states of different steps or optimizers"


def mesh_of(**sizes):
    return fs.init_mesh(sizes or {"shard": -1}, device="cpu", timeout=30.0)


def meet(axis):
    """Wait for all ranks; return how many came."""
    return fs.psum(torch.ones(()), axis).item()


def state_of(mesh, tx=ADAMW):
    full = {name: torch.full((4, 4), 0.1 * (n + 1)) for n, name in enumerate(LAYERS)}
    return fs.TrainState.create(fs.shard(full, fs.zero3(mesh, min_shard_elements=0, bucket_bytes=0)), tx)


def loss_fn(params, x):
    for n, name in enumerate(LAYERS):
        x = torch.tanh(x @ fs.gather({name: params[name]})[name])
        x = breaks(x, "forward") if n == 3 else x
    return x.square().mean()


def train_step(state, tx=ADAMW, donate=False):
    loss, grads = fs.value_and_grad(loss_fn)(state.params, X)
    return fs.update(tx, state, grads, donate=donate), loss


def updated(state, tx=ADAMW):
    """Update a state by gradients of ones."""
    return fs.update(tx, state, fs.tree_map(torch.ones_like, state.params))


def differentiate(state, reduce):
    return fs.value_and_grad(loss_fn, reduce=reduce)(state.params, X)


def breaks_at(place, error=BadSampleError):
    """Break one rank at a place."""

    def at(reached):
        if reached == place and my_rank() == 1:
            raise error("bad sample 17")

    return at


def check_every_leaf_is_refused(state):
    """Of the parameters by the next step, which says how to go on; and an update refuses the state."""
    headline, *lines, remedy = outcome(lambda: train_step(state)).text.splitlines()
    assert (headline, remedy) == ("value_and_grad: arguments were donated", RESTORE)
    assert [line.endswith(LOST) for line in lines] == [True] * len(LAYERS), lines
    grads = fs.tree_map(torch.ones_like, state_of(mesh_of()).params)
    text = outcome(lambda: fs.update(ADAMW, state, grads)).text
    assert text.startswith("update: arguments were donated\n"), text


@pytest.mark.parametrize("error", (BadSampleError, pytest.param(KeyboardInterrupt, marks=pytest.mark.slow)))
@on_ranks(2, pytest.param("2 processes", marks=pytest.mark.slow))
def test_a_donated_state_is_lost_on_all_ranks_where_a_jitted_step_fails_in_its_middle(error):
    """Leaves behind the one that failed were updated, on one rank more of them than on the other."""
    mesh, step = mesh_of(), fs.jit(train_step, donate_argnums=0)
    state, _ = step(state_of(mesh))
    failure = outcome_of(lambda _: step(state), fs.axis_of(mesh), breaks_at("backward", error))
    assert "bad sample 17" in failure.text, failure
    mesh = mesh_of()
    check_every_leaf_is_refused(state)
    # A state that was restored trains on.
    restored, _ = step(state_of(mesh))
    assert restored.step.item() == 1


def breaking(tx):
    """Make an optimizer whose update may break before it does anything."""

    def make(update):
        def run(grads, state, params):
            Hook.at("update")
            return update(grads, state, params)

        return run

    return tx._replace(update=make(tx.update), update_donated=make(tx.update_donated))


@pytest.mark.parametrize("error", (BadSampleError, pytest.param(KeyboardInterrupt, marks=pytest.mark.slow)))
@on_ranks(2, pytest.param("2 processes", marks=pytest.mark.slow))
def test_a_donated_state_is_lost_where_an_update_fails_in_its_middle(error):
    mesh, tx = mesh_of(), fs.partition({"w[012]": ADAMW, "*": breaking(ADAMW)})
    before = state_of(mesh, tx)
    state, _ = train_step(before, tx, donate=True)
    # A state is as lost whose successor was made.
    check_every_leaf_is_refused(before)
    failure = outcome_of(lambda _: train_step(state, tx, donate=True), fs.axis_of(mesh), breaks_at("update", error))
    assert failure.text == ("bad sample 17" if my_rank() else ""), failure
    check_every_leaf_is_refused(state)
    # So is what remains of it beside parameters that were restored.
    mixed = state_of(mesh_of(), tx)._replace(opt_state=state.opt_state)
    with pytest.raises(ValueError, match=r"^update: arguments were donated\n  \.opt_state\[0\]"):
        train_step(mixed, tx)


def test_an_update_that_is_refused_before_it_begins_leaves_a_donated_state_alone():
    state = state_of(mesh_of())
    with pytest.raises(ValueError, match="gradients do not fit"):
        fs.update(ADAMW, state, fs.tree_map(lambda leaf: leaf[:1], state.params), donate=True)
    train_step(state, donate=True)


def fail_in_the_update(mesh):
    """Take steps until one rank fails in its third update, where nothing is sent; return the states of each rank."""
    tx, states = breaking(ADAMW), [state_of(mesh)]
    for at in (lambda place: None, lambda place: None, breaks_at("update"), lambda place: None):
        failure = outcome_of(lambda _: states.append(train_step(states[-1], tx)[0]), mesh, at)
        if failure.error:
            break
    assert "bad sample 17" in failure.text, failure
    # The rank that failed has no successor; the others hear of it one step later.
    assert [state.step.item() for state in states] == ([0, 1, 2] if my_rank() == 1 else [0, 1, 2, 3])
    return states


@pytest.mark.rows(2)
@pytest.mark.parametrize("form", ("eager", "jitted"))
@on_ranks("2 processes", 3)
def test_states_of_different_steps_are_refused_by_the_first_update_on_a_new_mesh(form):
    """As after a failure in an update; from states of one step training goes on with the bits of a run without it."""
    mesh = mesh_of()
    states = fail_in_the_update(mesh)
    mesh_of()
    step, verb = (fs.jit(train_step), "jit") if form == "jitted" else (train_step, "update")
    for _ in range(2):
        assert outcome(lambda: step(states[-1])).text.splitlines() == [
            f"{verb}: ranks hold states of different steps or optimizers",
            "  state.step: expected 3 as on the rank at shard=0, got 2 on the rank at shard=1",
            "To fix: use the same optimizer on every rank, and take the state of the smaller step, which the others "
            "had before their last one, or restore the last checkpoint on every rank.",
        ]
    state, records = states[2], []
    for _ in range(2):
        with fs.comm.record() as record:
            state, _ = step(state)
        records.append(collections.Counter(record))
    # One message more, once.
    (more,) = (records[0] - records[1]).elements()
    assert (more.op, more.label, more.unit, more.about.parts) == ("all_gather", "agree", "step of states", "a digest")
    assert more.about.is_comparison
    assert not records[1] - records[0]
    expected = state_of(mesh)
    for _ in range(4):
        expected, _ = train_step(expected)
    assert_same_bits(fs.tree_leaves(state), fs.tree_leaves(expected))


@on_ranks("2 processes", 3)
def test_an_update_that_one_rank_makes_alone_on_a_new_mesh_is_named_as_another_call():
    """Not as states of other steps; and where the others fail before they compare, with their error."""
    lines = {
        "mean": "verb: expected update as on the rank at shard=0, got value_and_grad on the rank at shard=1",
        "max": "value_and_grad: reduce must be",
    }
    for reduce, line in lines.items():
        states = fail_in_the_update(mesh_of())
        mesh_of()
        program = partial(differentiate, states[2], reduce)
        if my_rank() == 0:
            program = partial(updated, states[2])
        text = outcome(program).text
        assert line in text
        assert text.startswith("update: ranks make different calls") == (my_rank() == 0 and reduce == "mean")


@on_ranks(2)
def test_each_of_several_states_is_compared_on_a_new_mesh():
    """As those of a generator and a discriminator, of which one was updated on all ranks."""
    states = fail_in_the_update(mesh_of())
    other = fs.TrainState.create(fs.shard({"other": torch.ones(4)}, fs.zero3(mesh_of())), ADAMW)
    assert updated(other).step.item() == 1
    refusal = outcome(lambda: train_step(states[-1]))
    assert refusal.text.startswith(f"{DIFFERENT_STEPS}\n"), refusal


@on_ranks(2)
def test_states_of_different_optimizers_are_refused_on_a_new_mesh():
    """Their counters are others, at the same step."""
    fail_in_the_update(mesh_of())
    tx = (ADAMW, fs.sgd(0.1))[my_rank()]
    refusal = outcome(lambda: updated(state_of(mesh_of(), tx), tx))
    assert refusal.text.startswith(f"{DIFFERENT_STEPS}\n  state.opt_state"), refusal
    assert "To fix: use the same optimizer on every rank, and" in refusal.text


@on_ranks(4)
def test_optimizers_on_ranks_that_own_different_pieces_may_count_differently():
    fail_in_the_update(mesh_of())
    mesh = mesh_of(shard=2, expert=2)
    strategy = fs.compose(fs.fully_shard(mesh["shard"]), fs.own_dim(mesh["expert"]))
    state = fs.TrainState.create(fs.shard({"w": torch.ones(4, 2)}, strategy), ADAMW)

    def update(step, updates):
        counted = state.opt_state._replace(updates=torch.tensor(updates))
        return outcome(lambda: updated(state._replace(step=torch.tensor(step), opt_state=counted)))

    refusal = update(my_rank() // 3, my_rank() % 2)
    assert refusal.text.splitlines()[:2] == [
        DIFFERENT_STEPS,
        "  state.step: expected 0 as on the rank at expert=0, shard=1, got 1 on the rank at expert=1, shard=1",
    ], refusal
    assert update(0, my_rank() % 2).error == ""


@on_ranks(4)
def test_states_of_stages_that_are_split_over_a_pipeline_are_compared_between_stages():
    """Each stage is of one step, and one stage is one step ahead of the other."""
    mesh = mesh_of(pipe=2, shard=2)
    layout = fs.compose(fs.fully_shard(mesh["shard"], dim=1), fs.split_dim(mesh["pipe"], dim=0))
    states = [fs.TrainState.create(fs.shard({"layers": torch.ones(4, 4)}, fs.zero3(mesh, layout=layout)), ADAMW)]
    for _ in range(2):
        states.append(updated(states[-1]))
    # The last rank fails, and states of the second stage are one step behind.
    failure = outcome(lambda: comm.call(fail_on_the_last_rank, begins=False)(fs.axis_of(mesh, "pipe")))
    assert bool(failure.error) == (my_rank() in (1, 3)), failure
    mesh_of(pipe=2, shard=2)
    refusal = outcome(lambda: updated(states[2 if my_rank() < 2 else 1]))
    assert refusal.text.splitlines()[:2] == [
        DIFFERENT_STEPS,
        "  state.step: expected 2 as on the rank at pipe=0, shard=0, got 1 on the rank at pipe=1, shard=0",
    ], refusal


def fail_on_the_last_rank(axis):
    if my_rank() == 3:
        raise BadSampleError("bad sample 17")
    meet(axis)


# A rank fails between two calls, where nobody is told, and calls init_mesh while others are in their step.


def meet_again(call, victims):
    """Let some ranks make a new mesh instead of a call, and check that the others hear of it."""
    if my_rank() in victims:
        return
    failure = outcome(call)
    names = "|".join(map(str, victims))
    first = rf"rank ({names}) called init_mesh, while others wait for it in a collective\n  rank \d+ waits in \w+ "
    assert failure.error == "CollectiveError", failure
    assert re.match(first, failure.text), failure
    assert failure.seconds < 10.0, failure


@on_ranks("2 processes", 4, pytest.param("4 processes", marks=pytest.mark.slow))
def test_ranks_that_wait_for_one_in_init_mesh_meet_it_there():
    """Also where several are there already; the timeout of the mesh is 30 s."""
    axis = axis_of_all()
    meet(axis)
    victims, before = [1] if axis.size == 2 else [2, 3], comm.rank_state().generation
    for number in (1, 2):
        meet_again(partial(meet, axis), victims)
        axis = axis_of_all()
        assert meet(axis) == axis.size
        assert comm.rank_state().generation == before + number
        assert comm.rank_state().failure is None


@on_ranks(4, pytest.param("4 processes", marks=pytest.mark.slow))
def test_ranks_that_wait_for_each_other_are_all_woken_by_one_in_init_mesh():
    """Rank 3 does not come to its row, and rank 2, which waits for it there, does not come to the column of rank 0."""
    mesh = mesh_of(a=2, b=2)
    axes = [fs.axis_of(mesh, name) for name in "ba"]
    for axis in axes:
        meet(axis)
    meet_again(lambda: [meet(axis) for axis in axes], [3])
    mesh = mesh_of(a=2, b=2)
    for name in "ab":
        assert meet(fs.axis_of(mesh, name)) == 2.0


@on_ranks(3, pytest.param("3 processes", marks=pytest.mark.slow))
def test_a_rank_in_init_mesh_does_not_wake_those_that_wait_for_a_late_one():
    """It has started what they wait in."""
    axis, before = axis_of_all(), comm.rank_state().generation
    meet(axis)
    if my_rank() == 2:
        # Longer than a rank in init_mesh needs to look where the others are.
        time.sleep(1.2)
    finish = comm.start_all_gather([torch.tensor([my_rank()])], axis, "late")
    if my_rank() == 1:
        axis_of_all()
    assert finish()[0].tolist() == [[0], [1], [2]]
    if my_rank() != 1:
        axis_of_all()
    assert meet(axis) == 3.0
    assert comm.rank_state().generation == before


def usage():
    """Threads, open files and KiB of memory of this process."""
    gc.collect()
    (resident,) = re.findall(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), int(resident)


@pytest.mark.slow
@on_ranks("2 processes", timeout=200.0)
def test_threads_files_and_memory_stay_as_they_are_over_many_failures():
    """Of an error inside a call, and of one between calls, by turns."""
    axis, usages = axis_of_all(), []
    for number in range(20):
        state, _ = train_step(state_of(mesh_of()))
        if number % 2:
            meet_again(partial(train_step, state), [1])
        else:
            failure = outcome_of(lambda _: train_step(state), axis, breaks_at("forward"))  # noqa: B023
            assert "bad sample 17" in failure.text, failure
        axis = axis_of_all()
        meet(axis)
        usages.append(usage())
    threads, files, memory = zip(*usages, strict=True)
    # What is about to end is not counted; memory of the first failures is that of the code that they load.
    assert max(threads[2:]) <= threads[1] + 4, usages
    assert max(files[2:]) <= files[1] + 8, usages
    assert memory[-1] <= memory[3] + 4096, usages
