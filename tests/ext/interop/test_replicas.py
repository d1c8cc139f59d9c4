"""Ranks that hold other values of one part are refused by exports."""

import pytest

from fshard import checkpoint
from tests.checkpoint.test_replicas import check_exports_are_refused

EXPORTS = {"save_huggingface": checkpoint.save_huggingface, "save_dcp": checkpoint.save_dcp}


@pytest.mark.parametrize("export", EXPORTS)
def test_exports_are_refused(export, tmp_path):
    check_exports_are_refused(export, EXPORTS[export], tmp_path / "out")
