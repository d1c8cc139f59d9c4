"""Flags are True or False: no other value opens a pickle, casts a dtype or gives up a copy."""

import pickle

import torch

from fshard import checkpoint
from fshard.checkpoint import CheckpointError
from fshard.testing import spmd
from tests.checkpoint.states import refused

# Each is true or false to Python, and none is True.
OTHERS = ("no", "", 1, 0, None, 1.0, [False], torch.tensor(True))
TREE = {"w": torch.ones(3)}


class Writes:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def check_only_true_opens_a_pickle(load, tmp_path):
    directory, ran = tmp_path / "saved", tmp_path / "ran"
    directory.mkdir()
    for name in (".metadata", "pytorch_model.bin"):
        (directory / name).write_bytes(pickle.dumps(Writes(ran)))
    for flag in OTHERS:
        text = refused(lambda: load(directory, TREE, trusted=flag), CheckpointError)  # noqa: B023
        assert text.startswith(f"checkpoint.{load.__name__}: {directory}/")
        assert " is pickled, and reading it can run code of its author; pass trusted=True if you trust" in text
    assert not ran.exists()


def check_a_flag_on_one_rank_is_refused_on_all(load):
    def program():
        trusted = "no" if torch.distributed.get_rank() else True
        return refused(lambda: load(TREE, trusted=trusted), CheckpointError)

    (text,) = set(spmd(program, 2))
    assert "is pickled" in text


def calls(tmp_path):
    """Calls of every function of the package that has a flag, by the flag's name."""
    yield "donate", "restore", lambda flag: checkpoint.restore(tmp_path / "there", TREE, donate=flag)
    for name in ("asynchronous", "donated"):
        yield name, "save", lambda flag, name=name: checkpoint.save(tmp_path / "new", TREE, 1, **{name: flag})
        yield name, "Manager", lambda flag, name=name: checkpoint.Manager(tmp_path / "new", **{name: flag})
    yield "rank0_only", "to_state_dict", lambda flag: checkpoint.to_state_dict(TREE, rank0_only=flag)
    yield "cast", "from_state_dict", lambda flag: checkpoint.from_state_dict(TREE, TREE, cast=flag)


def check_every_flag(calls, tmp_path):
    checkpoint.save(tmp_path / "there", TREE, 1)
    for name, function, call in calls(tmp_path):
        for flag in OTHERS:
            text = refused(lambda: call(flag))  # noqa: B023
            start = f"checkpoint.{function}: {name}: expected True or False, got {flag!r}; "
            assert text.startswith(start), (function, name, flag, text)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_every_flag_of_checkpoints(tmp_path):
    check_every_flag(calls, tmp_path)
