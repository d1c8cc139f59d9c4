"""remat: the same gradients, computed again rather than kept, under torch.func and inside value_and_grad."""

import itertools
from collections import Counter
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.func import grad, grad_and_value, hessian, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import _compat
from fshard.testing import assert_trees_close
from tests.bad_input import text_of
from tests.ranks import on_ranks
from tests.tolerance import within
from tests.trees import OF_EVERY_LEAF, assert_same_bits, normal, one_axis


def full_values():
    draw = normal()
    return {"blocks": [{"w": draw(5, 5), "b": draw(5)} for _ in range(3)]}


def block(params, x):
    return torch.tanh(x @ params["w"] + params["b"])


def chain(step, params, x):
    for part in params["blocks"]:
        x = step(part, x)
    return x.square().sum()


def transformed(step):
    """What is computed of a chain of steps by every transform that is stated to work."""
    params, x, t = full_values(), normal(1)(2, 5), normal(2)(2, 5)

    def of_x(x):
        return chain(step, params, x)

    return {
        "grad and value": grad_and_value(lambda p: chain(step, p, x))(params),
        "jvp of parameters": jvp(lambda p: chain(step, p, x), (params,), (fs.tree_map(torch.ones_like, params),)),
        "grad of jvp": grad(lambda x: jvp(of_x, (x,), (t,))[1])(x),
        "hessian": hessian(of_x)(x),
        "vmap of grad": vmap(grad(of_x))(x),
        "grad of vmap": grad(lambda p: vmap(lambda row: chain(step, p, row))(x).sum())(params),
    }


def by_autograd(step, x):
    params = fs.tree_map(lambda tensor: tensor.requires_grad_(), full_values())
    return torch.autograd.grad(chain(step, params, x), fs.tree_leaves(params))


def test_it_is_the_function_called_once_in_the_forward_and_once_in_the_backward():
    """Where nothing is differentiated: once."""
    expected = transformed(block)
    # Sums over a row and its columns, through three blocks, forward and backward and, of a derivative's, again.
    assert_trees_close(transformed(fs.remat(block)), expected, **within(expected, terms=5, steps=12))
    x, counted = normal(1)(2, 5), Mock(wraps=block)
    assert_same_bits(by_autograd(fs.remat(counted), x), by_autograd(block, x))
    assert counted.call_count == 2 * 3
    grad(lambda p: chain(fs.remat(counted), p, x))(full_values())
    assert counted.call_count == 4 * 3
    with torch.no_grad():
        chain(fs.remat(counted), full_values(), x)
    assert counted.call_count == 5 * 3
    w, found = normal()(3).requires_grad_(), []

    def square():
        h = torch.tanh(w * w)
        found.append(_compat.StorageWeakRef(h.untyped_storage()))
        return h.sum()

    value = fs.remat(square)()
    # When the forward has ended, what it saved is gone.
    assert found[0].expired()
    assert_same_bits(*(torch.autograd.grad(out, w) for out in (value, square())))


def test_trees_flags_and_random_numbers_pass():
    """As arguments and as results; an argument may be returned as it is, and masks are drawn again as they were."""

    def f(tree, flag, *, scale, nothing=None):
        x, (y, text) = tree["x"], tree["pair"]
        assert (flag, text, nothing) == (True, "text", None)
        return {"product": nn.functional.dropout(x * y * scale), "shape": x.shape, "nothing": None, "same": [x, y]}

    def run(f, x):
        torch.manual_seed(0)
        out = f({"x": x, "pair": (torch.arange(1000), "text")}, True, scale=torch.tensor(2.0))
        assert (out["shape"], out["nothing"]) == (x.shape, None)
        return out["product"].sum() + out["same"][0].sum()

    x = normal()(1000)
    with torch.random.fork_rng():
        found, expected = (grad(lambda x, g=g: run(g, x))(x) for g in (fs.remat(f), f))
    assert_same_bits(found, expected)


