"""What is refused, in what words, on every rank alike, and that nothing is lost by it."""

import enum
import os
import subprocess
import sys
import textwrap

import numpy
import torch
from torch._subclasses import FakeTensorMode

import fshard as fs
from fshard import checkpoint
from fshard.checkpoint import CheckpointError
from fshard.testing import assert_trees_close
from fshard.tree import MASK
from tests.checkpoint.states import ROOT, refused, refused_everywhere
from tests.ranks import my_rank, on_ranks
from tests.trees import normal


class Colour(enum.IntEnum):
    RED = 1


class Tag:
    def __init__(self, number):
        self.number = number

    def __repr__(self):
        return "tag"

    def __lt__(self, other):
        return self.number < other.number


def test_bad_arguments(tmp_path):
    """Flags are True or False: no other value casts a dtype or writes beside the steps."""
    steps = {
        **{"None": None, "'7'": "7", "-1": -1, "1.0": 1.0, "True": True, f"{10**18}": 10**18},
        **{"np.int64(3)": numpy.int64(3), "2.5": torch.tensor(2.5), "False": torch.tensor(False)},
    }
    for shown, step in steps.items():
        text = refused(lambda: checkpoint.save(tmp_path, {}, step))  # noqa: B023
        remedy = "pass step=, or a state that has one"
        assert text == f"checkpoint.save: expected step to be a whole number from 0, got {shown}; {remedy}"
    assert "got 'x'" in refused_everywhere(lambda: checkpoint.save(tmp_path, {}, "x" if my_rank() else 1))
    text = "checkpoint.Manager: expected every to be a whole number from 1, got 1.5"
    assert refused(lambda: checkpoint.Manager(tmp_path, every=1.5)) == text
    text = "checkpoint.save: expected keep to be a whole number from 1, got True"
    assert refused(lambda: checkpoint.Manager(tmp_path, keep=True).save({}, 1)) == text
    tree = {"w": torch.ones(3)}
    calls = {
        "save: asynchronous": lambda flag: checkpoint.save(tmp_path, tree, 1, asynchronous=flag),
        "to_state_dict: rank0_only": lambda flag: checkpoint.to_state_dict(tree, rank0_only=flag),
        "from_state_dict: cast": lambda flag: checkpoint.from_state_dict(tree, tree, cast=flag),
    }
    for place, call in calls.items():
        for flag in ("no", 1, None, torch.tensor(True)):
            text = f"checkpoint.{place}: expected True or False, got {flag!r}; pass one of the two"
            assert refused(lambda: call(flag)) == text  # noqa: B023
    assert list(tmp_path.iterdir()) == []


def test_leaves_that_cannot_be_saved(tmp_path):
    with FakeTensorMode():
        fake = torch.ones(3)
    leaves = {
        **{"an object": object(), "a complex": 1j, "a Colour": Colour.RED, "a float64": numpy.float64(1)},
        **{"a dtype": torch.float32, "a float32 Tensor of shape (3,)": torch.ones(3, device="meta")},
        **{"a float64 Tensor of shape (3,)": torch.ones(3).double().to_sparse(), "a float32 FakeTensor": fake},
        "a float8_e4m3fnuz Tensor": torch.empty(3, dtype=torch.float8_e4m3fnuz),
    }
    needed = "None, a bool, an int, a float, a str, or a strided tensor with values, of dtype bool, uint8, "
    for found, leaf in leaves.items():
        text = refused(lambda: checkpoint.save(tmp_path, {"ok": torch.ones(1), "bad": [None, leaf]}, 1))  # noqa: B023
        assert text.startswith(f"checkpoint.save: leaves cannot be saved\n  ['bad'][1]: expected {needed}")
        assert f", got {found}" in text
        assert text.endswith("\nTo fix: keep them out of the state.")
    text = refused_everywhere(lambda: checkpoint.save(tmp_path, {"bad": object() if my_rank() else 3}, 1))
    assert text.startswith(f"checkpoint.save: leaves cannot be saved\n  ['bad']: expected {needed}")
    tree = {Tag(1): torch.ones(1), Tag(2): torch.zeros(1)}
    assert refused(lambda: checkpoint.save(tmp_path, tree, 1)) == (
        "checkpoint.save: leaves of one name\n  tag: expected one of each name, got 2 leaves\n"
        "To fix: give keys that print differently."
    )
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


