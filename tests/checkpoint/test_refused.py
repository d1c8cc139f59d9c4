"""What is refused, in what words, on every rank alike, and that nothing is lost by it."""

import enum
import os
import subprocess
import sys
import textwrap
import threading
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch

import fshard as fs
from fshard import checkpoint
from fshard.testing import RankError, spmd
from fshard.tree import MASK
from tests.checkpoint.states import assert_same, message, refused
from tests.ranks import my_rank
from tests.trees import normal, one_axis

ROOT = Path(__file__).parents[2]


class Colour(enum.IntEnum):
    RED = 1


class Tag:
    def __init__(self, number):
        self.number = number

    def __repr__(self):
        return "tag"

    def __lt__(self, other):
        return self.number < other.number


def refused_everywhere(program, ranks=2, kind=ValueError):
    """The text of an error that each rank raises, which must be one."""

    def each():
        return refused(program, kind)

    texts = spmd(each, ranks)
    assert len(set(texts)) == 1, texts
    return texts[0]


STEP = "pass step=, or a state that has one"


@pytest.mark.rows(6)
@pytest.mark.parametrize(
    ("step", "shown"),
    [
        (None, "None"),
        ("7", "'7'"),
        (-1, "-1"),
        (1.0, "1.0"),
        (True, "True"),
        (10**18, "1000000000000000000"),
        (numpy.int64(3), "3"),
        (torch.tensor(2.5), "2.5"),
        (torch.tensor(True), "True"),
        (torch.tensor(-3), "-3"),
    ],
)
@pytest.mark.parametrize("function", ("save", "Manager"))
def test_bad_steps(function, step, shown, tmp_path):
    save = checkpoint.Manager(tmp_path).save if function == "Manager" else partial(checkpoint.save, tmp_path)
    text = refused(lambda: save({}, step)).replace("np.int64(3)", "3")
    assert text == f"checkpoint.{function}: expected step to be a whole number from 0, got {shown}; {STEP}"
    assert list(tmp_path.iterdir()) == []


def test_a_bad_step_on_one_rank(tmp_path):
    text = refused_everywhere(lambda: checkpoint.save(tmp_path, {}, "x" if my_rank() else 1))
    assert text == f"checkpoint.save: expected step to be a whole number from 0, got 'x'; {STEP}"


PLAIN = "a plain tensor, or None, bool, int, float or str"
VALUES = "a strided tensor with values, of dtype bool, uint8"


@pytest.mark.parametrize(
    ("leaf", "found", "needed"),
    [
        (object(), "an object", PLAIN),
        (b"bytes", "a bytes", PLAIN),
        (1j, "a complex", PLAIN),
        (Colour.RED, "a Colour", PLAIN),
        (numpy.float64(1), "a float64", PLAIN),
        (numpy.ones(3), "a ndarray", PLAIN),
        (torch.float32, "a dtype", PLAIN),
        (torch.device("cpu"), "a device", PLAIN),
        (torch.nn.Linear(1, 1), "a Linear", PLAIN),
        (torch.ones(3, device="meta"), "a float32 Tensor of shape (3,), torch.strided on meta", VALUES),
        (torch.ones(3).to_sparse(), "a float32 Tensor of shape (3,), torch.sparse_coo on cpu", VALUES),
        (torch.empty(3, dtype=torch.float8_e4m3fnuz), "a float8_e4m3fnuz Tensor of shape (3,), torch.strided", VALUES),
    ],
)
@pytest.mark.parametrize("on", ("all", "one"))
def test_leaves_that_cannot_be_saved(leaf, found, needed, on, tmp_path):
    if on == "all":
        text = refused(lambda: checkpoint.save(tmp_path, {"ok": torch.ones(1), "bad": [None, leaf]}, 1))
        assert text.startswith(f"checkpoint.save: leaves cannot be saved\n  ['bad'][1]: expected {needed}")
    else:
        text = refused_everywhere(lambda: checkpoint.save(tmp_path, {"bad": leaf if my_rank() else 3}, 1))
        assert text.startswith(f"checkpoint.save: leaves cannot be saved\n  ['bad']: expected {needed}")
    assert f", got {found}" in text
    assert text.endswith("\nTo fix: keep them out of the state.")
    assert list(tmp_path.iterdir()) == []


