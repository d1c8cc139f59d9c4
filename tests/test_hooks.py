"""Hooks on a module's parameters see this rank's full gradient once in each backward, as under torch DDP."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.testing import assert_matches_ddp, assert_trees_close
from tests.ranks import my_rank, on_ranks
from tests.trees import STRATEGIES, assert_same_bits, meshes, normal, one_axis

STRATEGIES = {name: STRATEGIES[name] for name in ("ddp", "zero1", "zero2 of every leaf", "hsdp")} | {
    "zero3": lambda on: fs.zero3(on.line, min_shard_elements=0, merge_bytes=0),
    "zero3 that keeps": lambda on: fs.zero3(on.line, min_shard_elements=0, regather=False),
}
WORDS, WIDTH, LENGTH = 7, 5, 4
# Sums of a few hundred products of numbers around one, in float64, in another order.
ATOL = 1e-12


class Language(nn.Module):
    """Embedding and head are tied, the hidden layer runs twice, and `early` runs for some batches only."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.early = nn.Linear(WIDTH, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, early=None):
        def run(layer, h):
            return checkpoint(layer, h, use_reentrant=False) if self.checkpointed else layer(h)

        h = self.embedding(tokens)
        h = run(self.early, h) if (tokens[0] < 3 if early is None else early) else h
        return self.head(run(self.plain, run(self.hidden, run(self.hidden, h).tanh()).tanh()))


def language(hook=True, **options):
    """A module whose hooks depend on how much of the gradient they see."""
    module, draw = Language(**options).double(), normal()
    for parameter in module.parameters():
        parameter.data = draw(*parameter.shape)
    mask = (torch.arange(WORDS) % 3 > 0).double()[:, None]
    if hook:
        module.embedding.weight.register_hook(lambda grad: grad / grad.norm())
        module.embedding.weight.register_hook(lambda grad: grad * mask)
        for _ in range(2):
            module.hidden.weight.register_hook(torch.sin)
        module.hidden.bias.register_hook(lambda grad: None)
        module.early.weight.register_hook(lambda grad: grad + 1)
    return module


def batch(rank, number):
    return (torch.arange(LENGTH) * (rank + 2) + 3 * number + rank) % WORDS


def loss_of(logits, tokens):
    return cross_entropy(logits[:-1], tokens[1:])


def value_of(model, params, tokens, **options):
    return loss_of(model.apply(params, tokens, **options), tokens)


def in_torch(module, ranks, microbatches):
    """The mean over ranks and microbatches of what torch's own backward finds with the same hooks."""
    named, sums = dict(module.named_parameters()), {}
    for rank in range(ranks):
        for tokens in (batch(rank, number) for number in range(microbatches)):
            found = torch.autograd.grad(loss_of(module(tokens), tokens), list(named.values()), allow_unused=True)
            for name, grad in zip(named, found, strict=True):
                sums[name] = sums.get(name, 0) + (0 if grad is None else grad / (ranks * microbatches))
    return sums


def gradients(model, params, number, communicate):
    f = partial(value_of, model)
    if number == 1:
        return fs.value_and_grad(f)(params, batch(my_rank(), 0))
    run = fs.accumulate(f, communicate=communicate)
    return run(params, [batch(my_rank(), i) for i in range(number)])


RUNS = {"one batch": (1, None), "each": (3, "each"), "once": (3, "once")}


@pytest.mark.rows(1)
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("run", RUNS)
def test_gradients_are_those_of_torch_with_the_same_hooks(run, world_size):
    module, unhooked = language(), language(hook=False)
    number, communicate = RUNS[run]
    expected, other = (in_torch(m, world_size, number) for m in (module, unhooked))
    assert all(not expected[name].allclose(other[name]) for name in ("embedding.weight", "hidden.weight"))
    for strategy in STRATEGIES.values():
        model = fs.functionalize(module, units=nn.Linear if world_size == 2 else None)
        _, grads = gradients(model, model.init(strategy(meshes())), number, communicate)
        assert_trees_close(fs.unshard(grads), expected, rtol=ATOL, atol=ATOL)


@pytest.mark.rows(1)
@pytest.mark.parametrize("communicate", ("each", "once"))
@on_ranks(2)
def test_hooks_run_in_blocks_that_are_computed_again(communicate):
    module = language(checkpointed=True)
    expected = in_torch(module, 2, 2)
    for strategy in STRATEGIES.values():
        model = fs.functionalize(module, units=nn.Linear)
        _, grads = gradients(model, model.init(strategy(meshes())), 2, communicate)
        assert_trees_close(fs.unshard(grads), expected, rtol=ATOL, atol=ATOL)


