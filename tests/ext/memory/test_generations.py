"""Generations in memory: restored bitwise into any layout, chosen as one, and gone at the end of a run."""

import gc
import os
from collections import OrderedDict

import pytest
import torch

import fshard as fs
from fshard import checkpoint
from fshard.testing import spmd
from tests.checkpoint.states import (
    ALL_TREES,
    CHOOSY,
    LAYOUTS,
    assert_same,
    divisible,
    fail_writes,
    full,
    named_oddly,
    python_values,
    refused,
    sampler,
    split,
    zeros_like,
)
from tests.ext.memory.jobs import be_job, manager, save_steps, slots_in
from tests.ranks import my_rank, on_ranks
from tests.trees import assert_same_bits, meshes, one_axis


@pytest.fixture(autouse=True)
def job(monkeypatch):
    be_job(monkeypatch)


@pytest.mark.parametrize("ranks, other_ranks, count", [(2, 3, 9), (4, 1, 3)])
def test_restore_undoes_save_into_any_layout(ranks, other_ranks, count, tmp_path):
    """Of every tree, from some layouts into others."""
    draw = sampler(ranks)
    layouts = draw.sample(list(LAYOUTS), count)
    for layout, other in zip(layouts, draw.sample(list(LAYOUTS), count), strict=True):
        is_choosy = layout in CHOOSY or other in CHOOSY
        trees = divisible() if is_choosy else {name: make() for name, make in ALL_TREES.items()}
        directory = tmp_path / layout
        spmd(lambda: save_steps(directory, lambda step: fs.shard(trees, LAYOUTS[layout](meshes())), 1), ranks)  # noqa: B023
        spmd(lambda: assert_restored(directory, trees, LAYOUTS[other]), other_ranks)  # noqa: B023


def assert_restored(directory, trees, layout):
    params = fs.shard(trees, layout(meshes()))
    restored = manager(directory).restore(zeros_like(params))
    assert_same(restored, params)
    assert_same_bits(fs.unshard(restored), fs.tree_map(torch.Tensor.detach, trees))


def test_leaves_that_are_not_sharded(tmp_path):
    for number, tree in enumerate((python_values(), named_oddly(), {"w": torch.ones(0), "step": None}, {})):
        save_steps(tmp_path, lambda step: tree, number)  # noqa: B023
        assert_same(manager(tmp_path).restore(zeros_like(tree)), tree)


def test_texts_that_grow(tmp_path):
    """A text may take more room than was set aside for it, in any writing."""
    kept = manager(tmp_path)
    for step, text in enumerate(("", "x" * 20000, "é" * 20000, "😀" * 30000, '"' * 50000, "x")):
        kept.save({"text": text, "floats": [0.1] * 50}, step)
        assert manager(tmp_path).restore({"text": "", "floats": [0.0] * 50})["text"] == text


@on_ranks(2)
def test_the_newest_of_memory_and_disk(tmp_path):
    """The newer step counts, of two that are equal that in memory; each can be asked for."""
    kept = manager(tmp_path, every=4)
    for step in range(1, 7):
        kept.save(split(step), step)
    kept.wait()
    restarted = manager(tmp_path)
    assert restarted.latest_step() == 6
    like = zeros_like(split(0))
    for step, kind in ((None, 6), (5, 5), (4, 4)):
        assert_same(restarted.restore(like, step=step), split(kind))
    checkpoint.save(tmp_path / "disk", split(9), 9)
    assert restarted.latest_step() == 9
    assert_same(restarted.restore(like), split(9))


# Steps from one save to the disk and to memory to the next.
INTERVALS = [(10**9, 1), (4, 1), (4, 3), (1, 3), (3, 4)]


@pytest.mark.parametrize("every, memory_every", INTERVALS)
@on_ranks(2)
def test_a_restart_reads_what_was_saved_last_where_a_run_goes_back(every, memory_every, tmp_path):
    """Twice in the same process, and then in others; each state differs from that which the step had before."""
    kept = manager(tmp_path, every=every, memory_every=memory_every)
    for turn, steps in enumerate((range(1, 10), range(8, 9), range(3, 8), range(7, 14), range(2, 4))):
        if turn > 2:
            kept = manager(tmp_path, every=every, memory_every=memory_every)
        for step in steps:
            is_on_disk = kept.save(split(100 * turn + step), step, force=step == 1)
            kept.wait()
            if is_on_disk or step % memory_every == 0:
                newest = 100 * turn + step
            restarted = manager(tmp_path)
            assert restarted.latest_step() == newest % 100, (turn, step)
            assert_same(restarted.restore(zeros_like(split(0))), split(newest))


