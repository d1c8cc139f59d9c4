"""The figures of a plan, and the state that it leaves alone."""

import re
import resource
from functools import cache, partial

import pytest
import torch
from torch._subclasses import FakeTensorMode

import fshard as fs
from fshard.ext.plan.report import Rates
from fshard.extend import sockets_of_mesh
from fshard.testing import assert_trees_close
from tests.jit.steps import adamw, train_step
from tests.ranks import my_rank, on_ranks
from tests.tolerance import within
from tests.trees import tensors

MESH = {"shard": 4}
one_rank = partial(fs.init_mesh, {"shard": 1}, device="cpu")


def loss_fn(params, x):
    return (torch.tanh(x @ fs.gather(params["a"])) @ fs.gather(params["b"])).square().mean()


def make_case(mesh):
    """A step of two units, and its arguments."""
    params = fs.shard({"a": torch.ones(48, 64), "b": torch.ones(64, 64)}, fs.zero3(mesh, bucket_bytes=0))
    return train_step(loss_fn, adamw()), (fs.TrainState.create(params, adamw()), torch.ones(2, 48))


@cache
def case():
    return make_case(one_rank())


@cache
def make_plan(ranks=4):
    step, args = case()
    return fs.plan(step, *args, mesh={"shard": ranks})


def plan_nothing(sizes, **options):
    """The plan of a step that does nothing, for what depends on the mesh alone."""
    mesh = fs.init_mesh(dict.fromkeys(sizes, 1), device="cpu")
    params = fs.shard({"w": torch.ones(8)}, fs.hsdp(mesh) if len(sizes) > 1 else fs.zero3(mesh))
    return fs.plan(lambda params: params["w"].local.sum(), params, mesh=sizes, **options)


def nbytes(*trees):
    return sum(tensor.nbytes for tensor in tensors(trees))


def test_one_rank_holds_its_state_and_sends_nothing():
    step, (state, x) = case()
    plan = make_plan(1)
    assert plan.arguments.parameters == nbytes(state.params)
    # The optimizer counts updates.
    assert plan.arguments.optimizer_state == nbytes(state.opt_state)
    assert plan.arguments.inputs == nbytes(x, state.step)
    assert plan.arguments.total == nbytes(state, x)
    assert not plan.collectives()
    assert plan.seconds > plan.waiting == 0
    assert plan.peak_bytes == plan.arguments.total + fs.make_graph(step)(state, x).peak_bytes()
    tx, rates = adamw(), Rates(memory=nbytes(state.params))
    update = fs.jit(lambda state, grads: fs.update(tx, state, grads), donate_argnums=0)
    # It reads four numbers of a parameter and writes three, or four.
    assert 7 < fs.plan(update, state, state.params, mesh={"shard": 1}, rates=rates).seconds < 8.1


def test_each_of_several_states_is_told_by_its_parts():
    """As those of a GAN, in a tuple or a dict."""
    step, (state, x) = case()
    one = make_plan()

    def two_steps(states, x):
        first, (second,) = states
        return (step(first, x)[0], {"second": step(second["state"], x)[0]})

    plan = fs.plan(two_steps, (state, [{"state": fs.tree_map(torch.clone, state)}]), x, mesh=MESH)
    assert plan.arguments.parameters == 2 * one.arguments.parameters > 0
    assert plan.arguments.optimizer_state == 2 * one.arguments.optimizer_state > 0
    assert plan.arguments.inputs == nbytes(x, state.step, state.step)


def test_parts_of_the_peak_add_up_and_shrink_with_the_mesh():
    plans = [make_plan(ranks) for ranks in (1, 4, 4096)]
    for plan in plans:
        beyond_arguments = max(moment.bytes for moment in plan.timeline)
        assert plan.peak_bytes == sum(plan.peak) == plan.arguments.total + beyond_arguments
        assert min(plan.peak) >= 0
    parameters = [plan.arguments.parameters for plan in plans]
    assert parameters == sorted(parameters, reverse=True)
    assert plans[0].flops == plans[1].flops == plans[2].flops > 0


