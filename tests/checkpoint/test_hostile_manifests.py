"""Manifests and files made to do harm, their digests in order, and a fuzzer of both."""

import builtins
import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path

import pytest
import torch

from fshard import checkpoint
from fshard.checkpoint import CheckpointError
from fshard.checkpoint.files import decode
from tests.checkpoint import states
from tests.checkpoint.states import sampler

ROOT = Path(__file__).parents[2]
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
def saved(tmp_path):
    return checkpoint.save(tmp_path, {"w": W, "n": 5}, 1).wait()


def body_of(path):
    return json.loads((path / "manifest.json").read_bytes())["body"]


def refused(path, data, like=LIKE):
    """The text of the refusal of a manifest, which takes little memory and opens nothing elsewhere."""
    (path / "manifest.json").write_bytes(data)
    tracemalloc.start()
    try:
        text = states.refused(lambda: checkpoint.restore(path.parent, like), CheckpointError)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Mostly what JSON takes as Python's objects: up to 60 bytes for two of its own.
    assert peak < 100 * len(data) + (1 << 20)
    assert text.startswith("checkpoint.restore: ")
    return text


def test_the_encoder_here_is_the_one_there(saved):
    body = body_of(saved)
    assert sealed(body) == (saved / "manifest.json").read_bytes()
    assert checkpoint.restore(saved.parent, LIKE)["w"].equal(W)


# JSON of other types than a manifest's, and such as `encode` does not write.
TYPES, EDITED = "it is no manifest that fshard wrote", "its digest does not match, so it was damaged or edited"
GAP = "expected chunks that cover each element of ['w'] once, got 'float32' in"
HEADER = "its header does not match its digest, so it was damaged"
CHECKSUM = "the elements of ['w'] do not match their checksum, so it was damaged"
HUGE = 1 << 61


def chunk(offset=(0, 0), shape=(2, 3), file=0, checksum=0):
    return [file, offset, shape, checksum]


def leaf(*chunks, dtype="float32", shape=(2, 3)):
    return [dtype, shape, list(chunks)]


LEAVES = {
    "no list": ({}, TYPES),
    "short": (["float32", [2, 3]], TYPES),
    "dtype of Python": (leaf(dtype="__class__"), "got '__class__' in 0 chunks"),
    "dtype that is a function": (leaf(dtype="load"), "got 'load' in 0 chunks"),
    "dtype that is a list": (leaf(dtype=[[]]), "got [[]] in 0 chunks"),
    "dtype that is long": (leaf(dtype="x" * 10**6), f"got '{'x' * 39} in 0 chunks"),
    "path for a dtype": (leaf(dtype="../float32"), "got '../float32' in 0 chunks"),
    "negative shape": (leaf(shape=[-2, -3]), GAP),
    "bool in a shape": (leaf(shape=[True, 3]), GAP),
    "float in a shape": (leaf(shape=[2.0, 3]), GAP),
    "infinite shape": (leaf(shape=[10**400, 3]), GAP),
    "text in a shape": (leaf(shape=["2", 3]), GAP),
    "shape that is a dict": (leaf(shape={}), EDITED),
    "too many dims": (leaf(shape=[1] * 65), GAP),
    "chunks that are none": (["float32", [2, 3], None], TYPES),
    "no chunks": (leaf(), GAP),
    "huge shape": (leaf(chunk(), shape=[HUGE, HUGE]), GAP),
    "huge chunk": (leaf(chunk(shape=[HUGE, 3])), GAP),
    "huge leaf of one chunk": (leaf(chunk(shape=[HUGE, HUGE]), shape=[HUGE, HUGE]), HEADER),
    "overflow": (leaf(chunk(offset=[HUGE, 0])), GAP),
    "too large a number": (leaf(chunk(offset=[1 << 62, 0])), GAP),
    "negative offset": (leaf(chunk(offset=[-1, 0])), GAP),
    "bool as an offset": (leaf(chunk(offset=[False, 0])), GAP),
    "float as a checksum": (leaf(chunk(checksum=0.0)), CHECKSUM),
    "large checksum": (leaf(chunk(checksum=1 << 32)), CHECKSUM),
    "file that is not there": (leaf(chunk(file=1)), GAP),
    "file of a negative number": (leaf(chunk(file=-1)), GAP),
    "path for a file": (leaf(chunk(file="../../etc/passwd")), GAP),
    "another number of dims": (leaf(chunk(offset=[0], shape=[2])), GAP),
    "more dims than offsets": (leaf(chunk(offset=[0, 0], shape=[2, 3, 1])), GAP),
    "chunk that is a dict": (leaf({}), TYPES),
    "twice the same": (leaf(chunk(), chunk()), GAP),
    "two of one file": (leaf(chunk(shape=[1, 3]), chunk(offset=[1, 0], shape=[1, 3])), GAP),
    "overlap": (leaf(chunk(shape=[2, 2]), chunk(offset=[0, 1], shape=[2, 2])), GAP),
    "gap": (leaf(chunk(shape=[2, 1]), chunk(offset=[0, 2], shape=[2, 1])), GAP),
    "gap before": (leaf(chunk(offset=[1, 0], shape=[1, 3])), GAP),
    "empty chunk": (leaf(chunk(), chunk(offset=[2, 0], shape=[0, 3])), GAP),
    "chunks of no elements": (leaf(chunk(shape=[0, 3]), shape=[0, 3]), GAP),
    "many chunks": (leaf(*[chunk()] * 20_000), GAP),
    "many chunks in a row": (
        leaf(*[chunk(offset=[i, 0], shape=[1, 3]) for i in range(20_000)], shape=[20_000, 3]),
        GAP,
    ),
    "chunks on a diagonal": (
        leaf(*[chunk(offset=[i, i], shape=[1, 1]) for i in range(20_000)], shape=[20_000, 20_000]),
        GAP,
    ),
    "another dtype than the file": (leaf(chunk(), dtype="int32"), HEADER),
    "another checksum": (leaf(chunk()), CHECKSUM),
}


