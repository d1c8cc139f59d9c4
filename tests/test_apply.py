"""functionalize and apply: any module as a pure function, equal to the module itself, under any call."""

import copy
import gc
import re
import weakref
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.module_template import _ParametrizedCache
from fshard.testing import assert_trees_close
from tests.modules import EVERY_LEAF, MODULES, ROWS, assert_untouched, build, everything
from tests.ranks import my_rank, on_ranks
from tests.tolerance import within
from tests.trees import STRATEGIES, assert_same_bits, meshes, normal, one_axis, tensors
from tests.unit_models import filled, zero3


def loss_of(outputs):
    return sum((leaf * torch.linspace(0.5, 1.5, leaf.numel()).view_as(leaf)).sum() for leaf in tensors(outputs))


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.rows(len(MODULES))
def test_module_is_untouched_and_its_copy_holds_no_weights(name):
    module, args, kwargs = build(name)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    before = everything(module)
    model = fs.functionalize(module)
    params = model.init(fs.zero2(one_axis(), min_shard_elements=0))
    fs.value_and_grad(lambda p: loss_of(model.apply(p, *args, **kwargs)))(params)
    with torch.no_grad():
        model.apply(fs.gather(params), *args, **kwargs)
    assert_untouched(module, before)
    for submodule in module.modules():
        assert not [*submodule._forward_hooks, *submodule._forward_pre_hooks, *submodule._backward_hooks]
    for bare in (model._bare, *(template.module for template in model._idle)):
        assert isinstance(bare, type(module))
        assert bare.training == module.training
        # In lists too, such as a recurrent module's flat weights.
        attributes = [submodule.__dict__ for submodule in bare.modules()]
        assert all(tensor.is_meta for tensor in tensors(attributes))
    # Parameters are copies: a module that trains on does not change them.
    copies = fs.tree_map(torch.clone, params)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    assert_same_bits(fs.tree_leaves(params), fs.tree_leaves(copies))


# The same modules on each rank: their constructors draw from the process's generator.
BUILT = {name: build(name) for name in MODULES}


def test_the_shape_of_a_plain_parameter_is_its_own():
    """Whatever a program notes on it."""
    weight = torch.ones(2, 2)
    weight.spec = fs.Spec((3, 3))
    with pytest.raises(ValueError, match="apply: the shapes of params differ from the module's"):
        fs.functionalize(torch.nn.Linear(3, 3, bias=False)).apply({"weight": weight}, torch.ones(3))


@on_ranks(3)
def test_outputs_are_the_module_s():
    for module, args, kwargs in BUILT.values():
        model = fs.functionalize(module)
        before = {path: parameter.detach() for path, parameter in module.named_parameters()}
        # torch chooses other kernels where a weight requires a gradient, which a gathered one does not.
        expected = copy.deepcopy(module).requires_grad_(False)(*args, **kwargs)
        for strategy in (EVERY_LEAF, "last dim"):
            params = model.init(STRATEGIES[strategy](meshes()))
            assert list(params) == list(before)
            assert_same_bits(fs.unshard(params), before)
            for given in (params, fs.gather(params), before):
                out = fs.apply(model, given, *args, **kwargs)
                assert type(out) is type(expected)
                assert_same_bits(tensors(out), tensors(expected))
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    evaluated = tensors(model.apply(params, *args, **kwargs))
                    assert_same_bits(evaluated, tensors(expected))
                assert not any(tensor.requires_grad for tensor in evaluated)


@on_ranks(3)
def test_gradients_are_the_module_s():
    """Each rank sees the same inputs, so that the mean over ranks is what one process has."""
    for built, args, kwargs in BUILT.values():
        module = copy.deepcopy(built)
        trained = {path: parameter for path, parameter in module.named_parameters() if parameter.requires_grad}
        if not trained:
            continue
        value = loss_of(module(*args, **kwargs))
        dense = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
        expected = {path: grad for path, grad in zip(trained, dense) if grad is not None}
        model = fs.functionalize(module, units=nn.Module)
        params = model.init(fs.zero3(one_axis(), min_shard_elements=0, bucket_bytes=0))
        step = fs.value_and_grad(lambda p: loss_of(model.apply(p, *args, **kwargs)))  # noqa: B023
        loss, grads = step(params)
        grads = {path: grad for path, grad in grads.items() if grad is not None}
        # Sums over at most 10 rows or columns, in an order that depends on the kernel, through at most 10 layers.
        near = within((value, expected), terms=10, steps=10)
        assert_trees_close((loss, fs.unshard(grads)), (value.detach(), expected), **near)


