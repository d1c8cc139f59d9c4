"""safetensors in the layout of Hugging Face: what is written, what is read into any layout, and what is refused."""

import json
import os
import re
import zlib
from collections import OrderedDict

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import fshard as fs
from fshard.checkpoint import CheckpointError, load_huggingface, save_huggingface
from fshard.ext.interop import huggingface, shared_files
from fshard.ext.interop.transformers import plan_entry, plan_leaf
from fshard.extend import files as manifests
from fshard.testing import spmd
from fshard.tree import flatten
from tests.checkpoint.states import zeros_like
from tests.ext.interop.test_state_dict import Net, blank, every_leaf, refusal
from tests.ranks import my_rank, on_ranks
from tests.trees import TREES, assert_same_bits, every_strategy, exotic_dtypes, normal, one_axis

SINGLE, INDEX, CHECKSUMS = "model.safetensors", "model.safetensors.index.json", "checksums.json"
FULL = {"a": normal()(5, 3), "b": normal(1)(4)}
PARTS = {f"model-0000{i}-of-00002.safetensors": {name: FULL[name]} for i, name in enumerate(FULL, 1)}
FIRST = min(PARTS)


def representable():
    """A tree of all dtypes that safetensors has."""
    return {name: leaf for name, leaf in exotic_dtypes().items() if leaf.dtype != torch.complex128}


def written(directory):
    """All tensors of all files, as safetensors itself reads them."""
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return dict(sorted(tensors.items()))


def shard(full):
    return fs.shard(full, every_leaf(one_axis()))


def read(directory, **options):
    return load_huggingface(directory, shard(zeros_like(FULL)), **options)


def layout(directory, parts, index=INDEX, weight_map=None):
    """Write files by hand as transformers would."""
    directory.mkdir(exist_ok=True)
    for file, tensors in parts.items():
        save_file(tensors, directory / file, metadata={"format": "pt"})
    weight_map = weight_map or {name: file for file, tensors in parts.items() for name in tensors}
    if index:
        (directory / index).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))


def refused_read(directory):
    return refusal(lambda mesh: read(directory))


@pytest.fixture(params=(1, pytest.param(shared_files.BOX_BYTES, marks=pytest.mark.slow)))
def box_bytes(request, monkeypatch):
    """Boxes of one row each, and as they are."""
    monkeypatch.setattr(shared_files, "BOX_BYTES", request.param)


@pytest.mark.usefixtures("box_bytes")
@on_ranks(2, pytest.param(3, marks=pytest.mark.slow))
def test_trees_come_back_and_nothing_is_gathered(tmp_path):
    for make in (*TREES.values(), representable):
        for i, (_, strategy) in enumerate(every_strategy()):
            params, directory = fs.shard(make(), strategy), tmp_path / make.__name__ / f"{i}"
            with fs.comm.record() as record:
                save_huggingface(directory, params)
            assert {entry.about.verb for entry in record} == {"checkpoint.save_huggingface"}
            assert sorted(os.listdir(directory)) == [CHECKSUMS, SINGLE]
            assert_same_bits(fs.unshard(load_huggingface(directory, zeros_like(params))), fs.unshard(params))
        flat = flatten(make())
        leaves = {name: leaf.detach() for name, leaf in zip(flat.names, flat.leaves) if leaf is not None}
        assert_same_bits(written(directory), dict(sorted(leaves.items())))


@on_ranks(2)
def test_ranks_may_hold_leaves_in_another_order(tmp_path):
    for make in (fs.ddp, every_leaf):
        params = fs.shard({"a": torch.ones(4), "b": torch.zeros(4)}, make(one_axis()))
        directory = tmp_path / make.__name__
        names = "ba" if my_rank() else "ab"
        leaves = OrderedDict((name, params[name]) for name in names)
        save_huggingface(directory, leaves)
        assert_same_bits(written(directory), fs.unshard(params))
        assert_same_bits(fs.checkpoint.to_state_dict(leaves), fs.unshard(params))