def test_tensors_of_other_classes(tmp_path):
    from torch._subclasses import FakeTensorMode
    from torch.distributed.tensor import DTensor, Replicate

    with FakeTensorMode():
        fake = torch.ones(3)
    shard = DTensor.from_local(torch.ones(3), fs.init_mesh({"shard": 1}, device="cpu"), [Replicate()])
    for leaf, name in ((fake, "FakeTensor"), (shard, "DTensor")):
        text = refused(lambda: checkpoint.save(tmp_path, {"w": leaf}, 1))  # noqa: B023
        assert f"  ['w']: expected {PLAIN}, got a float32 {name} of shape (3,)" in text
    # The attribute holds the mode alive otherwise.
    del fake


@pytest.mark.parametrize("call", ("save", "restore"))
@pytest.mark.parametrize("inside", ("grad", "vmap", "jit"))
def test_calls_where_nothing_has_a_value(inside, call, tmp_path):
    checkpoint.save(tmp_path / "there", {"w": torch.ones(3)}, 1)

    def f(x):
        if call == "save":
            checkpoint.save(tmp_path / "new", {"w": 3}, 1)
        else:
            checkpoint.restore(tmp_path / "there", {"w": torch.ones(3)})
        return x.sum()

    run = {"grad": torch.func.grad, "vmap": torch.vmap, "jit": fs.jit}[inside](f)
    assert refused(lambda: run(torch.ones(2))) == (
        f"checkpoint.{call}: expected a call outside of fs.jit and torch.func, on their results, got one inside"
    )
    assert not (tmp_path / "new").exists()


def test_leaves_of_one_name(tmp_path):
    tree = {Tag(1): torch.ones(1), Tag(2): torch.zeros(1)}
    end = "leaves of one name\n  tag: expected one of each name, got 2 leaves\n"
    end += "To fix: give keys that print differently."
    assert refused(lambda: checkpoint.save(tmp_path, tree, 1)) == f"checkpoint.save: {end}"
    checkpoint.save(tmp_path, {Tag(1): torch.ones(1)}, 1)
    assert refused(lambda: checkpoint.restore(tmp_path, tree)) == f"checkpoint.restore: {end}"


REMEDY = "To fix: make all but the values of Sharded leaves the same on every rank."


def in_dtype(dtype):
    return fs.shard({"w": torch.ones(4, dtype=dtype)}, group_of_one())["w"]


@pytest.mark.parametrize(
    ("make", "path", "first", "second"),
    [
        (lambda: {"a": 1} | ({"b": 2} if my_rank() else {}), "['b']", "nothing", "2"),
        (lambda: {"a": my_rank()}, "['a']", "0", "1"),
        (lambda: {"a": float("nan") if my_rank() else 0.0}, "['a']", "0.0", "nan"),
        (lambda: {"a": True if my_rank() else 1}, "['a']", "1", "True"),
        (lambda: my_rank() + 4, "(step)", "4", "5"),
        (
            lambda: {"mean": torch.zeros(2 + my_rank())},
            "['mean']",
            "float32[2]",
            "float32[3]",
        ),
        (
            lambda: {"w": in_dtype(torch.float64 if my_rank() else None)},
            *("['w']", "float32[4]", "float64[4]"),
        ),
    ],
)
def test_ranks_with_different_states(make, path, first, second, tmp_path):
    """Of a tree, or of a step where there is a number."""

    def save():
        made = make()
        return checkpoint.save(tmp_path, {}, made) if isinstance(made, int) else checkpoint.save(tmp_path, made, 1)

    text = refused_everywhere(save)
    line = f"{path}: expected {first} as on rank world=0, got {second} on rank world=1"
    assert text.startswith(f"checkpoint.save: ranks hold different leaves\n  {line}")
    assert text.endswith(REMEDY)
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_ranks_hold_whole_and_that_differ(tmp_path):
    text = refused_everywhere(lambda: checkpoint.save(tmp_path, {"mean": torch.full((2,), float(my_rank()))}, 1))
    line = "['mean']: expected the same on all ranks, got other values on rank 1"
    start = f"checkpoint.save: ranks hold different values of one leaf\n  {line}\nTo fix: make them the same, "
    assert text.startswith(start)
    assert list(tmp_path.iterdir()) == []


def group_of_one():
    return fs.fully_shard(fs.init_mesh({"rank": -1, "shard": 1}, device="cpu")["shard"])


