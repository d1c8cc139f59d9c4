"""An error that names no file ends a call on every rank with the number of the rank that failed."""

import sys

import pytest
import torch

from fshard import checkpoint
from fshard.checkpoint import CheckpointError, files
from fshard.testing import spmd
from tests.checkpoint.states import names, refused_everywhere
from tests.checkpoint.test_save_asynchronous import new_state
from tests.ranks import my_rank

save_module = sys.modules["fshard.checkpoint.save"]


@pytest.mark.parametrize("error", (ValueError("a memoryview with gaps"), KeyError("w")))
def test_every_rank_hears_which_rank_failed_to_write(error, tmp_path, monkeypatch):
    """An error that names no file."""
    inner = files.write_file

    def write_file(path, *content):
        if path.name == files.file_name(1):
            raise error
        return inner(path, *content)

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_file", write_file)
        save = lambda: checkpoint.save(tmp_path, new_state(), asynchronous=True).wait()  # noqa: E731
        text = refused_everywhere(save, 3, CheckpointError)
    assert text == f"checkpoint.save: rank 1 failed with {type(error).__name__}: {error}"
    spmd(save, 3)
    assert names(tmp_path) == ["step-00000000.0"]


def test_every_rank_hears_which_rank_failed_to_copy(tmp_path, monkeypatch):
    """Before the first rank makes a directory for the others to write to."""
    inner = save_module.copy_to_host

    def copy_to_host(tensors):
        if my_rank() == 1:
            raise RuntimeError("out of memory")
        return inner(tensors)

    with monkeypatch.context() as patched:
        patched.setattr(save_module, "copy_to_host", copy_to_host)
        text = refused_everywhere(lambda: checkpoint.save(tmp_path, new_state(), asynchronous=True), 2, CheckpointError)
    assert text == "checkpoint.save: rank 1 failed with RuntimeError: out of memory"
    spmd(lambda: checkpoint.save(tmp_path, new_state()), 2)
    assert names(tmp_path) == ["step-00000000.0"]


def test_an_error_of_a_users_function_names_the_rank(tmp_path):
    checkpoint.save(tmp_path, {"w": torch.ones(3)}, 1)

    def only(name, leaf):
        return {0: True}[my_rank()]

    text = refused_everywhere(lambda: checkpoint.restore(tmp_path, {"w": torch.ones(3)}, only=only), 2, CheckpointError)
    assert text == "checkpoint.restore: rank 1 failed with KeyError: 1"
