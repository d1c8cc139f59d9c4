"""remat: the same gradients, computed again rather than kept, under torch.func and inside value_and_grad."""

import itertools
import re
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
from tests.operators import Operators
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


# Functions of a step, parameters and an input, by every transform that is stated to work.
TRANSFORMED = {
    "grad and value": lambda step, params, x: grad_and_value(partial(chain, step))(params, x),
    "grad of vmap": lambda step, params, x: grad(lambda p: vmap(partial(chain, step, p))(x).sum())(params),
    "vmap of grad": lambda step, params, x: vmap(grad(partial(chain, step, params)))(x),
    "vjp": lambda step, params, x: vjp(partial(chain, step, params), x)[1](torch.ones_like(x[0, 0])),
    "jvp of parameters": lambda step, params, x: jvp(lambda p: chain(step, p, x), (params,), (params,)),
    "grad of jvp": lambda step, params, x: grad(lambda x: jvp(partial(chain, step, params), (x,), (x.cos(),))[1])(x),
    "hessian": lambda step, params, x: hessian(partial(chain, step, params))(x),
}


def test_it_is_the_function_under_every_transform_and_so_it_is_jitted():
    params, x = full_values(), normal(1)(2, 5)
    for transformed in TRANSFORMED.values():
        run = partial(transformed, fs.remat(block))
        expected, eager = transformed(block, params, x), run(params, x)
        # Sums over a row and its columns, through three blocks, forward and backward and, of a derivative's, again.
        assert_trees_close(eager, expected, **within(expected, terms=5, steps=12))
        assert_same_bits(fs.tree_leaves(fs.jit(run)(params, x)), fs.tree_leaves(eager))


def test_it_is_called_once_in_the_forward_and_once_in_the_backward():
    """Where nothing is differentiated: once. What the forward saved is gone when it has ended."""
    x, counted = normal(1)(2, 5), Mock(wraps=block)
    params = fs.tree_map(lambda tensor: tensor.requires_grad_(), full_values())
    remade, plain = (
        torch.autograd.grad(chain(step, params, x), fs.tree_leaves(params)) for step in (fs.remat(counted), block)
    )
    assert_same_bits(remade, plain)
    assert counted.call_count == 2 * 3
    grad(lambda p: chain(fs.remat(counted), p, x))(full_values())
    assert counted.call_count == 4 * 3
    with torch.no_grad():
        chain(fs.remat(counted), full_values(), x)
    assert counted.call_count == 5 * 3
    w, saved = normal()(3).requires_grad_(), []

    def square():
        h = torch.tanh(w * w)
        saved.append(_compat.StorageWeakRef(h.untyped_storage()))
        return h.sum()

    value = fs.remat(square)()
    assert saved[0].expired()
    assert_same_bits(*(torch.autograd.grad(out, w) for out in (value, square())))


def test_trees_flags_and_random_numbers_pass():
    """As arguments and as results; an argument may be returned as it is, and masks are drawn again as they were."""

    def f(tree, flag, *, scale, nothing=None):
        x, (y, text) = tree["x"], tree["pair"]
        assert (flag, text, nothing) == (True, "text", None)
        return {"product": nn.functional.dropout(x * y * scale), "shape": x.shape, "nothing": None, "same": [x, y]}

    def run(x, f):
        torch.manual_seed(0)
        out = f({"x": x, "pair": (torch.arange(1000), "text")}, True, scale=torch.tensor(2.0))
        assert (out["shape"], out["nothing"]) == (x.shape, None)
        return out["product"].sum() + out["same"][0].sum()

    with torch.random.fork_rng():
        assert_same_bits(grad(run)(normal()(1000), fs.remat(f)), grad(run)(normal()(1000), f))


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
    mesh = one_axis()
    x = normal(1 + fs.comm.rank(fs.axis_of(mesh)))(2, 5)

    def loss(step):
        return lambda params: chain(step, params, x)

    forms = [
        fs.remat(loss(gathering)),
        loss(fs.remat(gathering)),
        loss(partial(checkpoint, gathering, use_reentrant=False)),
        loss(fs.remat(lambda part, x: fs.remat(block)(fs.gather(part), x))),
    ]
    for strategy in OF_EVERY_LEAF.values():
        params = fs.shard(full_values(), strategy(mesh))
        expected = fs.value_and_grad(loss(gathering))(params)
        for form in forms:
            assert_same_bits(fs.tree_leaves(fs.value_and_grad(form)(params)), fs.tree_leaves(expected))
    # The reference of value_and_grad, which keeps what it gathered, does not with remat.
    params = fs.shard(full_values(), OF_EVERY_LEAF["zero3"](mesh))
    for step, gathers in ((gathering, 3), (fs.remat(gathering), 6)):
        with fs.comm.record() as record:
            grad(lambda p, step=step: fs.objective(loss(step)(p), like=p))(params)
        assert [entry.label for entry in record].count("gather") == (gathers if world_size > 1 else 0)


