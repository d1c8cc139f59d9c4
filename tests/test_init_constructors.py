"""A seed draws what reset_parameters or reset= draws, of parameters and buffers; other leaves are refused."""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import spmd
from tests.bad_input import text_of
from tests.trees import assert_same_bits, one_axis

REMEDY = (
    "To fix: pass reset=, a function that sets the values of a submodule, or add reset_parameters to these modules, as "
    "fs.with_init_weights does to models of transformers, or leave out seed and take their values."
)
MODES = ("replay", "counter")


class GPT(nn.Module):
    """As nanoGPT: a root that draws by self.apply, projections into the residual path anew, a tied head."""

    def __init__(self):
        super().__init__()
        self.tokens, self.c_proj = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11, bias=False)
        self.tokens.weight = self.head.weight
        self.apply(self._init_weights)
        nn.init.normal_(self.c_proj.weight, std=0.01)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if getattr(module, "bias", None) is not None and isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


def reset_gpt(module):
    """What the root does, written down as reset=."""
    GPT._init_weights(module, module)
    if isinstance(module, nn.LayerNorm):
        module.reset_parameters()
    if isinstance(module, GPT):
        nn.init.normal_(module.c_proj.weight, std=0.01)


@pytest.mark.parametrize("mode", MODES)
def test_reset_sets_the_values_of_each_submodule(mode):
    """With the bits of nn.Module.apply of the same function, and the same values at every world size."""
    with torch.random.fork_rng():
        module = GPT()
        torch.manual_seed(3)
        with torch.no_grad():
            module.apply(reset_gpt)
    with torch.device("meta"):
        bare = GPT()

    def program():
        model = fs.functionalize(bare)
        return fs.unshard(model.init(fs.zero3(one_axis(), min_shard_elements=0), seed=3, mode=mode, reset=reset_gpt))

    first, *others = (params for size in (1, 2, 3) for params in spmd(program, size))
    assert_same_bits(others, [first] * len(others))
    if mode == "replay":
        assert_same_bits(first, {name: p.detach() for name, p in module.named_parameters()})


def test_what_nobody_draws_is_refused():
    model, strategy, what = (
        fs.functionalize(GPT()),
        fs.ddp(one_axis()),
        "model.init: values cannot be drawn from a seed",
    )
    root = "(root): expected a way to draw its values, got GPT, whose _init_weights is not called"
    for mode in MODES:
        assert text_of(lambda m=mode: model.init(strategy, seed=0, mode=m)) == f"{what}\n  {root}\n{REMEDY}"
    lines = [f"  ['norm.{name}']: expected a value for each, got elements left out" for name in ("weight", "bias")]
    text = text_of(lambda: model.init(strategy, seed=0, reset=GPT()._init_weights))
    assert all(line in text for line in (what, *lines, REMEDY))

    class Copies(nn.Linear):
        def reset_parameters(self):
            with torch.no_grad():
                self.weight.copy_(self.other[0].weight if hasattr(self, "other") else torch.ones(2, 2))
                self.bias.zero_()

    module = nn.Sequential(nn.Linear(2, 2), Copies(2, 2))
    module[1].other = [module[0]]
    with pytest.raises(ValueError, match="expected reset to use tensors of the submodule that it was given"):
        fs.functionalize(module).init(strategy, seed=0)


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
def test_buffers_that_are_drawn_have_values(mode):
    """In turn with parameters, from one generator, as constructing does; those that have values keep them."""
    module, built = make("meta"), make("cpu")

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

    for params, buffers, out, after in spmd(program, 3):
        needed = dict(built.named_buffers())
        assert_same_bits(buffers, needed if mode == "replay" else needed | {"2.features": buffers["2.features"]})
        if mode == "replay":
            assert_same_bits(params, {name: p.detach() for name, p in built.named_parameters()})
        assert int(after["1.num_batches_tracked"]) == 1
        expected = torch.func.functional_call(make("cpu"), {**params, **buffers}, torch.ones(5, 4))
        assert_same_bits(out, expected.detach())
    assert all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    with torch.no_grad():
        for buffer in built.buffers():
            buffer.fill_(7)
    model = fs.functionalize(built)
    model.init(fs.ddp(one_axis()), seed=3, mode=mode)
    assert all(buffer.eq(7).all() for buffer in [*model.buffers.values(), *built.buffers()])


@pytest.mark.parametrize("mode", MODES)
def test_buffers_that_nobody_draws_are_asked_for(mode):
    model = fs.functionalize(make("meta", has_mask=True))
    params = model.init(fs.ddp(one_axis()), seed=3, mode=mode)
    for buffers in ({}, {"buffers": model.buffers}):
        assert text_of(lambda b=buffers: model.apply(params, torch.ones(5, 4), **b)) == (
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
    out = fs.functionalize(module).apply(dict(module.named_parameters()), torch.ones(5, 4, device="meta"))
    assert (out.is_meta, out.shape) == (True, (5, 4))


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