@on_ranks(3)
def test_files_are_as_large_as_they_may_be(tmp_path):
    draw = normal()
    full = {"a": draw(5, 3), "b": draw(7, 11), "c": draw(3).float(), "d": draw(9, 2).bfloat16()}
    for max_file_bytes, files in ((1, 4), (500, 3)):
        directory = tmp_path / f"{files}"
        save_huggingface(directory, shard(full), max_file_bytes=max_file_bytes)
        assert_same_bits(fs.unshard(load_huggingface(directory, shard(zeros_like(full)))), full)
        assert_same_bits(written(directory), full)
        names = [f"model-{i:05d}-of-{files:05d}.safetensors" for i in range(1, files + 1)]
        assert sorted(os.listdir(directory)) == [CHECKSUMS, *names, INDEX]
        index = json.loads((directory / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in full.values())
        assert sorted(index["weight_map"]) == sorted(full)
        for name, file in index["weight_map"].items():
            with safe_open(directory / file, framework="pt") as opened:
                assert opened.metadata() == {"format": "pt"}
                assert name in opened.keys()  # noqa: SIM118


@on_ranks(2)
def test_names_may_be_others_in_the_files(tmp_path):
    params, names = shard(FULL), "model.{}".format
    save_huggingface(tmp_path, params, names=names)
    assert_same_bits(written(tmp_path), {f"model.{name}": tensor for name, tensor in FULL.items()})
    assert_same_bits(fs.unshard(read(tmp_path, names=names)), FULL)
    save_huggingface(tmp_path / "plain", FULL)
    for directory, options, text in (
        (tmp_path, {}, r"(?s)b: expected float.*, got nothing.*model\.b: expected nothing, got float64\[4\]"),
        (tmp_path / "plain", {"names": names}, r"(?s)got nothing.*b \(in the files\): expected nothing"),
    ):
        with pytest.raises(ValueError, match=text):
            read(directory, **options)
    for name, text in (("same", "b: is called 'same', as another leaf"), (["a"], "a: is called a list")):
        match = rf"{text}.*\n(.*\n)*To fix: give leaves other names by names="
        with pytest.raises(ValueError, match=match):
            save_huggingface(tmp_path / "other", FULL, names=lambda _, name=name: name)
        for strict in (True, False):
            with pytest.raises(ValueError, match=match):
                read(tmp_path / "plain", names=lambda _, name=name: name, strict=strict)


def test_a_buffer_that_is_not_saved_is_read_where_files_have_it(tmp_path):
    """Also under another name, as older files have buffers of rotary embeddings."""
    module = nn.Module()
    module.register_buffer("cache", torch.zeros(2), persistent=False)
    save_huggingface(tmp_path, {"cache": torch.ones(2)}, names="model.{}".format)
    loaded = load_huggingface(tmp_path, {"cache": torch.zeros(2)}, names="model.{}".format, module=module)
    assert loaded["cache"].tolist() == [1, 1]


def test_a_submodule_may_be_called_as_torch_compile_calls_one(tmp_path):
    """Its tensors have names of their own beside those of the module around it."""
    module = nn.Module()
    module._orig_mod = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.ones(3))
    params = {name: parameter.detach() for name, parameter in module.named_parameters()}
    save_huggingface(tmp_path, params, module=module)
    assert_same_bits(load_huggingface(tmp_path, zeros_like(params), module=module), params)


def test_names_that_are_no_function_are_refused(tmp_path):
    for names in ({}, "", 0):
        with pytest.raises(ValueError, match="expected names to be a function of a name, or None, got "):
            save_huggingface(tmp_path / "out", FULL, names=names)


TAKEN = "is called '__metadata__', a name that safetensors uses itself\n"
HALF = "  a\\ud800b: is called so, with half of a surrogate pair, which UTF-8 cannot encode\n"


