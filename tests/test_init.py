"""model.init(seed=...) draws what constructing the module draws, at every world size."""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import spmd
from tests.modules import Recurrent, assert_untouched, build, everything
from tests.trees import ONE_AXIS, assert_same_bits, meshes, one_axis


class Block(nn.Module):
    """A transformer's block whose modules are made in the order in which they are registered."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)
        self.mlp = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6))


class Scaled(nn.Module):
    """A parent that changes what its children have drawn."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.gain)
        with torch.no_grad():
            self.inner.weight.mul_(0.1)


SEEDED = {
    "linear": lambda: nn.Linear(30, 40),
    "sequential": lambda: nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 2, bias=False)),
    "blocks": lambda: nn.Sequential(nn.Embedding(7, 6), Block(), Block(), nn.LayerNorm(6)),
    "convolution": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU()),
    "recurrent": Recurrent,
    "attention": lambda: nn.MultiheadAttention(6, 2),
    "attention of other keys": lambda: nn.MultiheadAttention(6, 2, kdim=3, vdim=4, add_bias_kv=True),
    "encoder layer": lambda: nn.TransformerEncoderLayer(6, 2, 8),
    "transformer": lambda: nn.Transformer(6, 2, 1, 1, 8, batch_first=True),
    "scaled": Scaled,
}


def constructed(name, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return SEEDED[name]()


@pytest.mark.parametrize("device", ("cpu", "meta"))
@pytest.mark.parametrize("name", SEEDED)
def test_seed_draws_what_constructing_the_module_draws(name, device):
    with torch.device(device):
        module = SEEDED[name]()
    model = fs.functionalize(module)
    expected = {path: parameter.detach() for path, parameter in constructed(name, 3).named_parameters()}
    state = torch.get_rng_state()
    for strategy in (fs.ddp(one_axis()), fs.zero2(one_axis(), min_shard_elements=0)):
        params = model.init(strategy, seed=3)
        assert_same_bits(fs.unshard(params), expected)
    assert_same_bits(torch.get_rng_state(), state)
    assert all(parameter.device.type == device for parameter in module.parameters())


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", ("blocks", "encoder layer"))
def test_seed_draws_the_same_at_every_world_size(name):
    expected = {path: parameter.detach() for path, parameter in constructed(name, 3).named_parameters()}
    other = constructed(name, 4)
    state = torch.get_rng_state()

    def program():
        model = fs.functionalize(other)
        for make in ONE_AXIS.values():
            assert_same_bits(fs.unshard(model.init(make(meshes()), seed=3)), expected)

    for world_size in (1, 2, 3):
        spmd(program, world_size)
    assert_same_bits(torch.get_rng_state(), state)


def test_seed_leaves_module_and_buffers():
    module, _, _ = build("batch norm")
    before = everything(module)
    model = fs.functionalize(module)
    buffers = fs.tree_map(torch.clone, model.buffers)
    params = model.init(fs.ddp(one_axis()), seed=0)
    assert not fs.unshard(params)["0.weight"].equal(module[0].weight)
    assert_untouched(module, before)
    assert_same_bits(model.buffers, buffers)


class HalfDrawn(nn.Linear):
    """Adds a parameter that Linear's reset_parameters knows nothing of."""

    def __init__(self):
        super().__init__(2, 2)
        self.scale = nn.Parameter(torch.ones(2))


def test_what_a_seed_would_leave_undrawn_is_refused():
    with pytest.raises(ValueError, match="drawn from a seed") as caught:
        fs.functionalize(nn.Sequential(nn.Linear(2, 2), HalfDrawn())).init(fs.ddp(one_axis()), seed=0)
    assert str(caught.value) == (
        "model.init: values cannot be drawn from a seed\n"
        "  ['1.scale']: expected a value for each, got elements left out by reset_parameters\n"
        "To fix: draw them in reset_parameters, or leave out seed to take the values the module has."
    )