def waves(params, x):
    return block(params, x).sin().sin().sin()


@on_ranks(2)
def test_what_is_saved_holds_no_gathered_weight():
    """A transposed weight is a view of it: torch 2.14 lets the engine save a handle in its place, older ones do not."""
    # Without room to gather ahead only the last unit stays until the backward.
    params = fs.shard(full_values(), fs.zero3(one_axis(), min_shard_elements=0, bucket_bytes=0))
    x = normal(1)(2, 5)

    def run(remat):
        """Differentiate three steps; return also whether the weight of the first was freed in the forward."""
        weights = []

        def transposing(part, x):
            full = fs.gather(part)
            weights.append(_compat.StorageWeakRef(full["w"].untyped_storage()))
            return torch.tanh(x @ full["w"].t() + full["b"])

        def loss(params):
            value = chain(remat(transposing), params, x)
            return value, torch.tensor(weights[0].expired())

        (value, is_freed), grads = fs.value_and_grad(loss, has_aux=True)(params)
        return fs.tree_leaves((value, grads)), bool(is_freed)

    plain, plain_is_freed = run(lambda f: f)
    saving, saving_is_freed = run(partial(fs.remat, save=["aten.t"]))
    assert_same_bits(saving, plain)
    assert plain_is_freed
    assert saving_is_freed == bool(_compat.honor_saved_tensor_hooks())


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


def test_what_is_saved_under_torch_func_is_what_the_forward_computed():
    """Names may have an overload, as a graph prints those that are no default."""
    numbers, x = itertools.count(), normal()(3)
    again = fs.remat(lambda x: (x + next(numbers)).exp().sum(), save=["aten.exp"])
    assert_same_bits(grad(again)(x), x.exp())
    assert next(numbers) == 2
    rows = fs.remat(lambda x: (x + next(numbers)).sum(0, keepdim=True).exp().sum(), save=["aten.exp.default"])
    assert_same_bits(grad(rows)(x), (x + 3).sum(0, keepdim=True).exp().expand(3))


def test_what_names_no_operator_is_refused():
    text = r"^remat: save=.* is not a list of operator names such as .\"aten.topk\"..$"
    for wrong in ("aten.tanh", ["tanh"], ["aten"], [None]):
        with pytest.raises(ValueError, match=text):
            fs.remat(block, save=wrong)


def test_math_on_shards_is_done_before_a_checkpoint_or_refused():
    params = fs.shard({"w": normal(1)(4, 4), "a": normal(2)(4, 4)}, fs.zero3(one_axis(), min_shard_elements=0))

    def merge(p):
        return {"w": fs.tree_map(lambda w, a: 2 * w + a, p["w"], p["a"])}

    def square(p):
        return fs.gather(p)["w"].square().sum()

    def merged_square(p):
        return square(merge(p))

    expected = fs.value_and_grad(merged_square)(params)
    for remat in (fs.remat, lambda f: partial(checkpoint, f, use_reentrant=False)):
        again = remat(square)
        outside = fs.value_and_grad(lambda p, again=again: again(merge(p)))(params)
        assert_same_bits(fs.tree_leaves(outside), fs.tree_leaves(expected))
        assert text_of(partial(fs.value_and_grad(remat(merged_square)), params)) == (
            "value_and_grad: ['w'] is computed inside a checkpoint, so the backward cannot gather it again. Compute it "
            "outside of the checkpoint."
        )
    grads, value = grad_and_value(lambda p: fs.objective(fs.remat(merged_square)(p), like=p))(params)
    assert_same_bits(fs.tree_leaves((value, grads)), fs.tree_leaves(expected))


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
    """A module of a function of other modules and an input."""

    def __init__(self, f, *modules):
        super().__init__()
        self.f, self.modules_of_f = f, nn.ModuleList(modules)

    def forward(self, x):
        return self.f(*self.modules_of_f, x)