@on_ranks(1, 2)
def test_names_that_no_reader_takes_are_refused_before_anything_is_written(tmp_path):
    """Of one leaf or several, as the leaf is called or as `names` calls it."""
    leaves = {"__metadata__": torch.ones(2), "w": torch.ones(3), "a\ud800b": torch.ones(1)}
    for params, names, lines in (
        (leaves, None, f"  __metadata__: {TAKEN}{HALF}"),
        ({"a\ud800b": torch.ones(1)}, None, HALF),
        ({"w": torch.ones(1)}, {"w": "__metadata__"}.get, f"  w: {TAKEN}"),
    ):
        with pytest.raises(ValueError, match="names do not fit") as caught:
            save_huggingface(tmp_path / "out", params, names=names, max_file_bytes=1)
        start = "checkpoint.save_huggingface: names do not fit\n"
        assert str(caught.value) == f"{start}{lines}To fix: give leaves other names by names=."
    assert not (tmp_path / "out").exists()
    odd = dict.fromkeys(("a\0", "a\n", 'a"', "a\\", "é", "😀", "\ufffe", "a", ""), torch.ones(2))
    save_huggingface(tmp_path / "out", odd)
    assert_same_bits(load_huggingface(tmp_path / "out", zeros_like(odd)), odd)


@on_ranks(3)
def test_tied_parameters_are_found_under_another_name(tmp_path):
    module = Net()
    tensors = module.state_dict()
    del tensors["embedding.weight"]
    save_huggingface(tmp_path, tensors, names="net.{}".format)
    loaded = load_huggingface(tmp_path, blank(one_axis()), module=module, names="net.{}".format)
    assert_same_bits(fs.unshard(loaded), {name: module.state_dict()[name] for name in loaded})


def test_layouts_written_by_others(tmp_path):
    layout(tmp_path / "single", {SINGLE: FULL}, index=None)
    layout(tmp_path / "index", PARTS)
    # transformers takes the single one.
    layout(tmp_path / "both", {"model-00001-of-00001.safetensors": {"c": torch.ones(1)}})
    layout(tmp_path / "both", {SINGLE: FULL}, index=None)
    layout(tmp_path / "other name", {"diffusion_pytorch_model.safetensors": FULL}, index=None)
    layout(tmp_path / "other index", PARTS, index="diffusion_pytorch_model.safetensors.index.json")
    (tmp_path / "links").mkdir()
    os.symlink(f"../single/{SINGLE}", tmp_path / "links" / SINGLE)

    def program():
        for directory in sorted(tmp_path.iterdir()):
            assert_same_bits(fs.unshard(read(directory)), FULL)

    spmd(program, 3)


def test_dtypes_change_when_asked(tmp_path):
    layout(tmp_path, {SINGLE: FULL | {"a": FULL["a"].bfloat16()}}, index=None)
    assert "a: expected float64[5, 3], got bfloat16[5, 3]" in refused_read(tmp_path)
    expected = FULL | {"a": FULL["a"].bfloat16().double()}
    spmd(lambda: assert_same_bits(fs.unshard(read(tmp_path, cast=True)), expected), 2)


@on_ranks(2)
def test_a_dtype_is_cast_to_as_files_are_written(tmp_path):
    full = {"h": normal(1)(3).half(), "n": torch.arange(5), "w": normal()(6, 2)}
    save_huggingface(tmp_path, shard(full), dtype=torch.bfloat16)
    assert_same_bits(written(tmp_path), {**full, "w": full["w"].bfloat16(), "h": full["h"].bfloat16()})
    with pytest.raises(ValueError, match=r"dtype to be a floating torch.dtype .*, or None, got torch.int8"):
        save_huggingface(tmp_path / "other", full, dtype=torch.int8)


def test_ranks_that_would_write_other_files_are_refused(tmp_path):
    for other in (dict(max_file_bytes=1), dict(names="other.{}".format), dict(dtype=torch.bfloat16)):
        text = refusal(lambda mesh, other=other: save_huggingface(tmp_path / "out", FULL, **other if my_rank() else {}))
        assert "checkpoint.save_huggingface: ranks hold different leaves" in text
        assert re.search(r"a: expected (torch.float64\[5, 3\]|nothing) as on the rank at", text)
    assert not (tmp_path / "out").exists()