def test_what_is_differentiated_and_no_argument_is_refused_under_torch_func():
    """Its gradient would be lost; a tensor that is not differentiated may be anywhere."""
    text = r"remat: f uses .*, which is differentiated but is not an argument of f, so its gradient would be lost\."
    for closure in (
        lambda f, w: jvp(lambda w: f(w)(), (w,), (w,)),
        lambda f, w: vmap(grad(lambda w: f(w)().sum()))(w[None]),
    ):
        with pytest.raises(ValueError, match=text):
            closure(lambda w: fs.remat(lambda: w * w), normal()(3))
    other = normal(1)(3)
    assert_same_bits(grad(lambda w: fs.remat(lambda w: w * other)(w).sum())(normal()(3)), other)


def gathering(part, x):
    return block(fs.gather(part), x)


@on_ranks(1, 3)
def test_inside_value_and_grad_it_is_the_function(world_size):
    """Gathering inside, or passed what was gathered outside; and as torch's own checkpoint does."""
    spellings = [
        fs.remat(gathering),
        lambda part, x: checkpoint(gathering, part, x, use_reentrant=False),
        fs.remat(lambda part, x: fs.remat(block)(fs.gather(part), x)),
    ]
    mesh = one_axis()
    x = normal(1 + fs.comm.rank(fs.axis_of(mesh)))(2, 5)
    for strategy in OF_EVERY_LEAF.values():
        params = fs.shard(full_values(), strategy(mesh))
        expected = fs.value_and_grad(lambda p: chain(gathering, p, x))(params)
        whole = fs.remat(lambda p: chain(gathering, p, x))
        for f in (whole, *(lambda p, s=step: chain(s, p, x) for step in spellings)):
            assert_same_bits(fs.tree_leaves(fs.value_and_grad(f)(params)), fs.tree_leaves(expected))
    # The reference of value_and_grad, which keeps what it gathered, does not with remat.
    params, counts = fs.shard(full_values(), OF_EVERY_LEAF["zero3"](mesh)), []
    for step in (gathering, fs.remat(gathering)):
        with fs.comm.record() as record:
            grad(lambda p, s=step: fs.objective(chain(s, p, x), like=p))(params)
        counts.append([entry.label for entry in record].count("gather"))
    assert counts == ([3, 6] if world_size > 1 else [0, 0])


def waves(params, x):
    return block(params, x).sin().sin().sin()


@on_ranks(2)
def test_what_is_saved_holds_no_gathered_weight(world_size):
    """A transposed weight is a view of it: torch 2.14 lets the engine save a handle in its place, older ones do not."""
    # Without room to gather ahead only the last unit stays until the backward.
    params = fs.shard(full_values(), fs.zero3(one_axis(), min_shard_elements=0, bucket_bytes=0))
    x, weights = normal(1)(2, 5), []

    def transposing(part, x):
        full = fs.gather(part)
        weights.append(_compat.StorageWeakRef(full["w"].untyped_storage()))
        return torch.tanh(x @ full["w"].t() + full["b"])

    def loss(p, step):
        value = chain(step, p, x)
        return value, torch.tensor(weights[0].expired())

    expected = fs.value_and_grad(partial(loss, step=transposing), has_aux=True)(params)
    weights.clear()
    found = fs.value_and_grad(partial(loss, step=fs.remat(transposing, save=["aten.t"])), has_aux=True)(params)
    assert_same_bits(fs.tree_leaves((found[0][0], found[1])), fs.tree_leaves((expected[0][0], expected[1])))
    assert bool(expected[0][1])
    assert bool(found[0][1]) == bool(_compat.honor_saved_tensor_hooks())


def test_what_is_saved_is_not_computed_again():
    """In a graph as in eager code: it holds no more than what is saved."""
    params, x = fs.shard(full_values(), fs.zero3(one_axis())), normal(1)(1000, 5)

    def loss(f, p):
        return chain(lambda part, x: f(fs.gather(part), x), p, x)

    peaks, expected = [], fs.value_and_grad(partial(loss, waves))(params)
    for f, times in ((waves, 3), (fs.remat(waves, save=["aten.tanh"]), 3), (fs.remat(waves), 6)):
        run = fs.value_and_grad(partial(loss, f))
        assert_same_bits(fs.tree_leaves(run(params)), fs.tree_leaves(expected))
        assert_same_bits(grad(partial(loss, f))(full_values()), fs.unshard(expected[1]))
        graph = fs.make_graph(run)(params)
        assert [moment.operator for moment in graph.moments].count("aten.tanh") == times
        peaks.append(graph.peak_bytes())
    assert peaks[0] > peaks[1] > peaks[2]
    times, x = itertools.count(), normal()(3)
    again = fs.remat(lambda x: (x + next(times)).exp().sum(), save=["aten.exp"])
    assert_same_bits(grad(again)(x), x.exp())
    assert next(times) == 2
    # Names with an overload, as a graph prints those that are no default, keep results too; others would keep nothing.
    rows = fs.remat(lambda x: (x + next(times)).sum(0, keepdim=True).exp().sum(), save=["aten.exp.default"])
    assert_same_bits(grad(rows)(x), (x + 3).sum(0, keepdim=True).exp().expand(3))
    for wrong in ("aten.tanh", ["tanh"], ["aten"], [None]):
        with pytest.raises(
            ValueError, match=r"^remat: save=.* is not a list of operator names such as .\"aten.topk\"..$"
        ):
            fs.remat(block, save=wrong)