@pytest.mark.rows(10)
@pytest.mark.parametrize("case", LEAVES)
def test_hostile_leaves(case, saved):
    made, text = LEAVES[case]
    assert text in refused(saved, sealed(body_of(saved) | {"tensors": {"['w']": made}}))


STEP = "expected step 1 as its name says, got step"
SIZE = f"{FILE}: expected"
MISSING = "rank-00001.safetensors: expected the file that the manifest names, got nothing"
BODIES = {
    "list": ([], TYPES),
    "none": (None, TYPES),
    "no step": ({"tensors": {}, "values": {}, "files": []}, TYPES),
    "negative step": ({"step": -1}, f"{STEP} -1"),
    "another step": ({"step": 2}, f"{STEP} 2; give it its own name back"),
    "list of tensors": ({"tensors": []}, TYPES),
    "list of values": ({"values": []}, TYPES),
    "value that is a list": ({"values": {"['n']": []}}, "['n']: expected an int, got a list"),
    "value that is a float": ({"values": {"['n']": 0.5}}, EDITED),
    "value of another type": ({"values": {"['n']": {"complex": "1j"}}}, TYPES),
    "float that is none": ({"values": {"['n']": {"float": "import os"}}}, TYPES),
    "float of a number": ({"values": {"['n']": {"float": 1}}}, EDITED),
    "float spelled otherwise": ({"values": {"['n']": {"float": "1_0"}}}, EDITED),
    "files that are a dict": ({"files": {}}, EDITED),
    "too many files": ({"files": [[0, "0" * 32]] * 100_000}, MISSING),
    "many files": ({"files": [[0, "0" * 32]] * 20_000}, MISSING),
    "no files": ({"files": [], "tensors": {}}, f"{FILE}: found a file that the manifest does not name"),
    "name for a file": ({"files": [["../../etc/passwd", "0" * 32]]}, f"{SIZE} ../../etc/passwd bytes"),
    "negative size": ({"files": [[-1, "0" * 32]]}, f"{SIZE} -1 bytes"),
    "file of more": ({"files": [[1, "0" * 32, "../x"]]}, TYPES),
    "digest that is none": ({"files": [[152, "x" * 32]]}, HEADER),
    "digest with a newline": ({"files": [[152, "0" * 32 + "\n"]]}, HEADER),
    "another header": ({"files": [[8 + 56 + 24, "0" * 32]]}, f"{SIZE} 88 bytes, got"),
}


@pytest.mark.parametrize("case", BODIES)
def test_hostile_bodies(case, saved):
    changes, text = BODIES[case]
    whole = not isinstance(changes, dict) or ("step" not in changes and len(changes) == 3)
    body = changes if whole else body_of(saved) | changes
    (saved / "manifest.json").write_bytes(sealed(body))
    if case == "value that is a list":
        assert text in states.refused(lambda: checkpoint.restore(saved.parent, LIKE))
    else:
        assert text in refused(saved, sealed(body))


