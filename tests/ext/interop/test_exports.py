"""An export writes its own files alone, over no others, and refuses ranks that hold other values of one part."""

import os
from functools import partial

import pytest
import torch

from fshard import checkpoint
from fshard.ext.interop import dcp_files, shared_files
from fshard.testing import spmd
from tests.checkpoint.states import refused
from tests.checkpoint.test_refused import check_export_is_refused
from tests.checkpoint.test_users_files import TREE, check_files_of_a_user_stay, contents


def test_files_of_a_user_stay(tmp_path):
    check_files_of_a_user_stay(tmp_path, partial(checkpoint.save_huggingface, params=TREE))


EXPORTS = {
    "save_dcp": checkpoint.save_dcp,
    "save_huggingface": checkpoint.save_huggingface,
    "save_huggingface, several files": partial(checkpoint.save_huggingface, max_file_bytes=12),
}


@pytest.mark.parametrize("export", EXPORTS)
def test_an_export_writes_over_nothing(export, tmp_path, monkeypatch):
    check_export_is_refused(export.partition(",")[0], EXPORTS[export], tmp_path / "out")
    first = {"a": torch.ones(3), "b": torch.zeros(3)}
    spmd(lambda: EXPORTS[export](tmp_path / "made", first), 2)
    for module in (shared_files, dcp_files):
        # It is refused before anybody writes.
        monkeypatch.setattr(module, "write", None)
    for name in os.listdir(tmp_path / "made"):
        directory = tmp_path / f"taken{name}"
        directory.mkdir()
        (directory / name).write_text("mine")
        save = partial(EXPORTS[export], directory, first)
        text, other = spmd(partial(refused, save, checkpoint.CheckpointError), 2)
        assert f"{directory / name} is there already; write to another directory, or remove it" in text
        assert other == text
        assert contents(directory) == {name: b"mine"}
