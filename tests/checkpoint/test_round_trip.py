"""Law: restore(save(x)) is x bitwise, from any layout and world size to any other."""

import json
from collections import Counter, OrderedDict

import pytest
import torch

import fshard as fs
from fshard import checkpoint
from fshard.checkpoint.files import decode
from fshard.testing import assert_trees_close, spmd
from tests.checkpoint.states import (
    ALL_TREES,
    CHOOSY,
    LAYOUTS,
    assert_same,
    named_oddly,
    python_values,
    sampler,
    save,
    tree_for,
    zeros_like,
)
from tests.ranks import my_rank, on_ranks
from tests.transforms.feedback import feedback
from tests.trees import WORLD_SIZES, assert_same_bits, meshes, normal, one_axis


@pytest.mark.rows(2)
@on_ranks(*WORLD_SIZES)
def test_restore_undoes_save(world_size, tmp_path):
    trees = list(ALL_TREES)[WORLD_SIZES.index(world_size) :: len(WORLD_SIZES)]
    for layout in LAYOUTS:
        for tree in ["divisible"] if layout in CHOOSY else trees:
            params = fs.shard(tree_for(layout, tree), LAYOUTS[layout](meshes()))
            checkpoint.save(tmp_path / layout / tree, params, 1)
            assert_same(checkpoint.restore(tmp_path / layout / tree, zeros_like(params)), params)


def pairs():
    """Random pairs of (layout, world size), each layout on either side."""
    draw = sampler(1)
    return [[(name, draw.choice(WORLD_SIZES)) for name in draw.sample(list(LAYOUTS), len(LAYOUTS))] for _ in range(12)]


@pytest.mark.rows(4)
@pytest.mark.parametrize(("start", "end"), [pair for a, b in zip(*[iter(pairs())] * 2) for pair in zip(a, b)])
def test_restore_into_many_other_layouts(start, end, tmp_path):
    (layout, ranks), (other, other_ranks) = start, end
    chosen = next((name for name in (layout, other) if name in CHOOSY), layout)
    trees = {tree: tree_for(chosen, tree) for tree in ALL_TREES}
    save(tmp_path, lambda on: {tree: fs.shard(trees[tree], LAYOUTS[layout](on)) for tree in trees}, ranks)

    def program():
        params = {tree: fs.shard(trees[tree], LAYOUTS[other](meshes())) for tree in trees}
        restored = checkpoint.restore(tmp_path, zeros_like(params))
        # Padding included.
        assert_same(restored, params)
        assert_same_bits(fs.unshard(restored), fs.tree_map(torch.Tensor.detach, trees))

    spmd(program, other_ranks)


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


TX = {"adamw": lambda: fs.adamw(0.1), "Adam of torch": lambda: fs.from_torch(torch.optim.Adam, lr=0.1)}


def state_of(tx, layout):
    draw = normal(30)
    full = {"w": draw(6, 4), "even": draw(8, 4), "v": draw(7), "scalar": draw()}
    params = fs.shard(full, LAYOUTS[layout](meshes()))
    return fs.TrainState.create(params, tx, buffers={"mean": draw(3)}, key=torch.arange(2))


def steps(tx, state, number):
    """Steps on a loss without data: every rank has its shards' gradients already, zero in padding."""
    for _ in range(number):
        state = fs.update(tx, state, fs.tree_map(torch.sin, state.params))
    return state


@pytest.mark.rows(1)
@pytest.mark.parametrize("tx", TX)
def test_training_goes_on_at_another_world_size(tx, tmp_path):
    def begin():
        optimizer = TX[tx]()
        state = steps(optimizer, state_of(optimizer, "zero3"), 3)
        checkpoint.save(tmp_path, state)
        return fs.unshard(state), fs.unshard(steps(optimizer, state, 3))

    state, ended = spmd(begin, 2)[0]

    def go_on(layout):
        optimizer = TX[tx]()
        restored = checkpoint.restore(tmp_path, zeros_like(state_of(optimizer, layout)))
        assert_same_bits(fs.unshard(restored), state)
        return fs.unshard(steps(optimizer, restored, 3))

    for ranks, layout in ((1, "ddp"), (3, "zero3"), (4, "two dims")):
        end = spmd(lambda: go_on(layout), ranks)[0]  # noqa: B023
        assert_trees_close(end.params, ended.params, exact=True)


@on_ranks(3)
def test_state_of_transforms_that_ranks_have_of_their_own(tmp_path):
    params = fs.shard({"w": normal()(6, 40)}, feedback(one_axis()))
    state = fs.tree_map(lambda row: row + my_rank() + 1, fs.transform_state(params))
    checkpoint.save(tmp_path, state, 1)
    assert_same(checkpoint.restore(tmp_path, fs.tree_map(lambda leaf: leaf.to("meta"), state)), state)


@on_ranks(2)
def test_parts_by_subtree_and_by_name(tmp_path):
    optimizer = TX["adamw"]()
    state = steps(optimizer, state_of(optimizer, "zero3"), 2)
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
    from safetensors.torch import load_file

    tree = {"b": torch.arange(3.0), "a": [torch.tensor(1 + 2j), 5]}
    path = checkpoint.save(tmp_path, tree, 1).wait()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".lock", "step-00000001.0"]
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json", "rank-00000.safetensors"]
    read = load_file(path / "rank-00000.safetensors")
    assert read["['b']"].equal(tree["b"])
    assert read["['a'][0]"].tolist() == [1, 2]
    body = json.loads((path / "manifest.json").read_text())["body"]
    assert list(body["tensors"]) == sorted(body["tensors"])


def test_half_of_a_surrogate_pair_in_a_key_or_a_text(tmp_path):
    """FORMAT.md says how it is written; UTF-8 could not hold it."""
    from safetensors.torch import load_file

    half = chr(0xD800)
    tree = {half: torch.arange(3.0), "text": half}
    path = checkpoint.save(tmp_path, tree, 1).wait()
    assert list(load_file(path / "rank-00000.safetensors")) == ["['\\ud800']"]
    manifest = (path / "manifest.json").read_bytes()
    assert manifest.isascii()
    assert manifest.endswith(b'"values": {"[\'text\']": "\\ud800"}}}\n')
    restored = checkpoint.restore(tmp_path, {half: torch.zeros(3), "text": ""})
    assert restored["text"] == half
    assert restored[half].equal(tree[half])


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
