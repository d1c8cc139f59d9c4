"""Manifests and files made to do harm, their digests in order, and a fuzzer of both."""

import builtins
import contextlib
import hashlib
import json
import os
import tracemalloc

import pytest
import torch

from fshard import checkpoint
from fshard.checkpoint import CheckpointError
from fshard.checkpoint.files import decode
from tests.checkpoint.states import sampler

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
        leaf(*(chunk([i, i], [1, 1]) for i in range(20_000)), shape=[20_000, 20_000]),
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


def with_header(entries, length=None):
    """The start of a file: a header, and its length or another one."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text


def split_header(data):
    """The header of a file, and the rows behind it."""
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], data[end:]


TOKENS = (
    *(b"[", b"]", b"{", b"}", b",", b'"', b"\\", b"-", b".", b"e9", b"1", b"99999999999999999999", b"null", b"NaN"),
    *(b"\xff", b"\0", b"\\ud800", b"[[[[", b'"float"', b"float64", b"../", b'"step"', b"4611686018427387904"),
)
VALUES = (0, 1, -1, 2, 5, True, None, 1.5, "", "x", [], {}, [0], {"float": "nan"}, HUGE, 2 * HUGE, 1 << 200, "float32")


def mutated(draw, data):
    """A few random edits of bytes and tokens."""
    data = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        start = draw.randrange(len(data) + 1)
        stop = min(len(data), start + draw.choice((0, 1, 1, 2, 5, 30)))
        copied = draw.randrange(len(data) + 1)
        piece = draw.choice((draw.choice(TOKENS), bytes([draw.randrange(256)]), bytes(data[copied : copied + 9]), b""))
        data[start:stop] = piece
    return bytes(data)


def swapped_values(draw, value):
    """The same JSON with something in it put in another's place, or another kind's."""
    if isinstance(value, (dict, list)) and value and draw.random() < 0.8:
        key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        changed = value.copy()
        changed[key] = swapped_values(draw, value[key])
        return changed
    return draw.choice((*VALUES, [value], [value, value]))


def is_restored(path):
    """Whether a fuzzed checkpoint is restored, to values that are right, or refused by a documented exception."""
    try:
        restored = checkpoint.restore(path.parent, LIKE)
    except ValueError as error:
        assert str(error).startswith("checkpoint.restore: ")  # noqa: PT017
        return False
    assert restored["w"].equal(W)
    return True


def test_fuzzed_manifests_and_files(saved):
    """Whole, and with their digests in order; values come from nowhere else than what was saved."""
    draw, body = sampler(0), body_of(saved)
    manifest, data = (saved / MANIFEST).read_bytes(), (saved / FILE).read_bytes()
    header, rows = split_header(data)
    for _ in range(100):
        case = mutated(draw, manifest)
        (saved / MANIFEST).write_bytes(case)
        assert is_restored(saved) == (case == manifest), case
        case = body
        for _ in range(draw.choice((1, 1, 2, 4))):
            case = swapped_values(draw, case)
        for other in (case, mutated(draw, json.dumps(case).encode())):
            (saved / MANIFEST).write_bytes(sealed(other))
            is_restored(saved)
        (saved / MANIFEST).write_bytes(manifest)
        other_header = draw.choice((mutated(draw, header), swapped_values(draw, json.loads(header))))
        (saved / FILE).write_bytes(draw.choice((with_header(other_header) + rows, mutated(draw, data))))
        is_restored(saved)
        (saved / FILE).write_bytes(data)
    # Nothing but CheckpointError comes out of the decoder.
    for _ in range(1500):
        with contextlib.suppress(CheckpointError):
            decode(draw.choice((mutated(draw, manifest), sealed(mutated(draw, json.dumps(body).encode())))))
