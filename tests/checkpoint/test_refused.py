"""What is refused, in what words, on every rank alike, and that nothing is lost by it."""

import enum
import os
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from torch._subclasses import FakeTensorMode

import fshard as fs
from fshard import checkpoint
from fshard.checkpoint import CheckpointError
from fshard.tree import MASK
from tests.checkpoint.states import refused, refused_everywhere
from tests.ranks import my_rank

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


STEP = "pass step=, or a state that has one"
STEPS = {
    **{
        "None": None,
        "'7'": "7",
        "-1": -1,
        "1.0": 1.0,
        "True": True,
        "1000000000000000000": 10**18,
        "3": numpy.int64(3),
    },
    **{"2.5": torch.tensor(2.5), "False": torch.tensor(False), "-3": torch.tensor(-3)},
}


def test_bad_steps(tmp_path):
    for shown, step in STEPS.items():
        for function, save in (
            ("Manager", checkpoint.Manager(tmp_path).save),
            ("save", partial(checkpoint.save, tmp_path)),
        ):
            text = refused(lambda: save({}, step)).replace("np.int64(3)", "3")  # noqa: B023
            assert text == f"checkpoint.{function}: expected step to be a whole number from 0, got {shown}; {STEP}"
    text = refused_everywhere(lambda: checkpoint.save(tmp_path, {}, "x" if my_rank() else 1))
    assert text == f"checkpoint.save: expected step to be a whole number from 0, got 'x'; {STEP}"
    for name, value in (("keep", 0), ("keep", True), ("every", -1), ("every", 1.5)):
        text = f"checkpoint.Manager: expected {name} to be a whole number from 1, got {value}"
        assert refused(lambda: checkpoint.Manager(tmp_path, **{name: value})) == text  # noqa: B023
    assert list(tmp_path.iterdir()) == []


PLAIN = "a plain tensor, or None, bool, int, float or str"
VALUES = "a strided tensor with values, of dtype bool, uint8"
LEAVES = (
    *(
        (object(), "an object", PLAIN),
        (b"bytes", "a bytes", PLAIN),
        (1j, "a complex", PLAIN),
        (Colour.RED, "a Colour", PLAIN),
    ),
    *((numpy.float64(1), "a float64", PLAIN), (numpy.ones(3), "a ndarray", PLAIN), (torch.float32, "a dtype", PLAIN)),
    (torch.ones(3, device="meta"), "a float32 Tensor of shape (3,), torch.strided on meta", VALUES),
    (torch.ones(3).to_sparse(), "a float32 Tensor of shape (3,), torch.sparse_coo on cpu", VALUES),
    (torch.empty(3, dtype=torch.float8_e4m3fnuz), "a float8_e4m3fnuz Tensor of shape (3,), torch.strided", VALUES),
)


def test_leaves_that_cannot_be_saved(tmp_path):
    with FakeTensorMode():
        fake = torch.ones(3)
    for leaf, found, needed in (*LEAVES, (fake, "a float32 FakeTensor of shape (3,)", PLAIN)):
        text = refused(lambda: checkpoint.save(tmp_path, {"ok": torch.ones(1), "bad": [None, leaf]}, 1))  # noqa: B023
        assert text.startswith(f"checkpoint.save: leaves cannot be saved\n  ['bad'][1]: expected {needed}")
        assert f", got {found}" in text
        assert text.endswith("\nTo fix: keep them out of the state.")
    text = refused_everywhere(lambda: checkpoint.save(tmp_path, {"bad": object() if my_rank() else 3}, 1))
    assert text.startswith(f"checkpoint.save: leaves cannot be saved\n  ['bad']: expected {PLAIN}")
    assert list(tmp_path.iterdir()) == []


def test_calls_where_nothing_has_a_value(tmp_path):
    checkpoint.save(tmp_path / "there", {"w": torch.ones(3)}, 1)
    calls = {
        "save": lambda: checkpoint.save(tmp_path / "new", {"w": 3}, 1),
        "restore": lambda: checkpoint.restore(tmp_path / "there", {"w": torch.ones(3)}),
    }
    for name, call in calls.items():
        for inside in (torch.func.grad, torch.vmap, fs.jit):
            run = inside(lambda x: (call(), x.sum())[1])  # noqa: B023
            assert refused(lambda: run(torch.ones(2))) == (  # noqa: B023
                f"checkpoint.{name}: expected a call outside of fs.jit and torch.func, on their results, got one inside"
            )
    assert not (tmp_path / "new").exists()


