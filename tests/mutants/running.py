"""A pytest plugin of the runner: it notes in a file which tests run and since when, to tell a hang from slow tests."""

import json
import os
import time
from pathlib import Path

import pytest

import fshard


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test another copy than the one with the fault."""
    assert Path(str(fshard.__file__)).is_relative_to(os.environ["PYTHONPATH"])
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(_Running(Path(os.environ["MUTANTS_RUNNING"])))


class _Running:
    def __init__(self, file: Path) -> None:
        self._file, self._since = file, dict[str, float]()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._since[nodeid] = time.time()
        self._file.write_text(json.dumps(self._since))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._since.pop(nodeid, None)
        self._file.write_text(json.dumps(self._since))
