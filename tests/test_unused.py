"""Parameters that no rank used: no gradient, and the state of their transform stays."""

import pytest
import torch

import fshard as fs
from tests.ranks import my_rank, on_ranks
from tests.tolerance import within
from tests.transforms.feedback import feedback
from tests.trees import OF_EVERY_LEAF, STRATEGIES, assert_same_bits, meshes, normal, one_axis


def shard(strategy):
    draw = normal()
    full = {name: draw(5, 3) for name in ("all", "one", "zero", "none", "late", "frozen")}
    full |= {"small": draw(2), "scalar": draw()}
    return full, fs.shard(full, strategy, frozen="*frozen*")


def loss_of(params, batch):
    """Rank 0 alone uses "one", and "late" only in a microbatch of 3; nobody uses "none" and "small"."""
    full = fs.gather(params)
    loss = (full["all"] * batch).square().sum() + 0.0 * full["zero"].sum()
    loss = loss + (full["one"].sum() if my_rank() == 0 else 0.0)
    return loss + (full["late"].square().sum() if batch == 3 else 0.0)


# How microbatches communicate, and the microbatches.
RUNS = (("each", (2.0,)), ("each", (2.0, 3.0)), ("once", (3.0, 2.0)), ("once", (1.0, 2.0)))


@pytest.mark.rows(2)
@on_ranks(1, 2, 3)
@pytest.mark.parametrize(("communicate", "batches"), RUNS)
def test_a_leaf_that_no_rank_used_has_no_gradient(communicate, batches, world_size):
    """One that another rank used has this rank's zeros, and one whose gradient is zero was used."""
    strategies = [make(meshes()) for make in STRATEGIES.values()]
    for strategy in (*strategies, *(make(one_axis()) for make in OF_EVERY_LEAF.values())):
        full, params = shard(strategy)
        grads = fs.unshard(fs.accumulate(loss_of, communicate=communicate)(params, batches)[1])
        expected = {
            "all": sum(2 * full["all"] * b**2 for b in batches) / len(batches),
            "one": torch.ones(5, 3, dtype=torch.float64) / world_size,
            "zero": torch.zeros(5, 3, dtype=torch.float64),
        }
        if 3 in batches:
            expected["late"] = 2 * full["late"] / len(batches)
        grads = {name: grad for name, grad in grads.items() if grad is not None}
        # A term for each microbatch of each rank.
        torch.testing.assert_close(grads, expected, **within(expected, len(batches) * world_size))


def doubled(params, *names):
    """Leaves that are computed from others, gathered."""
    return fs.gather({name: fs.tree_map(lambda tensor: 2 * tensor, params[name]) for name in names})


def of_a_derived_leaf_that_is_a_gathered_tensor(params):
    """Only the gathered tensor that it is has a gradient, not its neighbors in the unit."""
    full = fs.gather(params)
    return fs.gather({"derived": fs.Sharded(full["one"], params["one"].spec)})["derived"].sum()


def that_is_a_gathered_tensor(params):
    full = fs.gather(params)
    doubled(params, "all")
    return full["scalar"]


# Losses of leaves that are computed from others, and the leaves that then have a gradient.
DERIVED = (
    (lambda p: doubled(p, "all")["all"].sum(), {"all"}),
    (lambda p: (doubled(p, "one"), fs.gather(p["all"]).sum())[1], {"all"}),
    (lambda p: (doubled(p, "one")["one"].sum(), fs.gather(p["all"]).sum())[my_rank()], {"all", "one"}),
    (lambda p: doubled(p, "all", "one")["all"].sum(), {"all"}),
)
OF_WHOLE_LEAVES = ((of_a_derived_leaf_that_is_a_gathered_tensor, {"one"}), (that_is_a_gathered_tensor, {"scalar"}))


@on_ranks(2)
def test_leaves_of_which_others_are_computed():
    """Ranks run the backward of what was computed from shards whether they use it or not."""
    rows = [(*row, OF_EVERY_LEAF[name]) for row in DERIVED for name in ("zero3", "zero2")]
    rows += [(*row, fs.ddp) for row in OF_WHOLE_LEAVES]
    for loss, used, strategy in rows:
        _, params = shard(strategy(one_axis()))
        _, grads = fs.value_and_grad(loss)(params)
        assert {leaf for leaf, grad in grads.items() if grad is not None} == used


def check_the_state_of_a_transform_stays(layout):
    full = {name: normal(i)(64, 8, dtype=torch.float32) for i, name in enumerate(("a", "b"))}
    params = fs.shard(full, fs.zero3(one_axis(), layout=layout))
    state = fs.tree_map(torch.ones_like, fs.transform_state(params))
    run = fs.value_and_grad(lambda p: fs.gather(p)["a"].square().sum(), transform_state=state)
    _, grads, after = run(params)
    assert grads["b"] is None
    assert_same_bits(fs.tree_leaves(after["b"]), fs.tree_leaves(state["b"]))
    assert not any(leaf.eq(1).all() for leaf in fs.tree_leaves(after["a"]))


@on_ranks(2)
def test_the_state_of_a_transform_stays():
    """What a lossy reduction left out of an earlier gradient waits for the next one."""
    check_the_state_of_a_transform_stays(feedback(one_axis()))


LOSSES_WITHOUT_PARAMETERS = (
    lambda params: fs.gather(params)["w"].sum().detach(),
    torch.no_grad()(lambda params: fs.gather(params)["w"].sum()),
    lambda params: torch.ones(()),
)


def test_a_loss_of_no_parameter_is_warned_of():
    """As of a module that was called itself, and not by `apply`."""
    strategy = fs.zero3(one_axis())
    params = fs.shard({"w": torch.ones(3), "frozen": torch.ones(2)}, strategy, frozen="frozen")
    for loss in LOSSES_WITHOUT_PARAMETERS:
        for call in (fs.value_and_grad(loss), lambda p, loss=loss: fs.accumulate(lambda p, _: loss(p))(p, [1, 2])):
            with pytest.warns(UserWarning, match=": the loss of no rank depends on the parameters, so there are no"):
                assert call(params)[1] == {"w": None, "frozen": None}
    # There is nothing to differentiate by.
    frozen = fs.shard({"w": torch.ones(3)}, strategy, frozen="*")
    assert fs.value_and_grad(LOSSES_WITHOUT_PARAMETERS[0])(frozen)[1] == {"w": None}
