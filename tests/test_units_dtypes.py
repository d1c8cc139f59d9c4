"""Several dtypes in a unit, casts, autocast and views of weights: one process's numbers, rounded as they are."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad_and_value
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.ranks import on_ranks
from tests.trees import meshes, normal, one_axis
from tests.unit_models import HIDDEN, MORE_RULES, WIDTH, Block, Language, filled, full, tokens, vectors, zero3


class Mixed(Block):
    """A unit of two dtypes, and one inside it."""

    def __init__(self, hidden):
        super().__init__(hidden)
        self.perceptron.inner.double()
        self.scale = nn.Parameter(torch.empty(3, WIDTH, dtype=torch.float64))

    def forward(self, x):
        h = F.gelu(self.perceptron.inner(self.norm(x).double()) * self.scale.sum())
        return self.perceptron.outer(h.float()) + x


class MixedLanguage(Language):
    """A language model of float32 whose blocks hold float64 as well; `wrap` is how each is called."""

    def __init__(self, wrap=lambda block, h: block(h)):
        super().__init__()
        self.blocks = nn.ModuleList(map(Mixed, (13, HIDDEN, 11)))
        self.wrap = wrap

    def hidden(self, h):
        for block in self.blocks:
            h = self.wrap(block, h)
        return h


def again(block, h):
    return checkpoint(block, h, use_reentrant=False)


def by_rank(module, batches, context=nullcontext, dtype=None):
    """Each rank's loss and gradients in one process, of parameters and inputs in the dtype."""
    found = []
    for batch in batches:
        leaves = {name: cast(p.detach(), dtype).requires_grad_() for name, p in module.named_parameters()}
        with context():
            loss = functional_call(module, leaves, tuple(cast(x, dtype) for x in batch))
        found.append((loss.detach(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))))
    return found


def cast(tensor, dtype):
    return tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor.clone()


def mean(ranks, dtype=None):
    """The mean over ranks, added up in rank order in the dtype."""
    losses, grads = zip(*ranks)
    summed = {name: sum(cast(grad[name], dtype) for grad in grads) / len(ranks) for name in grads[0]}
    return sum(losses) / len(ranks), summed


def assert_rounded_once(found, expected, dtypes):
    """Assert that leaves differ by no more than sums over ranks round, each in its dtype."""
    value, grads = found
    assert {name: grad.dtype for name, grad in grads.items()} == dtypes
    for dtype in set(dtypes.values()):
        names = [name for name in dtypes if dtypes[name] is dtype]
        pair = ({name: grads[name] for name in names}, {name: expected[1][name] for name in names})
        assert_trees_close(*pair, rtol=0, atol=HIDDEN * torch.finfo(dtype).eps)
    assert_trees_close(value, expected[0], rtol=4 * torch.finfo(expected[0].dtype).eps, atol=0)


def runs(module, batches, rule, strategies, context=nullcontext, around=nullcontext):
    """Each rank's loss and full gradients by several strategies."""

    def program():
        mesh, model = one_axis(), fs.functionalize(module, MORE_RULES[rule])
        batch, found = batches[mesh.get_rank()], []

        def loss(params):
            with context():
                return model.apply(params, *batch)

        for strategy in strategies:
            with around():
                found.append(full(fs.value_and_grad(loss)(model.init(strategy(mesh)))))
        return found

    return [found for rank in spmd(program, len(batches)) for found in rank]


