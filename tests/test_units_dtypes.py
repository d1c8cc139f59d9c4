"""Several dtypes in a unit, and casts: one process's numbers, rounded as they are."""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fshard as fs
from fshard.rounding import tolerance
from tests.ranks import my_rank, on_ranks
from tests.tolerance import largest
from tests.trees import assert_same_bits, one_axis
from tests.unit_models import HIDDEN, WIDTH, Block, filled, full, vectors, zero3


class Regression(nn.Module):
    """Blocks of floating inputs."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*map(Block, (13, HIDDEN, 11)))

    def forward(self, x):
        return torch.tanh(self.blocks(x)).square().mean()


POLICIES = [
    dict(param_dtype=torch.bfloat16),
    dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float64),
    dict(reduce_dtype=torch.float64),
]


def in_one_process(module, x, dtype):
    """A rank's loss and gradients, of parameters and inputs in the dtype."""
    leaves = {name: p.detach().to(dtype).requires_grad_() for name, p in module.named_parameters()}
    loss = functional_call(module, leaves, x.to(dtype))
    return loss.detach(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))


class Mixed(nn.Module):
    """A float32 buffer is mixed with the input of each part, as tables of rotary embeddings are."""

    def __init__(self, seen=None):
        super().__init__()
        self.chosen = nn.Linear(WIDTH, WIDTH)
        self.other = Probe(seen)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        x = x * self.scale
        # Without fshard, the module has to cast.
        x = self.chosen(x if self.other.seen is not None else x.to(self.chosen.weight.dtype))
        return self.other(x * self.scale)


class Probe(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(WIDTH)), seen

    def forward(self, x):
        if self.seen is not None:
            self.seen.add(x.dtype)
        return (x * self.weight).sum()


class Dtypes(set):
    """Seen dtypes, which all copies of a module share: a set of its own would be restored after each call."""

    def __deepcopy__(self, memo):
        return self


@on_ranks(2)
def test_units_of_the_rule_cast_what_the_module_mixed_with_other_dtypes():
    """As FSDP2 casts the inputs of each sharded module, and not those of what the root holds itself."""
    x, seen = vectors(2)[my_rank()][0].float(), Dtypes()
    dense, mixed = (filled(module, torch.float32) for module in (Mixed(), Mixed(seen)))
    expected = [in_one_process(dense, vectors(2)[rank][0].float(), torch.bfloat16) for rank in range(2)]
    for units in ("chosen", nn.Linear):
        model = fs.functionalize(mixed, units)
        options = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        for strategy in (zero3(**options), partial(fs.ddp, **options)):
            params = model.init(strategy(one_axis()))
            loss, grads = full(fs.value_and_grad(model.apply)(params, x))
            assert_same_bits(loss, sum(loss for loss, _ in expected) / 2)
            for name, grad in grads.items():
                assert_same_bits(grad, sum(of_rank[name].float() for _, of_rank in expected) / 2)
    assert seen == {torch.float32}


@on_ranks(3)
def test_casts_by_the_strategy(world_size):
    """Parameters and inputs are cast, gradients computed in that dtype, added up in another and finished in a third."""
    module, batches = filled(Regression(), torch.float32), [x.float() for (x,) in vectors(world_size)]
    model = fs.functionalize(module, nn.Module)
    for options in POLICIES:
        computed = options.get("param_dtype", torch.float32)
        output, reduced = options.get("output_dtype", computed), options.get("reduce_dtype", computed)
        losses, grads_of_ranks = zip(*(in_one_process(module, x, computed) for x in batches))
        expected = (sum(loss.to(output).float() for loss in losses) / world_size).to(output)
        strategies = zero3(**options), partial(fs.zero1, min_shard_elements=0, **options), partial(fs.ddp, **options)
        for strategy in strategies:
            params = model.init(strategy(one_axis()))
            value, grads = full(fs.value_and_grad(model.apply)(params, batches[my_rank()]))
            assert_same_bits(value, expected)
            for name, grad in grads.items():
                # Sums over ranks, and a cast to the dtype of the leaf.
                terms = [grads_of_rank[name] for grads_of_rank in grads_of_ranks]
                mean = sum(term.to(reduced) for term in terms) / world_size
                scale = largest(terms)
                atol = tolerance(reduced, world_size, scale) + tolerance(torch.float32, terms=1, scale=scale)
                torch.testing.assert_close(grad, mean.float(), rtol=0.0, atol=atol)


class OwnBias(nn.Linear):
    """Adds the bias in its own dtype, which F.linear refuses beside a weight of another one."""

    def forward(self, x):
        return F.linear(x.to(self.weight.dtype), self.weight) + self.bias


STEPS = 3
SGD = dict(lr=0.1, momentum=0.9)