class Counter(nn.Module):
    """Buffers written every way there is: in place, by assignment, under a second name; one is None."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2, dtype=torch.float64)
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("assigned", torch.ones(2), persistent=False)
        self.register_buffer("constant", torch.full((1,), 5.0))
        self.register_buffer("none", None)
        self.register_buffer("also_in_place", self.in_place)

    def forward(self, x):
        self.also_in_place.add_(1)
        self.assigned = 2 * self.assigned
        return self.linear(x) * self.assigned + self.in_place + self.constant


def test_buffers_go_in_and_out():
    module = Counter()
    reference = copy.deepcopy(module)
    before = everything(module)
    model = fs.functionalize(module)
    params = model.init(fs.zero2(one_axis(), min_shard_elements=0))
    buffers = model.buffers
    assert list(buffers) == ["in_place", "assigned", "constant"]
    for _ in range(3):
        old = fs.tree_map(torch.clone, buffers)
        out, new = model.apply(params, ROWS, buffers=buffers)
        assert_same_bits(buffers, old)
        buffers = new
        assert_same_bits(out, reference(ROWS).detach())
        assert_same_bits(buffers, dict(reference.named_buffers()))
    assert_untouched(module, before)
    assert_same_bits(model.buffers, dict(module.named_buffers()))
    # Buffers are values like others: the same ones in give the same ones out.
    assert_same_bits(*(model.apply(params, ROWS, buffers=buffers)[1] for _ in range(2)))


@on_ranks(4)
def test_sync_buffers():
    rank = my_rank()
    like = fs.shard({"w": torch.ones(3)}, STRATEGIES["two dims"](meshes()))
    buffers = {"mean": torch.tensor([rank, 2.0 * rank]), "count": torch.tensor(10 + rank), "none": None}
    before = fs.tree_map(torch.clone, buffers)
    first = fs.sync_buffers(buffers, like)
    mean = fs.sync_buffers(buffers, like, by="mean")
    assert_same_bits(buffers, before)
    assert_same_bits(first, {"mean": torch.zeros(2), "count": torch.tensor(10), "none": None})
    assert_same_bits(mean, first | {"mean": torch.tensor([1.5, 3.0])})


class Rescaled(nn.Linear):
    """Divides its weight in place before it is used, as RWKV of transformers does where it is evaluated."""

    def forward(self, x, rescale=True):
        if rescale:
            with torch.no_grad():
                self.weight.div_(2)
        return super().forward(x)


WRITTEN = (
    r"^\w+: parameters were modified in place\n  \['weight'\]: was written to once\n"
    r"To fix: return a new tensor\. The other leaves are unchanged\.$"
)


@on_ranks(2)
@pytest.mark.parametrize("mode", (torch.inference_mode, torch.no_grad, torch.enable_grad))
def test_writes_to_gathered_weights_and_buffers_are_refused_in_every_mode(mode):
    """By name, on every rank; calls after that, and parameters made there, are as ever."""
    module, x = filled(Rescaled(3, 3)).eval(), normal()(3, 3)
    expected = module(x, rescale=False).detach()
    model = fs.functionalize(module, nn.Linear)
    norm = fs.functionalize(nn.BatchNorm1d(3).double())
    runs = [model.apply, fs.jit(model.apply), lambda params, x: model.apply(fs.gather(params), x)]
    if mode is torch.enable_grad:
        runs.append(fs.value_and_grad(lambda params, x: model.apply(params, x).sum()))
    for strategy in (fs.zero2(one_axis(), min_shard_elements=0), fs.ddp(one_axis()), zero3()(one_axis())):
        params = model.init(strategy)
        for run in runs:
            written = fs.tree_map(torch.clone, params)
            with mode(), pytest.raises(ValueError, match=WRITTEN):
                run(written, x)
            # What was written has reached parameters that ranks hold whole, and no others.
            if params["weight"].spec.partition:
                assert_same_bits(fs.tree_leaves(written), fs.tree_leaves(params))
        with mode():
            params = model.init(strategy)
            inside = model.apply(params, x, rescale=False)
            with pytest.raises(ValueError, match=r"updated buffers .*\['num_batches_tracked'\], and the updates"):
                norm.apply(norm.init(strategy), x)
        outside = model.apply(params, x, rescale=False)
        assert_same_bits((inside.detach(), outside.detach()), (expected, expected))


def test_writes_to_a_leaf_that_the_function_computes_are_refused():
    """Also where its full tensor is the shard itself, to which the call counts no writes."""

    def loss(params):
        full = fs.gather(fs.tree_map(lambda shard: 2 * shard, params))["weight"]
        with torch.no_grad():
            full.add_(1)
        return full.sum()

    params = fs.shard({"weight": torch.ones(3)}, fs.zero3(one_axis()))
    with pytest.raises(ValueError, match=WRITTEN):
        fs.value_and_grad(loss)(params)


@pytest.mark.parametrize("is_sharded", [True, False])
def test_leaves_that_a_function_has_donated_are_refused(is_sharded):
    """The call has checked them before, when they had values. A plain tensor stays the same object."""
    model = fs.functionalize(nn.Linear(2, 2))
    tx = fs.sgd(0.1)

    def loss(params):
        bias = {"bias": params["bias"] if is_sharded else params["bias"].local}
        fs.update(tx, fs.TrainState.create(bias, tx), fs.tree_map(torch.ones_like, bias), donate=True)
        return model.apply(params, torch.ones(1, 2)).sum()

    with pytest.raises(ValueError, match=r"apply: arguments were donated\n  \['bias'\]: was donated"):
        fs.value_and_grad(loss)(model.init(fs.zero3(one_axis())))


def write_to_a_result(w):
    result = torch.exp(w)
    result.add_(1)
    return result.sum()


def write_to_an_operand(w):
    operand = 2 * w
    result = torch.sin(operand)
    operand.add_(1)
    return result.sum()


@pytest.mark.parametrize("write", (write_to_a_result, write_to_an_operand))
@on_ranks(2)
def test_writes_to_what_a_backward_needs_are_refused(write):
    """torch sees them by itself only where no hooks save tensors."""

    def loss(params, batch=None):
        return write(fs.gather(params)["w"])

    params = fs.shard({"w": normal()(4, 4)}, zero3()(one_axis()))
    message = (
        r"a tensor that autograd saved for the backward \(a float64 \w*Tensor of shape \(4, 4\)\) was modified in "
        "place. Modify a clone instead."
    )
    for run in (fs.value_and_grad(loss), fs.jit(fs.value_and_grad(loss))):
        with pytest.raises(RuntimeError, match=f"value_and_grad: {message}"):
            run(params)
    with pytest.raises(RuntimeError, match=f"accumulate: {message}"):
        fs.accumulate(loss)(params, [0])


class Stateful(nn.Linear):
    """A unit whose forward writes to tensors and containers, replaces its weight and deletes an attribute."""

    def __init__(self):
        super().__init__(5, 5)
        self.calls = 0
        self.total = torch.zeros(())
        self.outputs = []
        self.by_name = {"calls": [0]}
        self.once = True

    def forward(self, x):
        self.eval()
        self.calls += 1
        self.total += 1
        self.outputs.append(self.weight.sum())
        self.by_name["calls"][0] += 1
        self.register_forward_hook(lambda module, args, out: 2 * out)
        self.weight = nn.Parameter(2 * self.weight.detach())
        factor = self.calls + self.total.item() + self.by_name["calls"][0] + self.training + hasattr(self, "once")
        if hasattr(self, "once"):
            del self.once
        self.total = self.total + sum(self.outputs)
        return torch.tanh(super().forward(x) * factor + self.total)


class Around(nn.Module):
    """Enters a unit twice; a checkpoint reads what the forward set."""

    def __init__(self):
        super().__init__()
        self.inner, self.plain, self.mask = Stateful(), nn.Linear(5, 5), None

    def forward(self, x, fail=False):
        self.mask = (x > 0).to(x.dtype)
        x = self.inner(x) + checkpoint(lambda x: torch.tanh(self.plain(x) * self.mask), x, use_reentrant=False)
        if fail:
            raise KeyError("after a change")
        return self.inner(x).square().mean()


def test_attributes_that_a_forward_sets_before_it_fails_do_not_outlive_the_call():
    module, x = filled(Around()), normal()(3, 5)
    model = fs.functionalize(module, nn.Linear)
    params = model.init(zero3()(one_axis()))
    for run in (fs.value_and_grad(model.apply), model.apply):
        with pytest.raises(KeyError, match="after a change"):
            run(params, x, fail=True)
    fresh = fs.functionalize(module, nn.Linear)
    assert_same_bits(model.apply(params, x), fresh.apply(params, x))


class Counting(nn.Linear):
    """Counts its calls in a list inside a tuple, and in a buffer that it replaces."""

    def __init__(self):
        super().__init__(5, 5)
        self.counts = ([0],)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.counts[0][0] += 1
        self.calls = self.calls + 1
        return super().forward(x) * self.counts[0][0]


def test_a_buffer_that_is_replaced_is_an_update_too():
    model = fs.functionalize(Counting())
    with pytest.raises(ValueError, match=r"^apply: the module updated buffers \['calls'\], and the updates"):
        model.apply(model.init(zero3()(one_axis())), torch.ones(1, 5))


def test_a_buffer_of_two_submodules_is_read_from_the_first():
    module = nn.ModuleList((Counting(), Counting()))
    module[1].calls = module[0].calls
    module.forward = module[0].forward
    model = fs.functionalize(module)
    _, buffers = model.apply(model.init(zero3()(one_axis())), torch.ones(1, 5), buffers=model.buffers)
    assert buffers["0.calls"] == 1


class Negative(nn.Module):
    """Counts how often it computes a tensor."""

    computed = 0

    def forward(self, x):
        Negative.computed += 1
        return -x


def parametrized(parametrization):
    layer = nn.Linear(5, 5)
    parametrize.register_parametrization(layer, "weight", parametrization)
    return layer


class Twice(nn.Module):
    """Uses a layer twice, with another one in between."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.other = layer, nn.Linear(5, 5)

    def forward(self, x):
        return self.layer(torch.tanh(self.other(self.layer(x))))


