"""mode="counter": values that belong to their elements, the same at every world size, of the right distributions."""

import math
import re

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.shard import without_padding
from fshard.testing import spmd
from fshard.transforms.compose import layout_axes
from tests.bad_input import text_of
from tests.ranks import on_ranks
from tests.test_init import GPT, SEEDED, Own, frozen, tied, transposed
from tests.trees import assert_same_bits, every_strategy, one_axis

ROWS, COLUMNS = 256, 512


def sampled(draw, shape=(ROWS, COLUMNS), dtype=torch.float32, seed=0):
    """A matrix that `draw` has drawn, in float64."""
    module = Own(lambda module: draw(module.weight), dtype)
    module.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    params = fs.functionalize(module).init(fs.ddp(one_axis()), seed=seed, mode="counter")
    assert params["weight"].local.dtype == dtype
    return params["weight"].local.double()


def normal_cdf(x):
    return torch.erfc(-x / math.sqrt(2)) / 2


def uniform_cdf(low, high):
    return lambda x: ((x - low) / (high - low)).clamp(0, 1)


DISTRIBUTIONS = {
    "uniform": (lambda w: nn.init.uniform_(w, -0.3, 0.7), uniform_cdf(-0.3, 0.7)),
    "kaiming": (nn.init.kaiming_normal_, lambda x: normal_cdf(x / math.sqrt(2 / COLUMNS))),
    "scaled": (lambda w: w.data.normal_().mul_(0.5).add_(2.0), lambda x: normal_cdf((x - 2) / 0.5)),
}

# Five standard deviations: one false alarm in two million tests.
SIGMAS = 5


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_values_have_their_distribution(name, dtype):
    """Kolmogorov and Smirnov's distance, to which rounding adds at most a step of the dtype."""
    draw, cdf = DISTRIBUTIONS[name]
    x = sampled(draw, dtype=dtype).flatten().sort().values
    n = len(x)
    rounding = cdf(x + x.abs() * torch.finfo(dtype).eps) - cdf(x - x.abs() * torch.finfo(dtype).eps)
    above = torch.searchsorted(x, x, right=True) / n - cdf(x)
    below = cdf(x) - torch.searchsorted(x, x) / n
    # The distance exceeds z / sqrt(n) with a probability of 2 exp(-2 z^2): here as seldom as SIGMAS deviations.
    bound = math.sqrt(-math.log(math.erfc(SIGMAS / math.sqrt(2)) / 2) / 2 / n)
    assert (torch.maximum(above, below) - rounding).max() < bound


def test_numbers_do_not_depend_on_each_other():
    """Not neighbours in a row or column, nor elements of other parameters, seeds or draws of the same one."""
    x = sampled(nn.init.normal_)
    other = Own(lambda module: [nn.init.normal_(p) for p in (module.weight, module.bias)])
    other.weight, other.bias = (nn.Parameter(torch.empty(ROWS, COLUMNS, device="meta")) for _ in range(2))
    params = fs.functionalize(other).init(fs.ddp(one_axis()), seed=0, mode="counter")
    assert_same_bits(params["weight"].local.double(), x)
    halves = sampled(lambda w: (w.data.normal_(), w.data[:100].normal_()))
    assert_same_bits(halves[100:], x[100:])
    pairs = {
        "row": (x[:, 1:], x[:, :-1]),
        "column": (x[1:], x[:-1]),
        "power of two": (x.flatten()[4096:], x.flatten()[:-4096]),
        "squares": ((x[:, 1:] ** 2 - 1) / 2, x[:, :-1] ** 2 - 1),
        "parameter": (x, params["bias"].local.double()),
        "draw": (x[:100], halves[:100]),
        **{f"seed {seed}": (x, sampled(nn.init.normal_, seed=seed)) for seed in (1, 2**63 + 5, -1)},
    }
    for name, (a, b) in pairs.items():
        assert abs(float((a * b).mean())) * math.sqrt(a.numel()) < SIGMAS, name


class Assorted(nn.Module):
    """Leaves of every shape, drawn through views."""

    def __init__(self):
        super().__init__()
        shapes = {"matrix": (37, 29), "cube": (5, 7, 9), "vector": (1031,), "scalar": (), "one": (1, 1), "none": (0, 3)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.empty(shape)))
        self.big = nn.Parameter(torch.empty(211, 317))
        self.low = nn.Parameter(torch.empty(33, 17, dtype=torch.bfloat16))
        self.high = nn.Parameter(torch.empty(33, 17, dtype=torch.float64))
        self.whole = nn.Parameter(torch.empty(33, dtype=torch.int64), requires_grad=False)

    def reset_parameters(self):
        with torch.no_grad():
            for parameter in (self.matrix, self.cube, self.vector, self.scalar, self.one, self.big):
                parameter.normal_()
            self.none.zero_()
            self.low.uniform_(-1, 1).mul_(0.3).add_(0.1)
            self.high.normal_().clamp_(max=1.0)
            self.whole.fill_(3)
            self.matrix[4].zero_()
            self.matrix[:, 3:20:4] = 2.0
            self.matrix.t()[7, 1::5].uniform_(5, 6)
            self.matrix[30:].mul_(torch.tensor(3.0))
            self.cube.transpose(0, 2)[1:3, 2].add_(2)
            self.cube[..., 8].fill_(7)
            self.cube.view(-1)[::11].sub_(1)


