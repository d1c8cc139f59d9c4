"""In inference mode models evaluate, in-place writes are found, and differentiation is refused, as in torch."""

import itertools
import re

import pytest
import torch
from torch import nn

import fshard as fs
from tests.ranks import on_ranks
from tests.trees import STRATEGIES, assert_same_bits, meshes, normal
from tests.unit_models import filled, zero3

MODES = (torch.inference_mode, torch.no_grad, torch.enable_grad)
LAYOUTS = {"zero3": lambda on: zero3()(on.line), **{name: STRATEGIES[name] for name in ("ddp", "hsdp")}}
WIDTH = 4


class Rescaled(nn.Module):
    """Divides its weights in place when it is evaluated, once, as RWKV of transformers does."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.layers_are_rescaled = False

    def forward(self, x, rescale=True):
        if rescale and self.layers_are_rescaled == self.training:
            with torch.no_grad():
                for number, block in enumerate(self.blocks):
                    block.weight.div_(2 ** (number + 1))
            self.layers_are_rescaled = not self.training
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x / 2 if self.layers_are_rescaled else x


@on_ranks(2)
def test_writes_to_gathered_weights_and_buffers_are_refused_in_every_mode():
    """By name, on every rank; calls after that, and parameters made there, are as ever."""
    module, x = filled(Rescaled()).eval(), normal()(3, WIDTH)
    expected = module(x, rescale=False).detach()
    on, model = meshes(), fs.functionalize(module, nn.Linear)
    norm = fs.functionalize(nn.BatchNorm1d(WIDTH).double())
    runs = (
        lambda params: model.apply(params, x),
        lambda params: fs.jit(model.apply)(params, x),
        lambda params: model.apply(fs.gather(params), x),
    )
    for layout, mode in itertools.product(LAYOUTS.values(), MODES):
        for run in runs:
            # What was written may have reached the parameters.
            params = model.init(layout(on))
            with mode(), pytest.raises(ValueError, match=r"\['blocks.0.weight'\]: .*1 in-place writes"):
                run(params)
        with mode():
            params = model.init(layout(on))
            found = [model.apply(params, x, rescale=False)]
            with pytest.raises(ValueError, match=r"(?s)updated and would be lost.*\['num_batches_tracked'\]"):
                norm.apply(norm.init(layout(on)), x)
        found.append(model.apply(params, x, rescale=False))
        assert_same_bits([out.detach() for out in found], [expected] * 2)


def loss(params, x):
    return (x @ fs.gather(params)["w"]).square().sum()


REFUSED = (
    "expected a call outside of torch.inference_mode(), got one inside it; "
    "call it outside, and evaluate with model.apply inside"
)


@on_ranks(2)
def test_differentiation_is_refused():
    """Before anything is computed, and what was passed can be differentiated outside."""
    on, x = meshes(), normal(1)(3, WIDTH)
    params = fs.shard({"w": normal()(WIDTH, WIDTH)}, LAYOUTS["zero3"](on))
    runs = {
        "value_and_grad": lambda p: fs.value_and_grad(loss)(p, x),
        "accumulate": lambda p: fs.accumulate(loss)(p, [x, x]),
    }
    for name, run in runs.items():
        expected = run(params)
        refused = pytest.raises(ValueError, match=f"^{re.escape(f'{name}: {REFUSED}')}$")
        with fs.comm.record() as record, torch.inference_mode(), refused:
            run(params)
        assert all(entry.about.is_comparison for entry in record)
        with torch.inference_mode():
            doubled = fs.tree_map(lambda leaf: 2 * leaf, params)
        # Autograd says so of tensors made there.
        with pytest.raises(RuntimeError, match="requires_grad=True on inference tensor"):
            run(doubled)
        with torch.no_grad():
            assert_same_bits(run(fs.tree_map(torch.clone, doubled))[0], 4 * expected[0])