def test_leaves_of_one_name(tmp_path):
    tree = {Tag(1): torch.ones(1), Tag(2): torch.zeros(1)}
    end = (
        "leaves of one name\n  tag: expected one of each name, got 2 leaves\nTo fix: give keys that print differently."
    )
    assert refused(lambda: checkpoint.save(tmp_path, tree, 1)) == f"checkpoint.save: {end}"
    checkpoint.save(tmp_path, {Tag(1): torch.ones(1)}, 1)
    assert refused(lambda: checkpoint.restore(tmp_path, tree)) == f"checkpoint.restore: {end}"


def in_dtype(dtype):
    strategy = fs.fully_shard(fs.init_mesh({"rank": -1, "shard": 1}, device="cpu")["shard"])
    return fs.shard({"w": torch.ones(4, dtype=dtype)}, strategy)["w"]


DIFFERENT = (
    (lambda: {"a": 1} | ({"b": 2} if my_rank() else {}), "['b']", "nothing", "2"),
    (lambda: {"a": float("nan") if my_rank() else 0.0}, "['a']", "0.0", "nan"),
    (lambda: {"a": True if my_rank() else 1}, "['a']", "1", "True"),
    (lambda: my_rank() + 4, "(step)", "4", "5"),
    (lambda: {"mean": torch.zeros(2 + my_rank())}, "['mean']", "float32[2]", "float32[3]"),
    (lambda: {"w": in_dtype(torch.float64 if my_rank() else None)}, "['w']", "float32[4]", "float64[4]"),
)


def test_ranks_with_different_states(tmp_path):
    """Of a tree, or of a step where there is a number."""
    for make, path, first, second in DIFFERENT:

        def save():
            made = make()  # noqa: B023
            return checkpoint.save(tmp_path, {}, made) if isinstance(made, int) else checkpoint.save(tmp_path, made, 1)

        line = f"{path}: expected {first} as on rank world=0, got {second} on rank world=1"
        assert refused_everywhere(save) == (
            f"checkpoint.save: ranks hold different leaves\n  {line}\n"
            "To fix: make all but the values of Sharded leaves the same on every rank."
        )
    text = refused_everywhere(lambda: checkpoint.save(tmp_path / str(my_rank()), {}, 1))
    assert f"  (directory): expected {tmp_path}/0 as on rank world=0, got {tmp_path}/1 on rank world=1" in text
    text = refused_everywhere(lambda: checkpoint.save(tmp_path, {"mean": torch.full((2,), float(my_rank()))}, 1))
    line = "['mean']: expected the same on all ranks, got other values on rank 1"
    assert text.startswith(
        f"checkpoint.save: ranks hold different values of one leaf\n  {line}\nTo fix: make them the "
    )
    assert list(tmp_path.iterdir()) == []


W, NO_W, NO_N = torch.ones(3, 2), "['w']: expected nothing, got float32[3, 2]", "['n']: expected nothing, got an int"
MISFITS = (
    ({"w": torch.ones(3, 3), "n": 1}, "['w']: expected float32[3, 3], got float32[3, 2]"),
    ({"w": W.bfloat16(), "n": 1}, "['w']: expected bfloat16[3, 2], got float32[3, 2]"),
    ({"w": W, "x": torch.ones(1), "n": 1}, "['x']: expected float32[1], got nothing"),
    ({"w": W}, NO_N),
    ({"w": W, "n": True}, "['n']: expected a bool, got an int"),
    ({"w": W, "n": None}, "['n']: expected None, got an int"),
    ({"w": W, "n": torch.ones(())}, "['n']: expected float32[], got an int"),
    ({"w": None, "n": 1}, "['w']: expected None, got float32[3, 2]"),
    ({"w": numpy.ones((3, 2)), "n": 1}, "['w']: expected a ndarray, got float32[3, 2]"),
    (W, f"(root): expected float32[3, 2], got nothing\n  {NO_W}\n  {NO_N}"),
)
GENERIC = "To fix: restore into a state built as the one that was saved; only= and subtree= read parts of it."


def test_a_state_that_does_not_fit(tmp_path):
    checkpoint.save(tmp_path, {"w": W, "n": 1}, 1)
    for like, lines in MISFITS:
        text = refused(lambda: checkpoint.restore(tmp_path, like))  # noqa: B023
        assert text == f"checkpoint.restore: leaves do not fit\n  {lines}\n{GENERIC}"
    like = lambda: {"w": torch.ones(4 if my_rank() == 1 else 3, 2), "n": 1}  # noqa: E731
    text = refused_everywhere(lambda: checkpoint.restore(tmp_path, like()), 3)
    assert "  ['w']: expected float32[4, 2], got float32[3, 2]\n" in text