@on_ranks(1)
def test_a_run_that_goes_back_loses_nothing_before_its_first_save_is_complete(tmp_path, monkeypatch):
    kept = manager(tmp_path, every=4)
    for step in range(1, 7):
        kept.save(split(step), step)
    kept.wait()
    with monkeypatch.context() as patched:
        fail_writes(patched, "content")
        for _ in range(2):
            with pytest.raises(checkpoint.CheckpointError, match="No space left on device"):
                kept.save(split(12), 2)
            restarted = manager(tmp_path)
            assert_same(restarted.restore(zeros_like(split(0))), split(6))
            assert_same(restarted.restore(zeros_like(split(0)), step=5), split(5))
    assert kept.save(split(12), 2)
    assert_same(manager(tmp_path).restore(zeros_like(split(0))), split(12))
    assert_same(manager(tmp_path).restore(zeros_like(split(0)), step=4), split(4))


@on_ranks(2)
def test_a_run_that_goes_on_looks_for_no_newer_state_between_two_states_in_memory(tmp_path):
    """Ranks send messages in the first save, and where they agree on the layout of the slots."""
    kept = manager(tmp_path, memory_every=3)
    state = split(0)
    sends = []
    for step in range(1, 7):
        with fs.comm.record() as record:
            kept.save(state, step)
        sends.append(len(record) > 0)
    # A slot is made by the first generation in it.
    assert sends == [True, False, True, False, False, True]


def test_a_process_forked_meanwhile_keeps_no_state_in_memory(tmp_path):
    """It has the files and their locks too, as one that loads data has, of two layouts; the run goes back, and ends."""
    kept = manager(tmp_path)
    for step in range(1, 5):
        kept.save({"w": torch.ones(3)}, step)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    try:
        kept.save({"w": torch.ones(4)}, 5)
        assert kept.save({"w": torch.ones(3)}, 2)
        assert manager(tmp_path).latest_step() == 2
        kept.save({"w": torch.ones(3)}, 3)
        kept.close()
        assert not slots_in(tmp_path)
    finally:
        os.close(write_end)
        os.close(read_end)
        os.waitpid(child, 0)


@pytest.mark.parametrize("is_restored", (True, False))
@on_ranks(2)
def test_ranks_that_a_failure_has_left_a_step_apart_go_on_in_the_same_processes(is_restored, tmp_path):
    """From the older state, which they have still or restore; the step that is repeated has another result."""
    axis = fs.axis_of(one_axis())
    kept = manager(tmp_path)
    for step in range(1, 5):
        kept.save(split(step), step)
    state = split(5)
    if my_rank() == 0:
        kept.save(state, 5)
        with pytest.raises(fs.comm.CollectiveError, match="rank 1 called init_mesh"):
            fs.psum(torch.ones(()), axis)
    one_axis()
    if is_restored:
        assert_same(kept.restore(zeros_like(split(0))), split(4))
    for step in range(5, 8):
        kept.save(split(100 + step), step)
        assert_same(manager(tmp_path).restore(zeros_like(split(0))), split(100 + step))


def test_a_warning_says_that_ranks_saved_other_values(tmp_path):
    """They may have a position of their own, of which the first save alone is compared."""

    def program():
        kept = manager(tmp_path)
        for step in range(1, 4):
            kept.save({**split(step), "position": 10 * step + my_rank() * (step > 1)}, step)
        return manager(tmp_path).latest_step()

    text = "checkpoint.restore: no state in memory is whole, because ranks saved different numbers or texts in it"
    with pytest.warns(UserWarning, match=text):
        assert spmd(program, 2) == [None, None]


def test_restore_or_makes_a_state_only_if_there_is_none(tmp_path):
    calls = []

    def program():
        kept = manager(tmp_path)
        first = kept.restore_or(lambda: calls.append(my_rank()) or split(0))
        assert_same(first, split(0))
        kept.save(split(3), 3)
        assert_same(manager(tmp_path).restore_or(lambda: split(0)), split(3))

    spmd(program, 2)
    assert sorted(calls) == [0, 1]


def test_restore_or_draws_nothing_where_there_is_a_state(tmp_path):
    drawn = []

    class Layer(torch.nn.Linear):
        def reset_parameters(self):
            drawn.append(my_rank())
            super().reset_parameters()

    def program():
        with torch.device("meta"):
            module = Layer(3, 4)
        drawn.clear()
        model = fs.functionalize(module)
        tx = fs.adamw(0.1)

        def init():
            return fs.TrainState.create(model.init(fs.zero3(one_axis(), min_shard_elements=0), seed=0), tx)

        kept = manager(tmp_path)
        first = kept.restore_or(init)
        assert drawn
        kept.save(first, 1)
        drawn.clear()
        assert_same(manager(tmp_path).restore_or(init), first)
        assert not drawn

    spmd(program, 1)


@on_ranks(2)
def test_parts_by_subtree_and_by_name(tmp_path):
    save_steps(tmp_path, lambda step: {"params": split(step), "head": torch.ones(2)}, 3)
    kept = manager(tmp_path)
    assert_same(kept.restore(zeros_like(split(0)), subtree="['params']"), split(3))
    head = kept.restore({"params": split(0), "head": torch.zeros(2)}, only="head")["head"]
    assert head.tolist() == [1, 1]


