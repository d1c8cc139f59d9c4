"""Flags of the exchange with other formats are True or False."""

from functools import partial

import pytest

from fshard import checkpoint
from tests.checkpoint.test_flags import (
    TREE,
    check_a_flag_on_one_rank_is_refused_on_all,
    check_every_flag,
    check_only_true_opens_a_pickle,
)


@pytest.mark.parametrize("load", (checkpoint.load_dcp, checkpoint.load_huggingface))
def test_only_true_opens_a_pickle(load, tmp_path):
    check_only_true_opens_a_pickle(load, tmp_path)


def test_a_flag_on_one_rank_is_refused_on_all(tmp_path):
    checkpoint.save_dcp(tmp_path, TREE)
    check_a_flag_on_one_rank_is_refused_on_all(partial(checkpoint.load_dcp, tmp_path))


def calls(tmp_path):
    """Calls of every function that has a flag, by the flag's name."""
    where = tmp_path / "there"
    checkpoint.save_huggingface(where, TREE)
    yield "cast", "load_huggingface", lambda flag: checkpoint.load_huggingface(where, TREE, cast=flag)
    yield "strict", "load_huggingface", lambda flag: checkpoint.load_huggingface(where, TREE, strict=flag)


def test_every_flag_of_formats(tmp_path):
    check_every_flag(calls, tmp_path)