def applied_twice(model, params, tokens):
    return value_of(model, params, tokens) + model.apply(params, tokens).sum()


@pytest.mark.rows(1)
@pytest.mark.parametrize("number", (1, 3))
@on_ranks(2)
def test_a_hook_runs_once_a_backward_where_its_leaf_is_used(number):
    """On full gradients, with the hooks of the time of functionalize, whatever calls of apply share the parameters."""
    mine = [batch(my_rank(), i) for i in range(number)]
    for strategy in STRATEGIES.values():
        module, seen = language(hook=False), []
        handles = [
            parameter.register_hook(lambda grad, seen=seen, name=name: seen.append((name, grad.shape)))
            for name, parameter in module.named_parameters()
        ]
        model = fs.functionalize(module, units=nn.Linear)
        handles[0].remove()
        module.plain.weight.register_hook(lambda grad: 1 / 0)
        params = model.init(strategy(meshes()))
        for communicate in ("each", "once"):
            seen.clear()
            fs.accumulate(partial(applied_twice, model), communicate=communicate)(params, mine)
            used = [n for tokens in mine for n in params if "early" not in n or tokens[0] < 3]
            shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
            assert sorted(seen) == sorted((name, shapes[name]) for name in used)
        with torch.no_grad():
            model.apply(params, mine[0])