def test_other_bytes_than_ranks_wrote_are_named_where_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_files, "BOX_BYTES", 1)
    spmd(lambda: save_huggingface(tmp_path, shard(FULL)), 3)
    file = tmp_path / SINGLE
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # of the last element of b, a box of its own
    file.write_bytes(data)
    text = f"{file}: b has other bytes than were written, in [1] from [3]; have it written again, or"
    assert text in refused_read(tmp_path)
    assert_same_bits(load_huggingface(tmp_path, {"a": 0 * FULL["a"]}, strict=False), {"a": FULL["a"]})
    (tmp_path / CHECKSUMS).unlink()
    spmd(lambda: read(tmp_path), 2)


def test_damaged_checksums_are_named(tmp_path):
    layout(tmp_path, {SINGLE: FULL}, index=None)
    others_file = "expected a manifest of version 1, got another file"
    damaged = "its digest does not match, so it was damaged or edited"
    manifest = manifests.encode(manifests.Manifest(0, {"a": manifests.StoredLeaf("float64", (5, 3), ())}, {}))
    for content, text in ((b"{", others_file), (b"[]", others_file), (manifest.replace(b"[5, 3]", b"[5, 9]"), damaged)):
        (tmp_path / CHECKSUMS).write_bytes(content)
        refusal_text = refused_read(tmp_path)
        assert f"{tmp_path / CHECKSUMS}: {text}" in refusal_text
        assert refusal_text.endswith(", or remove it to read without checksums")


@pytest.mark.parametrize("leaf", (None, ("float64", (5, 9)), ("float32", (5, 3))))
def test_checksums_of_another_export_are_named(leaf, tmp_path):
    layout(tmp_path, {SINGLE: FULL}, index=None)
    tensors = {"a": manifests.StoredLeaf(*leaf, ())} if leaf else {}
    (tmp_path / CHECKSUMS).write_bytes(manifests.encode(manifests.Manifest(0, tensors, {})))
    text = f"{tmp_path / CHECKSUMS} is of another a than {SINGLE} has; remove it"
    assert refused_read(tmp_path) == f"checkpoint.load_huggingface: {text}"


def test_boxes_beside_what_is_read_are_not_checked(tmp_path):
    tensor, file = torch.arange(4), tmp_path / SINGLE
    save_file({"w": tensor}, file)
    right = zlib.crc32(tensor[2:].numpy().data)
    chunks = (manifests.Chunk(0, (0,), (2,), 0), manifests.Chunk(0, (2,), (2,), right))
    written = {"w": manifests.StoredLeaf("int64", (4,), chunks)}
    with safe_open(file, framework="pt") as opened:
        entry = shared_files.make_entry(file, "w", opened.get_slice("w"), written)
        assert entry.read((slice(2, 4),)).tolist() == [2, 3]
        text = r": w has other bytes than were written, in \[2\] from \[0\]"
        with pytest.raises(CheckpointError, match=text):
            entry.read((slice(1, 3),))
        written["w"] = written["w"]._replace(chunks=chunks[1:])
        with pytest.raises(CheckpointError, match="w: 1 of its elements are on no rank"):
            shared_files.make_entry(file, "w", opened.get_slice("w"), written).read((slice(1, 3),))


def test_a_conversion_that_writes_to_a_weight_is_refused():
    """Its values are read after the conversion, so nothing would be written."""
    weight = plan_entry(fs.extend.Entry.of(torch.ones(3)), "w")
    text = "mul_ writes to a weight, and fshard reads weights only after their conversion"
    with pytest.raises(CheckpointError, match=text):
        weight.mul_(2)
    assert (2 * weight.contiguous()).value().tolist() == [2, 2, 2]


def make_first_a_pipe(directory):
    (directory / FIRST).unlink()
    os.mkfifo(directory / FIRST)


def half_bytes():
    """A file of a dtype that torch does not have, two elements to a byte."""
    header = b'{"a":{"dtype":"F4","shape":[16],"data_offsets":[0,8]}}'
    return len(header).to_bytes(8, "little") + header + bytes(8)


