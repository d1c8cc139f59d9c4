"""The planned collectives against those that ranks record when they run the step."""

import math
from functools import partial

import pytest
import torch

import fshard as fs
from fshard import comm
from fshard.testing import assert_trees_close, spmd
from tests.ext.plan.models import STRATEGIES, prepare_step
from tests.jit.steps import adamw, collectives, train_step
from tests.tolerance import within
from tests.transforms import test_own_dim as own_dim


def assert_exact(make, sizes):
    """A plan, made in a process of one rank, against what rank 0 records of a second call."""

    def make_plan():
        step, *args = make(fs.init_mesh(dict.fromkeys(sizes, 1), device="cpu"))
        return fs.plan(step, *args, mesh=sizes, backend="gloo")

    def record_step():
        step, state, *batch = make(fs.init_mesh(sizes, device="cpu"))
        state = step(state, *batch)[0]
        with fs.comm.record() as record:
            step(state, *batch)
        return record

    plan, record = spmd(make_plan, 1)[0], spmd(record_step, math.prod(sizes.values()))[0]
    sent = record.bytes_sent()
    assert collectives(plan.collectives()) == collectives(record)
    assert plan.bytes_sent() == sent
    for groups in (plan.by_axis(), plan.by_unit()):
        assert sum(traffic.collectives for traffic in groups.values()) == len(plan.collectives())
        assert_trees_close(sum(traffic.bytes for traffic in groups.values()), sent, **within(sent, len(record)))
    for name, traffic in plan.by_axis().items():
        over_axis = comm.Record(entry for entry in collectives(record) if entry.axis == name)
        assert traffic == (len(over_axis), over_axis.bytes_sent())


@pytest.mark.rows(1)
@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
@pytest.mark.parametrize("activations", ("kept", "checkpoint", "remat"))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_collectives_are_those_that_are_recorded(strategy, activations, world_size):
    replicas = {"replicate": 1 + (world_size % 2 == 0)} if strategy == "hsdp" else {}
    sizes = replicas | {"shard": world_size // replicas.get("replicate", 1)}
    assert_exact(partial(prepare_step, strategy, activations), sizes)


def test_transforms_with_a_state_are_moved():
    def make(mesh):
        layout = fs.quantize(mesh["shard"], scatter=True)
        params = fs.shard({"w": torch.ones(48, 64)}, fs.zero3(mesh, layout=layout))
        step = train_step(lambda p, x: (x @ fs.gather(p)["w"]).square().mean(), adamw())
        return step, fs.TrainState.create(params, adamw()), torch.ones(2, 48)

    assert_exact(make, {"shard": 4})


def test_deferred_sums_are_planned():
    """Groups are reduced over once for three microbatches."""

    def make(mesh):
        params = fs.shard({"w": torch.ones(48, 64)}, fs.hsdp(mesh))
        return step, fs.TrainState.create(params, fs.adamw(0.1)), torch.ones(6, 48)

    def step(state, x):
        differentiate = fs.accumulate(lambda p, x: (x @ fs.gather(p)["w"]).square().mean(), communicate="outer_once")
        loss, grads = differentiate(state.params, x.chunk(3))
        return fs.update(fs.adamw(0.1), state, grads), loss

    assert_exact(make, {"replicate": 2, "shard": 2})


def test_regathers_inside_a_group_are_planned():
    def make(mesh):
        layout = {"axis": ("local", "node"), "min_shard_elements": 0, "bucket_bytes": 0, "regather_axis": "local"}
        params = fs.shard({name: torch.ones(48, 48) for name in "abc"}, fs.zero3(mesh, prefetch=0, **layout))
        return train_step(loss, adamw()), fs.TrainState.create(params, adamw()), torch.ones(2, 48)

    def loss(params, x):
        for name in "abc":
            x = torch.tanh(x @ fs.gather(params[name]))
        return x.square().mean()

    assert_exact(make, {"node": 2, "local": 2})


def test_leaves_that_ranks_own_are_planned():
    def make(mesh):
        params = fs.shard(own_dim.initial(), own_dim.STRATEGIES["inside, by the same dim"](mesh))
        batch = [torch.ones(8, own_dim.WIDTH, dtype=torch.float64)] * 2
        return step, fs.TrainState.create(params, fs.adamw(0.1)), *batch

    def step(state, x, y):
        axis = state.params["experts"]["up"].spec.owned[0]
        loss, grads = fs.value_and_grad(own_dim.loss_fn)(state.params, x, y, axis)
        return fs.update(fs.adamw(0.1), state, grads), loss

    assert_exact(make, {"shard": 2, "expert": 2})


def test_units_with_strategies_of_their_own_and_gathers_started_ahead_are_planned():
    def make(mesh):
        apart = partial(fs.zero3, mesh, min_shard_elements=0, bucket_bytes=0)
        strategy = fs.masked(
            apart(regather=False, param_dtype=torch.float32), "1.*", otherwise=apart(param_dtype=torch.bfloat16)
        )
        model = fs.functionalize(torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)]), torch.nn.Linear)
        tx = adamw()
        state = fs.TrainState.create(model.init(strategy, seed=0), tx)

        def step(state, x):
            started = fs.start_gather({"2.weight": state.params["2.weight"]})
            run = fs.value_and_grad(lambda params, x: model.apply(params, x).square().mean())
            loss, grads = run(state.params | started, x)
            return fs.update(tx, state, grads), loss

        return step, state, torch.ones(2, 8)

    assert_exact(make, {"shard": 4})