def test_a_donated_step_may_overwrite_what_was_saved(tmp_path):
    state = {"w": torch.ones(1000)}
    kept = manager(tmp_path)
    kept.save(state, 1)
    state["w"].zero_()
    assert manager(tmp_path).restore({"w": torch.zeros(1000)})["w"].sum() == 1000


def test_saves_inside_inference_mode_and_outside(tmp_path):
    kept = manager(tmp_path)
    for step in range(4):
        with torch.inference_mode(step % 3 == 0):
            kept.save(full(step), step)
    assert_same(manager(tmp_path).restore(full(0)), full(3))


@on_ranks(2)
def test_leaves_of_other_kinds_in_the_same_layout(tmp_path):
    """A rank has a parameter where it had a tensor, and its entries in another order: nobody sends anything."""
    kept = manager(tmp_path)
    for step in (1, 2):
        kept.save({"w": torch.ones(3), "v": torch.ones(2), "text": ""}, step)
    kept._memory._exchange.merge_objects = None
    like = {"w": torch.arange(3.0), "v": torch.arange(2.0), "text": "?"}
    state = OrderedDict(text="?", w=torch.nn.Parameter(like["w"]), v=like["v"]) if my_rank() else like
    kept.save(state, 3)
    assert_same(manager(tmp_path).restore(zeros_like(like)), like)


def test_a_state_without_values_in_the_layout_of_one_with_values(tmp_path):
    """Each save looks at the leaves, whatever their structure."""
    tx = fs.adamw(0.1)
    state = fs.TrainState.create(fs.shard({"w": torch.ones(3)}, fs.ddp(one_axis())), tx)
    kept = manager(tmp_path)
    for step in (1, 2):
        kept.save(state, step)
    donated = fs.tree_map(torch.clone, state)
    following = fs.jit(lambda state: fs.update(tx, state, state.params), donate_argnums=0)(donated)
    abstract = fs.tree_map(lambda leaf: leaf.to("meta"), state)
    for broken, problem in ((donated, "arguments were donated"), (abstract, "leaves are abstract")):
        assert problem in refused(lambda: kept.save(broken, 3))  # noqa: B023
    assert kept.latest_step() == 2
    for call in (torch.func.grad, torch.vmap, fs.jit):
        text = refused(lambda: call(lambda x: (kept.save(state, 3), x.sum())[1])(torch.ones(2)))  # noqa: B023
        assert "expected a call outside of fs.jit and torch.func" in text
    kept.save(following, 3)
    assert_same(manager(tmp_path).restore(state), following)


def test_the_end_of_a_run_removes_the_directory(tmp_path):
    def program(error):
        with manager(tmp_path) as kept:
            kept.save(split(1), 1)
            if error:
                raise ZeroDivisionError

    with pytest.raises(fs.testing.RankError, match="ZeroDivisionError"):
        spmd(lambda: program(True), 1)
    assert len(slots_in(tmp_path)) == 1
    # The manager that has failed is kept by its error, which is part of a cycle.
    gc.collect()
    spmd(lambda: program(False), 2)
    assert list((tmp_path / "memory").iterdir()) == []


def test_a_manager_goes_on_after_close(tmp_path):
    kept = manager(tmp_path)
    for step in (1, 2):
        kept.save(full(step), step)
        assert kept.latest_step() == step
        kept.close()
        assert kept.latest_step() is None


def test_a_smaller_start_removes_the_slots_of_ranks_that_are_no_more(tmp_path):
    """But not before a generation of its own is whole, and then the next one is begun."""
    spmd(lambda: save_steps(tmp_path, split, 1, 2), 3)
    names = []
    kept = manager(tmp_path)
    for step in (3, 4):
        kept.save(split(step), step)
        names.append(len(slots_in(tmp_path)))
    assert names == [6, 2]


def test_hosts_have_what_their_ranks_hold(tmp_path, monkeypatch):
    """Three hosts of two ranks: each restores from its own directory, also leaves that all ranks have whole."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def program():
        def state(step):
            return {"all": torch.full((4,), float(step)), **split(step)}

        host = tmp_path / f"{my_rank() // 2}"
        kept = checkpoint.Manager(tmp_path / "disk", memory=host, every=100)
        kept.save(state(1), 1)
        restarted = checkpoint.Manager(tmp_path / "disk", memory=host, every=100)
        assert_same(restarted.restore(zeros_like(state(0))), state(1))
        # A rank that needs what other hosts have cannot, and then none does; it may have copies of one of them.
        whole = {key: torch.zeros(shape) for key, shape in (("all", 4), ("w", 6))}
        refused(lambda: restarted.restore(whole), checkpoint.CheckpointError)
        # A run that has no checkpoint yet begins anew, where each restart would fail again.
        assert_same(restarted.restore_or(lambda: whole), whole)
        restarted.save(split(2), 2, force=True)
        restarted.wait()
        refused(lambda: restarted.restore_or(lambda: {"w": torch.zeros(5)}))

    with pytest.warns(UserWarning, match=r"step 1 is in memory.* \['w'\]: \d of its elements are on no"):
        spmd(program, 6)