DIFFERENT = (
    (lambda: ({"a": 1} | ({"b": 2} if my_rank() else {}), 1), "['b']", "nothing", "2"),
    (lambda: ({"a": float("nan") if my_rank() else 0.0}, 1), "['a']", "0.0", "nan"),
    (lambda: ({"a": True if my_rank() else 1}, 1), "['a']", "1", "True"),
    (lambda: ({}, my_rank() + 4), "(step)", "4", "5"),
    (lambda: ({"mean": torch.zeros(2 + my_rank())}, 1), "['mean']", "float32[2]", "float32[3]"),
)


def test_ranks_with_different_states(tmp_path):
    for make, path, first, second in DIFFERENT:
        line = f"{path}: expected {first} as on rank world=0, got {second} on rank world=1"
        assert refused_everywhere(lambda: checkpoint.save(tmp_path, *make())) == (  # noqa: B023
            f"checkpoint.save: ranks hold different leaves\n  {line}\n"
            "To fix: make all but the values of Sharded leaves the same on every rank."
        )
    text = refused_everywhere(lambda: checkpoint.save(tmp_path / str(my_rank()), {}, 1))
    assert f"  (directory): expected '{tmp_path}/0' as on rank world=0, got '{tmp_path}/1' on rank world=1" in text
    assert list(tmp_path.iterdir()) == []
    for value in (1, 2):
        checkpoint.save(tmp_path / f"of {value}", {"w": value}, 1)
    text = refused_everywhere(lambda: checkpoint.restore(tmp_path / f"of {my_rank() + 1}", {"w": 0}))
    start = "checkpoint.restore: ranks read different checkpoints\n  (checkpoint): expected step-00000001.0 of"
    assert text.startswith(start)


W, NO_W, NO_N = torch.ones(3, 2), "['w']: expected nothing, got float32[3, 2]", "['n']: expected nothing, got an int"
MISFITS = (
    ({"w": torch.ones(3, 3), "n": 1}, "['w']: expected float32[3, 3], got float32[3, 2]"),
    ({"w": W.bfloat16(), "n": 1}, "['w']: expected bfloat16[3, 2], got float32[3, 2]"),
    ({"w": W, "x": torch.ones(1), "n": 1}, "['x']: expected float32[1], got nothing"),
    ({"w": W, "n": True}, "['n']: expected a bool, got an int"),
    ({"w": W, "n": torch.ones(())}, "['n']: expected float32[], got an int"),
    ({"w": None, "n": 1}, "['w']: expected None, got float32[3, 2]"),
    (W, f"(root): expected float32[3, 2], got nothing\n  {NO_W}\n  {NO_N}"),
)


def test_a_state_that_does_not_fit(tmp_path):
    checkpoint.save(tmp_path, {"w": W, "n": 1}, 1)
    remedy = "restore into a state built as the one that was saved; only= and subtree= read parts of it"
    for like, lines in MISFITS:
        text = refused(lambda: checkpoint.restore(tmp_path, like))  # noqa: B023
        assert text == f"checkpoint.restore: leaves do not fit\n  {lines}\nTo fix: {remedy}."
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
    text = refused(lambda: checkpoint.restore(tmp_path, tree, only=(1,)))
    assert text == f"checkpoint.restore: expected only to be {MASK}, got a tuple"


def test_no_checkpoint(tmp_path):
    for directory in (tmp_path, tmp_path / "none", os.fsdecode(bytes(tmp_path) + b"/\xff\xfe")):
        text = refused_everywhere(lambda: checkpoint.restore(directory, {}), 2, CheckpointError)  # noqa: B023
        expected = "expected a checkpoint that fs.checkpoint.save wrote"
        assert text == f"checkpoint.restore: {directory}: {expected}, got none"
    for step in (3, 5, 5):
        checkpoint.save(tmp_path, {}, step)
    text = refused(lambda: checkpoint.restore(tmp_path, {}, step=4), CheckpointError)
    there = "step-00000003.0, step-00000005.1, step-00000005.2"
    assert text == f"checkpoint.restore: {tmp_path}: expected a checkpoint of step 4, got {there}"


def test_directories_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / ".lock").symlink_to(tmp_path / "file")
    # Not even root makes a directory in /proc; a writer would follow a link.
    for place, found in {
        tmp_path / "file": f"{tmp_path}/file: File exists",
        tmp_path / "file/in": f"{tmp_path}/file/in: Not a directory",
        "/proc/checkpoints": "/proc/checkpoints: No such file or directory",
        tmp_path: f"{tmp_path}/.lock: Too many levels of symbolic links",
    }.items():
        save = lambda: checkpoint.save(place, {"w": torch.ones(3)}, 1)  # noqa: E731, B023
        assert refused_everywhere(save, 2, CheckpointError) == f"checkpoint.save: {found}"
    assert (tmp_path / "file").read_text() == "mine"
    text = refused(lambda: checkpoint.restore(tmp_path / "file", {}), CheckpointError)
    assert text == f"checkpoint.restore: {tmp_path / 'file'}: Not a directory"


