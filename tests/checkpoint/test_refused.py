"""What is refused, in what words, on every rank alike, and that nothing is lost by it."""

import os

import numpy
import torch
from torch._subclasses import FakeTensorMode

import fshard as fs
from fshard import checkpoint
from fshard.checkpoint import CheckpointError
from fshard.errors import escape_text
from fshard.testing import spmd
from fshard.tree import MASK
from fshard.tree.checks import mark_donated
from tests.checkpoint.states import refused, refused_everywhere
from tests.ranks import my_rank
from tests.trees import normal


def test_a_directory_that_cannot_be_read(tmp_path):
    file = tmp_path / "file"
    file.touch()
    text = refused(lambda: checkpoint.latest_step(file), CheckpointError)
    assert text == f"checkpoint.latest_step: {file}: Not a directory"
    manager = checkpoint.Manager(file)
    assert refused(manager.latest_step, CheckpointError) == text
    assert refused(lambda: manager.restore_or(dict), CheckpointError) == text
    long = tmp_path / ("x" * 300)
    text = refused(lambda: checkpoint.Manager(long), CheckpointError)
    assert text == f"checkpoint.Manager: {long}: File name too long"


class PathOf:
    """A path whose text is whatever it is given."""

    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return self.path


def test_bad_arguments(tmp_path):
    """Flags are True or False: no other value casts a dtype or writes beside the steps."""
    for step in (None, "7", -1, 1.0, True, 10**18, numpy.int64(3), torch.tensor(2.5)):
        text = refused(lambda: checkpoint.save(tmp_path, {}, step))  # noqa: B023
        assert text.startswith("checkpoint.save: expected step to be a whole number from 0, got ")
    assert "got 'x'; pass step=" in refused_everywhere(lambda: checkpoint.save(tmp_path, {}, "x" if my_rank() else 1))
    tree, numbers = {"w": torch.ones(3)}, "to be a whole number from 1, got"
    for call, text in (
        (lambda: checkpoint.Manager(tmp_path).restore_or(tree), "Manager: expected init to be a function"),
        (lambda: checkpoint.latest_step(PathOf(b"a")), "latest_step: expected directory to be a path, got"),
        (lambda: checkpoint.latest_step(PathOf("")), "latest_step: expected directory to be a path, got"),
        (lambda: checkpoint.latest_step(PathOf("a\0")), "latest_step: expected directory to be a path, got"),
        (lambda: checkpoint.Manager(3), "Manager: expected directory to be a path, got 3"),
        (lambda: checkpoint.Manager(tmp_path, every=1.5), f"Manager: expected every {numbers} 1.5"),
        (lambda: checkpoint.Manager(tmp_path, keep=True).save({}, 1), f"save: expected keep {numbers} True"),
        (lambda: checkpoint.save(tmp_path, tree, 1, asynchronous=1), "save: asynchronous must be True or False, got"),
        (lambda: checkpoint.Manager(tmp_path).save({}, 1, force=1), "Manager: force must be True or False, got 1"),
        (lambda: checkpoint.save("a\0b", {}, 1), r"save: expected directory to be a path, got 'a\x00b'"),
        (lambda: checkpoint.to_state_dict(tree, rank0_only="no"), "to_state_dict: rank0_only must be True or False"),
        (lambda: checkpoint.from_state_dict(tree, tree, cast=None), "from_state_dict: cast must be True or False"),
        (lambda: checkpoint.restore(tmp_path, tree, only=(1,)), f"restore: expected only to be {MASK}, got a tuple"),
    ):
        assert refused(call).startswith(f"checkpoint.{text}")
    assert list(tmp_path.iterdir()) == []