def test_math_on_shards_is_done_before_a_checkpoint_or_refused():
    params = fs.shard({"w": normal(1)(4, 4), "a": normal(2)(4, 4)}, fs.zero3(one_axis(), min_shard_elements=0))

    def merge(p):
        return {"w": fs.tree_map(lambda w, a: 2 * w + a, p["w"], p["a"])}

    def square(p):
        return fs.gather(p)["w"].square().sum()

    expected = fs.value_and_grad(lambda p: square(merge(p)))(params)

    def merged_square(p):
        return square(merge(p))

    for remat in (fs.remat, lambda f: partial(checkpoint, f, use_reentrant=False)):
        again = remat(square)
        found = fs.value_and_grad(lambda p: again(merge(p)))(params)  # noqa: B023
        assert_same_bits(fs.tree_leaves(found), fs.tree_leaves(expected))
        assert text_of(partial(fs.value_and_grad(remat(merged_square)), params)) == (
            "value_and_grad: ['w'] is computed inside a checkpoint, so the backward cannot gather it again. Compute it "
            "outside of the checkpoint."
        )
    reference = grad_and_value(lambda p: fs.objective(fs.remat(merged_square)(p), like=p))(params)
    assert_same_bits(fs.tree_leaves(reference[::-1]), fs.tree_leaves(expected))


def test_a_checkpoint_that_groups_its_gathers_in_another_way_is_told():
    params = fs.shard({"a": normal(1)(4), "b": normal(2)(4)}, fs.zero3(one_axis(), min_shard_elements=0))

    def text(first, again):
        """The error where a checkpoint makes some gathers in its forward and others when it is recomputed."""
        groups = iter((first, again))

        def compute(p, x):
            full = {}
            for names in next(groups):
                full |= fs.gather({name: p[name] for name in names})
            # The backward of a sine reads what was computed before it.
            return (x * sum(full.values())).sin()

        def loss(p):
            return checkpoint(compute, p, torch.ones(4), use_reentrant=False).sum()

        return text_of(partial(fs.value_and_grad(loss), params))

    end = "but did not in its forward. Make the checkpointed function gather the same leaves each time."
    assert text(("a", "b"), ("ab",)) == (
        f"value_and_grad: a checkpoint gathers ['a'], ['b'] together when it is recomputed, {end}"
    )
    assert text(("a",), ("b",)) == f"value_and_grad: a checkpoint gathers ['b'] when it is recomputed, {end}"


class Function(nn.Module):
    """A module of a function that has no module in torch."""

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.5)

    def forward(self, x):
        return self.attention(x, x, x)[0]


def behind_linear(make):
    return nn.Sequential(nn.Linear(6, 6), make())