WRITERS = """
    import os, sys, torch
    from fshard import checkpoint
    directory, saved, refused = sys.argv[1], 0, 0
    child = os.fork()
    value = 2 if child else 1
    for step in range(5):
        try:
            checkpoint.save(directory, {"w": torch.full((1000,), float(value)), "writer": value, "step": step}, step)
            saved += 1
        except checkpoint.CheckpointError as error:
            assert "another save there is not complete; wait for it" in str(error), error
            refused += 1
    os.write(1, f"{saved} {refused}\\n".encode())
    assert not child or os.waitpid(child, 0)[1] == 0
"""


def test_two_processes_at_once(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(WRITERS), str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    counts = [tuple(map(int, line.split())) for line in result.stdout.splitlines()]
    assert [saved + refused for saved, refused in counts] == [5, 5]
    there = [path.name for path in tmp_path.iterdir() if path.name.startswith("step-")]
    assert len(there) == sum(saved for saved, _ in counts)
    like = {"w": torch.zeros(1000), "writer": 0, "step": 0}
    for step in {int(name[5:].partition(".")[0]) for name in there}:
        state = checkpoint.restore(tmp_path, like, step=step)
        assert state["step"] == step
        assert state["w"].eq(state["writer"]).all()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".saving")]


FULL = {"a": normal()(5, 3).float(), "b": normal(1)(3).float(), "c": normal(2)(4, 4).float()}
STRATEGIES = {
    "zero3": lambda shard: fs.zero3(shard, min_shard_elements=0),
    "zero3 with small leaves whole": lambda shard: fs.zero3(shard, min_shard_elements=8),
    "ddp": fs.ddp,
}


def trained(strategy="zero3", shard=2):
    """Local SGD: each replica trains two leaves by itself; no spec names the axis between them."""
    mesh = fs.init_mesh({"replica": -1, "shard": shard}, device="cpu")
    axis = fs.axis_of(mesh, "replica")
    params = fs.shard(FULL, STRATEGIES[strategy](mesh["shard"]))
    own = {name: fs.tree_map(lambda x: x + fs.comm.rank(axis), leaf) for name, leaf in params.items()}
    return own | {"b": params["b"]}, axis


def test_replicas_that_differ(tmp_path):
    """Ranks that hold other values of one part: every leaf is named."""
    for shard in (1, 2):
        for strategy in STRATEGIES:
            save = lambda: checkpoint.save(tmp_path, trained(strategy, shard)[0], step=1)  # noqa: E731, B023
            assert refused_everywhere(save, 2 * shard) == (
                "checkpoint.save: ranks hold different values of one leaf\n"
                f"  ['a']: expected the same on all ranks, got other values on rank {shard}\n"
                f"  ['c']: expected the same on all ranks, got other values on rank {shard}\n"
                "To fix: make them the same, buffers by fs.sync_buffers, or store a row of one leaf for each rank."
            )
            assert checkpoint.latest(tmp_path) is None
    check_export_is_refused("to_state_dict", lambda _, params: checkpoint.to_state_dict(params), tmp_path / "out")


def check_export_is_refused(name, export, directory):
    text = refused_everywhere(lambda: export(directory, trained()[0]), 4)
    start = f"checkpoint.{name}: ranks hold different values of one leaf\n  a: expected the same on all ranks"
    assert text.startswith(start)
    assert not directory.exists() or not list(directory.iterdir())


@on_ranks(4)
def test_rows_of_one_leaf_keep_replicas_that_differ(tmp_path):
    """The remedy: a leading dim over the axis of the replicas, taken off again after a restore; padding may differ."""

    def rows(leaf, axis):
        spec = leaf.spec
        over = fs.Spec((axis.size, *spec.shape), fs.P(axis.name, *spec.partition), (axis, *spec.axes))
        return fs.Sharded(leaf.local.unsqueeze(0), over)

    params, axis = trained()
    stacked = {name: rows(leaf, axis) for name, leaf in params.items()}
    checkpoint.save(tmp_path, stacked, step=1)
    found = checkpoint.restore(tmp_path, like=stacked)
    own = {name: fs.Sharded(found[name].local[0], leaf.spec) for name, leaf in params.items()}
    assert_trees_close(fs.unshard(own), fs.unshard(params), exact=True)
