"""States after a failure: a lost one is refused, and training goes on from the same step on all ranks."""

import pytest
import torch

import fshard as fs
from tests.faults import BadSampleError, Hook, outcome, outcome_of
from tests.ranks import my_rank, on_ranks

LAYERS = [f"w{n}" for n in range(6)]
ADAMW = fs.from_torch(torch.optim.AdamW, lr=0.1)
LOST = "expected what that call returned in its place, got a tensor that was donated to an earlier call"
RESTORE = "To fix: go on with the state that the call returned; if the call failed, restore the last checkpoint."

OPERATORS = torch.library.Library("fshard_tests", "DEF")
OPERATORS.define("breaks(Tensor x, str place) -> Tensor")


@torch.library.impl(OPERATORS, "breaks", "CompositeExplicitAutograd")
def breaks(x, place):
    """The identity, as an operator that stays in graphs; its forward and its backward may break."""
    Hook.at(place)
    return x.clone()


torch.library.register_fake("fshard_tests::breaks", lambda x, place: x.clone(), lib=OPERATORS)
torch.library.register_autograd(
    "fshard_tests::breaks",
    lambda ctx, grad: (torch.ops.fshard_tests.breaks(grad, "backward"), None),
    lib=OPERATORS,
)


def mesh_of_all():
    return fs.init_mesh({"shard": -1}, device="cpu", timeout=30.0)


def state_of(mesh, tx=ADAMW):
    full = {name: torch.full((4, 4), 0.1 * (n + 1)) for n, name in enumerate(LAYERS)}
    return fs.TrainState.create(fs.shard(full, fs.zero3(mesh, min_shard_elements=0, merge_bytes=0)), tx)


def loss_fn(params, x):
    for n, name in enumerate(LAYERS):
        x = torch.tanh(x @ fs.gather({name: params[name]})[name])
        x = torch.ops.fshard_tests.breaks(x, "forward") if n == 3 else x
    return x.square().mean()


def train_step(state, x, tx=ADAMW, donate=False):
    loss, grads = fs.value_and_grad(loss_fn)(state.params, x)
    return fs.update(tx, state, grads, donate=donate), loss


def breaks_at(place, error=BadSampleError):
    """Break one rank at a place."""

    def at(reached):
        if reached == place and my_rank() == 1:
            raise error("bad sample 17")

    return at


def refusals(state, x):
    """What verbs say of a state."""
    grads = fs.tree_map(torch.ones_like, state_of(mesh_of_all()).params)
    verbs = {
        "value_and_grad": lambda: fs.value_and_grad(loss_fn)(state.params, x),
        "update": lambda: fs.update(ADAMW, state, grads),
        "unshard": lambda: fs.unshard(state),
        "jit": lambda: fs.jit(train_step)(state, x),
    }
    return {name: outcome(verb) for name, verb in verbs.items()}


def check_every_leaf_is_refused(state, x):
    """By all verbs, on every rank, with the way on."""
    for name, found in refusals(state, x).items():
        assert found.error == "ValueError", (name, found)
        assert found.text.startswith(f"{name}: arguments were donated\n"), found.text
        assert found.text.endswith(RESTORE), found.text
        lines = found.text.splitlines()[1:-1]
        assert all(line.endswith(LOST) or line.startswith("  and ") for line in lines), found.text
        assert name != "value_and_grad" or len(lines) == len(LAYERS), found.text


@pytest.mark.parametrize("error", (BadSampleError, KeyboardInterrupt))
@on_ranks(2, "2 processes")
def test_a_donated_state_is_lost_on_all_ranks_where_a_jitted_step_fails_in_its_middle(error):
    """Leaves behind the one that failed were updated, on one rank more of them than on the other."""
    mesh, x = mesh_of_all(), torch.ones(2, 4)
    step = fs.jit(train_step, donate_argnums=0)
    state, _ = step(state_of(mesh), x)
    found = outcome_of(lambda _: step(state, x), fs.axis_of(mesh), breaks_at("backward", error))
    assert "bad sample 17" in found.text, found
    mesh = mesh_of_all()
    check_every_leaf_is_refused(state, x)
    # A state that was restored trains on.
    restored, _ = step(state_of(mesh), x)
    assert restored.step.item() == 1


def breaks_in_its_middle(tx):
    """Make an optimizer of the first leaves and then of the last ones, between which a rank may break."""

    def breaking(update):
        def run(grads, state, params):
            Hook.at("update")
            return update(grads, state, params)

        return run

    late = tx._replace(update=breaking(tx.update), update_donated=breaking(tx.update_donated))
    return fs.partition({"w[012]": tx, "*": late})


@pytest.mark.parametrize("error", (BadSampleError, KeyboardInterrupt))
@on_ranks(2, "2 processes")
def test_a_donated_state_is_lost_where_an_update_fails_in_its_middle(error):
    mesh, x, tx = mesh_of_all(), torch.ones(2, 4), breaks_in_its_middle(ADAMW)
    before = state_of(mesh, tx)
    state, _ = train_step(before, x, tx, donate=True)
    # A state is as lost whose successor was made.
    check_every_leaf_is_refused(before, x)
    found = outcome_of(lambda _: train_step(state, x, tx, donate=True), fs.axis_of(mesh), breaks_at("update", error))
    assert found.text == ("bad sample 17" if my_rank() else ""), found
    check_every_leaf_is_refused(state, x)
    # So is what remains of it beside parameters that were restored.
    mixed = state_of(mesh_of_all(), tx)._replace(opt_state=state.opt_state)
    with pytest.raises(ValueError, match=r"^update: arguments were donated\n  \.opt_state\[0\]"):
        train_step(mixed, x, tx)


def test_an_update_that_is_refused_before_it_begins_leaves_a_donated_state_alone():
    state = state_of(mesh_of_all())
    with pytest.raises(ValueError, match="gradients do not fit"):
        fs.update(ADAMW, state, fs.tree_map(lambda leaf: leaf[:1], state.params), donate=True)
    train_step(state, torch.ones(2, 4), donate=True)
