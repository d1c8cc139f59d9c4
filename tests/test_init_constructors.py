"""A seed draws what reset_parameters or reset= draws, of parameters and buffers; other leaves are refused."""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import spmd
from tests.trees import assert_same_bits, one_axis


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head, self.norm = nn.Embedding(11, 6), nn.Linear(6, 11), nn.LayerNorm(6)
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            torch.nn.init.normal_(module.weight, std=0.02)


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


def reset(module):
    """Sets the values of a submodule of GPT."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, nn.Linear):
        nn.init.kaiming_uniform_(module.weight)
        nn.init.ones_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        module.reset_parameters()


REMEDY = (
    "To fix: pass reset=, a function that sets the values of a submodule, or add reset_parameters to these modules, as "
    "fs.with_init_weights does to models of transformers, or leave out seed and take their values."
)
MODES = ("replay", "counter")


@pytest.mark.parametrize("mode", MODES)
def test_reset_sets_the_values_of_each_submodule(mode):
    """In the place of reset_parameters, as nn.Module.apply calls it."""
    with torch.random.fork_rng(), torch.no_grad():
        module = GPT()
        torch.manual_seed(3)
        module.apply(reset)

    def program():
        with torch.device("meta"):
            model = fs.functionalize(GPT())
        found = fs.unshard(model.init(fs.zero2(one_axis()), seed=3, mode=mode, reset=reset))
        if mode == "replay":
            assert_same_bits(found, dict(module.named_parameters()))
        assert all(leaf.eq(1).all() for name, leaf in found.items() if name.endswith("head.bias"))
        assert not any(leaf.isnan().any() for leaf in found.values())

    spmd(program, 2)


@pytest.mark.parametrize("mode", MODES)
def test_an_initializer_of_a_root_that_nobody_calls_is_refused(mode):
    model = fs.functionalize(GPT())
    with pytest.raises(ValueError, match="values cannot be drawn from a seed") as caught:
        model.init(fs.ddp(one_axis()), seed=0, mode=mode)
    assert str(caught.value) == (
        "model.init: values cannot be drawn from a seed\n"
        f"  (root): expected a way to draw its values, got GPT, whose _init_weights is not called\n{REMEDY}"
    )


def test_a_leaf_that_reset_leaves_out_is_refused():
    model = fs.functionalize(GPT())
    with pytest.raises(ValueError, match="values cannot be drawn from a seed") as caught:
        model.init(fs.ddp(one_axis()), seed=0, reset=GPT()._init_weights)
    lines = [f"  ['{name}']: expected" for name in ("head.bias", "norm.bias", "norm.weight")]
    assert all(line in str(caught.value) for line in lines)
    assert str(caught.value).endswith(REMEDY)


PASSED = {
    "reset_parameters of its own": Resets,
    "no write": Computes,
    "torch's": lambda: nn.TransformerEncoderLayer(4, 2, 8),
}


@pytest.mark.parametrize("name", PASSED)
def test_others_draw_what_their_constructors_do(name):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = PASSED[name]()

    def program():
        model = fs.functionalize(module)
        found = fs.unshard(model.init(fs.zero2(one_axis()), seed=3))
        assert_same_bits(found, dict(module.named_parameters()))

    spmd(program, 2)


class NanoGPT(nn.Module):
    """Karpathy's: a root that draws by self.apply, projections into the residual path anew, a tied head."""

    def __init__(self, layers=2):
        super().__init__()
        self.layers = layers
        blocks = nn.ModuleList(nn.ModuleDict({"c_attn": nn.Linear(6, 18), "c_proj": nn.Linear(6, 6)}) for _ in range(2))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(11, 6), "h": blocks, "ln_f": nn.LayerNorm(6)})
        self.lm_head = nn.Linear(6, 11, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        self._init_projections()

    def _init_projections(self):
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.02 / (2 * self.layers) ** 0.5)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)


def reset_gpt(module):
    """What the root does, written down as reset=."""
    NanoGPT._init_weights(module, module)
    if isinstance(module, nn.LayerNorm):
        module.reset_parameters()
    if isinstance(module, NanoGPT):
        module._init_projections()


class Bottleneck(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x):
        return x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))


class ResNet(nn.Module):
    """Of torchvision's kind: the constructor of the root draws convolutions over what theirs have drawn."""

    def __init__(self, zero_init_residual=True):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(Bottleneck(), Bottleneck())
        self.fc = nn.Linear(4, 3)
        self.apply(reset_convolution)
        self.apply(reset_residual)

    def forward(self, x):
        return self.fc(self.layer1(self.bn1(self.conv1(x))).mean((2, 3)))