# Modules that draw or that write to more than their result, with the shape of what they take.
NOISY = {
    "rrelu": (nn.RReLU, (4, 6)),
    "rrelu of a product": (lambda: behind_linear(nn.RReLU), (4, 6)),
    "rrelu, seen otherwise": (lambda: nn.Sequential(nn.RReLU(), nn.Flatten(0)), (4, 6)),
    "rrelu in place": (lambda: behind_linear(partial(nn.RReLU, inplace=True)), (4, 6)),
    "rrelu twice": (lambda: nn.Sequential(nn.RReLU(), nn.RReLU(0.5, 0.9)), (4, 6)),
    "dropout": (nn.Dropout, (4, 6)),
    "dropout in place": (lambda: behind_linear(partial(nn.Dropout, inplace=True)), (4, 6)),
    "dropout1d": (nn.Dropout1d, (4, 6, 5)),
    "dropout2d": (nn.Dropout2d, (4, 6, 3, 3)),
    "dropout3d": (nn.Dropout3d, (4, 6, 2, 2, 2)),
    "alpha dropout": (nn.AlphaDropout, (4, 6)),
    "feature alpha dropout": (nn.FeatureAlphaDropout, (4, 6, 5)),
    "native dropout": (lambda: Function(lambda x: torch.native_dropout(x, 0.5, True)[0]), (4, 6)),
    "fractional pool 2d": (lambda: nn.FractionalMaxPool2d(2, output_ratio=0.5), (2, 3, 8, 8)),
    "fractional pool 3d": (lambda: nn.FractionalMaxPool3d(2, output_ratio=0.5), (2, 3, 6, 6, 6)),
    "batch norm 1d": (lambda: nn.BatchNorm1d(6), (4, 6)),
    "batch norm 2d": (lambda: nn.BatchNorm2d(6), (4, 6, 3, 3)),
    "instance norm": (lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True), (4, 6, 5)),
    "lstm": (lambda: nn.LSTM(6, 6, 2, dropout=0.5), (4, 2, 6)),
    "gru": (lambda: nn.GRU(6, 6, 2, dropout=0.5), (4, 2, 6)),
    "rnn": (lambda: nn.RNN(6, 6, 2, dropout=0.5), (4, 2, 6)),
    "attention": (Attention, (4, 2, 6)),
    "encoder": (lambda: nn.TransformerEncoderLayer(6, 2, 12), (4, 2, 6)),
    "attended": (
        lambda: Function(lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)),
        (2, 4, 6),
    ),
    "gumbel": (lambda: Function(nn.functional.gumbel_softmax), (4, 6)),
    "noise": (lambda: Function(lambda x: x * torch.empty_like(x).normal_()), (4, 6)),
    "noise in place": (lambda: Function(lambda x: (2 * x).mul_(torch.empty_like(x).bernoulli_())), (4, 6)),
}


def noisy_loss(name, around):
    """A loss of a module in training mode and of what it takes, which the function recomputed ends with."""
    make, shape = NOISY[name]
    module, draw = make().double(), normal(3)
    model = fs.functionalize(module.train())
    params = {name: draw(*parameter.shape) for name, parameter in module.named_parameters()}

    def run(tree, key):
        full = fs.gather(tree)
        out, buffers = model.apply(full["params"], full["x"], key=key, buffers=model.buffers)
        return fs.tree_leaves(out)[0], buffers

    def loss(tree, key):
        out, buffers = around(run)(tree, key)
        return (out.flatten() * torch.linspace(1, 2, out.numel(), dtype=out.dtype)).sum(), buffers

    return loss, {"params": params, "x": draw(*shape)}


def differentiated(way, name, around):
    """Loss, buffers and gradients."""
    loss, full = noisy_loss(name, around)
    keys = torch.tensor([3, 4])
    sharded = fs.shard(full, fs.zero3(one_axis(), min_shard_elements=0))
    match way:
        case "autograd":
            leaves = fs.tree_map(lambda leaf: leaf.requires_grad_(), full)
            value, buffers = loss(leaves, keys[0])
            return value, buffers, torch.autograd.grad(value, fs.tree_leaves(leaves))
        case "value_and_grad":
            return fs.value_and_grad(loss, has_aux=True)(sharded, keys[0])
        case "jit":
            return fs.jit(fs.value_and_grad(loss, has_aux=True))(sharded, keys[0])
        case "accumulate":
            return fs.accumulate(loss, has_aux=True)(sharded, list(keys))
        case "torch.func":
            return torch.func.grad_and_value(loss, has_aux=True)(full, keys[0])


WAYS = ("autograd", "value_and_grad", "jit", "accumulate", "torch.func")