def test_views_are_followed():
    """Against the same operators on full tensors, where they do not draw."""
    params = fs.functionalize(Assorted()).init(fs.ddp(one_axis()), seed=0, mode="counter")
    full = {name: leaf.local for name, leaf in params.items()}
    matrix, cube = full["matrix"], full["cube"]
    rows, columns = set(range(4)) | set(range(5, 30)), set(range(29)) - set(range(3, 20, 4)) - {7}
    assert matrix[4, list(columns)].eq(0).all()
    assert matrix[:30, 3:20:4][:, [0, 2, 3]].eq(2).all()
    assert matrix.t()[7, 1:30:5].gt(5).all()
    assert matrix[31:, 3].eq(6).all()
    assert matrix[list(rows)][:, list(columns)].abs().max() < 5
    expected = torch.full((5, 7), 7.0)
    expected.view(-1)[torch.arange(8, 315, 9) % 11 == 0] -= 1
    assert cube[..., 8].equal(expected)
    assert full["whole"].eq(3).all()
    assert full["high"].max() == 1


@pytest.mark.parametrize("world_size", (2, 3, pytest.param(4, marks=pytest.mark.slow)))
def test_every_world_size_and_strategy_draws_the_same(world_size):
    with torch.device("meta"):
        modules = [SEEDED[name]() for name in ("convolution", "recurrent", "attention")]
        modules += [make() for make in (GPT, tied, transposed, frozen, Assorted, nn.ReLU)]
    models = [fs.functionalize(module) for module in modules]
    expected = [fs.unshard(model.init(fs.ddp(one_axis()), seed=7, mode="counter")) for model in models]

    def program():
        for module, needed in zip(modules, expected):
            for _, strategy in every_strategy():
                with fs.comm.record() as record:
                    params = fs.functionalize(module).init(strategy, seed=7, mode="counter")
                assert len(record) <= 4 * sum(axis.size > 1 for axis in layout_axes(strategy))
                for leaf in params.values():
                    assert leaf.local.count_nonzero() == without_padding(leaf).count_nonzero()
                assert_same_bits(fs.unshard(params), needed)

    state = torch.get_rng_state()
    spmd(program, world_size)
    assert_same_bits(torch.get_rng_state(), state)


EXPECTED = "model.init: expected operators on each element by itself, got"
COMPUTED = "aten._local_scalar_dense.default"


REFUSED = {
    "orthogonal": (lambda m: nn.init.orthogonal_(m.weight), f"{EXPECTED} copy_ on ['1.weight']"),
    "another parameter": (lambda m: m.weight.data.copy_(m.inner.weight.mean()), COMPUTED),
    "rejection": (lambda m: nn.init.trunc_normal_(m.weight), COMPUTED),
    "a value": (lambda m: m.weight.data.div_(m.weight.max().item()), COMPUTED),
    "exponential": (lambda m: m.bias.data.exponential_(), f"{EXPECTED} exponential_ on ['1.bias']"),
    "rounding": (lambda m: m.bias.data.div_(2, rounding_mode="floor"), f"{EXPECTED} div_ on ['1.bias']"),
    "a list": (lambda m: torch._foreach_mul_([m.bias.data], 2), f"{EXPECTED} _foreach_mul_ on ['1.bias']"),
    "out": (lambda m: torch.mul(m.bias.data, 2, out=m.bias.data), f"{EXPECTED} mul on ['1.bias']"),
    "its own numbers": (
        lambda m: m.weight.data.normal_(generator=torch.Generator()),
        f"{EXPECTED} normal_ on ['1.weight']",
    ),
}


def test_what_is_not_element_by_element_is_refused():
    for draw, expected in REFUSED.values():
        model = fs.functionalize(nn.Sequential(nn.Linear(2, 2), Own(draw)))
        with pytest.raises(Exception, match=re.escape(expected)) as caught:
            model.init(fs.ddp(one_axis()), seed=0, mode="counter")
        assert str(caught.value) == expected
        assert caught.value.__notes__ == ['in the reset of 1 without values; pass mode="replay", which runs any']
    model = fs.functionalize(Own(lambda module: setattr(module.bias, "data", torch.zeros(6))))
    with pytest.raises(ValueError, match=r"\['bias'\]: expected a value for each, got elements left out"):
        model.init(fs.ddp(one_axis()), seed=0, mode="counter")


class HalfDrawn(nn.Linear):
    def reset_parameters(self):
        nn.init.normal_(self.weight.data[:2])


@on_ranks(4)
def test_what_no_rank_draws_is_refused_on_all():
    """Under "counter" only the ranks that have these elements see it."""
    model, strategy = fs.functionalize(HalfDrawn(3, 8, bias=False)), fs.zero2(one_axis(), min_shard_elements=0)
    texts = [text_of(lambda m=mode: model.init(strategy, seed=0, mode=m)) for mode in ("replay", "counter")]
    assert all("elements left out by reset_parameters" in text for text in texts)
    return texts


@on_ranks(2)
def test_seeds_that_differ_between_ranks_are_refused():
    mesh = one_axis()
    with pytest.raises(ValueError, match="ranks hold different trees") as caught:
        fs.functionalize(nn.Linear(2, 2)).init(fs.zero2(mesh), seed=mesh.get_rank(), mode="counter")
    assert "drawn from seed 1 by uniform_(" in str(caught.value)
    assert "as on rank shard=0" in str(caught.value)
    return str(caught.value)
