"""Models whose own method draws all of their values, as those of torchtitan: refused, and drawn as the error says."""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import spmd
from tests.bad_input import text_of
from tests.trees import assert_same_bits


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8, bias=False)

    def init_weights(self, std):
        self.norm.reset_parameters()
        nn.init.trunc_normal_(self.up.weight, std=std)


class Titan(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(16, 4)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(2)})
        self.register_buffer("frequencies", torch.ones(3), persistent=False)

    def init_weights(self, buffer_device=None):
        self.frequencies = torch.arange(3.0, device=buffer_device)
        nn.init.normal_(self.tokens.weight)
        for number, layer in enumerate(self.layers.values()):
            layer.init_weights(0.02 / (number + 1))


def build_on_meta():
    with torch.device("meta"):
        return Titan()


def test_the_error_says_how_to_draw_the_model():
    model = fs.functionalize(build_on_meta())
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    assert text_of(lambda: model.init(fs.zero3(mesh), seed=0)) == (
        "model.init: values cannot be drawn from a seed\n"
        "  (root): expected a way to draw its values, got Titan, whose init_weights is not called\n"
        "To fix: pass reset=lambda module: module.init_weights() if isinstance(module, Titan) else None, which draws "
        "the whole model at once, or a reset that draws one submodule at a time."
    )


def draw_dense(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = Titan()
        torch.manual_seed(seed)
        module.init_weights()
    return module


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_remedy_draws_what_the_model_draws(world_size):
    # Torch's generator belongs to the process, so not inside the ranks, which are threads.
    dense = draw_dense(seed=3)
    weights = {name: weight.detach() for name, weight in dense.named_parameters()}

    def program():
        model = fs.functionalize(build_on_meta(), units=Block)
        strategy = fs.zero3(fs.init_mesh({"shard": -1}, device="cpu"), min_shard_elements=0)
        reset = lambda module: module.init_weights() if isinstance(module, Titan) else None  # noqa: E731
        params = model.init(strategy, seed=3, reset=reset)
        return fs.unshard(params), model.buffers

    for params, buffers in spmd(program, world_size):
        assert_same_bits(params, weights)
        assert_same_bits(buffers, dict(dense.named_buffers()))
