"""Several dtypes in a unit, casts by the strategy and autocast: one process's numbers, rounded as they are."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.trees import one_axis
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
    whole = (partial(fs.ddp, **options), partial(fs.zero2, min_shard_elements=0, **options))
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
