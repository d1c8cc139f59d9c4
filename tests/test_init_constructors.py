"""A seed draws what reset_parameters draws, of parameters and buffers; what it would not draw is refused by name."""

import math
import re

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import spmd
from tests.trees import assert_same_bits, one_axis


class ResNet(nn.Module):
    """Goes over its submodules once they are made, as those of vision libraries do."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.constant_(module.weight, 0)


class LoraLayer:
    def update_layer(self, rank):
        self.lora_A = nn.ModuleDict({"default": nn.Linear(self.base_layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, self.base_layer.out_features, bias=False)})
        self.reset_lora_parameters("default")

    def reset_lora_parameters(self, name):
        nn.init.kaiming_uniform_(self.lora_A[name].weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B[name].weight)


class LoraLinear(nn.Module, LoraLayer):
    """Draws by a method of a class that is no module, as peft's layers do."""

    def __init__(self, base_layer, rank):
        super().__init__()
        self.base_layer = base_layer
        self.update_layer(rank)


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), LoraLinear(nn.Linear(3, 5), 2)


class ZeroLinear(nn.Linear):
    """Has reset_parameters of its base class alone, which knows nothing of the constructor here."""

    def __init__(self):
        super().__init__(3, 3)
        self.weight.data.zero_()


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            torch.nn.init.normal_(module.weight, std=0.02)


def halved(module):
    def halve(parameter):
        parameter.div_(2)

    with torch.no_grad():
        for parameter in module.parameters():
            halve(parameter)


class Halved(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 3))
        halved(self)


class Resets(GPT):
    """The same constructor, and a way to do again what it does."""

    def reset_parameters(self):
        self.apply(self._init_weights)


class Computes(nn.Sequential):
    """Writes in place in its forward, and in its constructor to nothing."""

    def __init__(self):
        super().__init__(nn.Linear(3, 3), nn.ReLU(inplace=True))
        self.requires_grad_(True)

    def forward(self, x):
        return super().forward(x).zero_()


