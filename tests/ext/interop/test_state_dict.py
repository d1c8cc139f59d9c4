"""To and from plain state dicts: tied names, buffers, and what is refused."""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.checkpoint import from_state_dict, to_state_dict
from fshard.testing import spmd
from tests import trees
from tests.checkpoint.states import zeros_like
from tests.ranks import my_rank, on_ranks
from tests.trees import assert_same_bits, every_strategy, normal, one_axis


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


def blank(mesh):
    like = sharded(Net(1), every_leaf(mesh))
    del like["cache"]
    return like


def refusal(load, world_size=2):
    """What every rank says, and the same."""

    def program():
        with pytest.raises(ValueError, match="checkpoint") as caught:
            load(one_axis())
        return str(caught.value)

    (text,) = set(spmd(program, world_size))
    return text


@on_ranks(2, pytest.param(3, marks=pytest.mark.slow))
def test_trees_come_back():
    for tree in (trees.uneven, trees.empty, trees.scalars, trees.nested, trees.exotic_dtypes):
        for _, strategy in every_strategy():
            params = fs.shard(tree(), strategy)
            state_dict = to_state_dict(params)
            assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in state_dict.values())
            assert_same_bits(fs.unshard(from_state_dict(state_dict, zeros_like(params))), fs.unshard(params))


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


@on_ranks(3)
def test_modules_give_what_is_sharded():
    """A tied parameter may be there under any of its names, or under all."""
    module = Net()
    expected = dict(module.named_parameters()) | dict(module.named_buffers())
    for left_out in ("embedding.weight", "head.weight", None):
        state_dict = {name: value for name, value in module.state_dict().items() if name != left_out}
        back = from_state_dict(state_dict, blank(one_axis()), module=module)
        assert_same_bits(fs.unshard(back), {name: expected[name].detach() for name in back})


@on_ranks(3)
def test_the_first_rank_alone():
    with torch.device("meta"):
        params = fs.shard({"w": torch.ones(5, device="cpu")}, every_leaf(one_axis()))
        state_dict = to_state_dict(params, rank0_only=True)
    assert_same_bits(state_dict, {} if my_rank() else {"w": torch.ones(5)})


def test_leaves_that_do_not_fit_are_all_named():
    state_dict = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4).double(), "extra": torch.ones(1)}
    like = {"a": torch.zeros(4), "b": torch.zeros(5), "c": torch.zeros(4), "missing": torch.zeros(2)}
    assert refusal(lambda mesh: from_state_dict(state_dict, fs.shard(like, every_leaf(mesh)))) == (
        "checkpoint.from_state_dict: leaves do not fit\n"
        "  b: expected float32[5], got float32[4]\n"
        "  c: expected float32[4], got float64[4]\n"
        "  missing: expected float32[2], got nothing\n"
        "  extra: expected nothing, got float32[1]\n"
        "To fix: pass a tree of the same names; module= knows which are tied or not saved, cast=True of "
        "from_state_dict and load_huggingface changes dtypes, strict=False of the latter passes over what only one "
        "has."
    )


def test_dtypes_change_when_asked_and_only_floating_ones():
    def load(mesh):
        like = fs.shard({"w": torch.zeros(5, dtype=torch.bfloat16)}, every_leaf(mesh))
        full = normal()(5)
        back = from_state_dict({"w": full}, like, cast=True)
        assert_same_bits(fs.unshard(back), {"w": full.bfloat16()})
        from_state_dict({"w": torch.arange(5)}, like, cast=True)

    assert "w: expected bfloat16[5], got int64[5]" in refusal(load)


ONE = torch.ones(1)
TIES_THAT_DIFFER = Net(1).state_dict() | {"head.weight": torch.ones(11, 7)}
REFUSED = {
    "cache: expected float32[3], got nothing": (
        lambda mesh: from_state_dict({}, {"cache": torch.ones(3, device="meta")}, module=Net())
    ),
    "embedding.weight is a tied parameter, and its names have different values. Pass a module that": (
        lambda mesh: from_state_dict(TIES_THAT_DIFFER, blank(mesh), module=Net())
    ),
    "different values of one leaf\n  w: exp": lambda mesh: from_state_dict({"w": ONE * my_rank()}, {"w": ONE}),
    "ranks hold different leaves\n  w: exp": lambda mesh: from_state_dict({"w": ONE.expand(1 + my_rank())}, {"w": ONE}),
    "step: expected a full tensor under a text, got an int": lambda mesh: from_state_dict({"step": 3}, {"step": ONE}),
    "7: expected a full tensor under a text": lambda mesh: from_state_dict({7: ONE, "w": ONE}, {"w": ONE}),
    "w: expected a full tensor under": lambda mesh: from_state_dict({"w": ONE.to("meta")}, {"w": ONE}),
    "v: expected a full tensor under": lambda mesh: from_state_dict({"v": ONE.to_sparse()}, {"v": ONE}),
    "head.weight: expected embedding.weight, got a leaf\n  w: expected a parameter or a buffer of the module": (
        lambda mesh: to_state_dict({"head.weight": ONE, "w": ONE}, module=Net())
    ),
    "a.b: expected one of each name, got 2 leaves": lambda mesh: to_state_dict({"a": {"b": ONE}, "a.b": ONE}),
    "v: expected a strided tensor, got ": lambda mesh: to_state_dict({"v": ONE.to_sparse()}),
    "w: expected a strided tensor, got an int": lambda mesh: to_state_dict({"w": 1 if my_rank() else ONE}),
}


def test_what_is_refused_on_every_rank():
    for text, call in REFUSED.items():
        assert text in refusal(call)


def test_leaves_share_no_memory_with_the_state_dict():
    state_dict = {"w": torch.zeros(3)}
    from_state_dict(state_dict, {"w": torch.ones(3)})["w"].add_(1)
    assert not state_dict["w"].any()


@on_ranks(2)
def test_ranks_may_list_the_leaves_in_another_order():
    """As where each of them begins with another file."""
    state_dict = Net().state_dict()
    items = list(state_dict.items())
    other = dict(reversed(items) if my_rank() else items)
    got = fs.unshard(from_state_dict(other, blank(one_axis()), module=Net()))
    assert_same_bits(got, {name: state_dict[name] for name in got})