class TwiceCached(Twice):
    """Caches parametrized tensors by itself."""

    def forward(self, x):
        with parametrize.cached():
            return super().forward(x)


class TwiceChecked(Twice):
    """Computes one of the uses again in the backward."""

    def forward(self, x):
        return torch.tanh(self.other(checkpoint(self.layer, x, use_reentrant=False)))


class Recurrent(nn.LSTM):
    """Returns the outputs alone."""

    def forward(self, x):
        return super().forward(x)[0]


def recurrent():
    lstm = Recurrent(5, 5)
    parametrize.register_parametrization(lstm, "weight_hh_l0", Negative())
    return nn.Sequential(lstm, nn.Linear(5, 5))


# Whatever keeps values that are computed from parameters: torch, attributes that hooks set, or the forward itself.
KEEPING = {
    "attributes": (lambda: filled(Around()), nullcontext),
    "a list in a tuple": (lambda: nn.Sequential(Counting()), nullcontext),
    "a tensor that is used twice": (lambda: Twice(parametrized(Negative())), parametrize.cached),
    "the gathered tensor itself": (lambda: Twice(parametrized(nn.Identity())), parametrize.cached),
    "a context of the forward alone": (lambda: TwiceCached(parametrized(nn.Identity())), nullcontext),
    "a checkpoint": (lambda: TwiceChecked(parametrized(Negative())), parametrize.cached),
    "spectral norm": (lambda: Twice(parametrizations.spectral_norm(nn.Linear(5, 5))), parametrize.cached),
    "spectral norm by hooks": (lambda: Twice(nn.utils.spectral_norm(nn.Linear(5, 5))), parametrize.cached),
    "recurrent": (recurrent, parametrize.cached),
    "autocast": (lambda: Twice(nn.Linear(5, 5)), lambda: torch.autocast("cpu", torch.bfloat16)),
}


