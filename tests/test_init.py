"""model.init(seed=): replay draws what constructing the module draws, counter each element by itself."""

import copy
import math
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fshard as fs
from fshard.init.drawing import children_first
from fshard.shard import without_padding
from fshard.testing import spmd
from fshard.transforms.structure import layout_axes
from tests.bad_input import text_of
from tests.modules import Recurrent, assert_untouched, everything
from tests.ranks import on_ranks
from tests.tolerance import step_at_one
from tests.trees import STRATEGIES, assert_same_bits, every_strategy, one_axis

MODES = ("replay", "counter")
REMEDY = (
    "To fix: pass reset=, a function that sets the values of a submodule, or add reset_parameters to these modules, as "
    "fs.with_init_weights does to models of transformers, or leave out seed and take their values."
)


def dense(module, seed, reset=None):
    """The oracle: the whole module filled with NaN, then each reset_parameters, or `reset` of each, in turn."""
    memo = {id(buffer): torch.zeros_like(buffer, device="cpu") for buffer in module.buffers()}
    for parameter in module.parameters():
        values = torch.full_like(parameter, torch.nan, device="cpu")
        memo[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    made = copy.deepcopy(module, memo)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for _, submodule in children_first(made, "", set()):
            if reset is not None:
                reset(submodule)
            elif hasattr(submodule, "reset_parameters"):
                submodule.reset_parameters()
            elif hasattr(submodule, "_reset_parameters"):
                submodule._reset_parameters()
    return detached_parameters(made)


def init_params(module, seed=0, mode="counter", **options):
    strategy = fs.ddp(one_axis())
    return fs.functionalize(module).init(strategy, seed=seed, mode=mode, **options)


def detached_parameters(module):
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


class Undrawn(nn.Module):
    """As nanoGPT: what its constructor would call draws the values of submodules; a projection anew, a tied head."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 6, padding_idx=2)
        self.c_proj = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight

    @staticmethod
    def _init_weights(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(0.0, 0.02)
        if getattr(module, "padding_idx", None) is not None:
            module.weight.data[module.padding_idx].zero_()
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Undrawn):
            nn.init.normal_(module.c_proj.weight, std=0.01)


class GPT(Undrawn):
    def reset_parameters(self):
        self.apply(self._init_weights)


class Titan(nn.Module):
    """As models of torchtitan: a method of its own draws all values at once, and makes a buffer."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.register_buffer("frequencies", torch.ones(3), persistent=False)

    def init_weights(self):
        self.frequencies = torch.arange(3.0)
        nn.init.normal_(self.tokens.weight)
        nn.init.trunc_normal_(self.head.weight, std=0.02)


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
        with torch.no_grad():
            self.draw(self)


def odd(module):
    """Reads what a child drew, draws by factories and from a seed of its own, puts others in the place of tensors."""
    mean = module.inner.weight.mean(0)
    module.weight.copy_(mean + torch.randn(7, 5) + torch.rand_like(module.weight))
    module.inner.weight.data = module.inner.weight.data * 2
    module.bias = nn.Parameter(torch.randperm(6) + torch.empty(6).bernoulli_(0.4))
    with torch.random.fork_rng():
        torch.manual_seed(8)
        nn.init.normal_(module.inner.bias)


def deviating(module):
    """Does something else where there are no values; draws until the values suit it, and writes past torch."""
    if type(module.weight) is nn.Parameter:
        while module.weight.abs().max() > 1 or not module.weight.std() > 0:
            module.weight.normal_(0, 0.4)
        module.bias.detach().numpy()[:] = module.inner.weight.detach().numpy().sum()


def transposed_and_frozen():
    module = nn.Linear(6, 4)
    module.weight = nn.Parameter(torch.empty(6, 4).t())
    module.bias.requires_grad_(False)
    return module


class Assorted(nn.Module):
    """Leaves of every shape, drawn through views."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(37, 29))
        self.cube = nn.Parameter(torch.empty(5, 7, 9))
        self.scalar = nn.Parameter(torch.empty(()))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.big = nn.Parameter(torch.empty(211, 317))

    @torch.no_grad()
    def reset_parameters(self):
        for parameter in self.parameters():
            parameter.normal_()
        self.big.clamp_(max=1.0)
        self.matrix[4].zero_()
        self.matrix.t()[7, 1::5].uniform_(5, 6)
        self.matrix[30:].mul_(torch.tensor(3.0))
        self.cube[..., 8].fill_(7)
        self.cube.view(-1)[::11].sub_(1)


CONSTRUCTED = {
    "convolution": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU()),
    "recurrent": Recurrent,
    "attention": lambda: nn.MultiheadAttention(6, 2, kdim=3, vdim=4, add_bias_kv=True),
    "transformer": lambda: nn.Transformer(6, 2, 1, 1, 8, batch_first=True),
}
RESET = {
    "odd": lambda: Own(odd),
    "deviating": lambda: Own(deviating),
    "GPT": GPT,
    "transposed_and_frozen": transposed_and_frozen,
}
MODULES = CONSTRUCTED | RESET | {"Assorted": Assorted}


def test_the_oracle_draws_what_constructors_do():
    for make in CONSTRUCTED.values():
        expected = dense(make(), seed=5)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            assert_same_bits(detached_parameters(make()), expected)


def test_a_seed_draws_what_drawing_the_whole_module_does():
    """And leaves the module, its buffers and torch's own generator alone."""
    state = torch.get_rng_state()
    for make in (CONSTRUCTED | RESET).values():
        with torch.random.fork_rng():
            module = make()
        before = everything(module)
        model = fs.functionalize(module)
        buffers = fs.tree_map(torch.clone, model.buffers)
        params = model.init(fs.zero2(one_axis()), seed=5)
        assert_same_bits(fs.unshard(params), dense(module, seed=5))
        for path, leaf in params.items():
            assert leaf.spec.frozen is not module.get_parameter(path).requires_grad
        assert_untouched(module, before)
        assert_same_bits(model.buffers, buffers)
    assert_same_bits(torch.get_rng_state(), state)


DRAWN = {"replay": ("GPT", "deviating"), "counter": ("recurrent", "Assorted")}
LAYOUTS = ("zero2 of every leaf", "last dim", "one dim over two axes", "two dims")


def expected_parameters(module, seed, mode, reset=None):
    """The oracle for "replay"; for "counter" what one rank draws."""
    if mode == "replay":
        return dense(module, seed, reset)
    return fs.unshard(init_params(module, seed, reset=reset))


SLOW_SIZES = [pytest.param(size, marks=pytest.mark.slow) for size in (2, 3)]


@pytest.mark.parametrize("world_size", (4, *SLOW_SIZES))
def test_every_world_size_and_strategy_draws_the_same(world_size):
    """Ranks compare what they drew and what was left out, and nothing else travels."""
    cases = []
    for mode, names in DRAWN.items():
        for name in names:
            with torch.device("meta"):
                module = MODULES[name]()
            cases.append((module, mode, expected_parameters(module, 5, mode)))

    def program():
        for module, mode, expected in cases:
            for _, strategy in every_strategy({name: STRATEGIES[name] for name in LAYOUTS}):
                with fs.comm.record() as record:
                    params = fs.functionalize(module).init(strategy, seed=5, mode=mode)
                assert len(record) <= 4 * sum(axis.size > 1 for axis in layout_axes(strategy))
                for leaf in params.values():
                    assert leaf.local.count_nonzero() == without_padding(leaf).count_nonzero()
                assert_same_bits(fs.unshard(params), expected)

    state = torch.get_rng_state()
    spmd(program, world_size)
    assert_same_bits(torch.get_rng_state(), state)


def reset(module):
    Undrawn._init_weights(module)
    if isinstance(module, nn.LayerNorm):
        module.reset_parameters()


def reset_at_once(module):
    """As the error says that a Titan is drawn."""
    return module.init_weights() if isinstance(module, Titan) else None


# Models, how they are reset, the mode, and the buffers that they then have.
RESETS = [(Undrawn, reset, "replay", {}), (Undrawn, reset, "counter", {})]
RESETS += [(Titan, reset_at_once, "replay", {"frequencies": torch.arange(3.0)})]


@pytest.mark.parametrize("make, reset, mode, buffers", RESETS)
def test_reset_sets_the_values_of_each_submodule(make, reset, mode, buffers):
    with torch.device("meta"):
        bare = make()

    def program():
        model = fs.functionalize(bare)
        strategy = fs.zero3(one_axis(), min_shard_elements=0)
        params = model.init(strategy, seed=3, mode=mode, reset=reset)
        # A rank holds its part, and not the memory of the tensor that it was cut from.
        for leaf in params.values():
            assert leaf.local.untyped_storage().nbytes() == leaf.local.nbytes
        return fs.unshard(params), model.buffers

    expected = expected_parameters(bare, 3, mode, reset), buffers
    assert_same_bits(spmd(program, 2), [expected] * 2)


def test_what_nobody_draws_is_refused():
    headline = "model.init: values cannot be drawn from a seed"
    root = "(root): expected a way to draw its values, got Undrawn, whose _init_weights is not called"
    for mode in MODES:
        assert text_of(lambda m=mode: init_params(Undrawn(), mode=m)) == f"{headline}\n  {root}\n{REMEDY}"
    left = "  ['norm.weight']: expected a value for each, got elements left out by reset_parameters"
    assert text_of(lambda: init_params(Undrawn(), reset=Undrawn._init_weights)) == f"{headline}\n{left}\n{REMEDY}"
    at_once = (
        "  (root): expected a way to draw its values, got Titan, whose init_weights is not called\n"
        "To fix: pass reset=lambda module: module.init_weights() if isinstance(module, Titan) else None, which draws "
        "the whole model at once, or a reset that draws one submodule at a time."
    )
    assert text_of(lambda: init_params(Titan())) == f"{headline}\n{at_once}"


WRAPPERS = {"checkpointed": checkpoint_wrapper, "compiled": lambda module: torch.compile(module, backend="eager")}


def layers(wrap=lambda module: module):
    return nn.Sequential(nn.Linear(5, 5), wrap(nn.BatchNorm1d(5)), wrap(nn.Linear(5, 5)), nn.Linear(5, 5))


def reset_by_names(module):
    for name in ("weight", "bias"):
        if hasattr(module, name):
            nn.init.normal_(getattr(module, name))


@pytest.mark.rows(4)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("mode", MODES)
def test_wrappers_do_not_draw_what_lies_inside_of_them_again(mode, wrapper):
    """They have the methods of the module inside, which is drawn by itself."""
    for options in ({}, {"reset": reset_by_names}):
        plain = init_params(layers(), mode=mode, **options)
        wrapped = init_params(layers(WRAPPERS[wrapper]), mode=mode, **options)
        wrapped = {name.replace("_orig_mod.", ""): leaf for name, leaf in wrapped.items()}
        # Under "counter" numbers belong to names, which those inside of a compiled module do not share.
        names = list(plain) if wrapper == "checkpointed" or mode == "replay" else ["0.weight", "3.weight", "3.bias"]
        assert_same_bits([wrapped[name].local for name in names], [plain[name].local for name in names])


class HalfDrawn(nn.Linear):
    def reset_parameters(self):
        nn.init.normal_(self.weight.data[:2])


@on_ranks(4)
def test_ranks_refuse_together():
    """Under "counter" only the ranks that have the elements left out see it."""
    mesh = one_axis()
    model = fs.functionalize(HalfDrawn(3, 8, bias=False))
    strategy = fs.zero2(mesh, min_shard_elements=0)
    texts = [text_of(partial(model.init, strategy, seed=0, mode=mode)) for mode in MODES]
    assert all("elements left out by reset_parameters" in text for text in texts)
    linear = fs.functionalize(nn.Linear(2, 2))
    differ = text_of(lambda: linear.init(fs.zero2(mesh), seed=mesh.get_rank(), mode="counter"))
    assert re.search(r"(?s)ranks hold different trees.*drawn from seed [13] by uniform_\(", differ), differ
    return texts, differ


class Rotary(nn.Module):
    """A buffer that is never saved, one that is drawn at random, and one that the constructor alone makes, if asked."""

    def __init__(self, has_mask):
        super().__init__()
        self.register_buffer("frequencies", torch.empty(4), persistent=False)
        self.register_buffer("features", torch.empty(4, 4))
        if has_mask:
            self.register_buffer("mask", torch.ones(4, 4).tril(), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        self.frequencies = 100.0 ** -torch.linspace(0, 1, 4)
        nn.init.normal_(self.features)

    def forward(self, x):
        return (x * self.frequencies.cos()) @ self.features


def rotary(device, has_mask=False):
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Rotary(has_mask))


@pytest.mark.parametrize("mode", MODES)
def test_buffers_that_are_drawn_have_values(mode):
    """In turn with parameters, from one generator, as constructing does; those that have values keep them."""
    module, built = rotary("meta"), rotary("cpu")

    def program():
        model = fs.functionalize(module)
        before = model.buffers
        strategy = fs.zero2(one_axis(), min_shard_elements=0)
        params = model.init(strategy, seed=3, mode=mode)
        assert all(buffer.is_meta for buffer in before.values())
        return fs.unshard(params), model.buffers

    for params, buffers in spmd(program, 2):
        expected = dict(built.named_buffers())
        if mode == "counter":
            expected["2.features"] = buffers["2.features"]
        assert_same_bits(buffers, expected)
        if mode == "replay":
            assert_same_bits(params, detached_parameters(built))
    for buffer in built.buffers():
        buffer.fill_(7)
    model = fs.functionalize(built)
    model.init(fs.ddp(one_axis()), seed=3, mode=mode)
    for buffer in (*model.buffers.values(), *built.buffers()):
        assert buffer.eq(7).all()


def test_buffers_that_nobody_draws_are_asked_for():
    model = fs.functionalize(rotary("meta", has_mask=True).eval())
    params = model.init(fs.ddp(one_axis()), seed=3)
    x = torch.ones(5, 4)
    text = text_of(lambda: model.apply(params, x, buffers=model.buffers))
    assert text == (
        "apply: buffers have no values\n"
        "  ['2.mask']: expected a tensor with values, got a tensor on the meta device\n"
        "To fix: pass buffers= with values for them, such as state.buffers or the buffers of the model whose init "
        "made the parameters (its eval() shares them), or write to them in the module's reset_parameters."
    )
    buffers = model.buffers | {"2.mask": torch.ones(4, 4).tril()}
    model.apply(params, x, buffers=buffers)


# Counter: numbers that belong to their elements.
ROWS, COLUMNS = 256, 512
# Five standard deviations: one false alarm in two million tests.
SIGMAS = 5


def normal_cdf(x):
    return torch.erfc(-x / math.sqrt(2)) / 2


DISTRIBUTIONS = (
    (lambda w: nn.init.uniform_(w, -0.3, 0.7), lambda x: (x + 0.3).clamp(0, 1)),
    (lambda w: w.data.normal_().mul_(0.5).add_(2.0), lambda x: normal_cdf((x - 2) / 0.5)),
)


@pytest.mark.rows(4)
@pytest.mark.parametrize("draw, cdf", DISTRIBUTIONS, ids=("uniform", "normal"))
@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
def test_values_have_their_distribution(dtype, draw, cdf):
    """Kolmogorov and Smirnov's distance, to which rounding adds at most a step of the dtype."""
    module = Own(lambda module: draw(module.weight), dtype)
    module.weight = nn.Parameter(torch.empty((ROWS, COLUMNS), dtype=dtype, device="meta"))
    x = init_params(module)["weight"].local.double().flatten().sort().values
    step = x.abs() * step_at_one(dtype)
    above = torch.searchsorted(x, x, right=True) / len(x) - cdf(x)
    below = cdf(x) - torch.searchsorted(x, x) / len(x)
    # The distance exceeds z / sqrt(n) with a probability of 2 exp(-2 z^2): here as seldom as SIGMAS deviations.
    probability = math.erfc(SIGMAS / math.sqrt(2))
    bound = math.sqrt(-math.log(probability / 2) / 2 / len(x))
    rounding = cdf(x + step) - cdf(x - step)
    assert (torch.maximum(above, below) - rounding).max() < bound


def test_views_are_followed():
    """Against the same operators on full tensors, where they do not draw."""
    full = {name: leaf.local for name, leaf in init_params(Assorted()).items()}
    matrix = full["matrix"]
    other_columns = [i for i in range(29) if i != 7]
    assert matrix[4, other_columns].eq(0).all()
    assert matrix[1:30:5, 7].gt(5).all()
    assert matrix[31, 7].gt(15)
    expected = torch.full((5, 7), 7.0)
    expected.view(-1)[torch.arange(8, 315, 9) % 11 == 0] -= 1
    assert full["cube"][..., 8].equal(expected)
    assert full["big"].max() == 1


BY_ITSELF = (
    "but counter supports only operators that compute each element by itself, such as normal_ and mul_ by a number"
)
# Newer versions draw again until no number is outside, and ask whether one is.
TRUNCATED = "aten._local_scalar_dense.default"
if torch.torch_version.__version__ < "2.13":
    TRUNCATED = f"model.init: ['1.weight'] is set by erfinv_, {BY_ITSELF}"
REFUSED = (
    (lambda m: nn.init.orthogonal_(m.weight), f"model.init: ['1.weight'] is set by copy_, {BY_ITSELF}"),
    (lambda m: nn.init.trunc_normal_(m.weight), TRUNCATED),
    (lambda m: m.bias.data.exponential_(), f"model.init: ['1.bias'] is set by exponential_, {BY_ITSELF}"),
    (lambda m: torch._foreach_mul_([m.bias.data], 2), f"model.init: ['1.bias'] is set by _foreach_mul_, {BY_ITSELF}"),
    (lambda m: torch.mul(m.bias.data, 2, out=m.bias.data), f"model.init: ['1.bias'] is set by mul, {BY_ITSELF}"),
)


def test_what_is_not_element_by_element_is_refused():
    for draw, expected in REFUSED:
        with pytest.raises(Exception, match=re.escape(expected)) as caught:
            init_params(nn.Sequential(nn.Linear(2, 2), Own(draw)))
        note = 'The reset of 1 ran on tensors without values. mode="replay" can run any reset.'
        assert caught.value.__notes__ == [note]
    for draw, text in (
        (lambda m: torch.zeros(6).add_(m.bias), "a buffer is computed from parameters, which counter draws"),
        (lambda m: setattr(m.bias, "data", torch.zeros(6)), "['bias']: expected a value for each, got elements left"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            init_params(Own(draw))


WIDTH, LAYERS = 256, 8


def peak_bytes(make):
    """The most bytes of tensors there are at once while something is made."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        make()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("mode", MODES)
def test_the_peak_is_the_outermost_submodule_that_draws_and_the_shards(mode):
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(LAYERS)))
    total = sum(parameter.nbytes for parameter in module.parameters())
    model = fs.functionalize(module)
    strategy = fs.zero3(one_axis(), min_shard_elements=0)
    # What is imported and remembered at first is not counted.
    model.init(strategy, seed=0, mode=mode)
    peak = peak_bytes(lambda: model.init(strategy, seed=0, mode=mode))
    # A chunk has at most a dozen numbers of eight bytes for each of its elements at once.
    extra = 12 * 8 * 2**15 if mode == "counter" else total // LAYERS
    assert extra < total / 2
    assert total <= peak <= total + extra + 2**14