def behind_linear(make):
    return nn.Sequential(nn.Linear(6, 6), make())


# Modules that draw or that write to more than their result, with the shape of what they take.
NOISY = {
    "rrelu of a product": (lambda: behind_linear(nn.RReLU), (4, 6)),
    "rrelu, seen otherwise": (lambda: nn.Sequential(nn.RReLU(), nn.Flatten(0)), (4, 6)),
    "rrelu in place": (lambda: behind_linear(partial(nn.RReLU, inplace=True)), (4, 6)),
    "rrelu twice": (lambda: nn.Sequential(nn.RReLU(), nn.RReLU(0.5, 0.9)), (4, 6)),
    "dropout in place": (lambda: behind_linear(partial(nn.Dropout, inplace=True)), (4, 6)),
    "feature alpha dropout": (nn.FeatureAlphaDropout, (4, 6, 5)),
    "native dropout": (lambda: Function(lambda x: torch.native_dropout(x, 0.5, True)[0]), (4, 6)),
    "fractional pool 2d": (lambda: nn.FractionalMaxPool2d(2, output_ratio=0.5), (2, 3, 8, 8)),
    "batch norm 2d": (lambda: nn.BatchNorm2d(6), (4, 6, 3, 3)),
    "lstm": (lambda: nn.LSTM(6, 6, 2, dropout=0.5), (4, 2, 6)),
    "attention": (
        lambda: Function(lambda attention, x: attention(x, x, x)[0], nn.MultiheadAttention(6, 2, dropout=0.5)),
        (4, 2, 6),
    ),
    "attended": (
        lambda: Function(lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)),
        (2, 4, 6),
    ),
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


def by_torch_autograd(loss, full, key):
    leaves = fs.tree_map(lambda leaf: leaf.requires_grad_(), full)
    value, buffers = loss(leaves, key)
    return value, buffers, torch.autograd.grad(value, fs.tree_leaves(leaves))


def sharded(full):
    return fs.shard(full, fs.zero3(one_axis(), min_shard_elements=0))


# Each differentiates a loss with buffers, of full parameters and a key.
WAYS = {
    "autograd": by_torch_autograd,
    "value_and_grad": lambda loss, full, key: fs.value_and_grad(loss, has_aux=True)(sharded(full), key),
    "jit": lambda loss, full, key: fs.jit(fs.value_and_grad(loss, has_aux=True))(sharded(full), key),
    "accumulate": lambda loss, full, key: fs.accumulate(loss, has_aux=True)(sharded(full), [key, key + 1]),
    "torch.func": lambda loss, full, key: grad_and_value(loss, has_aux=True)(full, key),
}


