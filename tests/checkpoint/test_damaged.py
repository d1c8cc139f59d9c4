"""Whatever happens to files, no wrong value is ever restored, and the file that is damaged is named."""

import os
import shutil
from pathlib import Path

import pytest
import torch

import fshard as fs
from fshard import checkpoint
from fshard.testing import spmd
from tests.checkpoint.states import assert_same, refused, sampler, save, zeros_like
from tests.trees import meshes, normal, one_axis


def state():
    """Leaves of all kinds, few bytes."""
    draw = normal(60)
    values = {"lr": 0.1, "name": "é", "flag": True, "count": 12, "nothing": None}
    return {
        "w": draw(3, 2, dtype=torch.float32),
        "c": torch.tensor([1 + 2j]),
        "b": torch.tensor([True, False]),
        **values,
    }


def split(tree):
    return fs.shard({"w": tree["w"], "v": torch.arange(7.0)}, fs.zero2(one_axis(), min_shard_elements=0))


def restored(directory, like):
    """What is restored, or the text of the refusal."""
    try:
        return checkpoint.restore(directory, like)
    except checkpoint.CheckpointError as error:
        return str(error)


def flips(size, number, seed):
    draw = sampler(seed)
    return [(draw.randrange(size), draw.randrange(1, 256)) for _ in range(number)]


def assert_refused(directory, like, name):
    found = restored(directory, like)
    assert isinstance(found, str), f"{name}: {found} was restored"
    assert found.startswith("checkpoint.restore: ")
    assert name in found, found


def flip(data, position, mask):
    return data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :]


@pytest.mark.rows(1)
@pytest.mark.parametrize("file", ("manifest.json", "rank-00000.safetensors", "latest"))
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
            assert_refused(tmp_path, tree, file)
    path.write_bytes(data)
    checkpoint.restore(tmp_path, tree)


