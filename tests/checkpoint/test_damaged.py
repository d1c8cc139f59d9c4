"""Whatever happens to files, no wrong value is ever restored, and the file that is damaged is named."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from fshard import checkpoint
from fshard.checkpoint import CheckpointError
from fshard.testing import spmd
from tests.checkpoint.states import assert_same, sampler, save, split, zeros_like
from tests.trees import normal


def state():
    """Leaves of all kinds, few bytes."""
    values = {"lr": 0.1, "name": "é", "flag": True, "count": 12, "nothing": None}
    tensors = {
        "w": normal(60)(3, 2, dtype=torch.float32),
        "c": torch.tensor([1 + 2j]),
        "b": torch.tensor([True, False]),
    }
    return {**tensors, **values}


def restored(directory, like, **arguments):
    """What is restored, or the text of the refusal."""
    try:
        return checkpoint.restore(directory, like, **arguments)
    except CheckpointError as error:
        return str(error)


def flip(data, position, mask):
    return data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :]


FILE, MANIFEST = "rank-00000.safetensors", "manifest.json"
FIRST, THIRD = "step-00000001.0", "step-00000003.2"


@pytest.mark.rows(1)
@pytest.mark.parametrize("file", (MANIFEST, FILE))
def test_each_single_byte(file, tmp_path):
    """Each byte of each file, one after the other, each in two ways: one bit, and several."""
    tree = state()
    checkpoint.save(tmp_path, zeros_like(tree), 1)
    path = checkpoint.save(tmp_path, tree, 2).wait() / file
    data, draw = path.read_bytes(), sampler(61)
    for position in range(len(data)):
        for mask in (1 << draw.randrange(8), draw.randrange(1, 256)):
            path.write_bytes(flip(data, position, mask))
            text = restored(tmp_path, tree)
            assert isinstance(text, str), (position, mask)
            assert text.startswith(f"checkpoint.restore: {path}: ")
    path.write_bytes(data)
    checkpoint.restore(tmp_path, tree)


def test_where_each_kind_of_damage_is_found(tmp_path):
    tree = state()
    path = checkpoint.save(tmp_path, tree, 2).wait() / FILE
    data, manifest = path.read_bytes(), path.with_name(MANIFEST)
    header = "its header is not the one that follows from the manifest, so it was damaged"
    last = "the elements of ['b'] do not match their checksum, so it was damaged"
    short = f"expected {len(data)} bytes, got {len(data) - 1}"
    for damaged, text in ((flip(data, 20, 1), header), (flip(data, len(data) - 1, 1), last), (data[:-1], short)):
        path.write_bytes(damaged)
        assert restored(tmp_path, tree) == f"checkpoint.restore: {path}: {text}"
    # A part that nobody asks for may be damaged.
    assert checkpoint.restore(tmp_path, tree, only="lr")["lr"] == 0.1
    text = manifest.read_text()
    other = "expected a manifest of version 1, got another file; read it by the fshard that wrote it"
    manifest.write_text(text.replace('"version": 1', '"version": 2', 1))
    assert restored(tmp_path, tree) == f"checkpoint.restore: {manifest}: {other}"


PART = f"{THIRD}/{FILE}"


def swap(one, other):
    spare = one.rename(f"{one}.spare")
    other.rename(one)
    spare.rename(other)


def stale(name):
    return lambda root: shutil.copy(root / FIRST / name, root / THIRD / name)


def replaced(name, make):
    """Something else in the place of a file or a directory."""
    return lambda root: (shutil.move(root / name, root.with_suffix(".aside")), make(root / name))


def linked(target):
    return replaced(PART, lambda path: path.symlink_to(target))


OTHER_STEP = f"{THIRD}: expected step 3 as its name says, got step 1"
NO_FILE = f"{FILE}: expected a regular file, got something else"
FAULTS = {
    "swapped files": (lambda root: swap(root / PART, root / THIRD / "rank-00001.safetensors"), FILE),
    "stale file": (stale(FILE), FILE),
    "stale manifest": (stale(MANIFEST), OTHER_STEP),
    "stale checkpoint": (lambda root: swap(root / FIRST, root / THIRD), OTHER_STEP),
    "missing file": (lambda root: (root / PART).unlink(), f"{PART}: No such file or directory"),
    "link to itself": (linked(FILE), f"{FILE}: Too many levels of symbolic links"),
    "link to a device": (linked("/dev/zero"), NO_FILE),
    "link to another file": (linked(f"../{FIRST}/rank-00001.safetensors"), FILE),
    "pipe": (replaced(PART, os.mkfifo), NO_FILE),
    "checkpoint that is a file": (replaced(THIRD, Path.touch), f"{THIRD}/{MANIFEST}: Not a directory"),
    "checkpoint that is empty": (replaced(THIRD, os.mkdir), f"{THIRD}/{MANIFEST}: No such file or directory"),
    "sparse file": (lambda root: os.truncate(root / PART, 1 << 40), " bytes, got 1099511627776"),
    "sparse manifest": (lambda root: os.truncate(root / THIRD / MANIFEST, 1 << 40), "at most 1073741824 bytes, got 10"),
}


@pytest.fixture
def three(tmp_path):
    """Checkpoints of steps 1, 2 and 3 by 2 ranks, of the same shapes."""
    for step in (1, 2, 3):
        save(tmp_path / "three", lambda on: split(step), 2, step)  # noqa: B023
    return tmp_path / "three"


def test_faults(three):
    """No other checkpoint suffers."""
    roots = {name: three.parent / name for name in FAULTS}
    for name, root in roots.items():
        shutil.copytree(three, root)
        FAULTS[name][0](root)

    def check():
        for name, root in roots.items():
            assert FAULTS[name][1] in restored(root, zeros_like(split(0))), name
            assert_same(checkpoint.restore(root, zeros_like(split(0)), step=2), split(2))

    for ranks in (1, 3):
        spmd(check, ranks)