@pytest.fixture
def memory_without_values_is_nan():
    """It often still holds what the forward left there, which would be right by chance."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_equals_what_is_not_computed_again(way, name, around=fs.remat):
    found, expected = (fs.tree_leaves(differentiated(way, name, f)) for f in (around, lambda run: run))
    assert_same_bits(found, expected)


@pytest.mark.usefixtures("memory_without_values_is_nan")
def test_an_operator_that_fills_what_autograd_has_saved_ends_what_is_computed_again():
    """RReLU draws into such a tensor. torch's own checkpoint stops as soon as that is saved, before it is filled."""
    for way in WAYS:
        for name in ("rrelu of a product", "rrelu, seen otherwise"):
            assert_equals_what_is_not_computed_again(way, name)
    nested = lambda run: fs.remat(fs.remat(run))  # noqa: E731
    selective = partial(fs.remat, save=["aten.mm", "aten.addmm", "aten.pow"])
    for around in (nested, selective):
        assert_equals_what_is_not_computed_again("value_and_grad", "rrelu of a product", around)
        assert_equals_what_is_not_computed_again("jit", "rrelu of a product", around)


class Counting(_compat.DispatchMode):
    """Counts the operators that are computed, not those that a checkpoint stops at."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.counts[op] += 1
        return op(*args, **(kwargs or {}))


def test_elsewhere_the_last_operator_is_not_computed_again():
    """Its arguments are saved, and nobody needs its result."""
    x = normal()(4, 6).requires_grad_()

    def products(f):
        with Counting() as counting:
            torch.autograd.grad(f(x).sum(), x)
        return counting.counts[torch.ops.aten.mm.default]

    def ends_in_product(x):
        return x.sin() @ x.T

    def ends_in_noise(x):
        return nn.functional.rrelu(ends_in_product(x), training=True)

    assert products(fs.remat(ends_in_product)) == products(ends_in_product)
    assert products(fs.remat(ends_in_noise)) == products(ends_in_noise) + 1


@pytest.mark.usefixtures("memory_without_values_is_nan")
@pytest.mark.rows(9)
@pytest.mark.parametrize("name", NOISY)
@pytest.mark.parametrize("way", WAYS)
def test_noise_is_computed_again_to_the_bit(way, name):
    assert_equals_what_is_not_computed_again(way, name)


# Functions of parameters and an input that differentiate a chain of steps.
DIFFERENTIATED = {
    "grad and value": lambda step: grad_and_value(partial(chain, step)),
    "vjp": lambda step: lambda params, x: vjp(partial(chain, step, params), x)[1](torch.ones((), dtype=x.dtype)),
    "jvp": lambda step: lambda params, x: jvp(partial(chain, step, params), (x,), (x,)),
    "hessian": lambda step: lambda params, x: hessian(partial(chain, step, params))(x),
    "vmap of grad": lambda step: lambda params, x: vmap(grad(partial(chain, step, params)))(x),
}


def test_jit_traces_derivatives_of_it_under_torch_func():
    params, x = full_values(), normal(1)(2, 5)
    for make in DIFFERENTIATED.values():
        expected = make(fs.remat(block))(params, x)
        found = fs.jit(make(fs.remat(block)))(params, x)
        assert_same_bits(fs.tree_leaves(found), fs.tree_leaves(expected))


class RematerializesDropout(nn.Module):
    """Drops out in a function that is computed again, and around it."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x):
        def dropped(x, w, b):
            return self.dropout(torch.tanh(nn.functional.linear(x, w, b)))

        return self.dropout(fs.remat(dropped)(self.dropout(x), self.linear.weight, self.linear.bias))


def test_jit_draws_masks_of_a_key_again_where_it_computes_again():
    model, x = fs.functionalize(RematerializesDropout()), torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    params = model.init(fs.zero3(one_axis()), seed=0)

    def gradients(params, key):
        return grad(lambda p: fs.objective(model.apply(p, x, key=key).square().sum(), like=p))(params)

    jitted = fs.jit(gradients)
    found = []
    for key in (torch.tensor(3), torch.tensor(4)):
        found.append(fs.tree_leaves(gradients(params, key)))
        assert_same_bits(fs.tree_leaves(jitted(params, key)), found[-1])
    assert not found[0][0].equal(found[1][0])
    text = text_of(partial(fs.jit(grad(fs.remat(lambda x: nn.functional.dropout(x).sum()))), x))
    assert text.startswith("jit: aten.bernoulli_.float draws random numbers without a key"), text
