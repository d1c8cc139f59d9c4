"""Every torch.func program on sharded parameters has the numbers of one process, but for some that do not work."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import grad, jvp, linearize, vmap

import fshard as fs
from fshard.testing import spmd
from tests.programs.batches import LONGEST, rows_dense
from tests.programs.curvature import rows_of
from tests.programs.sides import CHOSEN, Dense, OfRank
from tests.programs.subjects import COUNTS, ROWS, SUBJECTS, subject
from tests.programs.table import PROGRAMS, check, expected, strategies, world_sizes
from tests.ranks import on_ranks
from tests.trees import meshes, one_axis

CASES = [(program, name, n) for program in PROGRAMS for name in SUBJECTS for n in world_sizes(name, program)]


@pytest.mark.rows(4)
@pytest.mark.parametrize("program, name, world_size", CASES)
def test_program(program, name, world_size):
    # Once for all ranks.
    expected(name, program)
    spmd(lambda: [check(name, program, chosen) for chosen in strategies(name, program, world_size)], world_size)


# One of each kind: forward over backward, a whole matrix, nested vmap, an optimizer, inner products.
ON_PROCESSES = (
    "hvp, jvp of value_and_grad",
    "hessian, jacfwd of jacrev",
    "vmap, nested",
    "DP-SGD",
    "learned rate, fs.adam",
    "conjugate gradients",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
@on_ranks("2 processes")
def test_programs_on_processes(name):
    return [check(name, program, chosen) for program in ON_PROCESSES for chosen in ("zero3", "hsdp")]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_world_size_and_strategy_is_run(program):
    runs = {
        (n, chosen) for name in SUBJECTS for n in world_sizes(name, program) for chosen in strategies(name, program, n)
    }
    assert {n for n, _ in runs} == set(COUNTS)
    assert {chosen for n, chosen in runs if n > 1} == set(CHOSEN)


@pytest.mark.parametrize("name", SUBJECTS)
def test_dp_sgd_clips_some_rows(name):
    norms = rows_of(rows_dense(Dense(subject(name)))).norm(dim=1)
    assert 0 < (norms > LONGEST).sum() < ROWS


def test_rows_of_all_ranks_are_the_batch():
    assert all(len(counts) == ranks and sum(counts) == ROWS for ranks, counts in COUNTS.items())


@on_ranks("2 processes")
def test_linearize_is_refused_on_several_ranks():
    """It would fold collectives away; traced by threads, others could be in its place, hence processes."""
    side = OfRank(subject("function"), "zero3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = r"expected torch\.func\.jvp for each tangent, .* got torch\.func\.linearize, which folds"
        with pytest.raises(ValueError, match=text):
            linearize(side.loss, side.params)


@on_ranks(1)
def test_linearize_on_one_rank():
    side = OfRank(subject("function"), "zero3")
    with warnings.catch_warnings():
        # torch's own, about tensors that its trace holds.
        warnings.simplefilter("ignore")
        value, push = linearize(side.loss, side.params)
    expected_value, slope = jvp(side.loss, (side.params,), (side.directions[0],))
    assert value.equal(expected_value)
    assert push(side.directions[0]).equal(slope)


@pytest.mark.parametrize("strategy", ("ddp", "zero3"))
@on_ranks(2)
def test_vmap_of_a_loss_that_uses_a_leaf_on_one_rank(strategy):
    """A rank without rows for an expert: its gradient is zeros, which vmap has not batched."""
    full = {name: torch.ones(3, 5, dtype=torch.float64) for name in ("both", "expert")}
    rates = torch.tensor([1.0, 2.0], dtype=torch.float64)
    on = meshes()
    params = fs.shard(full, CHOSEN[strategy](on))

    def loss(p, rate):
        whole = fs.gather(p)
        names = ("both", "expert") if on.line.get_rank() == 0 else ("both",)
        return fs.objective(rate * sum(whole[name].sum() for name in names), like=p, reduce="sum")

    grads = vmap(grad(loss), in_dims=(None, 0))(params, rates)
    for name, ranks in {"both": 2, "expert": 1}.items():
        found = vmap(fs.gather)(grads)[name]
        assert found.equal(ranks * rates[:, None, None].expand_as(found))


def test_vmap_of_a_transformer_on_a_rank_without_rows():
    expected("transformer", "vmap, nested")
    spmd(lambda: check("transformer", "vmap, nested", "zero3"), 8)


def test_shard_inside_a_transform_is_refused_by_path():
    transform = fs.ddp(one_axis())
    params = fs.shard({"w": torch.ones(3)}, transform)

    def loss(p):
        noise = fs.shard({"noise": torch.ones(3)}, transform)
        return fs.objective((fs.gather(p)["w"] * fs.gather(noise)["noise"]).sum(), like=p)

    with pytest.raises(ValueError, match=r"\['noise'\]"):
        grad(loss)(params)


def test_remat_of_the_first_call_of_a_model():
    module = nn.Linear(3, 2)
    model = fs.functionalize(module)
    params = model.init(fs.ddp(one_axis()))

    def loss(p):
        return fs.objective(fs.remat(lambda p, x: model.apply(p, x).square().sum())(p, torch.ones(4, 3)), like=p)

    assert grad(loss)(params)["bias"].local.shape == (2,)
