"""Parameters that no rank used: no gradient, and they do not move, as under torch and its DDP."""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import assert_matches_ddp
from tests.ranks import my_rank, on_ranks
from tests.transforms.feedback import feedback
from tests.trees import STRATEGIES, assert_same_bits, meshes, normal, one_axis
from tests.unit_models import filled

STRATEGIES = STRATEGIES | {
    "zero3": lambda on: fs.zero3(on.line, min_shard_elements=0),
    "zero3 that keeps": lambda on: fs.zero3(on.line, min_shard_elements=0, regather=False),
}


def values():
    draw = normal()
    return {name: draw(5, 3) for name in ("all", "one", "zero", "none", "late", "frozen")} | {"small": draw(2)}


def shard(strategy):
    return fs.shard(values(), strategy, frozen="*frozen*")


def loss_of(params, batch):
    """Rank 0 alone uses "one", and "late" only in a microbatch of 3; nobody uses "none" and "small"."""
    full = fs.gather(params)
    loss = (full["all"] * batch).square().sum() + 0.0 * full["zero"].sum()
    loss = loss + (full["one"].sum() if my_rank() == 0 else 0.0)
    return loss + (full["late"].square().sum() if batch == 3 else 0.0)


def of(*batches):
    """Gradients of some microbatches of one process whose batch is that of all ranks."""

    def expected(ranks):
        full, count = values(), len(batches)
        found = {
            "all": sum(2 * full["all"] * b**2 for b in batches) / count,
            "one": torch.ones(5, 3, dtype=torch.float64) / ranks,
            "zero": torch.zeros(5, 3, dtype=torch.float64),
            "late": 2 * full["late"] / count if 3 in batches else None,
        }
        return dict.fromkeys(full) | found

    return expected


RUNS = {
    "one batch": (lambda p: fs.value_and_grad(loss_of)(p, 2.0), of(2.0)),
    "each": (lambda p: fs.accumulate(loss_of, communicate="each")(p, [2.0, 3.0]), of(2.0, 3.0)),
    "once": (lambda p: fs.accumulate(loss_of, communicate="once")(p, [3.0, 2.0]), of(3.0, 2.0)),
    "never late": (lambda p: fs.accumulate(loss_of, communicate="once")(p, [1.0, 2.0]), of(1.0, 2.0)),
}


@pytest.mark.rows(2)
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("run", RUNS)
def test_a_leaf_that_no_rank_used_has_no_gradient(run, world_size):
    """One that another rank used has this rank's zeros, and one whose gradient is zero was used."""
    for strategy in STRATEGIES.values():
        params = shard(strategy(meshes()))
        differentiate, expected = RUNS[run]
        grads = fs.unshard(differentiate(params)[1])
        wanted = expected(world_size)
        assert {name for name, grad in grads.items() if grad is None} == {n for n in wanted if wanted[n] is None}
        for name, grad in grads.items():
            if grad is not None:
                torch.testing.assert_close(grad, wanted[name])


def doubled(p, *names):
    """Leaves that are computed from others, gathered."""
    return fs.gather({name: fs.tree_map(lambda tensor: 2 * tensor, p[name]) for name in names})


# Losses of leaves that are computed from others, and the leaves that then have a gradient.
DERIVED = {
    "used": (lambda p, rank: doubled(p, "all")["all"].sum(), {"all"}),
    "gathered and unused": (lambda p, rank: (doubled(p, "one"), fs.gather(p["all"]).sum())[1], {"all"}),
    "used on one rank": (
        lambda p, rank: (doubled(p, "one")["one"].sum(), fs.gather(p["all"]).sum())[rank],
        {"all", "one"},
    ),
    "together with one that is used": (lambda p, rank: doubled(p, "all", "one")["all"].sum(), {"all"}),
}


@on_ranks(2)
def test_leaves_of_which_others_are_computed():
    """Ranks run the backward of what was computed from shards whether they use it or not."""
    for loss, used in DERIVED.values():
        for strategy in (fs.zero3(one_axis(), min_shard_elements=0), fs.zero2(one_axis(), min_shard_elements=0)):
            _, grads = fs.value_and_grad(lambda p: loss(p, my_rank()))(shard(strategy))  # noqa: B023
            assert {leaf for leaf, grad in grads.items() if grad is not None} == used


def check_the_state_of_a_transform_stays(layout):
    full = {name: normal(i)(64, 8, dtype=torch.float32) for i, name in enumerate(("a", "b"))}
    params = fs.shard(full, fs.zero3(one_axis(), layout=layout))
    state = fs.tree_map(torch.ones_like, fs.transform_state(params))

    def loss(p):
        return fs.gather(p)["a"].square().sum()

    _, grads, after = fs.value_and_grad(loss, transform_state=state)(params)
    assert grads["b"] is None
    assert_same_bits(fs.tree_leaves(after["b"]), fs.tree_leaves(state["b"]))
    assert not any(leaf.eq(1).all() for leaf in fs.tree_leaves(after["a"]))


@on_ranks(2)
def test_the_state_of_a_transform_stays():
    """What a lossy reduction left out of an earlier gradient waits for the next one."""
    check_the_state_of_a_transform_stays(feedback(one_axis()))


class Mixture(nn.Module):
    """Experts by number; the last one is never used."""

    def __init__(self):
        super().__init__()
        self.first, self.experts = nn.Linear(4, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x, picks):
        h = torch.tanh(self.first(x))
        return sum((torch.tanh(self.experts[pick](h)) for pick in picks), h).square().mean()


# The experts of each rank by step: 3 starts late, and 1 is left out for a while by all.
PICKS = (([0], [1, 2]), ([1], [2]), ([2], [0]), ([3, 0], [2]), ([3], []), ([0, 1], [3]), ([2], [1, 2]))


@on_ranks("2 processes")
def test_a_mixture_of_experts_is_ddp_bitwise():
    hyper = dict(lr=0.01, momentum=0.9, dampening=0.1, weight_decay=0.1)
    module, tx = filled(Mixture()), fs.from_torch(torch.optim.SGD, **hyper)
    model, draw = fs.functionalize(module, nn.Linear), normal(1 + my_rank())

    def step(state, batch):
        value, grads = fs.value_and_grad(model.apply)(state.params, *batch)
        return fs.update(tx, state, grads, donate=int(state.step) % 2 == 0), value

    for name in ("ddp", "zero3"):
        assert_matches_ddp(
            step,
            fs.TrainState.create(model.init(STRATEGIES[name](meshes())), tx),
            [(draw(5, 4), picks[my_rank()]) for picks in PICKS],
            module=module,
            loss_fn=lambda module, batch: module(*batch),
            optimizer=lambda parameters: torch.optim.SGD(parameters, **hyper),
            exact=True,
        )