def all_results(model, params, x):
    """Run a model in all ways; of buffers the updated ones are results too."""

    def loss_fn(params, x):
        out = model.apply(params, x, buffers=model.buffers)
        return out[0].double().square().mean(), out[1]

    def graph_loss(params, x):
        return loss_fn(params, x)[0]

    with torch.no_grad():
        evaluated = model.apply(params, x, buffers=model.buffers)
    full = fs.tree_map(lambda leaf: leaf.detach().clone().requires_grad_(), fs.gather(params))
    return [
        fs.value_and_grad(loss_fn, has_aux=True)(params, x),
        torch.autograd.grad(graph_loss(full, x), fs.tree_leaves(full)),
        fs.accumulate(graph_loss)(params, [x, 2 * x]),
        evaluated,
    ]


def check_calls_in_one_context(module, strategy, context):
    """Calls of several parameters in one context give what each gives in a context and of a model of its own."""
    model = fs.functionalize(module, nn.Linear)
    first = model.init(strategy)
    second = fs.tree_map(lambda leaf: 0.5 * leaf + 0.1, first)
    x = normal()(3, 5).to(next(module.parameters()).dtype)
    with context():
        together = [all_results(model, params, x) for params in (first, second, first)]
    alone = []
    for params in (first, second):
        with context():
            alone.append(all_results(fs.functionalize(module, nn.Linear), params, x))
    assert_same_bits(fs.tree_leaves(together), fs.tree_leaves([*alone, alone[0]]))


