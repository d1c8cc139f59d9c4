"""Flags of the exchange with other formats are True or False."""

from functools import partial

import pytest
import torch

from fshard import checkpoint
from tests.checkpoint.states import refused
from tests.checkpoint.test_flags import (
    TREE,
    check_a_flag_on_one_rank_is_refused_on_all,
    check_every_flag,
    check_only_true_opens_a_pickle,
)


@pytest.mark.parametrize("load", (checkpoint.load_dcp, checkpoint.load_huggingface))
def test_only_true_opens_a_pickle(load, tmp_path):
    place = check_only_true_opens_a_pickle(load, tmp_path)
    # Weights that are no pickle are not read either.
    checkpoint.save_huggingface(place, TREE)
    refused(lambda: load(place, TREE, trusted="no"))
    assert not (tmp_path / "ran").exists()


def test_a_flag_on_one_rank_is_refused_on_all(tmp_path):
    checkpoint.save_dcp(tmp_path, TREE)
    text = check_a_flag_on_one_rank_is_refused_on_all(partial(checkpoint.load_dcp, tmp_path))
    assert text.startswith("checkpoint.load_dcp: trusted: expected True or False, got 'no'; ")


def calls(tmp_path):
    """Calls of every function that has a flag, by the flag's name."""
    where, module = tmp_path / "there", torch.nn.Linear(1, 1)
    checkpoint.save_huggingface(where, TREE)
    yield "cast", "load_huggingface", lambda flag: checkpoint.load_huggingface(where, TREE, cast=flag)
    name = "flatten_optimizer_state_dict"
    yield name, "save_dcp", lambda flag: checkpoint.save_dcp(tmp_path / "new", TREE, module=module, **{name: flag})


def test_every_flag_of_formats(tmp_path):
    check_every_flag(calls, tmp_path)
