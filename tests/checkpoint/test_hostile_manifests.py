"""Manifests made to do harm, their digests in order."""

import builtins
import hashlib
import json
import os
import tracemalloc

import pytest
import torch

from fshard import checkpoint
from fshard.checkpoint import CheckpointError
from fshard.checkpoint.files import decode

MANIFEST, FILE = "manifest.json", "rank-00000.safetensors"
W = torch.arange(6.0).view(2, 3)
LIKE = {"w": torch.zeros(2, 3), "n": 0}


def sealed(body):
    """A manifest of a body in JSON, with the digest it needs: the encoder written once more."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    digest = hashlib.blake2b(body, digest_size=16).hexdigest()
    return b'{"format": "fshard.checkpoint",\n "version": 1,\n "digest": "%s",\n "body": %s}\n' % (
        digest.encode(),
        body,
    )


def body_of(path):
    return json.loads((path / MANIFEST).read_bytes())["body"]


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A checkpoint: whatever is written to it, its files alone are opened, and nothing beside it changes."""
    path = checkpoint.save(tmp_path / "run", {"w": W, "n": 5}, 1).wait()
    assert sealed(body_of(path)) == (path / MANIFEST).read_bytes()
    opened = set()

    def recorded(open_file):
        def run(path, *arguments, **keywords):
            opened.add(str(path))
            return open_file(path, *arguments, **keywords)

        return run

    with monkeypatch.context() as recording:
        recording.setattr(os, "open", recorded(os.open))
        recording.setattr(builtins, "open", recorded(builtins.open))
        yield path
    assert str(path / MANIFEST) in opened
    assert {name for name in opened if not name.isdigit()} <= {str(path / MANIFEST), str(path / FILE)}
    assert [*tmp_path.iterdir()] == [tmp_path / "run"]


def refused(path, data):
    """The text of the refusal of a manifest, which takes little memory."""
    (path / MANIFEST).write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"^checkpoint\.restore: ") as error:
            checkpoint.restore(path.parent, LIKE)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Mostly what JSON takes as Python's objects: up to 60 bytes for two of its own.
    assert peak < 100 * len(data) + (1 << 20)
    return str(error.value)


def chunk(offset=(0, 0), shape=(2, 3), file=0, checksum=0):
    return [file, offset, shape, checksum]


def leaf(*chunks, dtype="float32", shape=(2, 3)):
    return [dtype, shape, list(chunks)]


EDITED = "its digest does not match, so it was damaged or edited"
HUGE = 1 << 61
# Leaves by the text of their refusal.
LEAVES = {
    EDITED: [{}, ["float32", [2, 3]], ["float32", [2, 3], None], leaf({}), leaf(shape={})],
    "chunks of ['w'] do not cover each of its elements once": [
        *(leaf(chunk(), shape=shape) for shape in ([-2, -3], [True, 3], [2.0, 3], [10**400, 3], ["2", 3])),
        *(leaf(chunk(), shape=shape) for shape in ([1] * 65, [0, 3], [HUGE, HUGE])),
        # A grid of more cells than can be listed.
        leaf(*(chunk([i, i], [1, 1], file=i) for i in range(1_000)), shape=[1_000, 1_000]),
        leaf(),
        *(leaf(chunk(offset)) for offset in ([HUGE, 0], [1 << 62, 0], [-1, 0], [False, 0], [0])),
        *(leaf(chunk(shape=shape)) for shape in ([HUGE, 3], [2, 3, 1])),
        *(leaf(chunk(file=file)) for file in (HUGE << 1, -1, "../../etc/passwd")),
        # Twice the same, two of one file, an overlap, gaps, and a chunk of no elements.
        leaf(chunk(), chunk()),
        leaf(chunk(shape=[1, 3]), chunk([1, 0], [1, 3])),
        leaf(chunk(shape=[2, 2]), chunk([0, 1], [2, 2])),
        leaf(chunk(shape=[2, 1]), chunk([0, 2], [2, 1])),
        leaf(chunk([1, 0], [1, 3])),
        leaf(chunk(), chunk([2, 0], [0, 3])),
    ],
    "the elements of ['w'] do not match their checksum, so it was damaged": [
        leaf(chunk(checksum=checksum)) for checksum in (0, 0.0, 1 << 32)
    ],
    "rank-00001.safetensors: No such file or directory": [leaf(chunk(file=1))],
    "expected float32[2, 3], got int32[2, 3]": [leaf(chunk(), dtype="int32")],
    f"got float32[{HUGE}, {HUGE}]": [leaf(chunk(shape=[HUGE, HUGE]), shape=[HUGE, HUGE])],
    **{
        f"['w'] has dtype {dtype!r:.40}, which fshard does not know": [leaf(dtype=dtype)]
        for dtype in ("__class__", "load", [[]], "x" * 10**6, "../f")
    },
}
NAMES = ("../../../etc/passwd", "/etc/passwd", "\ud800", "\0", "__metadata__", "", "x" * 10**6, "\x1b[31m")


def test_hostile_leaves(saved):
    body = body_of(saved)
    for text, leaves in LEAVES.items():
        for hostile in leaves:
            assert text in refused(saved, sealed(body | {"tensors": {"['w']": hostile}}))
    (whole,) = body["tensors"].values()
    for name in NAMES:
        assert "expected nothing, got float32[2, 3]" in refused(saved, sealed(body | {"tensors": {name: whole}}))


BODIES = [
    *(({key: []}, EDITED) for key in ("tensors", "values", "files")),
    *(({"step": step}, f"expected step 1 as its name says, got step {step}") for step in (-1, 2)),
    *(({"values": {"['n']": value}}, EDITED) for value in ({"complex": "1j"}, {"float": "import os"}, 0.5)),
    ({"tensors": {}}, "['w']: expected float32[2, 3], got nothing"),
]


def test_hostile_bodies(saved):
    body = body_of(saved)
    for changes, text in BODIES:
        assert text in refused(saved, sealed(body | changes))
    for data in (sealed([]), sealed(None), b"", b"import os", b"[" * 100_000, sealed(b"[" * 100_000 + b"]" * 100_000)):
        refused(saved, data)
    for step in (b"Infinity", b"1e999", b"9" * 10**5, b'1, "step": 2'):
        refused(saved, sealed(b'{"step": %s, "tensors": {}, "values": {}}' % step))
    # What Python can just read as JSON it may not be able to print.
    for depth in (*range(100, 1100, 21), 3000):
        nested = b"[" * depth + b"]" * depth
        with pytest.raises(CheckpointError):
            decode(sealed(b'{"step": 1, "tensors": {"w": [%s, [], []]}, "values": {}}' % nested))