def reset_convolution(module):
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.constant_(module.weight, 1)
        nn.init.constant_(module.bias, 0)


def reset_residual(module):
    if isinstance(module, Bottleneck):
        nn.init.constant_(module.bn2.weight, 0)


def reset_resnet(module):
    if isinstance(module, (nn.Linear, nn.BatchNorm2d)):
        module.reset_parameters()
    reset_convolution(module)
    reset_residual(module)


RESETS = {"nanoGPT": (NanoGPT, reset_gpt), "ResNet": (ResNet, reset_resnet)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RESETS)
def test_a_root_that_draws_in_its_constructor_is_drawn_by_reset(name, mode):
    """With the bits of nn.Module.apply of the same function, and the same values at every world size."""
    build, set_values = RESETS[name]
    with torch.random.fork_rng():
        module = build()
        torch.manual_seed(3)
        with torch.no_grad():
            module.apply(set_values)
    with torch.device("meta"):
        bare = build()

    def program():
        model = fs.functionalize(bare)
        params = model.init(fs.zero3(one_axis(), min_shard_elements=0), seed=3, mode=mode, reset=set_values)
        return fs.unshard(params), model.buffers

    ranks = [found for size in (1, 2, 3) for found in spmd(program, size)]
    for params, buffers in ranks:
        assert_same_bits(params, ranks[0][0])
        assert_same_bits(buffers, dict(module.named_buffers()))
        if mode == "replay":
            assert_same_bits(params, {name: p.detach() for name, p in module.named_parameters()})
    assert name != "ResNet" or not ranks[0][0]["layer1.1.bn2.weight"].any()


def test_a_root_that_draws_in_its_constructor_is_refused_without_reset():
    with pytest.raises(
        ValueError, match=r"\(root\): expected a way to draw its values, got NanoGPT, whose _init_weights"
    ):
        fs.functionalize(NanoGPT()).init(fs.ddp(one_axis()), seed=0)


class Constant(nn.Module):
    """Makes values in its constructor alone."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(2))
        self.register_buffer("steps", torch.arange(2))

    def forward(self, x):
        return self.linear(x) * self.gain + self.steps


@pytest.mark.parametrize("device", ("cpu", "meta"))
@pytest.mark.parametrize("mode", MODES)
def test_values_of_a_constructor_are_refused_by_name_or_kept(mode, device):
    """Never drawn otherwise, whether the module has values or not."""
    with torch.device(device):
        model = fs.functionalize(Constant())
    strategy = fs.ddp(one_axis())
    with pytest.raises(ValueError, match=r"\['gain'\]: expected a value for each, got elements left out"):
        model.init(strategy, seed=0, mode=mode)

    def reset_gain(module):
        if isinstance(module, nn.Linear):
            module.reset_parameters()
        if isinstance(module, Constant):
            nn.init.ones_(module.gain)

    params = model.init(strategy, seed=0, mode=mode, reset=reset_gain)
    assert params["gain"].local.tolist() == [1, 1]
    if device == "cpu":
        assert model.buffers["steps"].tolist() == [0, 1]
        assert model.init(strategy)["gain"].local.tolist() == [1, 1]
    else:
        with pytest.raises(ValueError, match=r"\['steps'\]: expected a tensor with values"):
            model.apply(params, torch.ones(1, 2))


def test_a_reset_that_uses_tensors_of_another_submodule_is_refused():
    class Copies(nn.Linear):
        def reset_parameters(self):
            with torch.no_grad():
                self.weight.copy_(self.other[0].weight if hasattr(self, "other") else torch.ones(2, 2))
                self.bias.zero_()

    module = nn.Sequential(nn.Linear(2, 2), Copies(2, 2))
    module[1].other = [module[0]]
    with pytest.raises(ValueError, match="expected reset to use tensors of the submodule that it was given"):
        fs.functionalize(module).init(fs.ddp(one_axis()), seed=0)


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
            "To fix: pass buffers= with values for them, such as buffers=state.buffers inside fs.plan, or write to "
            "them in the module's reset_parameters."
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
    with pytest.raises(ValueError, match="expected buffers of numbers, got one that is computed from parameters"):
        model.init(fs.ddp(one_axis()), seed=0, mode="counter")