@on_ranks(1, 2)
def test_hooks_may_write_to_what_they_get_and_keep_it():
    """No gradient of another leaf or of a later microbatch changes with it, nor does what a hook keeps."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.ones(3, 2).double()) for _ in range(2))

        def forward(self, x):
            return (self.a + self.b) * x

    for strategy in STRATEGIES.values():
        module, kept = Sum(), []
        module.a.register_hook(lambda grad: (grad.mul_(0), None)[1])
        module.b.register_hook(kept.append)
        model = fs.functionalize(module)
        f = fs.accumulate(lambda p, x, model=model: model.apply(p, x).sum(), reduce="sum", communicate="once")
        grads = fs.unshard(f(model.init(strategy(meshes())), [2.0, 3.0])[1])
        assert_same_bits(grads["a"], torch.zeros(3, 2).double())
        assert_same_bits(grads["b"], torch.full((3, 2), 5.0 * fs.axis_of(one_axis()).size).double())
        assert_same_bits(kept, [torch.full((3, 2), x).double() for x in (2.0, 3.0)])


@on_ranks(1, 2)
def test_a_hook_may_conjugate():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(normal()(3, 2, dtype=torch.complex128) * (1 + 2j))
            self.w.register_hook(torch.conj)

        def forward(self, x):
            return (self.w * x).sum().abs()

    module = Complex()
    x = normal(1)(3, 2, dtype=torch.complex128) * (2 - 1j)
    (expected,) = torch.autograd.grad(module(x), [module.w])
    for strategy in STRATEGIES.values():
        model = fs.functionalize(module)
        _, grads = fs.value_and_grad(model.apply)(model.init(strategy(meshes())), x)
        assert_trees_close(fs.unshard(grads)["w"], expected.resolve_conj(), rtol=ATOL, atol=ATOL)


@on_ranks(2)
def test_jit_traces_hooks():
    model = fs.functionalize(language(), units=nn.Linear)
    for name in ("ddp", "zero3"):
        params = model.init(STRATEGIES[name](meshes()))
        step, tokens = fs.value_and_grad(partial(value_of, model, early=True)), batch(0, 0)
        assert_same_bits(fs.tree_leaves(fs.jit(step)(params, tokens)), fs.tree_leaves(step(params, tokens)))


def hooked(hook):
    module = language(hook=False)
    module.hidden.weight.register_hook(hook)
    return module


def plus_shards(model, params, tokens):
    return value_of(model, params, tokens) + fs.pvary(params["hidden.weight"].local, fs.axis_of(one_axis())).sum()


def inside(model, params, tokens):
    loss, full = value_of(model, params, tokens), fs.gather(params["hidden.weight"])
    (grad,) = torch.autograd.grad(loss + full.sum(), [params["hidden.weight"].local], create_graph=True)
    return loss + grad.square().sum()


LOSSES = {
    "computed from others": lambda m, p, t: value_of(m, fs.tree_map(lambda x: 2 * x, p), t),
    "gathered before": lambda m, p, t: value_of(m, fs.gather(p), t),
    "one gathered before": lambda m, p, t: value_of(m, {**p, "hidden.weight": fs.gather(p["hidden.weight"])}, t),
    "torch.func inside": lambda m, p, t: torch.func.grad(lambda w: value_of(m, {**p, "hidden.weight": w}, t))(
        fs.gather(p["hidden.weight"])
    ).sum(),
    "maths on shards too": plus_shards,
    "differentiated inside": inside,
}


@pytest.mark.parametrize("name", LOSSES)
@on_ranks(2)
def test_gradients_that_a_hook_would_not_see_whole_are_refused(name):
    """Every rank says so, and names the leaf and a remedy."""
    model = fs.functionalize(hooked(torch.sin), units=nn.Linear)
    for strategy in ("ddp", "zero3"):
        params = model.init(STRATEGIES[strategy](meshes()))
        with pytest.raises(ValueError, match=r"(?s)hooks.*'hidden\.weight'.*To fix: "):
            fs.value_and_grad(partial(LOSSES[name], model))(params, batch(0, 0))


@on_ranks(2)
def test_torch_func_refuses_hooks():
    model = fs.functionalize(hooked(torch.sin))
    params = model.init(STRATEGIES["zero3"](meshes()))
    tokens, full = batch(0, 0), fs.gather(params)

    def f(p):
        return value_of(model, p, tokens)

    outer = fs.tree_map(lambda x: x.clone().requires_grad_(), params)
    calls = {
        "grad": lambda: torch.func.grad(f)(full),
        "reference": lambda: torch.func.grad(lambda p: fs.objective(f(p), like=p))(params),
        "vjp": lambda: torch.func.vjp(f, full),
        "grad of vmap": lambda: torch.func.grad(lambda p: torch.func.vmap(lambda _: f(p))(torch.ones(2)).sum())(full),
        "outer": lambda: f(outer),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match=r"(?s)register_hook.*'hidden\.weight'.*remove the hooks"):
            call()
    # No hook would run in these under torch either.
    torch.func.jvp(f, (full,), (full,))
    torch.func.vmap(lambda _: f(full))(torch.ones(2))
    torch.func.grad(lambda h: f(full) * h)(torch.ones(()))
    with torch.no_grad():
        f(outer)


SHAPE = r"'hidden\.weight'\].*expected None or a float64 Tensor of shape \(5, 5\)"
BAD = {
    "shape": (lambda grad: grad[0], ValueError, SHAPE),
    "dtype": (lambda grad: grad.float(), ValueError, r"'hidden\.weight'\].*got a float32 Tensor"),
    "type": (lambda grad: 3.0, ValueError, r"'hidden\.weight'\].*got a float$"),
    "raises": (lambda grad: 1 / 0, ZeroDivisionError, "division by zero"),
}


@pytest.mark.rows(2)
@pytest.mark.parametrize("communicate", ("each", "once"))
@pytest.mark.parametrize("name", BAD)
@on_ranks(2)
def test_a_hook_that_fails_on_one_rank_ends_the_call_on_all(name, communicate):
    (bad, kind, error), first = BAD[name], my_rank() == 0
    model = fs.functionalize(hooked(bad if first else lambda grad: None), units=nn.Linear)
    for strategy in STRATEGIES.values():
        params = model.init(strategy(meshes()))
        text = f"(?m){error}" if first else "on rank .*=0 the backward raised"
        with pytest.raises(kind if first else RuntimeError, match=text):
            gradients(model, params, 2, communicate)


def test_post_accumulate_hooks_are_refused():
    module = language(hook=False)
    module.hidden.weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(ValueError, match=r"(?s)hidden\.weight: .*register_post_accumulate_grad_hook"):
        fs.functionalize(module)


@pytest.mark.rows(1)
@pytest.mark.parametrize("strategy", ("ddp", "zero2 of every leaf", "zero3"))
@on_ranks("2 processes")
def test_hooks_run_as_under_torch_ddp(strategy):
    """Bit for bit, in processes, where a rank does not use some parameters too."""
    module = language()
    model = fs.functionalize(module, units=nn.Linear)
    tx = fs.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)

    def step(state, tokens):
        loss, grads = fs.value_and_grad(partial(value_of, model))(state.params, tokens)
        return fs.update(tx, state, grads), loss

    assert_matches_ddp(
        step,
        fs.TrainState.create(model.init(STRATEGIES[strategy](meshes())), tx),
        [batch(my_rank(), number) for number in range(3)],
        module=module,
        loss_fn=lambda module, tokens: loss_of(module(tokens), tokens),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        exact=True,
        find_unused_parameters=True,
    )