def test_members_that_are_stacked_for_vmap_keep_their_dim():
    params = fs.shard({"w": torch.ones(8, 4)}, fs.zero3(one_rank(), min_shard_elements=0))
    stacked = fs.tree_map(lambda leaf: torch.stack([leaf] * 3), params)
    step = torch.func.vmap(lambda params: fs.gather(params)["w"].sum())
    one, three = (
        fs.plan(f, tree, mesh=MESH) for f, tree in ((lambda p: fs.gather(p)["w"].sum(), params), (step, stacked))
    )
    assert three.arguments.inputs == 3 * one.arguments.inputs == 3 * 4 * 8
    assert three.bytes_sent() == 3 * one.bytes_sent() > 0


def test_text():
    text = str(make_plan())
    assert text.startswith("mesh shard 4: ")
    assert "\n  held at the peak; what is not held then is 0\n    parameters " in text
    assert all(word in text for word in ("optimizer state", "in flight", "sent by axis", "sent by unit"))
    rates = "400 TFLOP/s, memory 2500 GB/s, link 40 GB/s, latency 20 us"
    assert f" of it waiting: an estimate from these rates:\n    {rates}\n" in text
    assert re.search(r"\n  0\.\d+ ms of the host in each call to agree with other ranks\n  9 sockets$", text)
    step, args = case()
    slow = fs.plan(step, *args, mesh=MESH, rates=Rates(link={"shard": 1e6}))
    assert slow.waiting > slow.bytes_sent() / 1e6 * 0.5


def test_axes_that_have_rates_of_their_own_send_at_the_same_time():
    sizes, mesh = {"replicate": 2, "shard": 2}, fs.init_mesh({"replicate": 1, "shard": 1}, device="cpu")

    def step(params, *axes):
        gathers = [fs.comm.start_all_gather([params["w"].local], axis, "test") for axis in axes]
        return [finish() for finish in gathers]

    def waiting(link):
        axes = [fs.axis_of(mesh, name) for name in sizes]
        return fs.plan(step, params, *axes, mesh=sizes, rates=Rates(link=link, latency=0)).waiting

    params = fs.shard({"w": torch.ones(4096)}, fs.hsdp(mesh))
    shared = waiting(1e3)
    assert_trees_close(waiting(dict.fromkeys(sizes, 1e3)), shared / 2, **within(shared, terms=100))


def test_a_step_ends_with_its_last_message():
    """Also where nobody uses its result: what other ranks take part in is waited for."""
    axis, link = fs.axis_of(one_rank()), 1e3
    params = fs.shard({"w": torch.ones(4096)}, fs.zero3(axis))

    def step(params, axis):
        fs.psum(params["w"].local, axis)
        return params["w"].local.sum()

    plan = fs.plan(step, params, axis, mesh=MESH, rates=Rates(link=link, latency=0))
    assert plan.seconds > plan.waiting > 0.9 * plan.bytes_sent() / link > 0


def test_agreement_grows_with_the_logarithm():
    """By a round for twice as many ranks, over one axis after another; there is none on one rank."""
    latency, rounds = 1.0, 10
    rates = Rates(latency=latency)
    plans = [plan_nothing({"shard": ranks}, rates=rates) for ranks in (1, 2, 4, 1000, 1024)]
    alone, of_two, of_four, of_thousand, largest = [plan.agreement for plan in plans]
    assert alone == 0
    round_seconds = of_four - of_two
    assert round_seconds > latency
    assert of_thousand == largest
    assert_trees_close(largest, of_two + (rounds - 1) * round_seconds, **within(largest, terms=rounds))
    slower = plan_nothing({"shard": 1024}, rates=Rates(latency=2 * latency)).agreement
    assert_trees_close(slower - largest, rounds * latency, **within(slower, terms=rounds))
    plan = plan_nothing({"replicate": 2, "shard": 4}, rates=rates)
    assert_trees_close(plan.agreement, of_two + of_four, **within(plan.agreement, terms=rounds))


