"""Every torch.func program on sharded parameters has the numbers of one process, but for some that do not work."""

import warnings

import pytest
import torch
from torch.func import grad, linearize, vmap

import fshard as fs
from fshard.testing import spmd
from tests.programs.sides import CHOSEN, OfRank
from tests.programs.subjects import SUBJECTS, subject
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


# Forward over backward, nested vmap, samples, inner products.
ON_PROCESSES = ("hvp, jvp of value_and_grad", "vmap, nested", "DP-SGD", "conjugate gradients")


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
@on_ranks("2 processes")
def test_programs_on_processes(name):
    return [check(name, program, chosen) for program in ON_PROCESSES for chosen in ("zero3", "hsdp")]


@on_ranks("2 processes")
def test_linearize_is_refused_on_several_ranks():
    """It would fold collectives away; traced by threads, others could be in its place, hence processes."""
    side = OfRank(subject("function"), "zero3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = r"expected torch\.func\.jvp for each tangent, .* got torch\.func\.linearize, which folds"
        with pytest.raises(ValueError, match=text):
            linearize(side.loss, side.params)


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


def test_shard_inside_a_transform_is_refused_by_path():
    transform = fs.ddp(one_axis())
    params = fs.shard({"w": torch.ones(3)}, transform)

    def loss(p):
        noise = fs.shard({"noise": torch.ones(3)}, transform)
        return fs.objective((fs.gather(p)["w"] * fs.gather(noise)["noise"]).sum(), like=p)

    with pytest.raises(ValueError, match=r"\['noise'\]"):
        grad(loss)(params)
