"""Meshes of some ranks: a trainer on some ranks and a reference model on others, which never wait for each other."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import fshard as fs
from fshard import checkpoint
from fshard.testing import assert_matches_ddp, assert_trees_close, spmd

TX = fs.from_torch(torch.optim.AdamW, lr=0.05, fused=False)


def network():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def batch_of(number, place):
    draw = torch.Generator().manual_seed(10 * number + place)
    return torch.randn(4, 3, generator=draw, dtype=torch.float64), torch.randn(4, 1, generator=draw).double()


def loss_of(model, params, batch):
    return functional.mse_loss(model.apply(params, batch[0]), batch[1])


def is_member(mesh):
    return mesh.get_coordinate() is not None


def trained(mesh, wrap=fs.jit):
    """Train on a mesh by three steps: the state, and what does not depend on where ranks are."""
    model = fs.functionalize(network(), units=nn.Linear)
    state = fs.TrainState.create(model.init(fs.zero3(mesh, axis=None), seed=0), TX)
    axis = fs.axis_of(mesh)

    def step(state, batch):
        loss, grads = fs.value_and_grad(partial(loss_of, model))(state.params, batch)
        return fs.update(TX, state, grads), loss

    step, losses = wrap(step), []
    for number in range(3):
        state, loss = step(state, batch_of(number, fs.axis_index(axis)))
        losses.append(loss)
    return state, (losses, fs.unshard(state.params))


def evaluated(mesh, params):
    model, axis = fs.functionalize(network(), units=nn.Linear), fs.axis_of(mesh)
    return fs.objective(loss_of(model, params, batch_of(9, fs.axis_index(axis))), like=params)


def trainer_and_reference(world_size, directory, wrap):
    """Train on ranks 0 and 1, beside which the others evaluate; then evaluate there the state that was saved."""
    everyone = fs.axis_of(fs.init_mesh({"all": -1}, device="cpu"))
    trainer = fs.init_mesh({"train": 2}, device="cpu", ranks=[0, 1])
    reference = fs.init_mesh({"eval": -1}, device="cpu", ranks=range(2, world_size))
    with fs.comm.record() as events:
        if is_member(trainer):
            state, found = trained(trainer, wrap)
            checkpoint.save(directory, state, mesh=trainer)
        else:
            model = fs.functionalize(network(), units=nn.Linear)
            params = model.init(fs.zero3(reference, axis=None), seed=1)
            # Other calls than the trainer's, and another number of them.
            found = [evaluated(reference, params) for _ in range(5)]
            fs.value_and_grad(partial(loss_of, model))(params, batch_of(0, 0))
    fs.psum(torch.zeros(()), everyone)
    if is_member(reference):
        with fs.comm.record() as later:
            params = checkpoint.restore(directory, params, subtree=".params", mesh=reference)
            found = evaluated(reference, params), fs.unshard(params)
        events += later
    return found, {event.axis for event in events}


@pytest.mark.parametrize(
    ("world", "wrap"),
    [(3, fs.jit), (4, lambda step: step), ("3 processes", lambda step: step)],
    ids=["3", "4", "3 processes"],
)
def test_trainer_and_reference(world, wrap, workers, tmp_path):
    ranks = workers(3) if isinstance(world, str) else world
    size = 3 if isinstance(world, str) else world
    (losses, params), _ = spmd(lambda: trained(fs.init_mesh({"train": -1}, device="cpu"), wrap)[1], 2)
    found = spmd(partial(trainer_and_reference, size, tmp_path, wrap), ranks)
    for (got, full), axes in found[:2]:
        assert_trees_close((got, full), (losses, params), exact=True)
        assert axes == {"train"}
    model = fs.functionalize(network())
    needed = sum(loss_of(model, params, batch_of(9, place)) for place in range(size - 2)) / (size - 2)
    for (loss, full), axes in found[2:]:
        assert_trees_close(full, params, exact=True)
        assert_trees_close(loss, needed, rtol=0, atol=1e-12)
        assert axes == ({"eval"} if size == 4 else set())


def test_values_pass_by_broadcast_over_all_ranks():
    def program():
        everyone = fs.axis_of(fs.init_mesh({"all": -1}, device="cpu"))
        trainer, reference = (fs.init_mesh({"shard": -1}, device="cpu", ranks=ranks) for ranks in ([1, 2], [0, 3]))
        full = {"w": torch.zeros(3), "b": torch.zeros(())}
        if is_member(trainer):
            full = fs.unshard(fs.shard({"w": torch.arange(3.0), "b": torch.ones(())}, fs.zero3(trainer)))
        full = fs.broadcast(full, everyone, root=1)
        if is_member(reference):
            full = fs.unshard(fs.shard(full, fs.zero3(reference)))
        return full

    for full in spmd(program, 4):
        assert_trees_close(full, {"w": torch.arange(3.0), "b": torch.ones(())}, exact=True)


def test_a_mesh_of_two_axes_saves_by_one_group(tmp_path):
    """Members save in the background by a Manager, and a rank outside waits for nothing."""

    def program():
        grid = fs.init_mesh({"replicate": 2, "shard": -1}, device="cpu", ranks=[0, 1, 3, 4])
        # A mesh beside, whose groups are others.
        fs.init_mesh({"replicate": 2, "shard": -1}, device="cpu", ranks=[1, 2, 3, 4])
        if not is_member(grid):
            return None
        params = fs.shard({"w": torch.arange(6.0)}, fs.hsdp(grid, min_shard_elements=0))
        with checkpoint.Manager(tmp_path / "grid", mesh=grid) as manager, fs.comm.record() as events:
            manager.save(params, 1)
            found = manager.restore(fs.tree_map(torch.zeros_like, params))
        # One axis is a mesh of its ranks, too.
        row = grid["shard"]
        checkpoint.save(tmp_path / f"row {fs.axis_index(fs.axis_of(grid, 'replicate'))}", {"a": 1}, 1, mesh=row)
        return fs.unshard(found)["w"].tolist(), {(event.axis, event.size) for event in events}

    found = spmd(program, 5)
    assert found.pop(2) is None
    assert found == [([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], {("replicate+shard", 4)})] * 4


def test_ddp_and_traces_of_some_processes(workers):
    def program():
        mesh = fs.init_mesh({"shard": -1}, device="cpu", ranks=[0, 2])
        if not is_member(mesh):
            return None
        torch.manual_seed(0)
        module = network()
        model = fs.functionalize(module, units=nn.Linear)
        state = fs.TrainState.create(fs.shard(dict(module.named_parameters()), fs.zero3(mesh)), fs.sgd(0.1))

        def step(state, batch):
            loss, grads = fs.value_and_grad(partial(loss_of, model))(state.params, batch)
            return fs.update(fs.sgd(0.1), state, grads), loss

        batches = [batch_of(number, fs.axis_index(fs.axis_of(mesh))) for number in range(2)]
        with fs.trace() as trace:
            assert_matches_ddp(
                step,
                state,
                batches,
                module=module,
                loss_fn=lambda ddp, batch: functional.mse_loss(ddp(batch[0]), batch[1]),
                optimizer=partial(torch.optim.SGD, lr=0.1),
                mesh=mesh,
            )
        report = trace.report(mesh=mesh)
        return [line.rank for line in report.timelines], {e.members for line in report.timelines for e in line.events}

    assert spmd(program, workers(3)) == [([0, 2], {(0, 2)}), None, ([0, 2], {(0, 2)})]


def outside(mesh, directory):
    """Calls with a mesh that this rank is not in."""
    yield lambda: fs.axis_of(mesh)
    yield lambda: fs.zero3(mesh)
    yield lambda: fs.hsdp(mesh, "shard", "shard")
    yield lambda: fs.fully_shard(mesh)
    yield lambda: fs.measure(mesh)
    yield lambda: checkpoint.save(directory, {}, 1, mesh=mesh)
    yield lambda: checkpoint.restore(directory, {}, mesh=mesh)
    yield lambda: checkpoint.Manager(directory, mesh=mesh)
    with fs.trace() as trace:
        pass
    yield lambda: trace.report(mesh=mesh)


def held_by_others(params, axis):
    """Calls with leaves, and with the axis, of a mesh that this rank is not in."""
    yield "gather", lambda: fs.gather(params)
    yield "unshard", lambda: fs.unshard(params)
    yield "value_and_grad", lambda: fs.value_and_grad(lambda p: fs.gather(p)["w"].sum())(params)
    yield "scatter_grads", lambda: fs.scatter_grads({"w": torch.ones(4)}, like=params)
    yield "objective", lambda: fs.objective(torch.ones(()), like=params)
    yield "psum", lambda: fs.psum(torch.ones(2), axis)
    yield "broadcast", lambda: fs.broadcast(torch.ones(2), axis)
    yield "jit", lambda: fs.jit(lambda p: fs.gather(p))(params)


def test_a_foreign_mesh_is_refused_at_once(tmp_path):
    """Only the rank outside calls, so that a collective would never end."""
    shared = {}

    def program():
        everyone = fs.axis_of(fs.init_mesh({"all": -1}, device="cpu"))
        mesh = fs.init_mesh({"shard": 2}, device="cpu", ranks=[0, 1])
        if is_member(mesh):
            params = fs.shard({"w": torch.ones(4)}, fs.zero3(mesh, min_shard_elements=0))
            shared[fs.comm.rank(everyone)] = params, fs.axis_of(mesh)
        fs.psum(torch.zeros(()), everyone)
        if not is_member(mesh):
            for call in outside(mesh, tmp_path):
                with pytest.raises(ValueError, match=r"mesh's ranks \[0, 1\], got one on rank 2"):
                    call()
            for name, call in held_by_others(*shared[0]):
                with pytest.raises(ValueError, match=r"'shard' of 2 ranks") as raised:
                    call()
                assert name in str(raised.value)
        return fs.psum(torch.ones(()), everyone).item()

    assert spmd(program, 3) == [3.0] * 3


def whole_world(params, directory):
    """Calls that all ranks of the run make unless they are told a mesh."""
    module = nn.Linear(4, 1, bias=False)
    params = {"weight": params["w"]}
    yield "save", lambda: checkpoint.save(directory, params, 1)
    yield "restore", lambda: checkpoint.restore(directory, params)
    yield "Manager", lambda: checkpoint.Manager(directory).save(params, 1)
    yield "to_state_dict", lambda: checkpoint.to_state_dict(params)
    yield "from_state_dict", lambda: checkpoint.from_state_dict({}, params)
    yield "load_torch", lambda: checkpoint.load_torch(directory, params)
    yield "save_dcp", lambda: checkpoint.save_dcp(directory, params)
    yield "load_dcp", lambda: checkpoint.load_dcp(directory, params)
    yield "save_huggingface", lambda: checkpoint.save_huggingface(directory, params)
    yield "load_huggingface", lambda: checkpoint.load_huggingface(directory, params)
    yield (
        "from_optimizer_state_dict",
        lambda: checkpoint.from_optimizer_state_dict({}, TX.init(params), module, torch.optim.SGD(module.parameters())),
    )
    yield (
        "to_optimizer_state_dict",
        lambda: checkpoint.to_optimizer_state_dict(TX.init(params), module, torch.optim.SGD(module.parameters())),
    )


def test_a_checkpoint_is_told_which_ranks_make_it(tmp_path):
    """A state of some ranks is refused before any collective where the call is for all, or for other ranks."""

    def program():
        mesh = fs.init_mesh({"shard": 2}, device="cpu", ranks=[0, 2])
        line = fs.init_mesh({"shard": -1}, device="cpu")
        wide = fs.shard({"w": torch.ones(4)}, fs.zero3(line, min_shard_elements=0))
        if is_member(mesh):
            params = fs.shard({"w": torch.ones(4)}, fs.zero3(mesh, min_shard_elements=0))
            for _, call in whole_world(params, tmp_path):
                with pytest.raises(
                    ValueError, match=r"all ranks of this run, got axis 'shard' of ranks \[0, 2\]; .*mesh="
                ):
                    call()
            with pytest.raises(
                ValueError, match=r"leaves on a mesh of ranks \[0, 2\], got axis 'shard' of ranks \[0, 1, 2\]"
            ):
                checkpoint.save(tmp_path, wide, 1, mesh=mesh)

    spmd(program, 3)


NEEDED = r"init_mesh: expected ranks to be different ranks from 0 to 2, ascending, got "


@pytest.mark.parametrize(
    ("shape", "ranks", "message"),
    [
        ({"shard": -1}, [0, 0], NEEDED + r"\[0, 0\]"),
        ({"shard": -1}, [2, 1], NEEDED),
        ({"shard": -1}, [1, 3], NEEDED),
        ({"shard": -1}, [-1, 0], NEEDED),
        ({"shard": -1}, [], NEEDED),
        ({"shard": -1}, [True], NEEDED),
        ({"shard": -1}, "01", NEEDED),
        ({"shard": -1}, 2, NEEDED + "2"),
        ({"shard": 2}, [0], r"the number of ranks to be 2 for \{'shard': 2\}, got 1"),
        ({"a": 2, "b": -1}, [0, 1, 2], r"to be a multiple of 2 for \{'a': 2, 'b': -1\}, got 3"),
        ({"shard": 3}, [0, 1], r"to be 3 for \{'shard': 3\}, got 2"),
    ],
)
@pytest.mark.rows(4)
def test_refused(shape, ranks, message):
    def program():
        with pytest.raises(ValueError, match=message):
            fs.init_mesh(shape, device="cpu", ranks=ranks)
        # Nothing is left half made.
        fs.init_mesh({"shard": -1}, device="cpu", ranks=[0, 2])

    spmd(program, 3)


def test_ranks_that_ask_for_different_ranks_all_refuse():
    def program():
        rank = fs.comm.rank(fs.axis_of(fs.init_mesh({"all": -1}, device="cpu")))
        for ranks in ([0, 1] if rank else [0, 2], [0, 1] if rank else None, [0, 1] if rank else [0, 9]):
            with pytest.raises(ValueError, match=re.escape("of ranks [0, 1]") if rank or ranks != [0, 9] else "to 2"):
                fs.init_mesh({"shard": -1}, device="cpu", ranks=ranks)
        return rank

    assert spmd(program, 3) == [0, 1, 2]


def test_all_ranks_are_a_mesh_of_all():
    def program():
        mesh = fs.init_mesh({"shard": -1}, device="cpu", ranks=range(2))
        return fs.axis_of(mesh) == fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))

    assert spmd(program, 2) == [True] * 2
