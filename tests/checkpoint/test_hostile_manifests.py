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
from tests.checkpoint import states
from tests.checkpoint.states import sampler

FILE = "rank-00000.safetensors"
W = torch.arange(6.0).view(2, 3)
LIKE = {"w": torch.zeros(2, 3), "n": 0}


def blake(data):
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def sealed(body):
    """A manifest of a body in JSON, with the digest it needs: the encoder written once more."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f'{{"format": "fshard.checkpoint",\n "version": 1,\n "digest": "{blake(body)}",\n "body": '.encode()
    return head + body + b"}\n"


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A checkpoint: whatever is written to it, its files alone are opened, and nothing beside it changes."""
    path, opened = checkpoint.save(tmp_path / "run", {"w": W, "n": 5}, 1).wait(), set()
    assert sealed(body_of(path)) == (path / "manifest.json").read_bytes()

    def noted(inner):
        def call(path, *arguments, **keywords):
            opened.add(str(path))
            return inner(path, *arguments, **keywords)

        return call

    with monkeypatch.context() as noting:
        noting.setattr(os, "open", noted(os.open))
        noting.setattr(builtins, "open", noted(builtins.open))
        yield path
    known = path / "manifest.json", path / FILE
    assert str(known[0]) in opened
    assert {name for name in opened if not name.isdigit()} <= set(map(str, known))
    assert [*tmp_path.iterdir()] == [tmp_path / "run"]


def body_of(path):
    return json.loads((path / "manifest.json").read_bytes())["body"]


def refused(path, data):
    """The text of the refusal of a manifest, which takes little memory."""
    (path / "manifest.json").write_bytes(data)
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


EDITED = "its digest does not match, so it was damaged or edited"
GAP = "chunks of ['w'] do not cover each of its elements once"
CHECKSUM = "the elements of ['w'] do not match their checksum, so it was damaged"
HUGE = 1 << 61


def chunk(offset=(0, 0), shape=(2, 3), file=0, checksum=0):
    return [file, offset, shape, checksum]


def leaf(*chunks, dtype="float32", shape=(2, 3)):
    return [dtype, shape, list(chunks)]


# What must be chunks of (2, 3), each element once.
GAPS = (
    [],
    *([chunk(offset=offset)] for offset in ([HUGE, 0], [1 << 62, 0], [-1, 0], [False, 0], [0])),
    *([chunk(file=file)] for file in (HUGE << 1, -1, "../../etc/passwd")),
    *([chunk(shape=shape)] for shape in ([HUGE, 3], [2, 3, 1])),
    # Twice the same, two of one file, an overlap, gaps, and a chunk of no elements.
    [chunk(), chunk()],
    [chunk(shape=[1, 3]), chunk(offset=[1, 0], shape=[1, 3])],
    [chunk(shape=[2, 2]), chunk(offset=[0, 1], shape=[2, 2])],
    [chunk(shape=[2, 1]), chunk(offset=[0, 2], shape=[2, 1])],
    [chunk(offset=[1, 0], shape=[1, 3])],
    [chunk(), chunk(offset=[2, 0], shape=[0, 3])],
)
SHAPES = ([-2, -3], [True, 3], [2.0, 3], [10**400, 3], ["2", 3], [1] * 65, [0, 3], [HUGE, HUGE])
LEAVES = [
    *((made, EDITED) for made in ({}, ["float32", [2, 3]], ["float32", [2, 3], None], leaf({}), leaf(shape={}))),
    *(
        (leaf(dtype=dtype), f"['w'] has dtype {dtype!r:.40}, which fshard does not know")
        for dtype in ("__class__", "load", [[]], "x" * 10**6, "../f")
    ),
    *((leaf(chunk(), shape=shape), GAP) for shape in SHAPES),
    *((leaf(*chunks), GAP) for chunks in GAPS),
    (leaf(*[chunk(offset=[i, i], shape=[1, 1]) for i in range(20_000)], shape=[20_000, 20_000]), GAP),
    (leaf(chunk(shape=[HUGE, HUGE]), shape=[HUGE, HUGE]), f"got float32[{HUGE}, {HUGE}]"),
    *((leaf(chunk(checksum=checksum)), CHECKSUM) for checksum in (0, 0.0, 1 << 32)),
    (leaf(chunk(file=1)), f"{FILE}: is not one of the files that the manifest names"),
    (leaf(chunk(), dtype="int32"), "expected float32[2, 3], got int32[2, 3]"),
]


def test_hostile_leaves(saved):
    body = body_of(saved)
    for made, text in LEAVES:
        assert text in refused(saved, sealed(body | {"tensors": {"['w']": made}}))
    (whole,) = body["tensors"].values()
    for name in ("../../../etc/passwd", "/etc/passwd", "\ud800", "\0", "__metadata__", "", "x" * 10**6, "\x1b[31m"):
        assert "expected nothing, got float32[2, 3]" in refused(saved, sealed(body | {"tensors": {name: whole}}))


