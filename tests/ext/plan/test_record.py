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


def product(params, x):
    return (x @ fs.gather(params)["w"]).square().mean()


def with_a_state(mesh):
    layout = fs.quantize(mesh["shard"], scatter=True)
    params = fs.shard({"w": torch.ones(48, 64)}, fs.zero3(mesh, layout=layout))
    return train_step(product, adamw()), fs.TrainState.create(params, adamw()), torch.ones(2, 48)


def deferred(mesh):
    """Groups are reduced over once for three microbatches."""
    params = fs.shard({"w": torch.ones(48, 64)}, fs.hsdp(mesh))
    step = train_step(product, adamw(), fs.accumulate, communicate="outer_once")
    return step, fs.TrainState.create(params, adamw()), torch.ones(6, 48).chunk(3)


def regathered_inside_a_group(mesh):
    layout = {"axis": ("local", "node"), "min_shard_elements": 0, "bucket_bytes": 0, "regather_axis": "local"}
    params = fs.shard({name: torch.ones(48, 48) for name in "abc"}, fs.zero3(mesh, prefetch=0, **layout))

    def loss(params, x):
        for name in "abc":
            x = torch.tanh(x @ fs.gather(params[name]))
        return x.square().mean()

    return train_step(loss, adamw()), fs.TrainState.create(params, adamw()), torch.ones(2, 48)


def owned(mesh):
    params = fs.shard(own_dim.initial(), own_dim.STRATEGIES["inside, by the same dim"](mesh))
    batch = [torch.ones(8, own_dim.WIDTH, dtype=torch.float64)] * 2
    state = fs.TrainState.create(params, adamw())
    return train_step(own_dim.loss_fn, adamw()), state, *batch, fs.axis_of(mesh, "expert")


def started_ahead(mesh):
    """And units have strategies of their own."""
    apart = partial(fs.zero3, mesh, min_shard_elements=0, bucket_bytes=0)
    strategy = fs.masked(
        apart(regather=False, param_dtype=torch.float32), "1.*", otherwise=apart(param_dtype=torch.bfloat16)
    )
    model = fs.functionalize(torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)]), torch.nn.Linear)
    tx = adamw()

    def step(state, x):
        started = fs.start_gather({"2.weight": state.params["2.weight"]})
        run = fs.value_and_grad(lambda params, x: model.apply(params, x).square().mean())
        loss, grads = run(state.params | started, x)
        return fs.update(tx, state, grads), loss

    return step, fs.TrainState.create(model.init(strategy, seed=0), tx), torch.ones(2, 8)


STEPS = {
    **{with_a_state: {"shard": 4}, deferred: {"replicate": 2, "shard": 2}, owned: {"shard": 2, "expert": 2}},
    **{regathered_inside_a_group: {"node": 2, "local": 2}, started_ahead: {"shard": 4}},
}


@pytest.mark.rows(len(STEPS))
@pytest.mark.parametrize("make", STEPS)
def test_steps_of_other_kinds_are_planned(make):
    assert_exact(make, STEPS[make])