def test_ranks_with_different_directories(tmp_path):
    text = refused_everywhere(lambda: checkpoint.save(tmp_path / str(my_rank()), {}, 1))
    assert f"  (directory): expected {tmp_path}/0 as on rank world=0, got {tmp_path}/1 on rank world=1" in text


def test_a_shard_of_another_shape_on_one_rank(tmp_path):
    def program():
        params = fs.shard({"w": normal()(4, 2)}, fs.zero2(one_axis(), min_shard_elements=0))
        if my_rank():
            params = fs.tree_map(lambda local: local[:1], params)
        checkpoint.save(tmp_path, params, 1)

    assert refused_everywhere(program) == (
        "checkpoint.save: shards do not match their specs\n"
        "  ['w']: expected a local tensor of shape (2, 2), got a float64 Tensor of shape (1, 2) as local tensor\n"
        "To fix: keep a leaf's shape when mapping over it."
    )


def saved_state(directory):
    params = {"w": torch.ones(3, 2), "b": torch.ones(2)}
    state = fs.TrainState.create(fs.shard(params, fs.zero2(one_axis())), fs.adamw(0.1))
    checkpoint.save(directory, state)
    return state


GENERIC = "To fix: restore into a state built as the one that was saved; only= and subtree= read parts of it."


@pytest.mark.parametrize(
    ("like", "lines"),
    [
        ({"w": torch.ones(3, 3), "n": 1}, ["['w']: expected float32[3, 3], got float32[3, 2]"]),
        ({"w": torch.ones(3, 2, dtype=torch.bfloat16), "n": 1}, ["['w']: expected bfloat16[3, 2], got float32[3, 2]"]),
        ({"w": torch.ones(3, 2), "x": torch.ones(1), "n": 1}, ["['x']: expected float32[1], got nothing"]),
        ({"w": torch.ones(3, 2)}, ["['n']: expected nothing, got an int"]),
        ({"w": torch.ones(3, 2), "n": True}, ["['n']: expected a bool, got an int"]),
        ({"w": torch.ones(3, 2), "n": None}, ["['n']: expected None, got an int"]),
        ({"w": torch.ones(3, 2), "n": torch.ones(())}, ["['n']: expected float32[], got an int"]),
        ({"w": None, "n": 1}, ["['w']: expected None, got float32[3, 2]"]),
        ({"w": numpy.ones((3, 2)), "n": 1}, ["['w']: expected a ndarray, got float32[3, 2]"]),
        ({}, ["['w']: expected nothing, got float32[3, 2]", "['n']: expected nothing, got an int"]),
        (
            torch.ones(3, 2),
            [
                "(root): expected float32[3, 2], got nothing",
                "['w']: expected nothing, got float32[3, 2]",
                "['n']: expected nothing, got an int",
            ],
        ),
        (
            {"w": torch.ones(2), "n": "1"},
            ["['n']: expected a str, got an int", "['w']: expected float32[2], got float32[3, 2]"],
        ),
    ],
)
def test_a_state_that_does_not_fit(like, lines, tmp_path):
    checkpoint.save(tmp_path, {"w": torch.ones(3, 2), "n": 1}, 1)
    text = refused(lambda: checkpoint.restore(tmp_path, like))
    body = "".join(f"  {line}\n" for line in lines)
    assert text == f"checkpoint.restore: leaves do not fit\n{body}{GENERIC}"


def test_a_state_that_does_not_fit_on_one_rank(tmp_path):
    def program():
        checkpoint.save(tmp_path, {"w": torch.ones(3)}, 1)
        checkpoint.restore(tmp_path, {"w": torch.ones(4 if my_rank() == 1 else 3)})

    text = refused_everywhere(program, 3)
    assert "  ['w']: expected float32[4], got float32[3]\n" in text


def test_a_subtree_is_no_prefix_of_a_name(tmp_path):
    checkpoint.save(tmp_path, {"a": [torch.ones(1)], "ab": [torch.zeros(1)], "a.b": [torch.zeros(2)]}, 1)
    assert checkpoint.restore(tmp_path, [torch.zeros(1)], subtree="['a']")[0] == 1
    text = refused(lambda: checkpoint.restore(tmp_path, [torch.zeros(1)], subtree="['a"))
    assert "  ['a[0]: expected float32[1], got nothing" in text