def bfloat16_except_biases(mesh):
    """ZeRO-3 in bfloat16, but for the biases."""
    zero3 = partial(fs.zero3, mesh, min_shard_elements=0, reduce_dtype=torch.float32)
    return fs.masked(zero3(), "*bias", otherwise=zero3(param_dtype=torch.bfloat16))


def dtype_of(name):
    return torch.float32 if name.endswith("bias") else torch.bfloat16


def trained_in_one_process(module, batches):
    """The losses and parameters of training on all ranks' batches at once, by torch's own optimizer."""
    params = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = torch.optim.SGD(params.values(), **SGD)
    losses = []
    for _ in range(STEPS):
        total = 0.0
        for p in params.values():
            p.grad = torch.zeros_like(p)
        for x in batches:
            computed = {name: p.to(dtype_of(name)).requires_grad_() for name, p in params.items()}
            loss = functional_call(module, computed, x.bfloat16()).square().mean()
            total += loss.detach() / len(batches)
            for p, grad in zip(params.values(), torch.autograd.grad(loss, list(computed.values()))):
                p.grad += grad.float() / len(batches)
        optimizer.step()
        losses.append(total)
    return losses, params


@on_ranks(2)
def test_biases_keep_a_dtype_of_their_own(world_size):
    """They are gathered without rounding and computed with as float32; sums of two ranks have one order."""
    module = filled(nn.Sequential(OwnBias(WIDTH, 13), nn.Tanh(), OwnBias(13, WIDTH)), torch.float32)
    batches = [x.float() for (x,) in vectors(world_size)]
    tx = fs.from_torch(torch.optim.SGD, **SGD)
    model = fs.functionalize(module, nn.Linear)
    state = fs.TrainState.create(model.init(bfloat16_except_biases(one_axis())), tx)
    expected = {name: p.detach().to(dtype_of(name)) for name, p in module.named_parameters()}
    assert_same_bits(fs.gather(state.params), expected)
    run = fs.value_and_grad(lambda params, x: model.apply(params, x).square().mean())
    losses = []
    for _ in range(STEPS):
        loss, grads = run(state.params, batches[my_rank()])
        state = fs.update(tx, state, grads)
        losses.append(loss)
    assert_same_bits((losses, fs.unshard(state.params)), trained_in_one_process(module, batches))


@on_ranks(2)
def test_a_selective_checkpoint_keeps_no_memory_that_a_cast_has_yet_to_fill():
    """On accelerators torch would refuse the write as one to a tensor that the checkpoint keeps."""
    strategy = fs.compose(fs.cast(gather=torch.bfloat16), fs.fully_shard(one_axis()))
    params = fs.shard({"a": torch.ones(8, 8), "b": torch.ones(8, 8)}, strategy)
    seen = []

    def keep_all(context, operator, *args, **kwargs):
        seen.append(str(operator))
        return CheckpointPolicy.MUST_SAVE

    def loss_fn(x):
        full = fs.gather(params)
        return (x.bfloat16() @ full["a"] @ full["b"]).float().sum()

    x = torch.ones(2, 8, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, keep_all)
    checkpoint(loss_fn, x, use_reentrant=False, context_fn=contexts).backward()
    assert "aten.mm.default" in seen
    assert "aten._foreach_copy_.default" not in seen


@on_ranks(2)
def test_a_mean_is_taken_before_it_is_cast_to_a_dtype_that_does_not_hold_the_sum():
    """Of two ranks the sum is infinite in float16."""
    for strategy in (fs.ddp, fs.zero1, fs.zero3):
        params = fs.shard(
            {"w": torch.ones(2048, dtype=torch.float16)}, strategy(one_axis(), reduce_dtype=torch.float32)
        )
        for differentiate in (fs.value_and_grad, jitted):
            _, grads = differentiate(lambda p: (40000.0 * fs.gather(p)["w"]).float().sum())(params)
            assert grads["w"].local.eq(40000.0).all()


def jitted(f):
    return fs.jit(fs.value_and_grad(f))


@dataclass
class Counted:
    """A dataclass with a field that its constructor does not take."""

    x: torch.Tensor
    doubled: torch.Tensor = field(init=False)

    def __post_init__(self):
        self.doubled = 2 * self.x


class Counts(nn.Linear):
    def forward(self, counted):
        return Counted(super().forward(counted.x) + counted.doubled)


def test_dataclasses_are_cast_whatever_their_constructors_take():
    model = fs.functionalize(Counts(3, 3))
    params = model.init(fs.zero3(one_axis(), param_dtype=torch.bfloat16, output_dtype=torch.float64), seed=0)
    out = model.apply(params, Counted(torch.ones(2, 3)))
    assert out.x.dtype == out.doubled.dtype == torch.float64
    assert_same_bits(out.doubled, 2 * out.x)
