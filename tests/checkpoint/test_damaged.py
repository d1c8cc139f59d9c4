"""Whatever happens to files, no wrong value is ever restored, and the file that is damaged is named."""

import os
import shutil
from pathlib import Path

import pytest
import torch

import fshard as fs
from fshard import checkpoint
from fshard.checkpoint import CheckpointError
from fshard.testing import spmd
from tests.checkpoint.states import assert_same, refused, sampler, save, zeros_like
from tests.trees import normal, one_axis


def state():
    """Leaves of all kinds, few bytes."""
    values = {"lr": 0.1, "name": "é", "flag": True, "count": 12, "nothing": None}
    tensors = {
        "w": normal(60)(3, 2, dtype=torch.float32),
        "c": torch.tensor([1 + 2j]),
        "b": torch.tensor([True, False]),
    }
    return {**tensors, **values}


def split(step=0):
    full = {"w": state()["w"] + step, "v": torch.arange(7.0) + step}
    return fs.shard(full, fs.zero2(one_axis(), min_shard_elements=0))


def restored(directory, like):
    """What is restored, or the text of the refusal."""
    try:
        return checkpoint.restore(directory, like)
    except CheckpointError as error:
        return str(error)


def flip(data, position, mask):
    return data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :]


FILE, MANIFEST, THIRD = "rank-00000.safetensors", "manifest.json", "step-00000003"


@pytest.mark.rows(1)
@pytest.mark.parametrize("file", (MANIFEST, FILE, "latest"))
def test_each_single_byte(file, tmp_path):
    """Each byte of each file, one after the other, each in two ways: one bit, and several."""
    tree = state()
    checkpoint.save(tmp_path, zeros_like(tree), 1)
    path = tmp_path / file if file == "latest" else checkpoint.save(tmp_path, tree, 2).wait() / file
    data = path.read_bytes()
    draw = sampler(61)
    for position in range(len(data)):
        for mask in (1 << draw.randrange(8), draw.randrange(1, 256)):
            path.write_bytes(flip(data, position, mask))
            found = restored(tmp_path, tree)
            assert isinstance(found, str), (position, mask)
            assert found.startswith("checkpoint.restore: ")
            assert file in found
    path.write_bytes(data)
    checkpoint.restore(tmp_path, tree)


def test_where_each_kind_of_damage_is_found(tmp_path):
    tree = state()
    directory = checkpoint.save(tmp_path, tree, 2).wait()
    path = directory / FILE
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    padding = data.rindex(b"}", 0, 8 + length) + 1
    assert padding < 8 + length
    header = "its header does not match its digest, so it was damaged"
    last = "the elements of ['b'] do not match their checksum, so it was damaged"
    places = dict.fromkeys((0, 7, 8, 20, padding, 8 + length - 1), header) | {len(data) - 1: last}
    for position, text in places.items():
        path.write_bytes(flip(data, position, 1))
        assert restored(tmp_path, tree) == f"checkpoint.restore: {path}: {text}"
    path.write_bytes(data[:-1])
    size = len(data)
    assert restored(tmp_path, tree) == f"checkpoint.restore: {path}: expected {size} bytes, got {size - 1}"
    path.write_bytes(data)
    manifest = directory / MANIFEST
    text = manifest.read_text()
    edited = "its digest does not match, so it was damaged or edited"
    for old, new, message in (
        *((old, new, edited) for old, new in (("checkpoint", "checkpoinr"), ('"step": 2', '"step": 3'))),
        *((old, new, edited) for old, new in (("[3, 2]", "[2, 3]"), (" ", "  "), ("}\n", "}"), ("true", "null"))),
        *((old, new, edited) for old, new in (('st": "', 'st": "0'), ("float32", "float31"), ('"0.1"', '"0.2"'))),
        ('"version": 1', '"version": 2', "expected version 1, got 2; read it by the fshard that wrote it"),
        ("{", "", "it is no manifest that fshard wrote (JSONDecodeError)"),
    ):
        assert old in text
        manifest.write_text(text.replace(old, new, 1))
        assert restored(tmp_path, tree) == f"checkpoint.restore: {manifest}: {message}"


PART = f"{THIRD}/{FILE}"


def swapped(one, other):
    def damage(root):
        (root / one).rename(root / "spare")
        (root / other).rename(root / one)
        (root / "spare").rename(root / other)

    return damage


def stale(name):
    return lambda root: shutil.copy(root / "step-00000001" / name, root / THIRD / name)


def replaced(name, make):
    """Something else in the place of a file or a directory."""

    def damage(root):
        path = root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)

    return damage


def linked(name, target):
    return replaced(name, lambda path: path.symlink_to(target))


def grown(name):
    return lambda root: os.truncate(root / name, 1 << 40)


