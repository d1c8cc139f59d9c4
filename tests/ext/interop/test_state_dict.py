"""To and from plain state dicts: tied names, buffers, and what is refused."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fshard as fs
from fshard.checkpoint import from_state_dict, to_state_dict
from fshard.testing import spmd
from tests.ranks import my_rank, on_ranks
from tests.trees import (
    assert_same_bits,
    empty,
    every_strategy,
    exotic_dtypes,
    nested,
    normal,
    one_axis,
    scalars,
    uneven,
)


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


@on_ranks(2, pytest.param(3, marks=pytest.mark.slow))
def test_trees_come_back():
    for tree in (uneven, empty, scalars, nested, exotic_dtypes):
        for _, strategy in every_strategy():
            params = fs.shard(tree(), strategy)
            state_dict = to_state_dict(params)
            assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in state_dict.values())
            back = from_state_dict(state_dict, fs.tree_map(torch.zeros_like, params))
            assert_same_bits(fs.unshard(back), fs.unshard(params))


@on_ranks(2)
def test_modules_load_what_was_gathered():
    module = Net()
    full = sharded(module, every_leaf(one_axis()))
    state_dict = to_state_dict(full, module=module)
    assert state_dict.keys() == module.state_dict().keys()
    assert state_dict["head.weight"] is state_dict["embedding.weight"]
    back = from_state_dict(state_dict, full, module=module)
    assert_same_bits(fs.unshard(back), fs.unshard(full))
    # Of storage of its own, whatever a step writes to.
    assert back["cache"].data_ptr() != full["cache"].data_ptr()
    other = Net(1)
    other.load_state_dict(state_dict)
    assert_same_bits(dict(other.state_dict()), dict(module.state_dict()))


@on_ranks(2)
def test_checkpoint_wrappers_change_no_name():
    """Those inside, and one around the whole."""
    inside, around = Net(), checkpoint_wrapper(Net())
    inside.hidden, inside.norm = checkpoint_wrapper(inside.hidden), checkpoint_wrapper(inside.norm)
    plain = sharded(Net(), every_leaf(one_axis()))
    for module in (inside, around):
        full = sharded(module, every_leaf(one_axis()))
        assert full.keys() == plain.keys()
        state_dict = to_state_dict(full, module=module)
        assert_same_bits(state_dict, to_state_dict(plain, module=Net()))
        back = from_state_dict(
            state_dict, fs.tree_map(torch.zeros_like, full) | {"cache": full["cache"]}, module=module
        )
        assert_same_bits(fs.unshard(back), fs.unshard(full))


def blank(mesh):
    like = sharded(Net(1), every_leaf(mesh))
    del like["cache"]
    return like


@on_ranks(3)
def test_modules_give_what_is_sharded():
    """A tied parameter may be there under any of its names, or under all."""
    module = Net()
    expected = dict(module.named_parameters()) | dict(module.named_buffers())
    for left_out in ("embedding.weight", "head.weight", None):
        given = {name: value for name, value in module.state_dict().items() if name != left_out}
        back = from_state_dict(given, blank(one_axis()), module=module)
        assert_same_bits(fs.unshard(back), {name: expected[name].detach() for name in back})


@on_ranks(3)
def test_the_first_rank_alone():
    with torch.device("meta"):
        params = fs.shard({"w": torch.ones(5, device="cpu")}, every_leaf(one_axis()))
        found = to_state_dict(params, rank0_only=True)
    assert_same_bits(found, {} if my_rank() else {"w": torch.ones(5)})


def refusal(load, world_size=2):
    """What every rank says, and the same."""

    def program():
        with pytest.raises(ValueError, match="checkpoint") as caught:
            load(one_axis())
        return type(caught.value), str(caught.value)

    (said,) = set(spmd(program, world_size))
    return said[1]


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


class Adapted(Net):
    """Its state dict has the head alone, which shares the embedding's weight."""

    def state_dict(self, *args, **kwargs):
        return {name: tensor for name, tensor in super().state_dict(*args, **kwargs).items() if "head" in name}


REFUSED = {
    "frozen.weight: expected one that module.state_dict() has under a name of module.named_parameters() or": (
        lambda mesh: to_state_dict({"frozen.weight": torch.ones(7, 13)}, module=Adapted())
    ),
    "cache: expected float32[3], got nothing": (
        lambda mesh: from_state_dict({}, {"cache": torch.ones(3, device="meta")}, module=Net())
    ),
    "embedding.weight is a tied parameter, and its names have different values. Pass a module that": (
        lambda mesh: from_state_dict(
            Net(1).state_dict() | {"head.weight": torch.ones(11, 7)}, blank(mesh), module=Net()
        )
    ),
    "ranks hold different leaves": lambda mesh: from_state_dict({"w": torch.ones(3) * my_rank()}, {"w": torch.ones(3)}),
    "step: expected a full tensor, got an int": lambda mesh: from_state_dict({"step": 3}, {"step": torch.ones(1)}),
    "head.weight: expected embedding.weight, got a leaf\n  w: expected a parameter or a buffer of the module": (
        lambda mesh: to_state_dict({"head.weight": torch.ones(1), "w": torch.ones(1)}, module=Net())
    ),
    "a.b: expected one of each name, got 2 leaves": (
        lambda mesh: to_state_dict({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})
    ),
    "w: expected a tensor, got an int": lambda mesh: to_state_dict({"w": 1 if my_rank() else torch.ones(1)}),
}


def test_what_is_refused_on_every_rank():
    for text, call in REFUSED.items():
        assert text in refusal(call)