@pytest.mark.parametrize("ranks", (1, 2))
def test_no_checkpoint(ranks, tmp_path):
    for directory in (tmp_path, tmp_path / "none"):
        text = refused_everywhere(lambda: checkpoint.restore(directory, {}), ranks, checkpoint.CheckpointError)  # noqa: B023
        expected = "expected a checkpoint that fs.checkpoint.save wrote"
        assert text == f"checkpoint.restore: {directory}: {expected}, got none"
    assert not (tmp_path / "none").exists()


def test_an_unknown_step(tmp_path):
    text = refused(lambda: checkpoint.restore(tmp_path, {}, step=1), checkpoint.CheckpointError)
    remedy = "pass step= one that is there"
    assert text == f"checkpoint.restore: {tmp_path}: expected a checkpoint of step 1, got steps none; {remedy}"
    for step in (3, 5, 5):
        checkpoint.save(tmp_path, {}, step)
    text = refused(lambda: checkpoint.restore(tmp_path, {}, step=4), checkpoint.CheckpointError)
    assert text == f"checkpoint.restore: {tmp_path}: expected a checkpoint of step 4, got steps 3, 5; {remedy}"


def test_masks_and_subtrees_that_mean_nothing(tmp_path):
    tree = {name: torch.ones(1) for name in "abcde"}
    checkpoint.save(tmp_path, tree, 1)
    text = refused_everywhere(lambda: checkpoint.restore(tmp_path, tree, only="head.*" if my_rank() else None))
    assert text == "checkpoint.restore: the mask 'head.*' matches no leaf of a, b, c, d, ...; name some of these"
    for only, shown in ((3, "an int"), ((), "a tuple"), ((1,), "a tuple"), (True, "a bool")):
        text = refused(lambda: checkpoint.restore(tmp_path, tree, only=only))  # noqa: B023
        assert text == f"checkpoint.restore: expected only to be {MASK}, got {shown}"


def save_refused(directory, ranks=2):
    return refused_everywhere(
        lambda: checkpoint.save(directory, {"w": torch.ones(3)}, 1), ranks, checkpoint.CheckpointError
    )


def test_directories_that_cannot_be_written_to(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    assert save_refused(file) == f"checkpoint.save: {file}: File exists"
    assert save_refused(file / "in") == f"checkpoint.save: {file}/in: Not a directory"
    assert file.read_text() == "mine"
    # Not even root makes a directory there.
    text = save_refused("/proc/checkpoints")
    assert text == "checkpoint.save: /proc/checkpoints: No such file or directory"
    assert save_refused(f"{tmp_path}/{'x' * 300}").endswith("x: File name too long")
    text = refused(lambda: checkpoint.restore(file, {}), checkpoint.CheckpointError)
    assert text == f"checkpoint.restore: {file}: Not a directory"
    with pytest.raises(NotADirectoryError, match=f"{file}"):
        checkpoint.latest(file)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory(tmp_path):
    tmp_path.chmod(0o500)
    try:
        assert "Permission denied" in save_refused(tmp_path)
    finally:
        tmp_path.chmod(0o700)


def test_a_directory_whose_name_is_no_text(tmp_path):
    directory = os.fsdecode(bytes(tmp_path) + b"/\xff\xfe")
    text = refused_everywhere(lambda: checkpoint.restore(directory, {}), 2, checkpoint.CheckpointError)
    assert text.startswith(f"checkpoint.restore: {directory}: expected a checkpoint")
    assert text.endswith("got none")
    spmd(lambda: checkpoint.save(directory, {"w": torch.ones(3)}, 1), 2)
    assert checkpoint.restore(directory, {"w": torch.zeros(3)})["w"].sum() == 3


@pytest.mark.parametrize("name", (".lock", ".latest.part"))
def test_links_that_a_writer_would_follow(name, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    (directory / name).symlink_to(outside)
    if name == ".lock":
        text = save_refused(directory)
        assert text == f"checkpoint.save: {directory}/.lock: Too many levels of symbolic links"
    else:
        checkpoint.save(directory, {}, 1)
    assert outside.read_text() == "mine"


FULL_DISK = """
    import resource, sys, torch
    from fshard import checkpoint
    directory = sys.argv[1]
    small, large = ({"w": torch.full((n,), 3.0)} for n in (10, 100_000))
    checkpoint.save(directory, small, 1)
    # In the header, in the data, and no more.
    for size in (0, 60, 100_000, -1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, -1))
        try:
            checkpoint.save(directory, large, 2)
        except checkpoint.CheckpointError as error:
            print(error)
            assert checkpoint.restore(directory, small)["w"].equal(small["w"])
            assert checkpoint.latest(directory) == 1
    assert checkpoint.restore(directory, large)["w"].equal(large["w"])
"""


@pytest.mark.slow
def test_files_that_cannot_grow(tmp_path):
    lines = python(FULL_DISK, tmp_path).splitlines()
    assert len(lines) == 3
    for line in lines:
        assert line.startswith("checkpoint.save: step 2 was not saved: ")
        assert line.endswith("/rank-00000.safetensors: File too large")
    there = sorted(path.name for path in tmp_path.iterdir())
    assert there == [".lock", "latest", "step-00000001", "step-00000002"]


def python(code, *arguments):
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


WRITERS = """
    import os, sys, torch
    from fshard import checkpoint
    directory, saved, refused = sys.argv[1], 0, 0
    child = os.fork()
    value = 2 if child else 1
    for step in range(15):
        try:
            checkpoint.save(directory, {"w": torch.full((1000,), float(value)), "writer": value, "step": step}, step)
            saved += 1
        except checkpoint.CheckpointError as error:
            assert "expected no other save to be under way there, got one; wait for it" in str(error), error
            refused += 1
    os.write(1, f"{saved} {refused}\\n".encode())
    assert not child or os.waitpid(child, 0)[1] == 0
"""


def test_two_processes_at_once(tmp_path):
    counts = [tuple(map(int, line.split())) for line in python(WRITERS, tmp_path).splitlines()]
    assert [saved + refused for saved, refused in counts] == [15, 15]
    there = [path.name for path in tmp_path.iterdir() if path.name.startswith("step-")]
    assert len(there) == sum(saved for saved, _ in counts)
    like = {"w": torch.zeros(1000), "writer": 0, "step": 0}
    for step in {int(name[5:].partition(".")[0]) for name in there}:
        state = checkpoint.restore(tmp_path, like, step=step)
        assert state["step"] == step
        assert state["w"].eq(state["writer"]).all()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".saving")]


