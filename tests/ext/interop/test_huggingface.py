"""safetensors in the layout of Hugging Face: what is written, what is read into any layout, and what is refused."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fshard as fs
from fshard.checkpoint import load_huggingface, save_huggingface
from fshard.ext.interop import huggingface
from fshard.testing import spmd
from fshard.tree import flatten, names_of
from tests.checkpoint.test_state_dict import Net, every_leaf, refusal, sharded
from tests.ranks import on_ranks
from tests.trees import TREES, assert_same_bits, every_strategy, exotic_dtypes, normal, one_axis

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WORLD_SIZES = (1, 2, 3, 4)


def representable():
    """A tree of all dtypes that safetensors has."""
    return {name: leaf for name, leaf in exotic_dtypes().items() if leaf.dtype != torch.complex128}


def by_name(tree):
    flat = flatten(tree)
    return {n: leaf.detach() for n, leaf in zip(names_of(flat.treedef), flat.leaves) if leaf is not None}


def written(directory):
    """All tensors of all files, as safetensors itself reads them."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.rows(1)
@pytest.mark.parametrize("tree", [*TREES.values(), representable], ids=lambda make: make.__name__)
@on_ranks(*WORLD_SIZES)
def test_trees_come_back(tmp_path, tree):
    for i, (_, strategy) in enumerate(every_strategy()):
        params, directory = fs.shard(tree(), strategy), tmp_path / str(i)
        save_huggingface(directory, params)
        assert os.listdir(directory) == [SINGLE]
        back = load_huggingface(directory, fs.tree_map(torch.zeros_like, params))
        assert_same_bits(fs.unshard(back), fs.unshard(params))
    assert_same_bits(written(tmp_path / "0"), by_name(tree()))


@on_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("max_file_bytes, files", [(1, 4), (500, 3), (700, 2), (10_000, 1)])
def test_files_are_as_large_as_they_may_be(tmp_path, max_file_bytes, files):
    draw = normal()
    full = {"a": draw(5, 3), "b": draw(7, 11), "c": draw(3).float(), "d": draw(9, 2).bfloat16()}
    params = fs.shard(full, every_leaf(one_axis()))
    save_huggingface(tmp_path, params, max_file_bytes=max_file_bytes)
    back = load_huggingface(tmp_path, fs.tree_map(torch.zeros_like, params))
    assert_same_bits(fs.unshard(back), full)
    assert_same_bits(written(tmp_path), full)
    names = sorted(name for name in os.listdir(tmp_path) if name.endswith(".safetensors"))
    if files == 1:
        assert sorted(os.listdir(tmp_path)) == [SINGLE]
        return
    assert names == [f"model-{i:05d}-of-{files:05d}.safetensors" for i in range(1, files + 1)]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in full.values())
    assert sorted(index["weight_map"]) == sorted(full)
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, framework="pt") as opened:
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
    with pytest.raises(ValueError, match="w: expected a name of its own, got the name of another leaf"):
        save_huggingface(tmp_path / "other", full, names=lambda name: "same")


@pytest.mark.parametrize("alias", ["embedding.weight", "head.weight"])
@pytest.mark.parametrize("names", [None, "net.{}".format])
def test_tied_parameters_are_found_under_any_name(tmp_path, alias, names):
    module = Net()
    content = {name: tensor for name, tensor in module.state_dict().items() if name not in ("head.weight",)}
    content[alias] = content.pop("embedding.weight").clone()
    save_file({names(name) if names else name: tensor for name, tensor in content.items()}, tmp_path / SINGLE)

    def program():
        like = sharded(Net(1), every_leaf(one_axis()))
        del like["cache"]
        back = fs.unshard(load_huggingface(tmp_path, like, module=module, names=names))
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


@pytest.mark.parametrize("kind", ["single", "index", "both", "other name", "other index", "links", "meta"])
def test_layouts_written_by_others(tmp_path, kind):
    if kind in ("single", "both", "links"):
        layout(tmp_path, {SINGLE: FULL}, index=None)
    if kind in ("index", "meta"):
        layout(tmp_path, PARTS)
    if kind == "both":
        # transformers takes the single one.
        layout(tmp_path, {"model-00001-of-00001.safetensors": {"c": torch.ones(1)}})
    if kind == "other name":
        layout(tmp_path, {"diffusion_pytorch_model.safetensors": FULL}, index=None)
    if kind == "other index":
        layout(tmp_path, PARTS, index="diffusion_pytorch_model.safetensors.index.json")
    directory = tmp_path
    if kind == "links":
        directory = tmp_path / "snapshot"
        directory.mkdir()
        os.symlink("../" + SINGLE, directory / SINGLE)

    def program():
        if kind == "meta":
            with torch.device("meta"):
                like = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in FULL.items()}
            assert_same_bits(load_huggingface(directory, like), FULL)
        assert_same_bits(fs.unshard(read(directory)), FULL)

    spmd(program, 3)