@pytest.mark.rows(1)
@pytest.mark.parametrize("wrap", (None, again))
@pytest.mark.parametrize("rule", ("one unit", "every module"))
@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_a_unit_of_two_dtypes(world_size, rule, wrap):
    module = filled(MixedLanguage(wrap) if wrap else MixedLanguage(), dtype=None)
    dtypes = {name: p.dtype for name, p in module.named_parameters()}
    assert set(dtypes.values()) == {torch.float32, torch.float64}
    batches = tokens(world_size)
    expected = mean(by_rank(module, batches))
    strategies = (zero3(prefetch=0), zero3(), lambda mesh: fs.zero2(mesh, min_shard_elements=0))
    for found in runs(module, batches, rule, strategies):
        assert_rounded_once(found, expected, dtypes)


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.rows(1)
@pytest.mark.parametrize("checkpointed", (False, True))
@pytest.mark.parametrize("where", ("inside the loss", "around it all"))
@pytest.mark.parametrize("rule", ("a pattern", "every module"))
@pytest.mark.parametrize("world_size", (1, 3))
def test_autocast(world_size, rule, where, checkpointed):
    """The same casts in the same places, so that only the sums over ranks are rounded in another order."""
    model = Language()
    if checkpointed:
        model.blocks = nn.ModuleList(Checkpointed(hidden) for hidden in (13, HIDDEN, 11))
    module = filled(model, torch.float32)
    batches = tokens(world_size)
    expected = mean(by_rank(module, batches, autocast))
    contexts = {"inside the loss": dict(context=autocast), "around it all": dict(around=autocast)}
    strategies = (zero3(prefetch=0), zero3(), lambda mesh: fs.zero2(mesh, min_shard_elements=0))
    for found in runs(module, batches, rule, strategies, **contexts[where]):
        assert_rounded_once(found, expected, dict.fromkeys(expected[1], torch.float32))


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Regression(nn.Module):
    """Blocks of floating inputs; notes the dtypes that it computes with."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, (13, HIDDEN, 11)))
        self.seen = set()

    def forward(self, x):
        self.seen |= {x.dtype, self.blocks[0].scale.dtype}
        for block in self.blocks:
            x = block(x)
            self.seen.add(x.dtype)
        return torch.tanh(x).square().mean()

    def __deepcopy__(self, memo):
        made = Regression.__new__(Regression)
        nn.Module.__init__(made)
        made.blocks, made.seen = copy.deepcopy(self.blocks, memo), self.seen
        return made


POLICIES = {
    "bf16, sums in float32": dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16": dict(param_dtype=torch.bfloat16),
    "bf16 and outputs": dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float64),
    "sums in float64": dict(reduce_dtype=torch.float64),
    "float64": dict(param_dtype=torch.float64, reduce_dtype=torch.float32, output_dtype=torch.float32),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", ("a pattern", "every module"))
@pytest.mark.parametrize("world_size", (1, 3))
def test_casts_by_the_strategy(world_size, rule, policy):
    """Parameters and inputs are cast, gradients computed in that dtype, added up in another and finished in a third."""
    options = POLICIES[policy]
    module, batches = filled(Regression(), torch.float32), [(x.float(),) for (x,) in vectors(world_size)]
    computed, output = options.get("param_dtype", torch.float32), options.get("output_dtype")
    ranks = by_rank(module, batches, dtype=computed)
    ranks = [(loss.to(output) if output else loss, grads) for loss, grads in ranks]
    assert module.seen == {computed}
    reduced = options.get("reduce_dtype", computed)
    expected = mean(ranks, reduced)
    dtypes = dict.fromkeys(expected[1], torch.float32)
    whole = (partial(fs.ddp, **options), *(partial(f, min_shard_elements=0, **options) for f in (fs.zero1, fs.zero2)))
    for found in runs(module, batches, rule, (zero3(**options), zero3(**options, prefetch=0, regather=False), *whole)):
        assert found[0].dtype is expected[0].dtype
        assert {name: grad.dtype for name, grad in found[1].items()} == dtypes
        largest = {name: max(grads[name].abs().max().item() for _, grads in ranks) for name in dtypes}
        for name, grad in found[1].items():
            # Each addition rounds once, and so does the division.
            atol = (world_size + 1) * world_size * torch.finfo(reduced).eps * largest[name]
            assert_trees_close(
                {name: grad}, {name: expected[1][name].float()}, rtol=torch.finfo(torch.float32).eps, atol=atol
            )
        assert_trees_close(found[0], expected[0], rtol=world_size * torch.finfo(found[0].dtype).eps, atol=0)
    assert module.seen == {computed}


# Autograd saves views of gathered weights in every form; gathered again, they are the very same tensors.

SIDE = 6


class Subclass(torch.Tensor):
    pass


# What a function makes of a complex weight of SIDE x SIDE.
VIEWS = {
    "plain": lambda w: w,
    "conj": lambda w: w.conj(),
    "mH": lambda w: w.mH,
    "part of mH": lambda w: w.mH[1:, ::2],
    "real": lambda w: w.real,
    "imag": lambda w: w.imag,
    "conj imag": lambda w: w.conj().imag,
    "neg view": torch._neg_view,
    "neg view of conj": lambda w: torch._neg_view(w.conj()),
    "view as real": lambda w: torch.view_as_real(w)[..., 1],
    "conj of view as complex": lambda w: torch.view_as_complex(torch.view_as_real(w)).conj(),
    "dtype": lambda w: w.view(w.real.dtype),
    "subclass": lambda w: w.conj().as_subclass(Subclass),
}
REAL_VIEWS = {
    "plain": lambda w: w,
    "neg view": torch._neg_view,
    "complex": lambda w: torch.view_as_complex(w.reshape(-1, 2)[:SIDE]),
    "conj of complex": lambda w: torch.view_as_complex(w.reshape(-1, 2)).conj(),
}
CASES = [(dtype, name) for dtype in (torch.complex64, torch.complex128) for name in VIEWS]
CASES += [(torch.float64, name) for name in REAL_VIEWS]
VIEW_STRATEGIES = {
    "zero3": lambda on: fs.zero3(on.line, min_shard_elements=0, merge_bytes=0),
    "zero2": lambda on: fs.zero2(on.line, min_shard_elements=0),
    "ddp": lambda on: fs.ddp(on.line),
    "hsdp": lambda on: fs.hsdp(on.grid, min_shard_elements=0, merge_bytes=0),
}


def initial(dtype):
    draw = normal(1)
    tree = {name: draw(SIDE, SIDE) + 1j * draw(SIDE, SIDE) for name in ("first", "second")}
    tree = {**tree, "scale": draw() + 1j * draw()}
    return {name: value.to(dtype) if dtype.is_complex else value.real.clone() for name, value in tree.items()}


def loss_of(view, params, x):
    """Two layers, so that the backward needs the weights; each computes with a weight and with a view of it."""
    for name in ("first", "second"):
        w, scale = fs.gather({"w": params[name], "scale": params["scale"]}).values()
        seen = view(w)
        x = torch.sin(x @ w / SIDE) * (x.abs().mean() * seen).abs().square().mean() + (x.sum() * seen).sum().abs()
        x = x * (torch.view_as_real(scale)[1] if scale.is_complex() else scale)
    return x.abs().square().sum()


@pytest.mark.rows(1)
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@on_ranks(1, 2)
def test_views_of_gathered_weights(world_size):
    expected = {}
    batches = [normal(2 + rank)(2, SIDE) for rank in range(world_size)]
    for dtype, name in CASES:
        loss = partial(loss_of, (VIEWS if dtype.is_complex else REAL_VIEWS)[name])

        def objective(p, loss=loss, dtype=dtype):
            return sum(loss(p, x.to(dtype)) for x in batches)

        expected[dtype, name] = loss, *grad_and_value(objective)(initial(dtype))
    on = meshes()
    for (dtype, name), (loss, grads, value) in expected.items():
        x = batches[on.line.get_rank()].to(dtype)
        # Sums over two ranks round once more than one process does.
        bound = 16 * torch.finfo(dtype).eps * max(g.abs().max().item() for g in grads.values())
        for strategy, make in VIEW_STRATEGIES.items():
            params = fs.shard(initial(dtype), make(on))
            run = fs.value_and_grad(loss, reduce="sum")
            # A trace takes its time, and none takes a subclass.
            jitted = dtype is torch.complex128 and strategy == "zero3" and name != "subclass"
            for form in (run, fs.jit(run)) if jitted and world_size > 1 else (run,):
                found = form(params, x)
                try:
                    assert_trees_close((found[0], fs.unshard(found[1])), (value, grads), rtol=0, atol=bound)
                except Exception as error:
                    error.add_note(f"{dtype}, {name}, {strategy}, {'eager' if form is run else 'jitted'}")
                    raise
