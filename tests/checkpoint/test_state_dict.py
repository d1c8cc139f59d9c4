"""To and from plain state dicts: tied names, buffers, and what is refused."""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.checkpoint import CheckpointError, from_state_dict, load_torch, to_state_dict
from fshard.testing import RankError, spmd
from tests.ranks import my_rank, on_ranks
from tests.trees import TREES, assert_same_bits, every_strategy, exotic_dtypes, normal, one_axis

WORLD_SIZES = (1, 2, 3, 4)


class Net(nn.Module):
    """A tied weight, a frozen one, a buffer that is saved and one that is not; no size is a multiple of the ranks."""

    def __init__(self, seed=0):
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.hidden = nn.Linear(7, 13)
        self.frozen = nn.Linear(13, 7)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("cache", torch.ones(3), persistent=False)
        draw = normal(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(draw(*parameter.shape))
            self.norm.running_mean.copy_(draw(7))

    def forward(self, x):
        out = self.frozen(torch.tanh(self.hidden(self.embedding(x))))
        return self.head(self.norm(out)).square().mean()


def sharded(module, strategy):
    """Its parameters and buffers as one dict."""
    model = fs.functionalize(module)
    return model.init(strategy) | model.buffers


def every_leaf(mesh):
    return fs.zero2(mesh, min_shard_elements=0)


@pytest.mark.parametrize("tree", [*TREES.values(), exotic_dtypes], ids=lambda make: make.__name__)
@on_ranks(*WORLD_SIZES)
def test_trees_come_back(tree):
    for _, strategy in every_strategy():
        params = fs.shard(tree(), strategy)
        state_dict = to_state_dict(params)
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in state_dict.values())
        back = from_state_dict(state_dict, fs.tree_map(torch.zeros_like, params))
        assert_same_bits(fs.unshard(back), fs.unshard(params))


@on_ranks(*WORLD_SIZES)
def test_modules_load_what_was_gathered():
    module = Net()
    state_dict = to_state_dict(sharded(module, every_leaf(one_axis())), module=module)
    assert state_dict.keys() == module.state_dict().keys()
    assert state_dict["head.weight"] is state_dict["embedding.weight"]
    other = Net(1)
    other.load_state_dict(state_dict)
    assert_same_bits(dict(other.state_dict()), dict(module.state_dict()))


@pytest.mark.parametrize("alias", ["embedding.weight", "head.weight", None])
@on_ranks(3)
def test_modules_give_what_is_sharded(alias):
    """A tied parameter may be there under any of its names, or under all."""
    module = Net()
    given = {name: value for name, value in module.state_dict().items() if alias is None or "weight" not in name}
    if alias:
        given |= {name: value for name, value in module.state_dict().items() if "cache" not in name}
        del given["head.weight" if alias == "embedding.weight" else "embedding.weight"]
    like = sharded(Net(1), every_leaf(one_axis()))
    del like["cache"]
    back = from_state_dict(given, like, module=module)
    expected = dict(module.named_parameters()) | dict(module.named_buffers())
    assert_same_bits(fs.unshard(back), {name: expected[name].detach() for name in like})


OTHERS = {
    "value": (lambda tensor: tensor + 1, "expected embedding.weight to have the same values under all its names, got"),
    "dtype": (lambda tensor: tensor.double(), "embedding.weight: expected float32[11, 7], got float64[11, 7]"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_tie_that_is_none_there(other):
    (change, text), module = OTHERS[other], Net()
    given = dict(module.state_dict())
    given["head.weight"] = change(given["head.weight"])

    def load(mesh):
        like = sharded(Net(1), every_leaf(mesh))
        del like["cache"]
        from_state_dict(given, like, module=module)

    assert text in refusal(load, 3)


@on_ranks(3)
def test_the_first_rank_alone():
    found = to_state_dict(fs.shard({"w": torch.ones(5)}, every_leaf(one_axis())), rank0_only=True)
    assert_same_bits(found, {} if my_rank() else {"w": torch.ones(5)})


def test_what_was_gathered_stays_when_a_step_is_donated():
    params = fs.shard({"w": torch.ones(5)}, fs.ddp(one_axis()))
    state_dict = to_state_dict(params)
    fs.tree_leaves(params)[0].zero_()
    assert state_dict["w"].equal(torch.ones(5))


def refusal(load, world_size=2):
    """What every rank says, and the same."""

    def program():
        with pytest.raises(ValueError, match="checkpoint") as caught:
            load(one_axis())
        return type(caught.value), str(caught.value)

    first, *others = spmd(program, world_size)
    assert all(other == first for other in others)
    return first[1]


def test_leaves_that_do_not_fit_are_all_named():
    given = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4).double(), "extra": torch.ones(1)}

    def load(mesh):
        like = {"a": torch.zeros(4), "b": torch.zeros(5), "c": torch.zeros(4), "missing": torch.zeros(2)}
        from_state_dict(given, fs.shard(like, every_leaf(mesh)))

    assert refusal(load) == (
        "checkpoint.from_state_dict: leaves do not fit\n"
        "  b: expected float32[5], got float32[4]\n"
        "  c: expected float32[4], got float64[4]\n"
        "  missing: expected float32[2], got nothing\n"
        "  extra: expected nothing, got float32[1]\n"
        "To fix: pass a tree of the same names; module= knows which are tied or not saved, cast=True changes "
        "dtypes."
    )