@pytest.mark.rows(1)
@pytest.mark.parametrize("file", ("manifest.json", "rank-00000.safetensors", "rank-00001.safetensors", "latest"))
def test_random_damage_is_told_on_every_rank(file, tmp_path):
    path = save(tmp_path, lambda on: split(state()), 2, step=2)
    path = tmp_path / file if file == "latest" else path / file
    data = path.read_bytes()
    cases = [flip(data, *case) for case in flips(len(data), 12, seed=62)]
    cases += [data[:-1], data[: len(data) // 2], b"", data + b"\0", data + data, b"\0" * len(data), data[1:] + data[:1]]

    def read():
        torch.distributed.barrier()
        return restored(tmp_path, split(zeros_like(state())))

    for case in cases:
        path.write_bytes(case)
        for ranks in (2, 3):
            texts = spmd(read, ranks)
            assert isinstance(texts[0], str)
            assert len(set(texts)) == 1, texts
            assert texts[0].startswith("checkpoint.restore: ")
            assert str(path) in texts[0]


def test_where_each_kind_of_damage_is_found(tmp_path):
    tree = state()
    directory = checkpoint.save(tmp_path, tree, 2).wait()
    path = directory / "rank-00000.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    padding = data.rindex(b"}", 0, 8 + length) + 1
    header = f"checkpoint.restore: {path}: its header does not match its digest, so it was damaged"
    places = {0: header, 7: header, 8: header, 20: header, 8 + length - 1: header}
    assert padding < 8 + length
    last = f"checkpoint.restore: {path}: the elements of ['b'] do not match their checksum, so it was damaged"
    for position, text in (places | {padding: header, len(data) - 1: last}).items():
        path.write_bytes(flip(data, position, 1))
        assert restored(tmp_path, tree) == text
    path.write_bytes(data[:-1])
    size = len(data)
    assert restored(tmp_path, tree) == f"checkpoint.restore: {path}: expected {size} bytes, got {size - 1}"
    path.unlink()
    expected = "expected the file that the manifest names"
    assert restored(tmp_path, tree) == f"checkpoint.restore: {path}: {expected}, got nothing"
    path.write_bytes(data)
    manifest = directory / "manifest.json"
    text = manifest.read_text()
    for old, new, message in (
        ("fshard.checkpoint", "fshard.checkpoinr", "its digest does not match, so it was damaged or edited"),
        ('"version": 1', '"version": 2', "expected version 1, got 2; read it by the fshard that wrote it"),
        ('"step": 2', '"step": 3', "its digest does not match, so it was damaged or edited"),
        ("[3, 2]", "[2, 3]", "its digest does not match, so it was damaged or edited"),
        (" ", "  ", "its digest does not match, so it was damaged or edited"),
        ("}\n", "}", "its digest does not match, so it was damaged or edited"),
        ('"digest": "', '"digest": "0', "its digest does not match, so it was damaged or edited"),
        ("float32", "float31", "its digest does not match, so it was damaged or edited"),
        ("{", "", "it is no manifest that fshard wrote (JSONDecodeError)"),
        ('"0.1"', '"0.2"', "its digest does not match, so it was damaged or edited"),
        ("true", "null", "its digest does not match, so it was damaged or edited"),
    ):
        assert old in text
        manifest.write_text(text.replace(old, new, 1))
        assert restored(tmp_path, tree) == f"checkpoint.restore: {manifest}: {message}"


@pytest.fixture
def three(tmp_path):
    """Checkpoints of steps 1, 2 and 3 by 2 ranks, of the same shapes."""
    for step in (1, 2, 3):
        save(tmp_path, lambda on: fs.tree_map(lambda leaf: leaf + step, split(state())), 2, step)  # noqa: B023
    return tmp_path


FILE, MANIFEST, THIRD = "rank-00000.safetensors", "manifest.json", "step-00000003"
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
    """A link in the place of a file."""

    def damage(root):
        (root / name).unlink()
        (root / name).symlink_to(target)

    return damage


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
    "missing file": (lambda root: (root / PART).unlink(), FILE),
    "missing manifest": (lambda root: (root / THIRD / MANIFEST).unlink(), MANIFEST),
    "extra file": (lambda root: (root / THIRD / "rank-00002.safetensors").touch(), "rank-00002.safetensors"),
    "extra hidden file": (lambda root: (root / THIRD / ".hidden").touch(), f"{THIRD}/.hidden"),
    "extra directory": (lambda root: (root / THIRD / "more").mkdir(), f"{THIRD}/more"),
    "link to nothing": (linked(PART, "nothing"), FILE),
    "link to itself": (linked(PART, FILE), f"{FILE}: Too many levels of symbolic links"),
    "link to a device": (linked(PART, "/dev/zero"), f"{FILE}: {NO_FILE}"),
    "link to another file": (linked(PART, "../step-00000001/rank-00001.safetensors"), FILE),
    "pipe": (replaced(PART, os.mkfifo), f"{FILE}: {NO_FILE}"),
    "directory": (replaced(PART, os.mkdir), f"{FILE}: {NO_FILE}"),
    "checkpoint that is a file": (replaced(THIRD, Path.touch), f"{THIRD}/{MANIFEST}: Not a directory"),
    "checkpoint that is empty": (replaced(THIRD, os.mkdir), f"{THIRD}/{MANIFEST}: No such file or directory"),
    "removed checkpoint": (lambda root: shutil.rmtree(root / THIRD), "got steps 1, 2; pass step= one that is there"),
    "latest that is a directory": (replaced("latest", os.mkdir), f"latest: {NO_FILE}"),
    "latest that is a pipe": (replaced("latest", os.mkfifo), f"latest: {NO_FILE}"),
    "latest that leads elsewhere": (lambda root: (root / "latest").write_text(f"../../{THIRD}"), NO_NAME),
    "latest without its digest": (lambda root: (root / "latest").write_text(f"{THIRD}\n"), NO_NAME),
    "large latest": (grown("latest"), "latest: expected at most 1000 bytes, got 1099511627776"),
    "sparse file": (grown(PART), " bytes, got 1099511627776"),
    "sparse manifest": (
        grown(f"{THIRD}/{MANIFEST}"),
        f"{MANIFEST}: expected at most 1073741824 bytes, got 1099511627776",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(fault, three):
    damage, text = FAULTS[fault]
    damage(three)

    def read():
        return restored(three, split(zeros_like(state())))

    for ranks in (1, 2, 3):
        texts = spmd(read, ranks)
        assert len(set(map(str, texts))) == 1
        assert isinstance(texts[0], str)
        assert text in texts[0], texts[0]
    if fault.startswith(("latest", "large latest")):
        assert str(three / "latest") in refused(lambda: checkpoint.latest(three), checkpoint.CheckpointError)

    def check_others():
        expected = split(state())
        for step in {1, 2} - ({1} if fault == "stale checkpoint" else set()):
            found = checkpoint.restore(three, zeros_like(expected), step=step)
            assert_same_values(found, expected, step)

    spmd(check_others, 2)


def assert_same_values(found, expected, step):
    assert_same(fs.unshard(found), fs.unshard(fs.tree_map(lambda leaf: leaf + step, expected)))


def test_what_is_beside_checkpoints_is_of_no_matter(three):
    for name in ("step-1", "step-000000009", "step-00000009x", "step-00000003.0", "step-٠٠٠٠٠٠٠٩", "notes", ".old-x"):
        (three / name).mkdir()
    (three / ".saving-00000009-x").mkdir()
    left = (".saving-00000009-0123456789abcdef", ".old-step-00000009-0123456789abcdef")
    for name in left:
        (three / name).mkdir()
    assert checkpoint.latest(three) == 3
    (three / "latest").unlink()
    # As after a kill between the first checkpoint and the file.
    assert checkpoint.latest(three) == 3
    with pytest.raises(checkpoint.CheckpointError, match="expected a checkpoint of step 9, got steps 1, 2, 3"):
        checkpoint.restore(three, {}, step=9)
    save(three, lambda on: split(state()), 2, step=4)
    there = {path.name for path in three.iterdir()}
    assert not there.intersection(left)
    assert there.issuperset((".old-x", ".saving-00000009-x", "notes"))


def test_damage_to_what_nobody_asks_for(tmp_path):
    """Only part of the data is read by `only`; headers are all checked."""
    tree = {"a": torch.ones(3), "b": torch.ones(2)}
    path = checkpoint.save(tmp_path, tree, 1).wait() / FILE
    data = path.read_bytes()
    path.write_bytes(flip(data, len(data) - 1, 1))
    assert checkpoint.restore(tmp_path, tree, only="a")["a"].equal(tree["a"])
    assert_refused(tmp_path, tree, FILE)
    path.write_bytes(flip(data, 9, 1))
    with pytest.raises(checkpoint.CheckpointError, match="its header does not match"):
        checkpoint.restore(tmp_path, tree, only="a")


def test_a_file_that_no_rank_reads_from_is_checked_too(tmp_path):
    """On 3 ranks two of them have nothing to write."""
    path = save(tmp_path, lambda on: {"w": torch.ones(3)}, 3)
    for rank in range(3):
        file = path / f"rank-{rank:05d}.safetensors"
        data = file.read_bytes()
        for position in range(0, len(data), 5):
            file.write_bytes(flip(data, position, 4))
            assert_refused(tmp_path, {"w": torch.ones(3)}, file.name)
        file.write_bytes(data)


def test_a_damaged_checkpoint_hinders_no_later_save(three):
    for name in ("manifest.json", FILE):
        path = three / "step-00000003" / name
        path.write_bytes(b"")
    (three / "latest").write_bytes(b"\xff")

    def program():
        with checkpoint.Manager(three, keep=2) as manager:
            manager.save(split(state()), 4)
        restored = checkpoint.restore(three, zeros_like(split(state())))
        assert_same(restored, split(state()))
        return meshes() is not None

    assert spmd(program, 2) == [True, True]