class Transformer(nn.Module):
    """Draws its submodules' values as models of transformers do, those of its own package."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer()

    def initialize_weights(self):
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)


class Foreign(nn.Linear):
    """Of another package than the model around it."""

    __module__ = "peft.tuners"

    def __init__(self):
        super().__init__(3, 3)
        nn.init.zeros_(self.weight)


class Wrapper(nn.Module):
    """Hands on what it is asked for to the model inside it, as peft's does; of the layer's package."""

    __module__ = "peft.model"

    def __init__(self):
        super().__init__()
        self.model = Transformer(Foreign)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)


HERE = __name__
REFUSED = {
    "a loop over submodules": (ResNet, "(root)", f"{HERE}.ResNet", "kaiming_normal_ in ResNet.__init__"),
    "a method of another base": (Lora, "second", f"{HERE}.LoraLinear", "kaiming_uniform_ in LoraLayer.reset_lora_para"),
    "a base's reset_parameters": (ZeroLinear, "(root)", f"{HERE}.ZeroLinear", "zero_ in ZeroLinear.__init__"),
    "apply": (GPT, "(root)", f"{HERE}.GPT", "normal_ in GPT._init_weights"),
    "a function inside a function": (Halved, "(root)", f"{HERE}.Halved", "div_ in halved"),
    "in a wrapped model": (Wrapper, "model.layer", "peft.tuners.Foreign", "zeros_ in Foreign.__init__"),
    "in a model of transformers": (
        lambda: Transformer(Foreign),
        "layer",
        "peft.tuners.Foreign",
        "zeros_ in Foreign.__in",
    ),
}


@pytest.mark.parametrize("mode", ("replay", "counter"))
@pytest.mark.parametrize("device", ("meta", "cpu"))
@pytest.mark.parametrize("name", REFUSED)
def test_constructors_that_draw_are_refused(name, device, mode):
    build, path, cls, write = REFUSED[name]
    with torch.device(device):
        module = build()
    error = (
        "model.init: values cannot be drawn from a seed\n"
        f"  {path}: expected a reset_parameters that draws them again, got {cls}, whose constructor draws or sets "
        f"values by {write}"
    )
    remedy = "To fix: add reset_parameters to these modules, or leave out seed to take the values the module has."

    def program():
        model = fs.functionalize(module)
        with pytest.raises(ValueError, match=f"(?s){re.escape(error)}.*{re.escape(remedy)}"):
            model.init(fs.zero2(one_axis()), seed=0, mode=mode)
        if device == "cpu":
            assert_same_bits(fs.unshard(model.init(fs.zero2(one_axis()))), dict(module.named_parameters()))

    spmd(program, 2)


PASSED = {
    "reset_parameters of its own": Resets,
    "no write": Computes,
    "torch's": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "a model of transformers": lambda: Transformer(ZeroLinear),
}


@pytest.mark.parametrize("name", PASSED)
def test_others_draw_what_their_constructors_do(name):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = PASSED[name]()
        if name == "a model of transformers":
            module.initialize_weights()

    def program():
        model = fs.functionalize(module)
        found = fs.unshard(model.init(fs.zero2(one_axis()), seed=3))
        assert_same_bits(found, dict(module.named_parameters()))

    spmd(program, 2)


def test_a_module_may_be_given_reset_parameters():
    with torch.device("meta"):
        module = Lora()
    layer = module.second
    type(layer).reset_parameters = lambda self: self.reset_lora_parameters("default")
    try:
        params = fs.functionalize(module).init(fs.ddp(one_axis()), seed=0)
        assert not fs.unshard(params)["second.lora_B.default.weight"].any()
        assert fs.unshard(params)["second.lora_A.default.weight"].any()
    finally:
        del type(layer).reset_parameters


class Rotary(nn.Module):
    """A buffer that is never saved, one that is drawn at random, and one that the constructor alone makes."""

    def __init__(self, has_mask=False):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4))
        self.register_buffer("frequencies", self.computed(), persistent=False)
        self.register_buffer("features", torch.empty(4, 4))
        self.register_buffer("positions", torch.arange(4), persistent=False)
        if has_mask:
            self.register_buffer("mask", torch.ones(4, 4).tril(), persistent=False)
        self.reset_parameters()

    @staticmethod
    def computed():
        return 100.0 ** -torch.linspace(0, 1, 4)

    def reset_parameters(self):
        nn.init.ones_(self.scale)
        self.frequencies = self.computed()
        nn.init.normal_(self.features)
        self.positions.copy_(torch.arange(4))

    def forward(self, x):
        y = (self.scale * x * self.frequencies.cos()) @ self.features + self.positions
        return y * self.mask[0] if hasattr(self, "mask") else y


def make(device, **options):
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Rotary(**options))


MODES = ("replay", "counter")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", (1, 3))
def test_buffers_that_are_drawn_have_values(mode, world_size):
    module = make("meta")

    def program():
        model = fs.functionalize(module)
        before = model.buffers
        params = model.init(fs.zero2(one_axis(), min_shard_elements=0), seed=3, mode=mode)
        assert all(buffer.is_meta for buffer in before.values())
        first = model.buffers
        model.init(fs.zero2(one_axis()), seed=4, mode=mode)
        assert not model.buffers["2.features"].equal(first["2.features"])
        out, after = model.apply(params, torch.ones(5, 4), buffers=first)
        return fs.unshard(params), first, out, after

    for params, buffers, out, after in spmd(program, world_size):
        assert buffers.keys() == dict(module.named_buffers()).keys()
        assert_same_bits(buffers["2.frequencies"], Rotary.computed())
        assert buffers["2.positions"].tolist() == [0, 1, 2, 3]
        assert buffers["1.running_mean"].tolist() == [0] * 4
        assert buffers["1.running_var"].tolist() == [1] * 4
        assert int(buffers["1.num_batches_tracked"]) == 0
        assert int(after["1.num_batches_tracked"]) == 1
        expected = torch.func.functional_call(make("cpu"), {**params, **buffers}, torch.ones(5, 4))
        assert_same_bits(out, expected.detach())
    assert all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


def test_replay_draws_buffers_as_constructing_does():
    """In turn with parameters, from one generator."""
    model = fs.functionalize(make("meta"))
    params = model.init(fs.ddp(one_axis()), seed=3)
    module = make("cpu")
    assert_same_bits(fs.unshard(params), {name: p.detach() for name, p in module.named_parameters()})
    assert_same_bits(model.buffers, dict(module.named_buffers()))


@pytest.mark.parametrize("mode", MODES)
def test_buffers_that_nobody_draws_are_asked_for(mode):
    model = fs.functionalize(make("meta", has_mask=True))
    params = model.init(fs.ddp(one_axis()), seed=3, mode=mode)
    for buffers in ({}, {"buffers": model.buffers}):
        with pytest.raises(ValueError, match="have no values") as caught:
            model.apply(params, torch.ones(5, 4), **buffers)
        assert str(caught.value) == (
            "apply: buffers have no values\n"
            "  ['2.mask']: expected a tensor with values, got a tensor on the meta device\n"
            "To fix: pass buffers= with values for them, or write to them in the module's reset_parameters."
        )
    given = model.buffers | {"2.mask": torch.ones(4, 4).tril()}
    out, _ = model.apply(params, torch.ones(5, 4), buffers=given)
    assert out[:, 1:].count_nonzero() == 0


def test_a_model_without_values_is_run_on_the_meta_device():
    module = make("meta").eval()
    model = fs.functionalize(module)
    out = model.apply(dict(module.named_parameters()), torch.ones(5, 4, device="meta"))
    assert (out.is_meta, out.shape) == (True, (5, 4))


@pytest.mark.parametrize("mode", MODES)
def test_buffers_with_values_keep_them(mode):
    module = make("cpu")
    with torch.no_grad():
        for buffer in module.buffers():
            buffer.fill_(7)
    model = fs.functionalize(module)
    model.init(fs.ddp(one_axis()), seed=3, mode=mode)
    assert all(buffer.eq(7).all() for buffer in [*model.buffers.values(), *module.buffers()])


def test_a_buffer_computed_from_parameters():
    """Replay computes it; counter has no full parameters to compute it from."""

    class Summed(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.register_buffer("total", torch.empty(()))

        def reset_parameters(self):
            super().reset_parameters()
            if hasattr(self, "total"):
                with torch.no_grad():
                    self.total.copy_(self.weight.sum())

    with torch.device("meta"):
        model = fs.functionalize(Summed())
    params = model.init(fs.ddp(one_axis()), seed=0)
    assert model.buffers["total"].equal(params["weight"].local.sum())
    with pytest.raises(ValueError, match="RuntimeError where parameters have no values: a buffer is computed from"):
        model.init(fs.ddp(one_axis()), seed=0, mode="counter")