NO_MAP = f"{INDEX} has no map from tensors to files"
OUTSIDE = "names '../x.safetensors' for a, which is no .safetensors file beside it"
DAMAGES = (
    (f"{NO_MAP} (JSONDecodeError)", lambda directory: (directory / INDEX).write_text("{")),
    (f"{NO_MAP} (TypeError)", lambda directory: (directory / INDEX).write_text("[]")),
    (f"{INDEX}: Error", lambda directory: (directory / INDEX).write_text('{"weight_map": {}}')),
    (
        f"{INDEX} names {FIRST} for b, which does not have it; fetch the directory anew",
        lambda directory: layout(directory, PARTS, INDEX, dict.fromkeys("ab", FIRST)),
    ),
    (OUTSIDE, lambda directory: layout(directory, PARTS, INDEX, {"a": "../x.safetensors"})),
    (f"{INDEX} names '\\x00.safetensors'", lambda directory: layout(directory, PARTS, INDEX, {"a": "\0.safetensors"})),
    (f"{INDEX} names '\\ud800.saf", lambda directory: layout(directory, PARTS, INDEX, {"a": "\ud800.safetensors"})),
    (f"{FIRST}: shape '[16]' is invalid", lambda directory: (directory / FIRST).write_bytes(half_bytes())),
    (f"names '{FIRST}' for a, which is no", lambda directory: (directory / FIRST).unlink()),
    (f"{FIRST}: ", lambda directory: (directory / FIRST).write_bytes(b"x" * 4)),
    (f"{FIRST}: ", lambda directory: os.truncate(directory / FIRST, (directory / FIRST).stat().st_size - 1)),
    (f"names '{FIRST}' for a, which is no", make_first_a_pipe),
    ("or one file of weights, got model-00001", lambda directory: (directory / INDEX).rename(directory / "notes.txt")),
)


@pytest.mark.parametrize("strict", (True, False))
def test_an_index_may_name_weights_that_nobody_needs(strict, tmp_path):
    """As one that lists a head that is tied, and stored under its other name."""
    layout(tmp_path, PARTS, INDEX, dict.fromkeys((*FULL, "head"), FIRST) | {"b": [*PARTS][-1]})
    zeros = fs.tree_map(torch.zeros_like, FULL)
    assert_same_bits(load_huggingface(tmp_path, zeros, strict=strict), FULL)
    with pytest.raises(CheckpointError, match=f"names {FIRST} for head, which does not have it"):
        load_huggingface(tmp_path, zeros | {"head": torch.zeros(1)}, strict=strict)


def test_damage_is_named_on_every_rank(tmp_path):
    for number, (text, damage) in enumerate(DAMAGES):
        directory = tmp_path / f"{number}"
        layout(directory, PARTS)
        damage(directory)
        assert re.match(f"checkpoint.load_huggingface: (.|\n)*{re.escape(text)}", refused_read(directory))


@pytest.mark.parametrize("failing", ((0,), (1,), (0, 1, 2)))
@pytest.mark.parametrize("name", ("fsync", "posix_fallocate"))
def test_a_write_that_fails_leaves_nothing_on_any_rank(name, failing, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".exporting-0123456789abcdef").mkdir()
    full, plain = FULL | {"c": torch.ones(3)}, getattr(os, name)

    def full_disk(*arguments):
        if my_rank() in failing:
            raise OSError(28, "No space left on device")
        plain(*arguments)

    def plan_conversion(leaves, name, full):
        """As what transformers converts, which every rank gathers."""
        tensor = plan_leaf(leaves, name, full)
        tensor.leaf = None if name == "b" else name
        return tensor

    monkeypatch.setattr(shared_files.os, name, full_disk)
    monkeypatch.setattr(huggingface, "plan_leaf", plan_conversion)

    def save(mesh):
        params = shard(full)
        try:
            save_huggingface(tmp_path, params, max_file_bytes=1)
        finally:
            assert_same_bits(fs.unshard(params), full)

    assert refusal(save, 3) == f"checkpoint.save_huggingface: {tmp_path}: No space left on device"
    assert os.listdir(tmp_path) == ["config.json"]