NO_FILE = "expected a regular file, got something else"
OTHER_STEP = f"{THIRD}: expected step 3 as its name says, got step 1"
NO_NAME = "/latest to name a checkpoint, got steps 1, 2, 3; pass step= one that is there"
FAULTS = {
    "swapped files": (swapped(PART, f"{THIRD}/rank-00001.safetensors"), FILE),
    "stale file": (stale(FILE), FILE),
    "stale manifest": (stale(MANIFEST), OTHER_STEP),
    "stale checkpoint": (swapped("step-00000001", THIRD), OTHER_STEP),
    "missing file": (lambda root: (root / PART).unlink(), f"{PART}: expected the file that the manifest names"),
    "missing manifest": (lambda root: (root / THIRD / MANIFEST).unlink(), MANIFEST),
    "extra file": (lambda root: (root / THIRD / "rank-00002.safetensors").touch(), "rank-00002.safetensors"),
    "extra hidden file": (lambda root: (root / THIRD / ".hidden").touch(), f"{THIRD}/.hidden"),
    "link to itself": (linked(PART, FILE), f"{FILE}: Too many levels of symbolic links"),
    "link to a device": (linked(PART, "/dev/zero"), f"{FILE}: {NO_FILE}"),
    "link to another file": (linked(PART, "../step-00000001/rank-00001.safetensors"), FILE),
    "pipe": (replaced(PART, os.mkfifo), f"{FILE}: {NO_FILE}"),
    "checkpoint that is a file": (replaced(THIRD, Path.touch), f"{THIRD}/{MANIFEST}: Not a directory"),
    "checkpoint that is empty": (replaced(THIRD, os.mkdir), f"{THIRD}/{MANIFEST}: No such file or directory"),
    "removed checkpoint": (lambda root: shutil.rmtree(root / THIRD), "got steps 1, 2; pass step= one that is there"),
    "latest that is a directory": (replaced("latest", os.mkdir), f"latest: {NO_FILE}"),
    "latest that is a pipe": (replaced("latest", os.mkfifo), f"latest: {NO_FILE}"),
    "latest that leads elsewhere": (lambda root: (root / "latest").write_text(f"../../{THIRD}"), NO_NAME),
    "latest without its digest": (lambda root: (root / "latest").write_text(f"{THIRD}\n"), NO_NAME),
    "latest that is large": (grown("latest"), "latest: expected at most 1000 bytes, got 1099511627776"),
    "sparse file": (grown(PART), " bytes, got 1099511627776"),
    "sparse manifest": (grown(f"{THIRD}/{MANIFEST}"), f"{MANIFEST}: expected at most 1073741824 bytes, got 10995116"),
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

    def read():
        found = [restored(root, zeros_like(split())) for root in roots.values()]
        for name, root in roots.items():
            for step in {1, 2} - ({1} if name == "stale checkpoint" else set()):
                assert_same(checkpoint.restore(root, zeros_like(split()), step=step), split(step))
        return found

    for ranks in (1, 2, 3):
        for name, *told in zip(FAULTS, *spmd(read, ranks)):
            assert len(set(map(str, told))) == 1
            assert isinstance(told[0], str)
            assert FAULTS[name][1] in told[0], (name, told[0])
    for name in filter(lambda name: name.startswith("latest"), FAULTS):
        assert f"{roots[name]}/latest" in refused(lambda: checkpoint.latest(roots[name]), CheckpointError)  # noqa: B023


def test_what_is_beside_checkpoints_is_of_no_matter(three):
    kept = ("step-1", "step-000000009", "step-00000009x", "step-00000003.0", "step-٠٠٠٠٠٠٠٩", "notes", ".old-x")
    left = (".saving-00000009-0123456789abcdef", ".old-step-00000009-0123456789abcdef")
    for name in (*kept, *left, ".saving-00000009-x"):
        (three / name).mkdir()
    assert checkpoint.latest(three) == 3
    (three / "latest").unlink()
    # As after a kill between the first checkpoint and the file.
    assert checkpoint.latest(three) == 3
    with pytest.raises(CheckpointError, match="expected a checkpoint of step 9, got steps 1, 2, 3"):
        checkpoint.restore(three, {}, step=9)
    save(three, lambda on: split(), 2, step=4)
    there = {path.name for path in three.iterdir()}
    assert not there.intersection(left)
    assert there.issuperset((*kept, ".saving-00000009-x"))


def test_damage_to_what_nobody_asks_for(tmp_path):
    """Only part of the data is read by `only`; headers are all checked."""
    tree = {"a": torch.ones(3), "b": torch.ones(2)}
    path = checkpoint.save(tmp_path, tree, 1).wait() / FILE
    data = path.read_bytes()
    path.write_bytes(flip(data, len(data) - 1, 1))
    assert checkpoint.restore(tmp_path, tree, only="a")["a"].equal(tree["a"])
    assert FILE in restored(tmp_path, tree)
    path.write_bytes(flip(data, 9, 1))
    with pytest.raises(CheckpointError, match="its header does not match"):
        checkpoint.restore(tmp_path, tree, only="a")


def test_a_damaged_checkpoint_hinders_no_later_save(three):
    for name in (MANIFEST, FILE):
        (three / THIRD / name).write_bytes(b"")
    (three / "latest").write_bytes(b"\xff")

    def program():
        with checkpoint.Manager(three, keep=2) as manager:
            manager.save(split(), 4)
        assert_same(checkpoint.restore(three, zeros_like(split())), split())

    spmd(program, 2)
