"""Law: restore(save(x)) is x bitwise, from any layout and world size to any other."""

import json
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

import fshard as fs
from fshard import checkpoint
from fshard.checkpoint.files import CheckpointReader, decode
from fshard.testing import spmd
from tests.checkpoint.states import (
    ALL_TREES,
    CHOOSY,
    LAYOUTS,
    assert_same,
    divisible,
    named_oddly,
    python_values,
    sampler,
    save,
    zeros_like,
)
from tests.ranks import my_rank, on_ranks
from tests.trees import assert_same_bits, meshes, normal, one_axis


@pytest.mark.parametrize(
    "ranks, other_ranks",
    [(2, 3), *(pytest.param(*row, marks=pytest.mark.slow) for row in ((2, 2), (3, 1), (1, 4), (4, 8), (8, 2)))],
)
def test_restore_undoes_save_into_any_layout(ranks, other_ranks, tmp_path):
    """Of every tree, from each layout into another one, and each into itself."""
    draw = sampler(ranks)
    others = draw.sample(list(LAYOUTS), len(LAYOUTS)) if ranks != other_ranks else LAYOUTS
    for layout, other in zip(LAYOUTS, others, strict=True):
        is_choosy = layout in CHOOSY or other in CHOOSY
        trees = divisible() if is_choosy else {name: make() for name, make in ALL_TREES.items()}
        save(tmp_path / layout, lambda on: fs.shard(trees, LAYOUTS[layout](on)), ranks)  # noqa: B023
        spmd(lambda: assert_restored(tmp_path / layout, trees, LAYOUTS[other]), other_ranks)  # noqa: B023


def assert_restored(directory, trees, layout):
    params = fs.shard(trees, layout(meshes()))
    restored = checkpoint.restore(directory, zeros_like(params))
    # Padding included.
    assert_same(restored, params)
    assert_same_bits(fs.unshard(restored), fs.tree_map(torch.Tensor.detach, trees))


@on_ranks(1, 3)
def test_leaves_that_are_not_sharded(tmp_path):
    # One of many bytes.
    large = {"w": torch.arange(1 << 20, dtype=torch.int32)}
    base = normal()(6, 8)
    views = {
        "step": base[::2, 1::3],
        "one": base[2:3, ::8],
        "same": base[0, 0].expand(5, 3),
        "conjugate": torch.complex(base, -base).conj(),
        "negative": torch.complex(base, -base).conj().imag,
        "parameter": torch.nn.Parameter(base[1]),
    }
    for number, tree in enumerate((python_values(), named_oddly(), large, views)):
        checkpoint.save(tmp_path, tree, number)
        assert_same(checkpoint.restore(tmp_path, zeros_like(tree)), tree)


def test_the_latest_and_each_step(tmp_path):
    states = {step: {"w": torch.full((3,), float(step))} for step in (10**17, 0, 7)}
    assert checkpoint.latest_step(tmp_path) is checkpoint.latest_step(tmp_path / "none") is None
    for number, (step, state) in enumerate(states.items()):
        assert checkpoint.save(tmp_path, state, step).wait().name == f"step-{step:08d}.{number}"
        assert checkpoint.latest_step(tmp_path) == step
        assert_same_bits(checkpoint.restore(tmp_path, state), state)
    for step, state in states.items():
        assert_same_bits(checkpoint.restore(tmp_path, state, step=step), state)


def state_of(layout, tx):
    draw = normal(30)
    full = {"w": draw(6, 4), "even": draw(8, 4), "v": draw(7), "scalar": draw()}
    params = fs.shard(full, LAYOUTS[layout](meshes()))
    return fs.TrainState.create(params, tx, buffers={"mean": draw(3)}, key=torch.arange(2))


def train(tx, state, steps=3):
    """Steps on a loss without data: every rank has its shards' gradients already, zero in padding."""
    for _ in range(steps):
        state = fs.update(tx, state, fs.tree_map(torch.sin, state.params))
    return state


TX = {"adamw": lambda: fs.adamw(0.1), "Adam of torch": lambda: fs.from_torch(torch.optim.Adam, lr=0.1)}


@pytest.mark.rows(1)
@pytest.mark.parametrize("make_tx", TX.values(), ids=TX)
def test_training_goes_on_at_another_world_size(make_tx, tmp_path):
    def begin():
        tx = make_tx()
        state = train(tx, state_of("zero3", tx))
        checkpoint.save(tmp_path, state)
        return fs.unshard(state), fs.unshard(train(tx, state))

    saved, expected = spmd(begin, 2)[0]

    def go_on(layout):
        tx = make_tx()
        restored = checkpoint.restore(tmp_path, zeros_like(state_of(layout, tx)))
        assert_same_bits(fs.unshard(restored), saved)
        assert_same_bits(fs.unshard(train(tx, restored).params), expected.params)

    for ranks, layout in ((1, "ddp"), (3, "zero3"), (4, "two dims")):
        spmd(lambda: go_on(layout), ranks)  # noqa: B023


@on_ranks(2)
def test_parts_by_subtree_and_by_name(tmp_path):
    tx = fs.adamw(0.1)
    state = train(tx, state_of("zero3", tx))
    checkpoint.save(tmp_path, state)
    params = zeros_like(state.params)
    # A second time, so that padding is zero.
    state = checkpoint.restore(tmp_path, state)
    assert_same(checkpoint.restore(tmp_path, params, subtree=".params"), state.params)
    assert_same(checkpoint.restore(tmp_path, params["w"], subtree=".params['w']"), state.params["w"])
    assert_same(checkpoint.restore(tmp_path, torch.zeros_like(state.step), subtree=".step"), state.step)
    some = checkpoint.restore(tmp_path, params, subtree=".params", only=("w", "sc*"))
    assert_same(some, {**params, "w": state.params["w"], "scalar": state.params["scalar"]})
    assert some["v"] is params["v"]
    by_function = checkpoint.restore(tmp_path, zeros_like(state), only=lambda name, leaf: name.startswith("params."))
    assert_same(by_function.params, state.params)
    assert by_function.step == 0