STEP = "expected step 1 as its name says, got step"
BODIES = [
    *(({key: []}, EDITED) for key in ("tensors", "values", "files")),
    *(({"step": step}, f"{STEP} {step}") for step in (-1, 2)),
    *(({"values": {"['n']": value}}, EDITED) for value in ({"complex": "1j"}, {"float": "import os"}, 0.5)),
    ({"tensors": {}}, f"{FILE}: is not one of the files that the manifest names"),
]


def test_hostile_bodies(saved):
    body = body_of(saved)
    for changes, text in BODIES:
        assert text in refused(saved, sealed(body | changes))
    for data in (sealed([]), sealed(None), b"", b"import os", b"[" * 100_000, sealed(b"[" * 100_000 + b"]" * 100_000)):
        refused(saved, data)
    for step in (b"Infinity", b"1e999", b"9" * 10**5, b'1, "step": 2'):
        refused(saved, sealed(b'{"step": ' + step + b', "tensors": {}, "values": {}}'))
    # What Python can just read as JSON it may not be able to print.
    for depth in (*range(100, 1100, 21), 3000):
        nested = "[" * depth + "]" * depth
        with pytest.raises(CheckpointError):
            decode(sealed(f'{{"step": 1, "tensors": {{"w": [{nested}, [], []]}}, "values": {{}}}}'.encode()))


def header(entries, length=None):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text


def test_hostile_files(saved):
    """A reader makes the header from the manifest, so no other bytes pass, whatever their digest."""
    whole = (saved / FILE).read_bytes()
    length = int.from_bytes(whole[:8], "little")
    text, rows = whole[8 : 8 + length].strip(), whole[8 + length :]
    same = (text, text + b" " * 8, text.replace(b":", b": "), b" " + text, text.replace(b"w", b"\\u0077"))
    for data in (header(b"{}", 1 << 63), header(b"{}", (1 << 64) - 1), header(b"[" * 100_000), *map(header, same)):
        (saved / FILE).write_bytes(data + rows)
        found = states.refused(lambda: checkpoint.restore(saved.parent, LIKE), CheckpointError)
        assert found.startswith(f"checkpoint.restore: {saved / FILE}: ")
    (saved / FILE).write_bytes(whole)
    assert checkpoint.restore(saved.parent, LIKE)["w"].equal(W)


TOKENS = (
    *(b"[", b"]", b"{", b"}", b",", b'"', b"\\", b"-", b".", b"e9", b"1", b"99999999999999999999", b"null", b"NaN"),
    *(b"\xff", b"\0", b"\\ud800", b"[[[[", b'"float"', b"float64", b"../", b'"step"', b"4611686018427387904"),
)


def mutated(draw, data):
    """A few random edits of bytes and tokens."""
    data = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        start = draw.randrange(len(data) + 1)
        stop = min(len(data), start + draw.choice((0, 1, 1, 2, 5, 30)))
        other = draw.randrange(len(data) + 1)
        piece = draw.choice((draw.choice(TOKENS), bytes([draw.randrange(256)]), bytes(data[other : other + 9]), b""))
        data[start:stop] = piece
    return bytes(data)


def swapped_numbers(draw, value):
    """The same JSON with something in it put in another's place, or another kind's."""
    if isinstance(value, (dict, list)) and value and draw.random() < 0.8:
        at = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        changed = value.copy()
        changed[at] = swapped_numbers(draw, value[at])
        return changed
    others = (0, 1, -1, 2, 5, True, None, 1.5, "", "x", [], {}, [0], 1 << 61, 1 << 62, 1 << 200, "float32")
    return draw.choice((*others, [value], [value, value], {"float": "nan"}))


def outcome(path):
    """What a restore of a fuzzed checkpoint comes to: values that are right, or a documented exception."""
    try:
        found = checkpoint.restore(path.parent, LIKE)
    except ValueError as error:
        assert str(error).startswith("checkpoint.restore: ")  # noqa: PT017
        return "refused"
    assert found["w"].equal(W)
    return "restored"


def test_fuzzed_manifests_and_files(saved):
    """Whole, and with their digests in order; values come from nowhere else than what was saved."""
    draw = sampler(0)
    body, whole, data = (body_of(saved), *((saved / name).read_bytes() for name in ("manifest.json", FILE)))
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    for _ in range(150):
        case = mutated(draw, whole)
        (saved / "manifest.json").write_bytes(case)
        assert outcome(saved) == ("restored" if case == whole else "refused"), case
        case = body
        for _ in range(draw.choice((1, 1, 2, 4))):
            case = swapped_numbers(draw, case)
        for other in (sealed(case), sealed(mutated(draw, json.dumps(case).encode()))):
            (saved / "manifest.json").write_bytes(other)
            outcome(saved)
        (saved / "manifest.json").write_bytes(whole)
        file = header(draw.choice((mutated(draw, data[8 : 8 + length]), swapped_numbers(draw, entries))))
        (saved / FILE).write_bytes(draw.choice((file + data[8 + length :], mutated(draw, data))))
        outcome(saved)
        (saved / FILE).write_bytes(data)
    # Nothing but CheckpointError comes out of the decoder.
    for _ in range(1500):
        with contextlib.suppress(CheckpointError):
            decode(draw.choice((mutated(draw, whole), sealed(mutated(draw, json.dumps(body).encode())))))
