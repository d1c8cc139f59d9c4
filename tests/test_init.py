"""model.init(seed=...) draws what constructing the module draws, one parameter at a time as all at once."""

import copy
import threading

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import spmd
from fshard.transforms.compose import layout_axes
from tests.bad_input import text_of
from tests.modules import Recurrent, assert_untouched, everything
from tests.trees import assert_same_bits, every_strategy, one_axis

SEEDED = {
    "linear": lambda: nn.Linear(30, 40),
    "convolution": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU()),
    "recurrent": Recurrent,
    "attention": lambda: nn.MultiheadAttention(6, 2, kdim=3, vdim=4, add_bias_kv=True),
    "transformer": lambda: nn.Transformer(6, 2, 1, 1, 8, batch_first=True),
}


def children_first(module, seen):
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from children_first(child, seen)
        yield module


def dense(module, seed):
    """The oracle: the whole module filled with NaN, then each reset_parameters in turn."""
    memo = {id(t): torch.zeros_like(t, device="cpu") for t in module.buffers()}
    for parameter in module.parameters():
        blank = torch.nan if parameter.is_floating_point() else 0
        values = torch.full_like(parameter, blank, device="cpu")
        memo[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    made = copy.deepcopy(module, memo)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for submodule in children_first(made, set()):
            reset = getattr(submodule, "reset_parameters", getattr(submodule, "_reset_parameters", None))
            if reset is not None:
                reset()
    return {name: parameter.detach() for name, parameter in made.named_parameters()}


class GPT(nn.Module):
    """Draws all of its submodules' values again, as GPTs do."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 6, padding_idx=2)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(6, 2, 8) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight

    def reset_parameters(self):
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("out_proj.weight"):
                nn.init.normal_(parameter, std=0.01)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(0.0, 0.02)
        if getattr(module, "padding_idx", None) is not None:
            module.weight.data[module.padding_idx].zero_()
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)


class Own(nn.Module):
    """A matrix, a vector and a linear layer whose values a function draws."""

    def __init__(self, draw, dtype=torch.float32):
        super().__init__()
        self.inner = nn.Linear(5, 4, dtype=dtype)
        self.weight = nn.Parameter(torch.empty(7, 5, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(6, dtype=dtype))
        self.draw = draw

    def reset_parameters(self):
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        self.draw(self)


def reading(module):
    """Reads what its child has drawn."""
    with torch.no_grad():
        module.weight.copy_(module.inner.weight.mean(0))
        module.weight.div_(module.inner.weight.norm())


def rejecting(module):
    """Draws until the values suit it, so that nothing can be said without values."""
    with torch.no_grad():
        while module.weight.abs().max() > 1 or not module.weight.std() > 0:
            module.weight.normal_(0, 0.4)
        module.inner.weight.clamp_(min=0)


def by_array(module):
    """Writes past torch."""
    module.weight.detach().numpy()[:] = module.inner.weight.detach().numpy().sum()


def deviating(module):
    """Does something else where there are no values, and something that depends on values drawn before."""
    if type(module.weight) is nn.Parameter:
        nn.init.normal_(module.weight)
        with torch.no_grad():
            module.inner.bias += module.weight.sum()


def in_place_of_others(module):
    """Puts tensors in the place of its own."""
    module.weight = nn.Parameter(torch.randn(7, 5))
    module.bias.data = torch.rand(6)
    module.inner.weight.data = module.inner.weight.data * 2


def with_a_seed_of_its_own(module):
    with torch.random.fork_rng():
        torch.manual_seed(8)
        nn.init.normal_(module.weight)
    nn.init.normal_(module.bias)


def with_factories(module):
    with torch.no_grad():
        module.weight.copy_(torch.randn(7, 5) + torch.rand_like(module.weight))
        module.bias.copy_(torch.randperm(6) + torch.empty(6).bernoulli_(0.4))
    nn.init.normal_(module.inner.bias)


DRAWS = (*(reading, rejecting, by_array, deviating, in_place_of_others), with_a_seed_of_its_own, with_factories)


def tied():
    module = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9))
    module[1].weight = module[0].weight
    return module


class Around(nn.Module):
    """Changes what a layer has drawn that others have too."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.gain = inner, nn.Parameter(torch.empty(3))

    def reset_parameters(self):
        nn.init.normal_(self.gain)
        with torch.no_grad():
            self.inner.weight.mul_(0.5)


def shared():
    inner = nn.Linear(3, 3)
    return nn.Sequential(Around(inner), nn.Linear(3, 3), Around(inner))


def transposed():
    module = nn.Linear(6, 4)
    module.weight = nn.Parameter(torch.empty(6, 4).t())
    return module


def frozen():
    module = nn.Linear(6, 4)
    module.weight.requires_grad_(False)
    return module


MODULES = {
    **SEEDED,
    **{draw.__name__: lambda draw=draw: Own(draw) for draw in DRAWS},
    "truncated": lambda: Own(lambda module: nn.init.trunc_normal_(module.weight, std=2.0)),
    "float16": lambda: Own(reading, torch.float16),
    **{f.__name__: f for f in (GPT, tied, shared, transposed, frozen)},
    "nothing": nn.ReLU,
}


@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_a_seed_draws_what_drawing_the_whole_module_and_constructing_it_do(device):
    for name, make in MODULES.items():
        with torch.device(device):
            module = make()
        expected = dense(module, 5)
        if name in SEEDED:
            with torch.random.fork_rng():
                torch.manual_seed(5)
                assert_same_bits(expected, {path: p.detach() for path, p in make().named_parameters()})
        before, state = everything(module), torch.get_rng_state()
        model = fs.functionalize(module)
        buffers = fs.tree_map(torch.clone, model.buffers)
        params = model.init(fs.zero2(one_axis()), seed=5)
        assert_same_bits(fs.unshard(params), expected)
        assert name != "frozen" or {name: leaf.spec.frozen for name, leaf in params.items()} == {
            "weight": True,
            "bias": False,
        }
        assert_same_bits(torch.get_rng_state(), state)
        if device == "cpu":
            assert_untouched(module, before)
            assert_same_bits(model.buffers, buffers)
        else:
            assert all(parameter.is_meta for parameter in module.parameters())


@pytest.mark.parametrize("world_size", (2, 3, pytest.param(4, marks=pytest.mark.slow)))
def test_replay_is_dense_at_every_world_size(world_size):
    """Of every strategy; ranks compare what they drew and what was left out, and nothing else travels."""
    modules = {name: MODULES[name]() for name in ("transformer", "GPT", "rejecting", "deviating", "tied")}
    expected = {name: dense(module, 5) for name, module in modules.items()}

    def program():
        for name, module in modules.items():
            for _, strategy in every_strategy():
                with fs.comm.record() as record:
                    params = fs.functionalize(module).init(strategy, seed=5)
                assert len(record) <= 4 * sum(axis.size > 1 for axis in layout_axes(strategy))
                assert_same_bits(fs.unshard(params), expected[name])

    spmd(program, world_size)


def test_other_threads_may_draw():
    """Simulated ranks share torch's generator."""
    module, done = SEEDED["transformer"](), threading.Event()

    def draw():
        while not done.is_set():
            torch.rand(1)

    expected, other = dense(module, 5), threading.Thread(target=draw)
    other.start()
    try:
        params = fs.functionalize(module).init(fs.ddp(one_axis()), seed=5)
    finally:
        done.set()
        other.join()
    assert_same_bits(fs.unshard(params), expected)


BAD = [
    (dict(seed="0"), "expected seed to be a whole number of 64 bits, got '0'"),
    (dict(seed=0, mode="dense"), 'expected mode to be "replay" or "counter", got \'dense\''),
    (dict(mode="counter"), "expected a seed for mode='counter', got none; pass seed="),
]


def test_bad_arguments():
    for arguments, message in BAD:
        assert text_of(lambda a=arguments: fs.functionalize(nn.Linear(2, 2)).init(fs.ddp(one_axis()), **a)) == (
            f"model.init: {message}"
        )


def test_a_leaf_that_does_not_fit_is_refused_before_anything_is_drawn():
    class Counting(nn.Linear):
        calls = 0

        def reset_parameters(self):
            Counting.calls += 1
            super().reset_parameters()

    model = fs.functionalize(nn.Sequential(Counting(3, 3)))
    before = Counting.calls
    with pytest.raises(ValueError, match=r"shard: leaves cannot be sharded\n  \['0.bias'\]"):
        model.init(fs.fully_shard(one_axis(), dim=1), seed=0)
    assert Counting.calls == before