def test_subtrees_and_masks_that_match_nothing(tmp_path):
    tree = {"a": [torch.ones(1)], "ab": [torch.zeros(1)], "a.b": [torch.zeros(2)]}
    checkpoint.save(tmp_path, tree, 1)
    assert checkpoint.restore(tmp_path, [torch.zeros(1)], subtree="['a']")[0] == 1
    text = refused(lambda: checkpoint.restore(tmp_path, [torch.zeros(1)], subtree="['a"))
    assert "  ['a[0]: expected float32[1], got nothing" in text
    text = refused_everywhere(lambda: checkpoint.restore(tmp_path, tree, only="head.*" if my_rank() else None))
    assert text == "checkpoint.restore: the mask 'head.*' matches no leaf of a.0, a.b.0, ab.0; name some of these"
    for only, shown in ((3, "an int"), ((), "a tuple"), ((1,), "a tuple"), (True, "a bool")):
        text = refused(lambda: checkpoint.restore(tmp_path, tree, only=only))  # noqa: B023
        assert text == f"checkpoint.restore: expected only to be {MASK}, got {shown}"


def test_no_checkpoint(tmp_path):
    for directory in (tmp_path, tmp_path / "none", os.fsdecode(bytes(tmp_path) + b"/\xff\xfe")):
        text = refused_everywhere(lambda: checkpoint.restore(directory, {}), 2, CheckpointError)  # noqa: B023
        expected = "expected a checkpoint that fs.checkpoint.save wrote"
        assert text == f"checkpoint.restore: {directory}: {expected}, got none"
    assert list(tmp_path.iterdir()) == []
    text = refused(lambda: checkpoint.restore(tmp_path, {}, step=1), CheckpointError)
    remedy = "pass step= one that is there"
    assert text == f"checkpoint.restore: {tmp_path}: expected a checkpoint of step 1, got steps none; {remedy}"
    for step in (3, 5, 5):
        checkpoint.save(tmp_path, {}, step)
    text = refused(lambda: checkpoint.restore(tmp_path, {}, step=4), CheckpointError)
    assert text == f"checkpoint.restore: {tmp_path}: expected a checkpoint of step 4, got steps 3, 5; {remedy}"


def save_refused(directory):
    return refused_everywhere(lambda: checkpoint.save(directory, {"w": torch.ones(3)}, 1), 2, CheckpointError)


def test_directories_that_cannot_be_written_to(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    assert save_refused(file) == f"checkpoint.save: {file}: File exists"
    assert save_refused(file / "in") == f"checkpoint.save: {file}/in: Not a directory"
    assert file.read_text() == "mine"
    # Not even root makes a directory there.
    assert save_refused("/proc/checkpoints") == "checkpoint.save: /proc/checkpoints: No such file or directory"
    text = refused(lambda: checkpoint.restore(file, {}), CheckpointError)
    assert text == f"checkpoint.restore: {file}: Not a directory"
    with pytest.raises(NotADirectoryError, match=f"{file}"):
        checkpoint.latest(file)


def test_links_that_a_writer_would_follow(tmp_path):
    (tmp_path / "outside").write_text("mine")
    (tmp_path / ".lock").symlink_to(tmp_path / "outside")
    assert save_refused(tmp_path) == f"checkpoint.save: {tmp_path}/.lock: Too many levels of symbolic links"
    assert (tmp_path / "outside").read_text() == "mine"


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
    for step in range(8):
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
    assert [saved + refused for saved, refused in counts] == [8, 8]
    there = [path.name for path in tmp_path.iterdir() if path.name.startswith("step-")]
    assert len(there) == sum(saved for saved, _ in counts)
    like = {"w": torch.zeros(1000), "writer": 0, "step": 0}
    for step in {int(name[5:].partition(".")[0]) for name in there}:
        state = checkpoint.restore(tmp_path, like, step=step)
        assert state["step"] == step
        assert state["w"].eq(state["writer"]).all()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".saving")]


def test_ranks_that_see_different_checkpoints(tmp_path):
    for value in (1, 2):
        checkpoint.save(tmp_path / f"of {value}", {"w": value}, 1)
    text = refused_everywhere(lambda: checkpoint.restore(tmp_path / f"of {my_rank() + 1}", {"w": 0}))
    start = "checkpoint.restore: ranks read different checkpoints\n  (checkpoint): expected step-00000001 of"
    assert text.startswith(start)