DEEP = 100_000
TEXTS = {
    "nothing": b"",
    "zeros": b"\0" * 1000,
    "no JSON": b"import os",
    "pickle": b"\x80\x04K\x01.",
    "not UTF-8": b'{"format": "\xff\xfe"}',
    "UTF-16": '{"format": 1}'.encode("utf-16"),
    "mark of order": b'\xef\xbb\xbf{"format": 1}',
    "deep lists": b"[" * DEEP,
    "deep and closed lists": b"[" * DEEP + b"]" * DEEP,
    "deep dicts": b'{"a":' * DEEP,
    "deep body": sealed(b"[" * DEEP + b"]" * DEEP),
    "NaN": b'{"format": NaN}',
    "Infinity": sealed(b'{"step": Infinity, "tensors": {}, "values": {}, "files": []}'),
    "large float": sealed(b'{"step": 1e999, "tensors": {}, "values": {}, "files": []}'),
    "large int": sealed(b'{"step": ' + b"9" * 10**5 + b', "tensors": {}, "values": {}, "files": []}'),
    "twice": b'{"format": "fshard.checkpoint", "format": "fshard.checkpoint"}',
    "step twice": sealed(b'{"step": 1, "tensors": {}, "values": {}, "files": [], "step": 2}'),
    "list": b"[]",
    "number": b"1",
    "another format": b'{"format": "pickle"}',
    "no version": b'{"format": "fshard.checkpoint"}',
    "more entries": b'{"format": "fshard.checkpoint", "version": 1, "digest": "", "body": {}, "run": "os"}',
    "digest of another kind": sealed({}).replace(b'"digest": "', b'"digest": 1, "x": "'),
}


@pytest.mark.parametrize("case", TEXTS)
def test_hostile_texts(case, saved):
    assert str(saved) in refused(saved, TEXTS[case])


@pytest.mark.parametrize(
    ("version", "shown"),
    [
        (2, "2"),
        (0, "0"),
        ("1", "'1'"),
        (None, "None"),
        ([[[]]], "[[[]]]"),
        ({}, "{}"),
        (10**300, "1" + "0" * 39),
        (1.5, "1.5"),
    ],
)
def test_another_version(version, shown, saved):
    data = json.dumps({"format": "fshard.checkpoint", "version": version, "more": "of the future"}).encode()
    end = f"expected version 1, got {shown}; read it by the fshard that wrote it"
    assert refused(saved, data).endswith(f"manifest.json: {end}")


@pytest.mark.parametrize("depth", [*range(100, 1100, 7), 3000])
def test_versions_and_dtypes_of_any_depth(depth):
    """What Python can just read as JSON it may not be able to print."""
    nested = "[" * depth + "]" * depth
    body = f'{{"step": 1, "tensors": {{"w": [{nested}, [], []]}}, "values": {{}}, "files": []}}'
    for data in (f'{{"format": "fshard.checkpoint", "version": {nested}}}'.encode(), sealed(body.encode())):
        with pytest.raises(CheckpointError):
            decode(data)


def test_paths_of_hostile_leaves(saved):
    body = body_of(saved)
    (made,) = body["tensors"].values()
    for name in ("../../../etc/passwd", "/etc/passwd", "\ud800", "\0", "__metadata__", "", "x" * 10**6, "\x1b[31m"):
        data = sealed(body | {"tensors": {name: made}})
        (saved / "manifest.json").write_bytes(data)
        for like, subtree in ((LIKE, ""), (torch.zeros(2, 3), name)):
            with pytest.raises(CheckpointError, match=f"{FILE}: its header does not match its digest"):
                checkpoint.restore(saved.parent, like, subtree=subtree)


@pytest.mark.slow
def test_nothing_elsewhere_is_opened(saved, monkeypatch):
    """Whatever a manifest says, only files of the checkpoint are opened."""
    opened = []
    inner, inner_open = os.open, builtins.open

    def note(path, *arguments, **keywords):
        opened.append(str(path))
        return inner(path, *arguments, **keywords)

    def note_open(path, *arguments, **keywords):
        opened.append(str(path))
        return inner_open(path, *arguments, **keywords)

    body = body_of(saved)
    cases = [sealed(body | {"tensors": {"['w']": made}}) for made, _ in LEAVES.values()]
    cases += [sealed(body | changes) for changes, _ in BODIES.values() if isinstance(changes, dict)]
    outside = sorted(path for path in saved.parent.parent.iterdir())
    for data in cases:
        (saved / "manifest.json").write_bytes(data)
        with monkeypatch.context() as noting:
            noting.setattr(os, "open", note)
            noting.setattr(builtins, "open", note_open)
            assert outcome(saved, LIKE) == "refused"
    assert sorted(path for path in saved.parent.parent.iterdir()) == outside
    names = {path for path in opened if not path.isdigit()}
    assert names <= {str(saved / "manifest.json"), str(saved / FILE), str(saved.parent / "latest")}