def test_threads_at_once(tmp_path):
    outcomes = []
    begin = threading.Barrier(4)

    def write(value):
        begin.wait(30)
        for step in range(10):
            try:
                checkpoint.save(tmp_path, {"w": torch.full((1000,), float(value))}, step)
                outcomes.append("saved")
            except checkpoint.CheckpointError as error:
                outcomes.append("expected no other save to be under way there" in str(error))

    threads = [threading.Thread(target=write, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(outcomes) == 40
    assert False not in outcomes
    for step in range(10):
        if list(tmp_path.glob(f"step-{step:08d}*")):
            values = checkpoint.restore(tmp_path, {"w": torch.zeros(1000)}, step=step)["w"]
            assert values.unique().numel() == 1
    assert len(list(tmp_path.glob("step-*"))) == outcomes.count("saved")


def test_ranks_that_see_different_checkpoints(tmp_path):
    def program():
        directory = tmp_path / str(my_rank())
        directory.mkdir()
        torch.distributed.barrier()
        if not my_rank():
            return
        checkpoint.save(tmp_path, {}, 1)

    # A save alone on one rank is a program's mistake, told by the launcher.
    with pytest.raises(RankError):
        spmd(program, 2)
    for value in (1, 2):
        checkpoint.save(tmp_path / f"of {value}", {"w": value}, 1)
    text = refused_everywhere(lambda: checkpoint.restore(tmp_path / f"of {my_rank() + 1}", {"w": 0}))
    assert text.startswith(
        "checkpoint.restore: ranks read different checkpoints\n  (checkpoint): expected step-00000001 of"
    )


def test_a_refused_save_leaves_the_state_and_the_directory(tmp_path):
    state = saved_state(tmp_path)
    before = fs.tree_map(torch.clone, state)
    there = sorted(path.name for path in tmp_path.rglob("*"))
    refused(lambda: checkpoint.save(tmp_path, state._replace(key=object())))
    assert sorted(path.name for path in tmp_path.rglob("*")) == there
    assert_same(checkpoint.restore(tmp_path, state), before)
    with pytest.raises(RankError) as error:
        spmd(lambda: checkpoint.save(tmp_path, {"a": object()}, 1), 2)
    assert "leaves cannot be saved" in message(error)