# The same modules on each rank.
BUILT_FOR_KEEPING = {name: make() for name, (make, _) in KEEPING.items()}


@pytest.mark.rows(len(KEEPING))
@pytest.mark.parametrize("name, strategy", list(zip(KEEPING, cycle(("ddp", "units", EVERY_LEAF)))))
@on_ranks(2)
def test_values_that_torch_keeps_are_those_of_one_call(name, strategy):
    _, context = KEEPING[name]
    transform = zero3()(one_axis()) if strategy == "units" else STRATEGIES[strategy](meshes())
    check_calls_in_one_context(BUILT_FOR_KEEPING[name], transform, context)


# Of the tensors that the compiler is given, which have gradients of a function of fshard's.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed")
def test_values_that_a_compiled_module_keeps_are_those_of_one_call():
    module = torch.compile(Twice(parametrized(Negative())), backend="eager")
    check_calls_in_one_context(module, zero3()(one_axis()), parametrize.cached)


def test_a_parametrized_tensor_is_not_kept_beyond_its_forward():
    """A backward that computes a part of one call again may be followed by that of a call of other parameters."""
    layer = parametrizations.weight_norm(nn.Linear(3, 2))
    kept = _ParametrizedCache()
    with parametrize.cached(), torch.no_grad():
        kept.begin()
        assert kept.read(layer, "weight") is kept.read(layer, "weight")
        kept.end()
        before = kept.read(layer, "weight")
        layer.parametrizations.weight.original0.mul_(2)
        assert_same_bits(kept.read(layer, "weight"), 2 * before)


def test_a_parametrized_tensor_is_computed_once_in_a_call_that_caches():
    module, x = Twice(parametrized(Negative())), torch.ones(3, 5)
    model = fs.functionalize(module, nn.Linear)
    params = model.init(zero3()(one_axis()))
    expected = module(x).detach()

    def computed(run):
        Negative.computed = 0
        assert_same_bits(run(), expected)
        return Negative.computed

    assert computed(lambda: model.apply(params, x)) == 2
    with parametrize.cached():
        assert [computed(lambda: model.apply(params, x)) for _ in range(2)] == [1, 1]
        assert computed(lambda: model.apply(fs.gather(params), x)) == 1
    caching = fs.functionalize(TwiceCached(module.layer), nn.Linear)
    params = caching.init(zero3()(one_axis()))
    expected = caching.apply(params, x)
    assert computed(lambda: caching.apply(params, x)) == 1


def read_and_fill(submodule):
    """Draw by filling parameters, and read what a parametrization computes from them."""
    for tensor in submodule.parameters(recurse=False):
        tensor.fill_(1.0)
    if parametrize.is_parametrized(submodule):
        submodule.weight.sum()


def test_a_cache_of_the_module_s_own_tensors_is_left_alone():
    """Neither init nor calls read what the module cached, or write there."""
    module, x = Twice(parametrized(Negative())), torch.ones(3, 5)
    model = fs.functionalize(module, nn.Linear)
    params = fs.tree_map(lambda leaf: 2 * leaf, model.init(zero3()(one_axis())))
    expected = module(x), model.apply(params, x)
    with parametrize.cached():
        model.init(zero3()(one_axis()), seed=0, reset=read_and_fill)
        assert_same_bits(module(x), expected[0])
        assert_same_bits(model.apply(params, x), expected[1])


class Modulated(nn.Linear):
    """A layer that calls a submodule with weights that it computes from its own and from those of the submodule."""

    def __init__(self):
        super().__init__(3, 3)
        self.inner = nn.Linear(3, 3)

    def _call_inner(self, x):
        return torch.func.functional_call(self.inner, {"weight": self.inner.weight @ self.weight}, (x,)).tanh()

    def forward(self, x):
        return checkpoint(self._call_inner, x, use_reentrant=False) + self.bias


