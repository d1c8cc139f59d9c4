"""safetensors in the layout of Hugging Face: what is written, what is read into any layout, and what is refused."""

import json
import os
import zlib
from functools import partial

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fshard as fs
from fshard.checkpoint import load_huggingface, save_huggingface
from fshard.ext.interop import huggingface, shared_files
from fshard.ext.interop.transformers import plan_entry, plan_leaf
from fshard.testing import spmd
from fshard.tree import flatten, names_of
from tests.ext.interop.test_state_dict import Net, every_leaf, refusal, sharded
from tests.ranks import my_rank, on_ranks
from tests.trees import TREES, assert_same_bits, every_strategy, exotic_dtypes, normal, one_axis

SINGLE, INDEX, CHECKSUMS = "model.safetensors", "model.safetensors.index.json", "checksums.json"


def representable():
    """A tree of all dtypes that safetensors has."""
    return {name: leaf for name, leaf in exotic_dtypes().items() if leaf.dtype != torch.complex128}


def written(directory):
    """All tensors of all files, as safetensors itself reads them."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


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
            back = load_huggingface(directory, fs.tree_map(torch.zeros_like, params))
            assert_same_bits(fs.unshard(back), fs.unshard(params))
        flat = flatten(make())
        leaves = {n: leaf.detach() for n, leaf in zip(names_of(flat.treedef), flat.leaves) if leaf is not None}
        assert_same_bits(written(directory), leaves)


@on_ranks(3)
def test_files_are_as_large_as_they_may_be(tmp_path):
    draw = normal()
    full = {"a": draw(5, 3), "b": draw(7, 11), "c": draw(3).float(), "d": draw(9, 2).bfloat16()}
    params = fs.shard(full, every_leaf(one_axis()))
    for max_file_bytes, files in ((1, 4), (500, 3)):
        directory = tmp_path / f"{files}"
        save_huggingface(directory, params, max_file_bytes=max_file_bytes)
        back = load_huggingface(directory, fs.tree_map(torch.zeros_like, params))
        assert_same_bits(fs.unshard(back), full)
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
    full = {"w": normal()(5), "v": normal(1)(3)}
    params, names = fs.shard(full, every_leaf(one_axis())), "model.{}".format
    save_huggingface(tmp_path, params, names=names)
    like = fs.tree_map(torch.zeros_like, params)
    assert_same_bits(fs.unshard(load_huggingface(tmp_path, like, names=names)), full)
    text = r"(?s)w: expected float.*, got nothing.*model\.v: expected nothing, got float64\[3\]"
    with pytest.raises(ValueError, match=text):
        load_huggingface(tmp_path, like)
    assert_same_bits(written(tmp_path), {f"model.{name}": tensor for name, tensor in full.items()})
    save_huggingface(tmp_path / "own", full)
    with pytest.raises(ValueError, match=r"(?s)w: expected float.*, got nothing.*w \(in the files\): expected nothing"):
        load_huggingface(tmp_path / "own", like, names=names)
    with pytest.raises(ValueError, match="w: is called 'same', as another leaf is\nTo fix: change names="):
        save_huggingface(tmp_path / "other", full, names=lambda name: "same")


@on_ranks(1, 2)
def test_names_that_no_reader_takes_are_refused_before_anything_is_written(tmp_path):
    """Of one leaf or several, as the leaf is called or as `names` calls it."""
    leaves = {"__metadata__": torch.ones(2), "w": torch.ones(3), "a\ud800b": torch.ones(1)}
    taken = "  __metadata__: is a name that safetensors uses itself\n"
    half = "  a\\ud800b: has half of a surrogate pair, which UTF-8 cannot encode\n"
    start = "checkpoint.save_huggingface: safetensors cannot hold these names\n"
    for params, names, lines in (
        (leaves, None, taken + half),
        ({"a\ud800b": torch.ones(1)}, None, half),
        ({"w": torch.ones(1)}, {"w": "__metadata__"}.get, taken),
    ):
        with pytest.raises(ValueError, match="safetensors cannot hold") as caught:
            save_huggingface(tmp_path / "out", params, names=names, max_file_bytes=1)
        assert str(caught.value) == f"{start}{lines}To fix: give these leaves other names by names=."
    assert not (tmp_path / "out").exists()
    odd = {"a" + letter: torch.ones(1) for letter in ("\0", "\n", '"', "\\", "é", "😀", "\ufffe", "")} | {
        "": torch.ones(2)
    }
    save_huggingface(tmp_path / "out", odd)
    assert_same_bits(load_huggingface(tmp_path / "out", fs.tree_map(torch.zeros_like, odd)), odd)


def test_tied_parameters_are_found_under_any_name(tmp_path):
    module, names = Net(), "net.{}".format
    aliases = ("embedding.weight", "head.weight")
    for alias in aliases:
        content = {name: tensor for name, tensor in module.state_dict().items() if name != "head.weight"}
        content[alias] = content.pop("embedding.weight").clone()
        (tmp_path / alias).mkdir()
        save_file({names(name): tensor for name, tensor in content.items()}, tmp_path / alias / SINGLE)

    def program():
        like = sharded(Net(1), every_leaf(one_axis()))
        del like["cache"]
        for alias in aliases:
            back = fs.unshard(load_huggingface(tmp_path / alias, like, module=module, names=names))
            assert_same_bits(back, {name: module.state_dict()[name].detach() for name in like})

    spmd(program, 3)


def layout(directory, parts, where=None, index=INDEX):
    """Write files by hand as transformers would."""
    for file, content in parts.items():
        save_file(content, directory / file, metadata={"format": "pt"})
    where = {name: file for file, content in parts.items() for name in content} if where is None else where
    if index:
        (directory / index).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": where}))


FULL = {"a": normal()(5, 3), "b": normal(1)(4)}
PARTS = {f"model-0000{i}-of-00002.safetensors": {name: FULL[name]} for i, name in enumerate(FULL, 1)}


def read(directory, **arguments):
    like = fs.shard({name: torch.zeros_like(tensor) for name, tensor in FULL.items()}, every_leaf(one_axis()))
    return load_huggingface(directory, like, **arguments)


def test_layouts_written_by_others(tmp_path):
    kinds = {
        "single": lambda d: layout(d, {SINGLE: FULL}, index=None),
        "index": lambda d: layout(d, PARTS),
        # transformers takes the single one.
        "both": lambda d: (layout(d, {"model-00001-of-00001.safetensors": {"c": torch.ones(1)}}), kinds["single"](d)),
        "other name": lambda d: layout(d, {"diffusion_pytorch_model.safetensors": FULL}, index=None),
        "other index": lambda d: layout(d, PARTS, index="diffusion_pytorch_model.safetensors.index.json"),
        "links": lambda d: os.symlink(f"../single/{SINGLE}", d / SINGLE),
    }
    for kind, write in kinds.items():
        (tmp_path / kind).mkdir()
        write(tmp_path / kind)

    def program():
        for kind in kinds:
            assert_same_bits(fs.unshard(read(tmp_path / kind)), FULL)

    spmd(program, 3)


def test_dtypes_change_when_asked(tmp_path):
    layout(tmp_path, {SINGLE: {"a": FULL["a"].bfloat16(), "b": FULL["b"]}}, index=None)
    message = refusal(lambda mesh: read(tmp_path))
    assert "a: expected float64[5, 3], got bfloat16[5, 3]" in message
    expected = {"a": FULL["a"].bfloat16().double(), "b": FULL["b"]}
    spmd(lambda: assert_same_bits(fs.unshard(read(tmp_path, cast=True)), expected), 2)


DAMAGES = [
    (lambda d: (d / INDEX).write_text("{"), f"{INDEX} has no map from tensors to files (JSONDecodeError)"),
    (lambda d: (d / INDEX).write_text("[]"), f"{INDEX} has no map from tensors to files (TypeError)"),
    (lambda d: (d / INDEX).write_text('{"weight_map": {}}'), f"{INDEX} has no map from tensors to files"),
    (lambda d: layout(d, PARTS, where={"a": min(PARTS), "b": min(PARTS)}), "b: expected float64[4], got nothing"),
    (
        lambda d: layout(d, PARTS, where={"a": "../x.safetensors"}),
        "names '../x.safetensors' for a, which is no .safetensors file beside it",
    ),
    (lambda d: os.remove(d / min(PARTS)), f"{min(PARTS)}: No such file"),
    (lambda d: (d / min(PARTS)).write_bytes(b"x" * 4), f"{min(PARTS)}: "),
    (lambda d: (d / min(PARTS)).write_bytes((d / min(PARTS)).read_bytes()[:-1]), f"{min(PARTS)}: "),
    (lambda d: (os.remove(d / min(PARTS)), os.mkfifo(d / min(PARTS))), f"{min(PARTS)} is no regular file"),
    (lambda d: (d / INDEX).rename(d / "notes.txt"), "or one file of weights, got model-00001"),
]


@on_ranks(2)
def test_a_dtype_is_cast_to_as_files_are_written(tmp_path):
    full = {"w": normal()(6, 2), "n": torch.arange(5), "h": normal(1)(3).half()}
    save_huggingface(tmp_path, fs.shard(full, every_leaf(one_axis())), dtype=torch.bfloat16)
    assert_same_bits(written(tmp_path), {**full, "w": full["w"].bfloat16(), "h": full["h"].bfloat16()})
    with pytest.raises(ValueError, match=r"dtype to be one of floating numbers, or None, got torch.int8"):
        save_huggingface(tmp_path / "other", full, dtype=torch.int8)


def test_ranks_that_would_write_other_files_are_refused(tmp_path):
    for other in (dict(max_file_bytes=1), dict(names="other.{}".format), dict(dtype=torch.bfloat16)):

        def save(mesh):
            save_huggingface(tmp_path / "out", FULL, **other if my_rank() else {})  # noqa: B023

        text = refusal(save)
        assert "checkpoint.save_huggingface: ranks hold different leaves" in text
        assert "a: torch.float64[5, 3] as on the rank at" in text
    assert not (tmp_path / "out").exists()


def test_other_bytes_than_ranks_wrote_are_named_where_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_files, "BOX_BYTES", 1)
    spmd(lambda: save_huggingface(tmp_path, fs.shard(FULL, every_leaf(one_axis()))), 3)
    file = tmp_path / SINGLE
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # of the last element of b, a box of its own
    file.write_bytes(data)
    text = f"{file}: b has other bytes than were written, in [1] from [3]; have it written again, or"
    assert text in refusal(lambda mesh: read(tmp_path))
    like = {"a": torch.zeros(5, 3, dtype=torch.float64)}
    assert_same_bits(load_huggingface(tmp_path, like, strict=False), {"a": FULL["a"]})
    (tmp_path / CHECKSUMS).unlink()
    spmd(lambda: read(tmp_path), 2)


def test_damaged_checksums_are_named(tmp_path):
    layout(tmp_path, {SINGLE: FULL}, index=None)
    for damaged in ("{", "[]", '{"a": [[1]]}', '{"a": 1}', '{"a": [[["0", 0], [5, 3], 1]]}', '{"a": [[0, 4, 5]]}'):
        (tmp_path / CHECKSUMS).write_text(damaged)
        assert f"{CHECKSUMS} does not hold checksums of tensors (" in refusal(lambda mesh: read(tmp_path))
    for boxes in ({}, {"a": []}, {"a": [[[0, 0], [4, 3], 1]]}):
        (tmp_path / CHECKSUMS).write_text(json.dumps(boxes))
        text = refusal(lambda mesh: read(tmp_path))
        assert f"{tmp_path / CHECKSUMS}: its boxes of a are not all of it: [" in text
        assert text.endswith("; remove checksums.json")


def test_boxes_beside_what_is_read_are_not_checked(tmp_path):
    file = tmp_path / SINGLE
    save_file({"w": torch.arange(4)}, file)
    right = zlib.crc32(torch.arange(2, 4).numpy().data)
    boxes = [shared_files.WrittenBox((0,), (2,), 0), shared_files.WrittenBox((2,), (2,), right)]
    with safe_open(file, framework="pt") as opened:
        read_place = partial(shared_files.read, file, "w", opened.get_slice("w"), boxes)
        assert read_place((slice(2, 4),)).tolist() == [2, 3]
        with pytest.raises(
            fs.checkpoint.CheckpointError, match=r": w has other bytes than were written, in \[2\] from \[0\]"
        ):
            read_place((slice(1, 3),))


def test_a_conversion_that_writes_to_a_weight_is_refused():
    """Its values are read after the conversion, so nothing would be written."""
    weight = plan_entry(fs.extend.Entry.of(torch.ones(3)), "w")
    text = "mul_ writes to a weight, and fshard reads weights only after their conversion"
    with pytest.raises(fs.checkpoint.CheckpointError, match=text):
        weight.mul_(2)
    assert (2 * weight.contiguous()).value().tolist() == [2, 2, 2]


def test_damage_is_named_on_every_rank(tmp_path):
    for number, (damage, message) in enumerate(DAMAGES):
        directory = tmp_path / f"{number}"
        directory.mkdir()
        layout(directory, PARTS)
        damage(directory)
        text = refusal(lambda mesh: read(directory))  # noqa: B023
        assert text.startswith("checkpoint.load_huggingface: ")
        assert message in text


@pytest.mark.parametrize("failing", ((0,), (1,), (0, 1, 2)))
@pytest.mark.parametrize("name", ("fsync", "posix_fallocate"))
def test_a_write_that_fails_leaves_nothing_on_any_rank(name, failing, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".exporting-0123456789abcdef").mkdir()
    plain = getattr(os, name)

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
        params = fs.shard(FULL | {"c": torch.ones(3)}, every_leaf(mesh))
        try:
            save_huggingface(tmp_path, params, max_file_bytes=1)
        finally:
            assert_same_bits(fs.unshard(params), FULL | {"c": torch.ones(3)})

    assert refusal(save, 3) == f"checkpoint.save_huggingface: {tmp_path}: No space left on device"
    assert os.listdir(tmp_path) == ["config.json"]