class Averaged(NamedTuple):
    """Trees of which the path of one begins like that of the other."""

    params: Any
    params_before: Any


def test_a_subtree_has_no_leaf_of_another_whose_path_begins_alike(tmp_path):
    state = Averaged({"w": torch.ones(2)}, {"w": torch.zeros(2)})
    checkpoint.save(tmp_path, state, 1)
    assert_same(checkpoint.restore(tmp_path, zeros_like(state.params), subtree=".params"), state.params)


def test_a_rank_reads_the_chunks_that_have_elements_for_it(tmp_path, monkeypatch):
    reads = []
    inner = CheckpointReader.read_chunk

    def read_chunk(reader, path, chunk, memory):
        reads.append((my_rank(), chunk.file))
        inner(reader, path, chunk, memory)

    def program():
        params = fs.shard({"w": torch.arange(6.0)}, fs.zero3(one_axis(), min_shard_elements=0))
        checkpoint.save(tmp_path, params, 1)
        checkpoint.restore(tmp_path, params)

    monkeypatch.setattr(CheckpointReader, "read_chunk", read_chunk)
    spmd(program, 3)
    assert sorted(reads) == [(0, 0), (1, 1), (2, 2)]


@on_ranks(3)
def test_each_element_is_written_once_and_by_turns(world_size, tmp_path):
    draw = normal(40)
    full = {f"w{i:02}": draw(24, 24) for i in range(2 * world_size)} | {"w": draw(24, 8), "cube": draw(8, 8, 8)}
    for layout in LAYOUTS:
        # Plain tensors are as replicated as can be.
        state = fs.shard(full, LAYOUTS[layout](meshes())) | {"plain": full["w00"], "as plain": full["w01"]}
        path = checkpoint.save(tmp_path / layout, state, 1).wait()
        manifest = decode((path / "manifest.json").read_bytes())
        files = [(path / f"rank-{rank:05d}.safetensors").read_bytes() for rank in range(world_size)]
        data = [len(file) - 8 - int.from_bytes(file[:8], "little") for file in files]
        assert sum(data) == sum(tensor.nbytes for tensor in full.values()) + 2 * full["w00"].nbytes
        # No rank writes more than a leaf of each kind beyond its share.
        kinds = Counter(len(leaf.chunks) for leaf in manifest.tensors.values())
        assert max(data) - min(data) <= 2 * len(kinds) * full["w00"].nbytes


def test_a_file_is_plain_safetensors_and_paths_are_sorted(tmp_path):
    """And half of a surrogate pair in a key or a text is written as FORMAT.md says; UTF-8 could not hold it."""
    from safetensors.torch import load_file

    half = chr(0xD800)
    tree = {"b": torch.arange(3.0), "a": [torch.tensor(1 + 2j), 5], half: torch.arange(2.0), "text": half}
    path = checkpoint.save(tmp_path, tree, 1).wait()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".lock", "step-00000001.0"]
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json", "rank-00000.safetensors"]
    file = load_file(path / "rank-00000.safetensors")
    assert {name: tensor.tolist() for name, tensor in file.items()} == {
        "['a'][0]": [1, 2],
        "['b']": [0, 1, 2],
        "['\\ud800']": [0, 1],
    }
    manifest = (path / "manifest.json").read_bytes()
    assert manifest.isascii()
    assert manifest.endswith(b'"values": {"[\'a\'][1]": 5, "[\'text\']": "\\ud800"}}}\n')
    tensors = json.loads(manifest)["body"]["tensors"]
    assert list(tensors) == sorted(tensors)
    assert_same(checkpoint.restore(tmp_path, zeros_like(tree) | {"text": ""}), tree)


@on_ranks(4)
def test_padding_and_the_order_of_entries_are_no_part_of_a_state(tmp_path):
    params = fs.shard({"w": normal()(5, 3)}, fs.zero2(one_axis(), min_shard_elements=0))
    dirty = fs.tree_map(torch.clone, params)
    dirty["w"].local[min(2, max(0, 5 - 2 * my_rank())) :] = torch.nan
    checkpoint.save(tmp_path, dirty, 1)
    assert_same(checkpoint.restore(tmp_path, dirty), params)
    names = "abc" if my_rank() else "cba"
    state = OrderedDict((name, torch.full((4,), float(ord(name)))) for name in names)
    checkpoint.save(tmp_path, state, 2)
    assert_same(checkpoint.restore(tmp_path, zeros_like(state)), state)


def test_a_donated_step_writes_to_the_memory_of_a_state_that_was_saved_or_restored(tmp_path):
    """Else it would take memory for one more state, once after each save and each start."""
    tx = fs.from_torch(torch.optim.SGD, lr=0.1)
    params = fs.shard({"w": torch.ones(8), "b": torch.ones(())}, fs.zero3(one_axis()))
    saved = fs.TrainState.create(params, tx)
    checkpoint.save(tmp_path, saved, step=1)
    for state in (saved, checkpoint.restore(tmp_path, like=saved)):
        before = [tensor.data_ptr() for tensor in fs.tree_leaves(state.params)]
        state = fs.update(tx, state, fs.tree_map(torch.ones_like, state.params), donate=True)
        assert [tensor.data_ptr() for tensor in fs.tree_leaves(state.params)] == before