@pytest.mark.parametrize("units", (Modulated, nn.Linear, None), ids=("layers", "submodules", "whole"))
@on_ranks(2)
def test_a_forward_calls_a_submodule_with_other_weights(units):
    module = filled(nn.Sequential(Modulated(), Modulated(), Modulated()))
    x = normal()(4, 3)
    grads = torch.autograd.grad(module(x).square().mean(), list(module.parameters()))
    expected = dict(zip(dict(module.named_parameters()), grads, strict=True))
    model = fs.functionalize(module, units=units)
    params = model.init(zero3()(one_axis()))
    _, grads = fs.value_and_grad(lambda params: model.apply(params, x).square().mean())(params)
    assert_trees_close(fs.unshard(grads), expected, exact=True)


class Closing(nn.Module):
    """Has an activation that closes over the module, beside a function that counts its calls."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(5, 5), nn.Parameter(torch.ones(5))
        self.activations = {"scaled": lambda x: torch.tanh(x * self.scale)}
        calls = 0

        def count(x):
            nonlocal calls
            calls += 1
            return calls if x is None else x

        self.count = count

    def forward(self, x):
        return self.count(self.activations["scaled"](self.layer(x)))


def with_new_forward():
    """Wraps the forward of a layer, and the wrapped one once more, as adapters do."""
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    original = module[0].forward
    module[0].forward = lambda x: 2 * original(x)
    doubled = module[0].forward
    module[0].forward = lambda x: doubled(x) - module[1].bias
    return module


def with_hook():
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    module[0].register_forward_hook(lambda layer, args, out: out * module[1].weight.sum())
    return module


def with_new_method():
    """Binds a function that closes over the method that it replaces."""
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    original = module[0].forward
    module[0].forward = MethodType(lambda layer, x: 2 * original(x), module[0])
    return module


def with_hook_of_a_buffer():
    """Closes over a buffer, which has values in no copy of the module."""
    module = nn.Linear(5, 5)
    scale = torch.arange(5.0, dtype=torch.float64)
    module.register_buffer("scale", scale)
    module.register_forward_hook(lambda layer, args, out: out * scale)
    return module


@pytest.mark.rows(5)
@pytest.mark.parametrize("make", [Closing, with_new_forward, with_hook, with_new_method, with_hook_of_a_buffer])
@on_ranks(2)
def test_functions_that_close_over_the_module_see_the_parameters_of_the_call(make):
    module = filled(make())
    x = normal()(2, 5)
    trained = {path: 2 * parameter.detach() for path, parameter in module.named_parameters()}
    other = filled(make())
    other.load_state_dict(trained, strict=False)
    value = other(x).sum()
    expected = dict(zip(trained, torch.autograd.grad(value, list(other.parameters())), strict=True))
    model = fs.functionalize(module, nn.Linear)
    params = fs.shard(trained, zero3()(one_axis()))
    loss, grads = fs.value_and_grad(lambda leaves: model.apply(leaves, x).sum())(params)
    results = loss, fs.unshard(grads)
    assert_trees_close(results, (value.detach(), expected), **within((value, expected), terms=25, steps=4))


def test_functions_that_read_the_module_as_a_global_are_refused():
    """A copy cannot change the globals of a program."""
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].forward = eval("lambda x: 2 * original(x)", {"original": module[0].forward})
    text = (
        "functionalize: <lambda> reads the global original, which is part of the module, so it would always compute "
        "with the weights of this module. Make it in a function that takes original as an argument."
    )
    reads = module[0].forward
    for forward in (reads, lambda x: reads(x)):
        module[0].forward = forward
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            fs.functionalize(module)


class Holding(nn.Module):
    """Reads the weight and the buffer of a layer past the layer."""

    def __init__(self, read):
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        self.layer.register_buffer("scale", torch.ones(2, 2))
        weight = self.layer.weight
        self.tensors = [weight, self.layer.scale]
        self.multiply = lambda x: x @ weight
        self.partial = partial(torch.nn.functional.linear, weight=weight)
        self.read = read

    def forward(self, x):
        return self.read(self, x)


HELD = {
    "a list": (lambda module, x: x @ module.tensors[0], "matmul", "layer.weight"),
    "a list of buffers": (lambda module, x: x @ module.tensors[1], "matmul", "layer.scale"),
    "a closure": (lambda module, x: module.multiply(x), "matmul", "layer.weight"),
    "a partial": (lambda module, x: module.partial(x), "linear", "layer.weight"),
    "in place": (lambda module, x: module.tensors[0].mul_(2), "mul_", "layer.weight"),
    "a view": (lambda module, x: x @ module.tensors[0].T, "matmul", "layer.weight"),
}


@pytest.mark.parametrize("case", HELD)
def test_tensors_that_a_forward_reads_past_their_submodule_are_refused(case):
    """Torch multiplies by a tensor on the meta device as if it had values, and returns memory that nobody wrote."""
    read, name, tensor = HELD[case]
    model = fs.functionalize(Holding(read))
    params = model.init(zero3()(one_axis()))
    text = (
        f"apply: {name} got {tensor!r} from a list, a closure or another object that holds it, where it has no values. "
        "Read it as an attribute of its submodule, as in self.weight."
    )
    for apply in (model.apply, fs.jit(model.apply)):
        for leaves in (params, fs.gather(params)):
            with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
                apply(leaves, torch.ones(1, 2))


METADATA = {
    "what a parameter is": lambda weight: isinstance(weight, nn.Parameter) and weight.is_floating_point(),
    "its shape": lambda weight: len(weight) == weight.dim() == len(weight.shape) and weight.size(0) == weight.shape[1],
    "its elements": lambda weight: weight.numel() * weight.element_size() == weight.nbytes == weight.data.nbytes,
    "its strides": lambda weight: weight.stride() == (2, 1) and weight.is_contiguous() and weight.T.stride() == (1, 2),
    "its text": lambda weight: repr(weight) and f"{weight}",
    "copies": lambda weight: copy.deepcopy([weight])[0].dtype == weight.dtype,
}


@pytest.mark.parametrize("case", METADATA)
def test_a_tensor_that_is_held_elsewhere_may_be_asked_for_what_needs_no_values(case):
    module = Holding(lambda module, x: module.layer(x) * bool(METADATA[case](module.tensors[0])))
    model = fs.functionalize(module)
    params = model.init(zero3()(one_axis()))
    x = torch.ones(1, 2)
    for apply in (model.apply, model.apply, fs.jit(model.apply)):
        assert torch.equal(apply(params, x), module(x))


def test_a_forward_may_copy_a_submodule():
    module = Holding(lambda module, x: copy.deepcopy(module.layer)(x))
    model = fs.functionalize(module)
    x = torch.ones(1, 2)
    assert torch.equal(model.apply(model.init(zero3()(one_axis())), x), module(x))


@pytest.mark.parametrize("make", (torch.jit.script, lambda layer: torch.jit.trace(layer, torch.ones(1, 2))))
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_modules_that_torch_jit_made_are_refused(make):
    """Their weights lie in C++, so they would ignore the parameters of a call and never train."""
    module = nn.Sequential(nn.Linear(2, 2), make(nn.Linear(2, 2)))
    for part, name in ((module, "1"), (module[1], "the module")):
        text = (
            f"functionalize: {name} was made by torch.jit, so it would always compute with its own weights. Pass the "
            "module as it was before. fs.jit and torch.compile take it."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            fs.functionalize(part)
    fs.functionalize(nn.Sequential(nn.Linear(2, 2), make(nn.ReLU())))


class Deleting(nn.Module):
    """Deletes its weight before it is read, or afterwards."""

    def __init__(self, reads_first):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))
        self.reads_first = reads_first

    def forward(self, x):
        before = self.weight if self.reads_first else 0
        del self.weight
        return before + self.weight * x


@pytest.mark.parametrize("reads_first", (False, True))
def test_a_parameter_that_a_forward_deletes_stays(reads_first):
    model = fs.functionalize(Deleting(reads_first))
    params = model.init(zero3()(one_axis()))
    expected = torch.arange(3.0) * (3 if reads_first else 2)
    assert torch.equal(model.apply(params, torch.tensor(2.0)), expected)


def test_functions_that_close_over_no_module_are_left_alone():
    module = Closing()
    model = fs.functionalize(module)
    params = model.init(fs.ddp(one_axis()))
    for _ in range(3):
        model.apply(params, torch.ones(2, 5))
    assert module.count(None) == 4


def test_no_mode_of_a_model_keeps_those_before_alive():
    model = fs.functionalize(with_hook())
    copies = []
    for _ in range(3):
        model = model.eval().train()
        copies.append(weakref.ref(model._bare))
    gc.collect()
    assert [copy() is not None for copy in copies] == [False, False, True]
