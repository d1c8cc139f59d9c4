"""Ranks of a mesh of several axes that make different calls: all of them hear of it."""

import re

import pytest
import torch

import fshard as fs
from tests.faults import outcome
from tests.ranks import my_rank, on_ranks


@on_ranks(4, pytest.param("4 processes", marks=pytest.mark.slow), timeout=90.0)
def test_a_difference_over_the_last_axis_of_a_jitted_step_is_told_to_all_ranks():
    """Ranks 0 and 1, which agree with each other, go on into the step, and wait there for ranks 2 and 3."""
    mesh = fs.init_mesh({"a": 2, "b": 2}, device="cpu", timeout=60.0)
    a, b = fs.axis_of(mesh, "a"), fs.axis_of(mesh, "b")
    params = fs.shard({"w": torch.ones(8, 4)}, fs.compose(fs.fully_shard(a, min_shard_elements=0), fs.own_dim(b)))

    def total(params):
        x = fs.psum(fs.gather(params)["w"].sum(), b)
        # Neither the arguments nor what is sent over the axis "a" differ.
        return x + fs.psum(torch.ones(5), b).sum() if my_rank() == 3 else x

    outcome_here = outcome(lambda: fs.jit(total)(params))
    difference = (
        "jit: ranks make different calls\n  collectives: expected nothing as on the rank at b=0, got "
        "all_reduce (psum ) over 'b' of 1 tensors, 20 bytes on the rank at b=1\n"
    )
    if my_rank() in (2, 3):
        assert outcome_here.error == "ValueError", outcome_here
        assert outcome_here.text.startswith(difference), outcome_here
    else:
        assert outcome_here.error == "CollectiveError", outcome_here
        text = r"rank [23] failed in jit: ValueError: " + re.escape(difference)
        assert re.match(text, outcome_here.text), outcome_here
    assert outcome_here.seconds < 50.0, outcome_here
    again = outcome(lambda: fs.psum(torch.ones(()), b))
    assert again.error == "CollectiveError", again


@on_ranks(4, pytest.param("4 processes", marks=pytest.mark.slow), timeout=60.0)
def test_of_several_ranks_that_fail_the_first_is_named_on_the_others():
    """Over both axes of a mesh, also where facts differ too."""
    mesh = fs.init_mesh({"a": 2, "b": 2}, device="cpu", timeout=60.0)
    params = fs.shard({"w": torch.ones(8, 4)}, fs.fully_shard(mesh["a"], min_shard_elements=0))
    params |= fs.shard({"v": torch.ones(8, 4)}, fs.fully_shard(mesh["b"], min_shard_elements=0))
    fails = my_rank() in (1, 3)
    text = outcome(lambda: fs.gather({**params, "x": object()} if fails else {"all": params})).text
    assert text.startswith("gather: " if fails else "rank 1 failed in gather: "), text
    # Nothing else was sent, and the mesh is good.
    assert fs.psum(torch.ones(()), fs.axis_of(mesh, "a")).item() == 2.0
