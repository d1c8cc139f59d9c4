"""Whatever happens to files, no wrong value is ever restored, and the file that is damaged is named."""

import os
import shutil

import pytest
import torch

import fshard as fs
from fshard import checkpoint
from fshard.testing import spmd
from tests.checkpoint.states import assert_same, sampler, zeros_like
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
    def write():
        return checkpoint.save(tmp_path, split(state()), 2).wait()

    path = spmd(write, 2)[0]
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
        ("fshard.checkpoint", "fshard.checkpoinr", "it is not of a checkpoint of fshard"),
        ('"version": 1', '"version": 2', "expected version 1, got 2; read it with the fshard that wrote it"),
        ('"step": 2', '"step": 3', "its digest does not match, so it was damaged or edited"),
        ("[3, 2]", "[2, 3]", "['w']: expected chunks that cover each element of [2, 3] once, got others"),
        (" ", "  ", "its digest does not match, so it was damaged or edited"),
        ("}\n", "}", "its digest does not match, so it was damaged or edited"),
        ('"digest": "', '"digest": "0', "its digest does not match, so it was damaged or edited"),
        (
            "float32",
            "float31",
            "['w']: expected a dtype of torch, in chunks of files of the manifest, got 'float31' in 1 chunks",
        ),
        ('"0.1"', '"0.2"', "its digest does not match, so it was damaged or edited"),
        ("true", "null", "its digest does not match, so it was damaged or edited"),
    ):
        assert old in text
        manifest.write_text(text.replace(old, new, 1))
        assert restored(tmp_path, tree) == f"checkpoint.restore: {manifest}: {message}"


@pytest.fixture
def three(tmp_path):
    """Checkpoints of steps 1, 2 and 3 by 2 ranks, of the same shapes."""

    def write():
        for step in (1, 2, 3):
            checkpoint.save(tmp_path, fs.tree_map(lambda leaf: leaf + step, split(state())), step)  # noqa: B023

    spmd(write, 2)
    return tmp_path


def swap(one, other):
    spare = one.with_name("spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


FILE, OTHER = "rank-00000.safetensors", "rank-00001.safetensors"


def damaged_file(damage):
    return lambda root: damage(root / "step-00000003" / FILE)


def replaced(make):
    def damage(root):
        path = root / "step-00000003" / FILE
        path.unlink()
        make(path)

    return damage


def linked(root):
    path = root / "step-00000003" / FILE
    outside = root / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def linked_manifest(root):
    path = root / "step-00000003" / "manifest.json"
    path.rename(root / "outside")
    path.symlink_to(root / "outside")


def linked_directory(root):
    (root / "step-00000003").rename(root / "outside")
    (root / "step-00000003").symlink_to(root / "outside")


FAULTS = {
    "swapped files": (lambda root: swap(root / "step-00000003" / FILE, root / "step-00000003" / OTHER), FILE),
    "stale file": (lambda root: shutil.copy(root / "step-00000001" / FILE, root / "step-00000003" / FILE), FILE),
    "stale manifest": (
        lambda root: shutil.copy(root / "step-00000001" / "manifest.json", root / "step-00000003" / "manifest.json"),
        "step-00000003: expected step 3 as its name says, got step 1",
    ),
    "stale checkpoint": (
        lambda root: swap(root / "step-00000001", root / "step-00000003"),
        "step-00000003: expected step 3 as its name says, got step 1",
    ),
    "missing file": (damaged_file(os.unlink), FILE),
    "missing manifest": (lambda root: (root / "step-00000003" / "manifest.json").unlink(), "manifest.json"),
    "extra file": (lambda root: (root / "step-00000003" / "rank-00002.safetensors").touch(), "rank-00002.safetensors"),
    "extra hidden file": (lambda root: (root / "step-00000003" / ".hidden").touch(), "step-00000003/.hidden"),
    "extra directory": (lambda root: (root / "step-00000003" / "more").mkdir(), "step-00000003/more"),
    "link": (linked, f"{FILE}: expected a regular file, got a link"),
    "link to nothing": (
        replaced(lambda path: path.symlink_to("nothing")),
        f"{FILE}: expected a regular file, got a link",
    ),
    "link to itself": (replaced(lambda path: path.symlink_to(path)), f"{FILE}: expected a regular file, got a link"),
    "link to a device": (
        replaced(lambda path: path.symlink_to("/dev/zero")),
        f"{FILE}: expected a regular file, got a link",
    ),
    "linked manifest": (linked_manifest, "manifest.json: expected a regular file, got a link"),
    "linked checkpoint": (linked_directory, "step-00000003: expected a directory, got a link"),
    "pipe": (replaced(os.mkfifo), f"{FILE}: expected a regular file, got something else"),
    "directory": (replaced(os.mkdir), f"{FILE}: expected a regular file, got something else"),
    "checkpoint that is a file": (
        lambda root: (shutil.rmtree(root / "step-00000003"), (root / "step-00000003").touch()),
        "step-00000003/manifest.json: Not a directory",
    ),
    "checkpoint that is empty": (
        lambda root: (shutil.rmtree(root / "step-00000003"), (root / "step-00000003").mkdir()),
        "step-00000003/manifest.json: No such file or directory",
    ),
    "removed checkpoint": (
        lambda root: shutil.rmtree(root / "step-00000003"),
        "; pass step= one of those that are there: 1, 2",
    ),
    "latest that is a directory": (
        lambda root: ((root / "latest").unlink(), (root / "latest").mkdir()),
        "latest: expected a regular file, got something else",
    ),
    "latest that is a pipe": (
        lambda root: ((root / "latest").unlink(), os.mkfifo(root / "latest")),
        "latest: expected a regular file, got something else",
    ),
    "latest that leads elsewhere": (
        lambda root: (root / "latest").write_text("../../step-00000003"),
        "expected the name of a checkpoint, got",
    ),
    "latest without its digest": (
        lambda root: (root / "latest").write_text("step-00000003\n"),
        "expected the name of a checkpoint, got",
    ),
    "large latest": (
        lambda root: os.truncate(root / "latest", 1 << 40),
        "latest: expected at most 1000 bytes, got 1099511627776",
    ),
    "sparse file": (damaged_file(lambda path: os.truncate(path, 1 << 40)), " bytes, got 1099511627776"),
    "sparse manifest": (
        lambda root: os.truncate(root / "step-00000003" / "manifest.json", 1 << 40),
        "manifest.json: expected at most 1073741824 bytes, got 1099511627776",
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
        with pytest.raises(checkpoint.CheckpointError) as error:
            checkpoint.latest(three)
        assert str(three / "latest") in str(error.value)

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
    with pytest.raises(checkpoint.CheckpointError, match="found no checkpoint of step 9, only of 1, 2, 3"):
        checkpoint.restore(three, {}, step=9)

    def write():
        checkpoint.save(three, split(state()), 4)

    spmd(write, 2)
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

    def program():
        return checkpoint.save(tmp_path, {"w": torch.ones(3)}, 1).wait()

    path = spmd(program, 3)[0]
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