@pytest.fixture
def memory_without_values_is_nan():
    """It often still holds what the forward left there, which would be right by chance."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_equals_what_is_not_computed_again(way, name, around=fs.remat):
    """Loss, buffers and gradients."""
    results = [fs.tree_leaves(WAYS[way](*noisy_loss(name, f), torch.tensor(3))) for f in (around, lambda run: run)]
    assert_same_bits(*results)


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


def test_elsewhere_the_last_operator_is_not_computed_again():
    """Its arguments are saved, and nobody needs its result."""
    x = normal()(4, 6).requires_grad_()

    def products(f):
        with Operators() as operators:
            torch.autograd.grad(f(x).sum(), x)
        return operators.names.count("aten.mm.default")

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


def drop_out_twice(linear, dropout, x):
    """Drop out in a function that is computed again, and around it."""

    def dropped(x, w, b):
        return dropout(torch.tanh(nn.functional.linear(x, w, b)))

    return dropout(fs.remat(dropped)(dropout(x), linear.weight, linear.bias))


def test_jit_draws_masks_of_a_key_again_where_it_computes_again():
    model = fs.functionalize(Function(drop_out_twice, nn.Linear(4, 4), nn.Dropout(0.5)))
    params, x = model.init(fs.zero3(one_axis()), seed=0), normal(1)(8, 4, dtype=torch.float32)

    def gradients(params, key):
        return fs.tree_leaves(grad(lambda p: fs.objective(model.apply(p, x, key=key).square().sum(), like=p))(params))

    first, second = (gradients(params, torch.tensor(key)) for key in (3, 4))
    jitted = fs.jit(gradients)
    assert_same_bits([jitted(params, torch.tensor(key)) for key in (3, 4)], [first, second])
    assert not first[0].equal(second[0])
    text = text_of(partial(fs.jit(grad(fs.remat(lambda x: nn.functional.dropout(x).sum()))), x))
    assert text.startswith("jit: aten.bernoulli_.float draws random numbers without a key"), text


@on_ranks(2)
def test_leaves_that_ranks_hold_whole_are_gathered_inside():
    """Under torch.func, where a graph shows only the call of remat: their gradients are summed, or refused."""
    axis = fs.axis_of(one_axis())
    scale = fs.axis_index(axis) + 1.0
    full = {"w": normal(1)(5, 3), "b": normal(2)(3)}

    def hidden(leaf):
        return torch.tanh(fs.gather(leaf) * scale)

    def product(h, leaf):
        return (h * fs.gather(leaf)).sum()

    def gradient_of(step):
        def objective(params):
            return fs.objective(step(product)(step(hidden)(params["w"]), params["b"]), like=params)

        return grad(objective)

    for strategy in (fs.ddp(one_axis()), fs.zero3(one_axis())):
        params = fs.shard(full, strategy)
        run, plain = gradient_of(fs.remat), gradient_of(lambda f: f)
        assert_trees_close(run(params), plain(params), exact=True)
        assert_trees_close(fs.jit(run)(params), plain(params), exact=True)
        stack = fs.tree_map(lambda leaf: torch.stack([leaf, -leaf]), params)
        assert_trees_close(vmap(run)(stack), vmap(plain)(stack), exact=True)
        expected = jvp(plain, (params,), (params,))
        assert_trees_close(jvp(run, (params,), (params,)), expected, **within(expected, terms=5, steps=12))
        summed = "gradients of these leaves would not be summed"
        text = "['w']: expected gather or pcast, got math on a leaf that is replicated over 'shard'"
        for f in (
            lambda params: (params["w"].local * scale).sum(),
            lambda params: product(params["w"].local, params["b"]),
        ):
            with pytest.raises(ValueError, match=re.escape(f"remat: {summed}\n  [0][0]{text}")):
                grad(lambda params, f=f: fs.objective(fs.remat(f)(params), like=params))(params)
        with pytest.raises(ValueError, match=re.escape(f"objective: {summed}\n  {text}")):
            grad(lambda params: fs.objective(fs.remat(lambda w: w.sum())(params["w"].local), like=params))(params)


def test_integers_pass_through_forward_mode():
    """Tokens go in, and a choice comes out beside what is differentiated."""
    table, tokens = normal()(5, 3), torch.tensor([1, 4, 1])

    def choose(table, tokens):
        rows = table[tokens].sin()
        return rows.argmax(), rows.square().sum(), tokens

    def second(step, table):
        return step(table, tokens)[1]

    for transform in (lambda f: hessian(f)(table), lambda f: jvp(f, (table,), (table.cos(),))):
        expected = transform(partial(second, choose))
        results = transform(partial(second, fs.remat(choose)))
        assert_trees_close(results, expected, **within(expected, terms=9, steps=4))