def test_dtypes_change_when_asked(tmp_path):
    layout(tmp_path, {SINGLE: {"a": FULL["a"].bfloat16(), "b": FULL["b"]}}, index=None)
    message = refusal(lambda mesh: read(tmp_path))
    assert "a: expected float64[5, 3], got bfloat16[5, 3]" in message
    expected = {"a": FULL["a"].bfloat16().double(), "b": FULL["b"]}
    spmd(lambda: assert_same_bits(fs.unshard(read(tmp_path, cast=True)), expected), 2)


def test_leaves_that_do_not_fit_are_all_named(tmp_path):
    layout(tmp_path, {SINGLE: {"a": FULL["a"].T.contiguous(), "c": torch.ones(1)}}, index=None)
    message = refusal(lambda mesh: read(tmp_path))
    assert "a: expected float64[5, 3], got float64[3, 5]" in message
    assert "b: expected float64[4], got nothing" in message
    assert "c: expected nothing, got float32[1]" in message


DAMAGES = [
    (lambda d: (d / INDEX).write_text("{"), "found no map from tensors to files (JSONDecodeError)"),
    (lambda d: (d / INDEX).write_text("[" * 100_000), "found no map from tensors to files (RecursionError)"),
    (lambda d: (d / INDEX).write_text("[]"), "found no map from tensors to files (TypeError)"),
    (lambda d: (d / INDEX).write_text('{"weight_map": {}}'), "a map from tensors to files, got none"),
    (lambda d: layout(d, PARTS, where={"a": min(PARTS), "b": min(PARTS)}), "expected b as"),
    (lambda d: os.remove(d / min(PARTS)), f"{min(PARTS)}: No such file"),
    (lambda d: (d / min(PARTS)).write_bytes(b"x" * 4), f"{min(PARTS)}: "),
    (lambda d: (d / min(PARTS)).write_bytes((d / min(PARTS)).read_bytes()[:-1]), f"{min(PARTS)}: "),
    (lambda d: layout(d, {max(PARTS): FULL}, index=None), "in one file, got it in another too"),
    (lambda d: (os.remove(d / min(PARTS)), os.mkfifo(d / min(PARTS))), "expected a regular file, got something else"),
    (lambda d: (d / INDEX).rename(d / "notes.txt"), "or one file of weights, got model-00001"),
]


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_damage_is_named_on_every_rank(tmp_path, number):
    damage, message = DAMAGES[number]
    layout(tmp_path, PARTS)
    damage(tmp_path)
    found = refusal(lambda mesh: read(tmp_path))
    assert found.startswith("checkpoint.load_huggingface: ")
    assert message in found


@pytest.mark.parametrize("indexed", [False, True])
def test_pickled_weights_are_read_when_trusted(tmp_path, indexed):
    parts = PARTS if indexed else {"pytorch_model": FULL}
    files = {file.replace(".safetensors", "") + ".bin": content for file, content in parts.items()}
    for file, content in files.items():
        torch.save(content, tmp_path / file)
    if indexed:
        where = {name: file for file, content in files.items() for name in content}
        layout(tmp_path, {}, where, index="pytorch_model.bin.index.json")
    assert "is pickled, and reading it can run code of its author; pass trusted=True" in refusal(
        lambda mesh: read(tmp_path)
    )
    spmd(lambda: assert_same_bits(fs.unshard(read(tmp_path, trusted=True)), FULL), 2)


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".exporting-0123456789abcdef").mkdir()
    calls = []

    def full_disk(descriptor):
        calls.append(descriptor)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface.os, "fsync", full_disk)

    def save(mesh):
        params = fs.shard(FULL | {"c": torch.ones(3)}, every_leaf(mesh))
        save_huggingface(tmp_path, params, max_file_bytes=1)

    assert "No space left on device" in refusal(save, 3)
    assert len(calls) == 1
    assert os.listdir(tmp_path) == ["config.json"]
