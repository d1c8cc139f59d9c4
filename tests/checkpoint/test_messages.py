"""The messages that ranks send each other for a save and a restore: few, and of few bytes, whatever the leaves."""

import pytest
import torch

import fshard as fs
from fshard import checkpoint
from fshard.testing import spmd
from tests.checkpoint.states import LAYOUTS, refused_everywhere
from tests.messages import counted_messages
from tests.ranks import my_rank
from tests.trees import meshes

# How often all ranks merge what they have, in log2 W messages of each, of at most so many bytes.
IN_SAVE = 6
IN_RESTORE = 5
BYTES = 512


def make_state(leaves, layout):
    full = {f"w{number}": torch.ones(8) for number in range(leaves)}
    return fs.shard(full, LAYOUTS[layout](meshes()))


def count(program, ranks):
    """The messages of a program, by their bytes."""
    with counted_messages() as messages:
        spmd(program, ranks)
    return sorted(messages)


@pytest.mark.parametrize("ranks", (2, 4, pytest.param(8, marks=pytest.mark.slow)))
def test_messages_of_a_save_and_a_restore(ranks, tmp_path):
    """All leaves together make two digests at most for each axis of the mesh, in one message."""
    for layout in ("zero3", "zero3 with small leaves whole", "hsdp of every leaf"):
        made = count(lambda: make_state(40, layout), ranks)  # noqa: B023
        saved = count(lambda: checkpoint.save(tmp_path / layout, make_state(40, layout), 1), ranks)  # noqa: B023
        read = count(lambda: checkpoint.restore(tmp_path / layout, make_state(40, layout)), ranks)  # noqa: B023
        each = ranks * (ranks.bit_length() - 1)
        assert len(saved) - len(made) == IN_SAVE * each
        # One of them compares the digest of the manifest.
        assert len(read) - len(made) == IN_RESTORE * each
        assert sum(saved) - sum(made) <= BYTES * (len(saved) - len(made))


def test_more_leaves_make_no_more_bytes(tmp_path):
    sizes = []
    for leaves in (10, 200):
        made = count(lambda: make_state(leaves, "zero3"), 4)  # noqa: B023
        saved = count(lambda: checkpoint.save(tmp_path / f"{leaves}", make_state(leaves, "zero3"), 1), 4)  # noqa: B023
        sizes.append(sum(saved) - sum(made))
    assert sizes[0] == sizes[1]


def test_every_leaf_that_differs_is_named_on_every_rank(tmp_path):
    """Of leaves that other ranks hold, and in the order of their paths, each with the first rank that differs."""

    def save():
        state = make_state(6, "hsdp of every leaf")
        # Ranks 0 and 2 hold one half, 1 and 3 the other.
        for number, ranks in {1: (3,), 4: (2, 3)}.items():
            if my_rank() in ranks:
                state[f"w{number}"].local.add_(1)
        plain = {f"x{number:02}": torch.full((3,), float(my_rank() // 3 and number % 2)) for number in range(12)}
        checkpoint.save(tmp_path, {**state, **plain}, 1)

    lines = refused_everywhere(save, 4).splitlines()
    assert lines[0] == "checkpoint.save: ranks hold different values of one leaf"
    expected = [("w1", 3), ("w4", 2)] + [(f"x{number:02}", 3) for number in range(1, 12, 2)]
    for line, (name, rank) in zip(lines[1:-1], expected, strict=True):
        assert line == f"  ['{name}']: expected the same on all ranks, got other values on rank {rank}"
    assert checkpoint.latest_step(tmp_path) is None