def test_a_launch_that_opens_more_files_than_a_process_may_is_told(monkeypatch):
    """Where a process opens so few files that a mesh of 16 ranks between processors does not fit."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 140))
    warning = "    too many for `ulimit -Hn`, which is 140 here: let each rank open "
    for ranks, backend, sockets in ((8, "gloo", 30), (16, "gloo", 55), (16, "nccl", 23)):
        plan = plan_nothing({"shard": ranks}, backend=backend)
        assert plan.sockets == sockets == sockets_of_mesh([ranks], sends_itself=backend == "nccl")
        last_line = str(plan).splitlines()[-1]
        if sockets > 40:
            assert last_line == f"{warning}{sockets + 100} files"
        else:
            assert last_line == f"  {sockets} sockets"


@on_ranks(2)
def test_real_ranks_are_not_disturbed():
    """Nor is a step on them; values of a state are not looked at."""
    step, (state, x) = make_case(fs.init_mesh({"shard": 2}, device="cpu"))
    step = fs.jit(step)
    before, _ = step(state, x)
    meta = fs.tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, state)
    text = str(fs.plan(step, meta, x.to("meta"), mesh={"shard": 64}, rank=my_rank()))
    after, _ = step(state, x)
    assert_trees_close(before, after, exact=True)
    assert len(step.traces) == 1
    return text


def test_fake_tensors_are_enough():
    """A tree of 4 TB, and an axis among the arguments."""
    rows, mesh = 2**31, one_rank()
    with FakeTensorMode():
        params = fs.shard({"w": torch.ones(rows, 512)}, fs.zero3(mesh))
        x = torch.ones(1, rows)

    def step(params, axis, x):
        return fs.value_and_grad(lambda p: fs.pmean((x @ fs.gather(p)["w"]).sum(), axis))(params)

    large = fs.plan(step, params, fs.axis_of(mesh), x, mesh={"shard": 8})
    shard = rows * 512 * 4 // 8
    assert (large.arguments.total, large.bytes_sent()) == (shard + rows * 4, shard * 7 * 2)


def refused(text):
    return pytest.raises(ValueError, match=re.escape(text))


def test_what_makes_no_sense_is_refused():
    step, args = case()
    for options, text in (
        ({"mesh": {"shard": 2.5}}, "mesh to be a mapping from names of axes to whole numbers of ranks from 1"),
        ({"rank": 4}, "rank to be a whole number from 0 to 3 for the mesh {'shard': 4}, got 4"),
        ({"rates": Rates(link={"tp": 1.0})}, "link of shard to be a number above 0, got None"),
    ):
        with refused(f"plan: expected {text}"):
            fs.plan(step, *args, **({"mesh": MESH} | options))
    with refused("mesh has the axes ['shard', 'tp'], and the state has ['shard']. Give a size to each axis"):
        fs.plan(step, *args, mesh=MESH | {"tp": 2})
    axis = fs.axis_of(one_rank())
    with refused("'shard' of 1 ranks, which the step closes over; pass axes as arguments, or"):
        fs.plan(lambda state, x: fs.psum(x.sum(), axis), *args, mesh=MESH)
    with refused("'shard' of 1 ranks, which the step closes over; pass axes as arguments, or"):
        fs.plan(lambda state, x: fs.ragged_all_to_all(x, axis, [2], [2]), *args, mesh=MESH, rank=3)
    with refused("plan: the arguments have no Sharded leaf, so there is no state. Make one with fs.shard."):
        fs.plan(lambda _: 1, torch.ones(2), mesh=MESH)


def test_coordinates_are_those_of_a_device_mesh():
    assert plan_nothing({"replicate": 2, "shard": 3}, rank=1).rank == {"replicate": 0, "shard": 1}