def test_a_donated_state_is_named_as_one(tmp_path):
    """It has no step any more, but another one as `step` would not help."""
    params = fs.shard({"w": torch.ones(4)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    state = fs.TrainState.create(params, fs.sgd(0.1))
    mark_donated(fs.tree_leaves(state))
    for save in (lambda: checkpoint.save(tmp_path, state), lambda: checkpoint.Manager(tmp_path).save(state)):
        text = refused(save)
        assert text.startswith("checkpoint.save: arguments were donated\n  .step: was donated to an earlier call")
    assert list(tmp_path.iterdir()) == []


def test_leaves_that_cannot_be_saved(tmp_path):
    with FakeTensorMode():
        fake = torch.ones(3)
    leaves = {
        **{"an object": object(), "a complex": 1j, "a float64": numpy.float64(1), "a dtype": torch.float32},
        **{"a float32 Tensor of shape (3,)": torch.ones(3, device="meta"), "a float32 FakeTensor": fake},
        "a float64 Tensor of shape (3,)": torch.ones(3).double().to_sparse(),
    }
    kinds = "None, a bool, an int, a float, a str, or a strided tensor with values, of dtype bool, uint8, "
    for kind, leaf in leaves.items():
        text = refused(lambda: checkpoint.save(tmp_path, {"ok": torch.ones(1), "bad": [None, leaf]}, 1))  # noqa: B023
        assert text.startswith(f"checkpoint.save: leaves cannot be saved\n  ['bad'][1]: expected {kinds}")
        assert f", got {kind}" in text
        assert text.endswith("\nTo fix: keep them out of the state.")
    text = refused_everywhere(lambda: checkpoint.save(tmp_path, {"bad": object() if my_rank() else 3}, 1))
    assert text.startswith(f"checkpoint.save: leaves cannot be saved\n  ['bad']: expected {kinds}")
    assert list(tmp_path.iterdir()) == []


def test_whole_numbers_that_a_reader_would_refuse(tmp_path):
    """Python reads no more than 4300 digits, and the error of writing them names no leaf."""
    for number in (10**4300, -(10**4300)):
        text = refused(lambda: checkpoint.save(tmp_path, {"n": number}, 1))  # noqa: B023
        assert "checkpoint.save: leaves cannot be saved\n  ['n']: expected an int of at most 4300 digits" in text
    checkpoint.save(tmp_path, {"n": 10**4300 - 1}, 1)
    assert checkpoint.restore(tmp_path, {"n": 0})["n"] == 10**4300 - 1


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
        line = f"{path}: expected {first} as on the rank at world=0, got {second} on the rank at world=1"
        assert refused_everywhere(lambda: checkpoint.save(tmp_path, *make())) == (  # noqa: B023
            f"checkpoint.save: ranks hold different leaves\n  {line}\n"
            "To fix: make all but the values of Sharded leaves the same on every rank."
        )
    text = refused_everywhere(lambda: checkpoint.save(tmp_path / str(my_rank()), {}, 1))
    assert f"  (directory): expected '{tmp_path}/0' as on the rank at world=0, got '{tmp_path}/1' on" in text
    text = refused_everywhere(lambda: checkpoint.save(tmp_path, {}, 1, keep=my_rank() or None))
    assert "  (keep): expected None as on the rank at world=0, got 1 on the rank at world=1" in text
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
    ({"w": W, "n": True}, "['n']: expected a bool, got an int"),
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
    text = refused_everywhere(lambda: checkpoint.restore(tmp_path, {"w": W}, only="v.*" if my_rank() else None))
    assert text == "checkpoint.restore: the mask 'v.*' matches no leaf. The leaves are w."
    remedy = " Leave it out, or pass a function of (name, leaf) as the mask of several models."
    assert refused(lambda: checkpoint.restore(tmp_path, {"w": W}, only=["w", "v.*"])) == text + remedy


def test_no_checkpoint(tmp_path):
    nothing = "holds no checkpoint that fs.checkpoint.save wrote"
    for directory in (tmp_path, tmp_path / "none", os.fsdecode(bytes(tmp_path) + b"/\xff\xfe")):
        text = refused_everywhere(lambda: checkpoint.restore(directory, {}), 2, CheckpointError)  # noqa: B023
        # A name that is no UTF-8 is escaped, as it could not be sent to the other ranks.
        assert text == f"checkpoint.restore: {escape_text(str(directory))}: {nothing}"
    for step in (3, 5, 5):
        checkpoint.save(tmp_path, {}, step)
    # Nothing that is spelled in another way is a checkpoint.
    for name in ("step-1.0", "step-000000009.9", "step-00000009.9x", "step-00000003", "step-٠٠٠٠٠٠٠٩.9"):
        (tmp_path / name).mkdir()
    assert checkpoint.latest_step(tmp_path) == 5
    text = refused(lambda: checkpoint.restore(tmp_path, {}, step=4), CheckpointError)
    others = "step-00000003.0, step-00000005.1, step-00000005.2"
    assert text == f"checkpoint.restore: {tmp_path}: holds no checkpoint of step 4, but {others}"


def test_directories_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / ".lock").symlink_to(tmp_path / "file")
    # Not even root makes a directory in /proc; a writer would follow a link.
    for place, problem in {
        tmp_path / "file": f"{tmp_path}/file: File exists",
        tmp_path / "file/in": f"{tmp_path}/file/in: Not a directory",
        "/proc/checkpoints": "/proc/checkpoints: No such file or directory",
        tmp_path: f"{tmp_path}/.lock: Too many levels of symbolic links",
    }.items():
        save = lambda: checkpoint.save(place, {"w": torch.ones(3)}, 1)  # noqa: E731, B023
        assert refused_everywhere(save, 2, CheckpointError) == f"checkpoint.save: {problem}"
    assert (tmp_path / "file").read_text() == "mine"
    text = refused(lambda: checkpoint.restore(tmp_path / "file", {}), CheckpointError)
    assert text == f"checkpoint.restore: {tmp_path / 'file'}: Not a directory"


FULL = {"a": normal()(5, 3).float(), "b": normal(1)(3).float(), "c": normal(2)(4, 4).float()}


def trained(shard=2, least=0):
    """Parameters after local SGD: each replica trains two leaves by itself; no spec names the axis between them."""
    mesh = fs.init_mesh({"replica": -1, "shard": shard}, device="cpu")
    axis = fs.axis_of(mesh, "replica")
    params = fs.shard(FULL, fs.zero3(mesh["shard"], min_shard_elements=least))
    trained_apart = fs.tree_map(lambda x: x + fs.comm.rank(axis), params)
    return trained_apart | {"b": params["b"]}


def test_replicas_that_differ(tmp_path):
    """Ranks that hold other values of one part: every leaf is named."""
    for shard in (1, 2):
        for least in (0, 8):
            save = lambda: checkpoint.save(tmp_path, trained(shard, least), step=1)  # noqa: E731, B023
            assert refused_everywhere(save, 2 * shard) == (
                "checkpoint.save: ranks hold different values of one leaf\n"
                f"  ['a']: expected the same on all ranks, got other values on rank {shard}\n"
                f"  ['c']: expected the same on all ranks, got other values on rank {shard}\n"
                "To fix: make them the same, buffers by fs.sync_buffers, or store a row of one leaf for each rank."
            )
            assert checkpoint.latest_step(tmp_path) is None
    check_export_is_refused("to_state_dict", lambda _, params: checkpoint.to_state_dict(params), tmp_path / "out")


def test_a_mesh_of_too_few_ranks(tmp_path):
    """Each rank saves by itself, and has half of the leaf."""

    def save():
        mesh = fs.init_mesh({"replica": 1, "shard": 2}, device="cpu")
        params = fs.shard({"w": normal(1)(4)}, fs.fully_shard(mesh["shard"]))
        checkpoint.save(tmp_path / f"{my_rank()}", params, step=1, mesh=mesh["replica"])

    for text in spmd(lambda: refused(save, CheckpointError), 2):
        assert text.endswith(
            "manifest.json: the 1 chunks of ['w'] do not cover each of its elements once; save it on a mesh of all "
            "ranks that it is split over"
        )


def check_export_is_refused(name, export, directory):
    text = refused_everywhere(lambda: export(directory, trained()), 4)
    start = f"checkpoint.{name}: ranks hold different values of one leaf\n  a: expected the same on all ranks"
    assert text.startswith(start)
    assert not directory.exists() or not list(directory.iterdir())
