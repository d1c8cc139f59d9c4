"""Ranks that call different verbs: every rank hears of it, whichever of them asks the others for what."""

import pytest
import torch

import fshard as fs
from fshard.checkpoint import to_state_dict
from fshard.comm.agree import FIRST
from fshard.errors import Problem, leaf_error
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, normal, one_axis

# A call that some rank never comes to would wait for the timeout of the process group, which is minutes.
SECONDS = 20.0

STRATEGIES = {
    "ddp": fs.ddp,
    "zero2": lambda mesh: fs.zero2(mesh, min_shard_elements=0),
    "zero3": lambda mesh: fs.zero3(mesh, min_shard_elements=0),
}


def axis_in(params):
    """A mesh is made by all ranks or by none."""
    return params["w"].spec.axes[0]


# What the first rank calls alone, and how it is called in the error.
CALLS = {
    "save": (lambda params, place: fs.checkpoint.save(place, params, step=1), "checkpoint.save"),
    "to_state_dict": (lambda params, _: to_state_dict(params, rank0_only=True), "checkpoint.to_state_dict"),
    "texts": (lambda params, _: fs.comm.texts("x" * 5000, axis_in(params), "texts"), "texts"),
    "highest": (lambda params, _: fs.comm.highest([1.0, 2.0], [axis_in(params)], "highest"), "highest"),
    "shard": (lambda params, _: fs.shard({"w": torch.ones(4, 4)}, fs.ddp(axis_in(params))), "shard"),
}


def loss(params):
    return fs.gather(params)["w"].square().sum()


REMEDY = (
    "To fix: let every rank make the same calls in the same order, also those whose result one rank alone uses, such "
    "as save and to_state_dict(rank0_only=True)."
)


def text_of(name, ranks):
    lines = [f"  rank 0: {CALLS[name][1]}", *(f"  rank {rank}: value_and_grad begins" for rank in range(1, ranks))]
    return "\n".join(["collective mismatch between ranks", *lines, REMEDY])


@pytest.mark.rows(6)
@pytest.mark.parametrize("name", CALLS)
@on_ranks(2, 3, "2 processes", timeout=SECONDS)
def test_a_verb_that_one_rank_calls_alone_is_told_to_all(name, world_size, tmp_path):
    """Processes too, which gloo would end by a signal, were their first messages of different sizes."""
    mesh, (call, _) = one_axis(), CALLS[name]
    for transform in STRATEGIES.values():
        params = fs.shard({"w": normal()(4, 4)}, transform(mesh))
        expected = fs.value_and_grad(loss)(params)
        with pytest.raises(fs.comm.CollectiveError) as caught:
            call(params, tmp_path) if mesh.get_rank() == 0 else fs.value_and_grad(loss)(params)
        assert str(caught.value) == text_of(name, world_size)
        assert_same_bits(fs.tree_leaves(fs.value_and_grad(loss)(params)), fs.tree_leaves(expected))


@on_ranks(2, timeout=SECONDS)
def test_what_is_no_comparison_is_told_apart():
    """By the rank that compares; the other one has what it did not ask for."""
    axis = fs.axis_of(one_axis())
    if fs.comm.rank(axis):
        fs.comm.all_gather([torch.ones(FIRST, dtype=torch.float64)], axis, "other")
        return
    with pytest.raises(fs.comm.CollectiveError) as caught:
        fs.comm.texts("", axis, "texts")
    lines = ["  rank 0: compares its calls", "  rank 1: runs another collective"]
    assert str(caught.value) == "\n".join(["collective mismatch between ranks", *lines, REMEDY])


@on_ranks(1, 2, 3, timeout=SECONDS)
def test_texts_of_any_length_and_numbers_of_any_count(world_size):
    axis = fs.axis_of(one_axis())
    rank = fs.comm.rank(axis)
    for size in (0, 1, 111, 112, 113, 1016, 5000):
        texts = fs.comm.texts("\udcff" * (size % 2) + f"{rank}" * size, axis, "texts")
        assert texts == ["\udcff" * (size % 2) + f"{i}" * size for i in range(world_size)]
    for count in (0, 1, 14, 15, 16, 40):
        numbers = [-i * (1 + rank) for i in range(count)]
        assert fs.comm.highest(numbers, [axis], "highest") == [-i for i in range(count)]
        halves = [number / 2 for number in numbers]
        assert fs.comm.highest(halves, [axis], "highest") == [-i / 2 for i in range(count)]


def test_of_many_problems_the_first_are_printed():
    problems = [Problem(f"['w{i}']", "none", "one") for i in range(13)]
    for many, rest in ((10, []), (11, ["  and 1 more"]), (13, ["  and 3 more"])):
        lines = str(leaf_error("what", problems[:many], "remedy")).splitlines()
        assert lines[1:11] == [f"  ['w{i}']: expected one, got none" for i in range(10)]
        assert [lines[0], *lines[11:]] == ["what", *rest, "To fix: remedy."]