def test_dtypes_change_when_asked_and_only_floating_ones():
    def load(mesh):
        like = fs.shard({"w": torch.zeros(5, dtype=torch.bfloat16)}, every_leaf(mesh))
        full = normal()(5)
        back = from_state_dict({"w": full}, like, cast=True)
        assert_same_bits(fs.unshard(back), {"w": full.bfloat16()})
        from_state_dict({"w": torch.arange(5)}, like, cast=True)

    assert "w: expected bfloat16[5], got int64[5]" in refusal(load)


def test_ranks_that_hold_different_values_are_refused():
    def load(mesh):
        own = torch.full((3,), float(mesh.get_local_rank()))
        from_state_dict({"w": own}, fs.shard({"w": torch.zeros(3)}, every_leaf(mesh)))

    assert "ranks hold different leaves" in refusal(load)


def test_no_plain_state_dict():
    assert "step: expected a full tensor, got an int" in refusal(
        lambda mesh: from_state_dict({"w": torch.ones(1), "step": 3}, {"w": torch.ones(1)})
    )


def test_leaves_that_the_module_has_not():
    module = Net()
    message = refusal(lambda mesh: to_state_dict({"head.weight": torch.ones(1), "w": torch.ones(1)}, module=module))
    assert "head.weight: expected embedding.weight, got a leaf" in message
    assert "w: expected a parameter or a buffer of the module, got a leaf" in message


@pytest.mark.parametrize("legacy", [False, True])
def test_pickled_files_are_read_when_trusted(tmp_path, legacy):
    module, path = Net(), tmp_path / "model.pt"
    torch.save(module.state_dict(), path, _use_new_zipfile_serialization=not legacy)

    def program():
        like = sharded(Net(1), every_leaf(one_axis()))
        del like["cache"]
        back = fs.unshard(load_torch(path, like, module=module, trusted=True))
        assert_same_bits(back, {name: module.state_dict()[name].detach() for name in like})

    spmd(program, 2)
    message = refusal(lambda mesh: load_torch(path, {}))
    assert "is pickled, and reading it can run code of its author; pass trusted=True" in message


class Bomb:
    def __reduce__(self):
        return print, ("boom",)


@pytest.mark.parametrize(
    "content, message",
    [
        ({"model": {"w": 1}}, "expected tensors by name, got a dict; torch.load it yourself"),
        ([1], "expected tensors by name, got a list"),
        ({"w": Bomb()}, "found no state dict of torch.save"),
        (b"nonsense", "found no state dict of torch.save"),
        (None, "No such file"),
    ],
)
def test_pickled_files_that_hold_something_else(tmp_path, capsys, content, message):
    path = tmp_path / "model.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=message):
        load_torch(path, {"w": torch.ones(1)}, trusted=True)
    assert capsys.readouterr().out == ""


def test_a_rank_that_raises_alone_is_seen_by_all(tmp_path):
    """A file that one rank cannot read."""
    torch.save({"w": torch.ones(3)}, tmp_path / "rank0.pt")

    def load(mesh):
        load_torch(tmp_path / f"rank{mesh.get_local_rank()}.pt", {"w": torch.ones(3)}, trusted=True)

    assert "rank1.pt: No such file" in refusal(load)


def test_leaves_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"a.b: expected one of each name, got 2 leaves"):
        to_state_dict({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})


def test_no_rank_waits_for_one_whose_tree_is_wrong():
    def program():
        to_state_dict({"w": torch.ones(1) if fs.comm.rank(fs.axis_of(one_axis())) else 1})

    with pytest.raises(RankError, match="w: expected a tensor, got an int"):
        spmd(program, 2)


class Cached(nn.Module):
    """A module with a buffer that no state dict has."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("cache", torch.full((3,), 7.0), persistent=False)


@on_ranks(2)
def test_buffers_that_are_not_persistent_make_the_round_trip():
    module = Cached()
    model = fs.functionalize(module)
    full = {**model.init(fs.zero2(one_axis()), seed=0), **model.buffers}
    saved = to_state_dict(full, module=module)
    assert "cache" not in saved
    back = from_state_dict(saved, full, module=module)
    assert_same_bits(fs.unshard(back), fs.unshard(full))
    assert back["cache"].data_ptr() != full["cache"].data_ptr()


@on_ranks(2)
def test_a_default_device_without_values_changes_nothing():
    like = fs.shard({"w": torch.ones(1)}, every_leaf(one_axis()))
    with torch.device("meta"):
        back = from_state_dict({"w": torch.full((1,), 2.0, device="cpu")}, like)
    assert fs.unshard(back)["w"].item() == 2
