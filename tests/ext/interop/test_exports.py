"""An export writes its own files alone, over no others, and refuses ranks that hold other values of one part."""

import os
from functools import partial

import pytest
import torch

from fshard import checkpoint
from fshard.ext.interop import dcp_files, shared_files
from fshard.testing import spmd
from tests.checkpoint.states import refused_everywhere
from tests.checkpoint.test_refused import check_export_is_refused
from tests.checkpoint.test_users_files import TREE, check_files_of_a_user_stay, contents

FULL = {"a": torch.ones(3), "b": torch.zeros(3)}
EXPORTS = {
    "save_dcp": checkpoint.save_dcp,
    "save_huggingface": checkpoint.save_huggingface,
    "save_huggingface, several files": partial(checkpoint.save_huggingface, max_file_bytes=12),
}


def test_files_of_a_user_stay(tmp_path):
    check_files_of_a_user_stay(tmp_path, partial(checkpoint.save_huggingface, params=TREE))


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_writes_over_nothing(name, tmp_path, monkeypatch):
    export = EXPORTS[name]
    check_export_is_refused(name.partition(",")[0], export, tmp_path / "out")
    spmd(lambda: export(tmp_path / "made", FULL), 2)
    for module in (shared_files, dcp_files):
        # It is refused before anybody writes.
        monkeypatch.setattr(module, "write", None)
    for file in os.listdir(tmp_path / "made"):
        directory = tmp_path / f"taken{file}"
        directory.mkdir()
        (directory / file).write_text("mine")
        text = refused_everywhere(partial(export, directory, FULL), kind=checkpoint.CheckpointError)
        assert f"{directory / file} is there already; write to another directory, or remove it" in text
        assert contents(directory) == {file: b"mine"}