def header(entries, length=None):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text


def entry(start=0, stop=24, shape=(2, 3), dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


ROWS = W.numpy().tobytes()
HEADERS = {
    "huge length": header(b"{}", 1 << 63),
    "largest length": header(b"{}", (1 << 64) - 1),
    "length of the file": header(b"{}" + b" " * 100, 130),
    "no JSON": header(b"import os"),
    "deep": header(b"[" * 100_000),
    "not UTF-8": header(b'{"\xff": 1}'),
    "list": header(b"[]"),
    "twice": header(b"{\"['w']\": " + json.dumps(entry()).encode() + b", \"['w']\": {}}"),
    "overlap": header({"['w']": entry(), "x": entry(0, 24)}),
    "gap": header({"['w']": entry(4, 28)}),
    "negative": header({"['w']": entry(-24, 0)}),
    "huge offset": header({"['w']": entry(0, 1 << 63)}),
    "backwards": header({"['w']": entry(24, 0)}),
    "huge shape": header({"['w']": entry(shape=[1 << 62, 1 << 62])}),
    "another shape": header({"['w']": entry(shape=[3, 2])}),
    "more dims": header({"['w']": entry(shape=[1, 2, 3])}),
    "another dtype": header({"['w']": entry(dtype="I32")}),
    "unknown dtype": header({"['w']": entry(dtype="OBJECT")}),
    "another name": header({"w": entry()}),
    "metadata alone": header({"__metadata__": {"['w']": "os"}}),
    "wrong metadata": header({"__metadata__": 1, "['w']": entry()}),
    "unaligned": header({"x": entry(0, 1, [1], "U8"), "['w']": entry(1, 25, dtype="I32")}),
}


def with_file(path, data):
    """Put a file in place and have the manifest say so, digest and all."""
    (path / FILE).write_bytes(data)
    length = int.from_bytes(data[:8], "little")
    digest = blake(data[: 8 + length] if length <= len(data) else data)
    body = body_of(path) | {"files": [[len(data), digest]]}
    (path / "manifest.json").write_bytes(sealed(body))


@pytest.mark.parametrize("case", HEADERS)
def test_hostile_files(case, saved):
    data = HEADERS[case]
    with_file(saved, data + (b"\0" if case == "unaligned" else b"") + ROWS)
    assert f"{saved / FILE}: " in states.refused(lambda: checkpoint.restore(saved.parent, LIKE), CheckpointError)


def test_a_header_that_says_the_same_in_other_words(saved):
    """A reader makes the header from the manifest, so no other bytes pass, whatever their digest."""
    data = (saved / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].strip()
    same = (text, text + b" " * 8, text.replace(b":", b": "), b" " + text, text.replace(b"w", b"\\u0077"))
    for other in same:
        assert json.loads(other) == json.loads(text)
        with_file(saved, header(other) + data[8 + length :])
        with pytest.raises(CheckpointError, match=f"{FILE}: its header does not match its digest"):
            checkpoint.restore(saved.parent, LIKE)
    with_file(saved, data)
    assert checkpoint.restore(saved.parent, LIKE)["w"].equal(W)


SPARSE = """
    import json, os, resource, sys, torch
    from fshard import checkpoint
    from tests.checkpoint.test_hostile_manifests import body_of, sealed
    from pathlib import Path
    path = Path(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    file = path / "rank-00000.safetensors"
    like = {"w": torch.zeros(2, 3), "n": 0}

    def attempt():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            checkpoint.restore(path.parent, like)
        except checkpoint.CheckpointError as error:
            print(str(error)[:200])
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 500 << 10, grown

    # A header as long as the file, which takes nothing on the disk.
    size = 1 << 42
    os.truncate(file, 0)
    with open(file, "r+b") as f:
        f.write((size - 8).to_bytes(8, "little"))
        f.truncate(size)
    body = body_of(path)
    manifest = sealed(body | {"files": [[size, "0" * 32]]})
    (path / "manifest.json").write_bytes(manifest)
    attempt()
    os.truncate(path / "manifest.json", (1 << 30) + 1)
    attempt()
    os.truncate(path.parent / "latest", 1 << 40)
    attempt()
"""


@pytest.mark.slow
def test_sparse_files_take_no_memory(saved):
    command = [sys.executable, "-c", textwrap.dedent(SPARSE), str(saved)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    first, second, third = result.stdout.splitlines()
    assert first.endswith(f"{FILE}: its header does not match its digest, so it was damaged")
    assert second.endswith("manifest.json: expected at most 1073741824 bytes, got 1073741825")
    assert third.endswith("latest: expected at most 1000 bytes, got 1099511627776")


TOKENS = [
    *(b"[", b"]", b"{", b"}", b",", b":", b'"', b"\\", b"-", b".", b"e9", b"0", b"1", b"99999999999999999999", b"null"),
    *(b"true", b"false", b"NaN", b"Infinity", b"\xff", b"\0", b"\n", b"\\ud800", b'"__class__"', b"[[[[", b'"float"'),
    *(b"float64", b"-1", b"1e5", b"0.0", b"\xed\xa0\x80", b"../", b'"step"', b"4611686018427387904"),
]


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
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        return value | {key: swapped_numbers(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        return [*value[:at], swapped_numbers(draw, value[at]), *value[at + 1 :]]
    others = (0, 1, -1, 2, 3, 5, True, None, 1.5, "", "x", [], {}, [0], 1 << 40, 1 << 61, 1 << 62, 1 << 200, "float32")
    return draw.choice((*others, [value], [value, value], {"float": "nan"}))


def outcome(path, like):
    """What a restore of a fuzzed checkpoint comes to: values that are right, or a documented exception."""
    try:
        found = checkpoint.restore(path.parent, like)
    except ValueError as error:
        assert str(error).startswith("checkpoint.restore: ")  # noqa: PT017
        return "refused"
    assert found["w"].equal(W)
    return "restored"


@pytest.mark.rows(1)
@pytest.mark.parametrize("seed", range(3))
def test_fuzzed_manifests(seed, saved):
    draw = sampler(seed)
    data = (saved / "manifest.json").read_bytes()
    for _ in range(300):
        case = mutated(draw, data)
        (saved / "manifest.json").write_bytes(case)
        assert outcome(saved, LIKE) == ("restored" if case == data else "refused"), case


@pytest.mark.rows(1)
@pytest.mark.parametrize("seed", range(3))
def test_fuzzed_bodies_with_digests_in_order(seed, saved):
    draw = sampler(seed)
    body = body_of(saved)
    for _ in range(300):
        case = body
        for _ in range(draw.choice((1, 1, 2, 4))):
            case = swapped_numbers(draw, case)
        (saved / "manifest.json").write_bytes(sealed(case))
        outcome(saved, LIKE)
        (saved / "manifest.json").write_bytes(sealed(mutated(draw, json.dumps(case).encode())))
        outcome(saved, LIKE)


@pytest.mark.rows(1)
@pytest.mark.parametrize("seed", range(3))
def test_fuzzed_files_with_digests_in_order(seed, saved):
    """Headers may say the same in other words, but values come from nowhere else."""
    draw = sampler(seed)
    data = (saved / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    for _ in range(200):
        kind = draw.randrange(3)
        if kind == 0:
            case = header(mutated(draw, data[8 : 8 + length])) + data[8 + length :]
        elif kind == 1:
            case = header(swapped_numbers(draw, entries)) + data[8 + length :]
        else:
            case = mutated(draw, data)
        with_file(saved, case)
        outcome(saved, LIKE)


def test_decoding_alone_for_longer(saved):
    """Nothing but CheckpointError comes out of it, and what comes back says the same."""
    draw = sampler(9)
    data = (saved / "manifest.json").read_bytes()
    body = body_of(saved)
    for _ in range(4000):
        case = mutated(draw, data) if draw.random() < 0.5 else sealed(mutated(draw, json.dumps(body).encode()))
        try:
            manifest = decode(case)
        except CheckpointError:
            continue
        assert json.loads(case)["body"]["step"] == manifest.step


def test_leftovers_that_are_links_are_not_followed(saved):
    outside = saved.parent.parent / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "mine").write_text("mine")
    (saved.parent / ".saving-00000001-0123456789abcdef").symlink_to(outside)
    left = saved.parent / ".saving-00000002-0123456789abcdef"
    left.mkdir()
    (left / "link").symlink_to(outside)
    (saved.parent / ".old-step-00000001-0123456789abcdef").symlink_to(outside)
    with checkpoint.Manager(saved.parent, keep=1) as manager:
        manager.save({"w": W, "n": 5}, 2)
    assert (outside / "mine").read_text() == "mine"
    assert not left.exists()
    shutil.rmtree(outside)
