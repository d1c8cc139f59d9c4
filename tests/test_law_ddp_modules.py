"""Law 3 on nn.Module: tied, frozen and unused parameters; and against torch's own DDP in processes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import fshard as fs
from fshard.testing import assert_matches_ddp, assert_trees_close, spmd
from tests.ranks import on_ranks
from tests.trees import ONE_AXIS, STRATEGIES, WORLD_SIZES, assert_same_bits, meshes, one_axis

SEQUENCES, LENGTH, VOCABULARY, WIDTH, STEPS = 24, 4, 11, 6, 4
LEARNING_RATE, MOMENTUM = 0.1, 0.9

# A gradient adds up at most SEQUENCES * LENGTH terms below 1, in another order than one process does; momentum
# hands on lr / (1 - momentum) = 1 times that, and the next gradient, of a loss with curvature about 1, what parameters
# differ by then. DDP at three ranks divides each rank's gradient before it sums, which is one rounding more of each.
BOUND = SEQUENCES * LENGTH * torch.finfo(torch.float64).eps * (2**STEPS - 1)


class Network(nn.Module):
    """A language model without attention: embedding and head are tied, positions frozen."""

    def __init__(self, has_unused):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.empty(LENGTH, WIDTH), requires_grad=False)
        self.hidden = nn.Linear(WIDTH, 7)
        self.back = nn.Linear(7, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.empty(3, 5)) if has_unused else None

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions
        return self.head(self.norm(x + self.back(gelu(self.hidden(x)))))


def network(has_unused=False, dtype=torch.float64):
    module, generator = Network(has_unused), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return module.to(dtype)


def batches():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (STEPS, SEQUENCES, LENGTH + 1), generator=generator)
    return [(step[:, :-1], step[:, 1:]) for step in tokens]


def mine(batch):
    """This rank's sequences."""
    axis = fs.axis_of(one_axis())
    return tuple(tensor.tensor_split(axis.size)[fs.comm.rank(axis)] for tensor in batch)


def loss_of(logits, targets, reduction="mean"):
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def train_steps(model, tx):
    """Both spellings of the train step."""

    def loss_fn(params, batch):
        return loss_of(model.apply(params, batch[0]), batch[1])

    def in_one_call(state, batch):
        loss, grads = fs.value_and_grad(loss_fn)(state.params, batch)
        return fs.update(tx, state, grads), loss

    def with_four_verbs(state, batch):
        grads, loss = torch.func.grad_and_value(loss_fn)(fs.gather(state.params), batch)
        grads = fs.scatter_grads(grads, like=state.params)
        return fs.update(tx, state, grads), fs.objective(loss, like=state.params)

    return in_one_call, with_four_verbs


def sgd():
    return fs.from_torch(torch.optim.SGD, lr=LEARNING_RATE, momentum=MOMENTUM)


def one_process(module):
    module = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    for tokens, targets in batches():
        optimizer.zero_grad()
        loss_of(module(tokens), targets).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@pytest.mark.rows(1)
@on_ranks(*WORLD_SIZES)
def test_tied_frozen_and_unused_parameters():
    module = network(has_unused=True)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    expected = one_process(module)
    moved = [name for name in before if not before[name].equal(expected[name])]
    assert moved == [name for name in before if name not in ("positions", "unused")]
    on, model = meshes(), fs.functionalize(module)
    for strategy in ("ddp", "zero2", "zero2 of every leaf", "two dims"):
        for step in train_steps(model, sgd()):
            state = fs.TrainState.create(model.init(STRATEGIES[strategy](on)), sgd())
            assert "head.weight" not in state.params
            for batch in batches():
                state, _ = step(state, mine(batch))
            assert state.opt_state.slots["momentum_buffer"]["positions"] is None
            after = fs.unshard(state.params)
            assert_trees_close(after, expected, rtol=0, atol=BOUND)
            for name in ("positions", "unused"):
                assert_same_bits(after[name], before[name])
    assert_same_bits(dict(module.named_parameters()), before)


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, dict(lr=LEARNING_RATE, momentum=MOMENTUM)),
    "AdamW": (torch.optim.AdamW, dict(lr=0.01, weight_decay=0.1)),
}


def matches_ddp(pool, strategies, optimizer, dtype=torch.float64, max_norm=None, **closeness):
    """Train by strategies and both spellings next to DDP, in processes; return the largest difference of parameters."""
    cls, hyper = OPTIMIZERS[optimizer]
    module = network(dtype=dtype)
    tx = fs.chain(*([] if max_norm is None else [fs.clip_by_global_norm(max_norm)]), fs.from_torch(cls, **hyper))

    def before_step(ddp):
        if max_norm is not None:
            assert nn.utils.clip_grad_norm_(ddp.parameters(), max_norm) > max_norm

    def program():
        on, model, gaps = meshes(), fs.functionalize(module), []
        for name in strategies:
            for step in train_steps(model, tx):
                match = assert_matches_ddp(
                    step,
                    fs.TrainState.create(model.init(STRATEGIES[name](on)), tx),
                    [mine(batch) for batch in batches()],
                    module=module,
                    loss_fn=lambda module, batch: loss_of(module(batch[0]), batch[1]),
                    optimizer=lambda parameters: cls(parameters, **hyper),
                    before_step=before_step,
                    **closeness,
                )
                gaps.append(match.params)
        return max(gaps)

    return max(spmd(program, pool))


@pytest.mark.rows(1)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_processes_are_ddp_bitwise(workers, optimizer, dtype):
    """DDP halves each gradient before it sums them, which changes no bit of the sum's half."""
    assert matches_ddp(workers(2), STRATEGIES, optimizer, dtype, exact=True) == 0


def test_two_processes_that_clip_are_ddp_within_the_bound(workers):
    """The norm adds leaves in the order of their names and split ones by rank, torch's in the order of the module."""
    matches_ddp(workers(2), STRATEGIES, "SGD", max_norm=0.1, rtol=0, atol=BOUND)


@pytest.mark.slow
def test_three_processes_are_ddp_within_the_bound(workers):
    """A third of each of three gradients is rounded before DDP sums them, and again after fshard has summed them."""
    matches_ddp(workers(3), STRATEGIES, "SGD", rtol=0, atol=BOUND)
    matches_ddp(workers(3), ["ddp", "zero2 of every leaf"], "SGD", max_norm=0.1, rtol=0, atol=BOUND)


def test_unequal_token_counts_on_processes(workers):
    """reduce="weighted" is the mean over all tokens, not the mean of the ranks' means."""
    module, (tokens, targets) = network(), batches()[0]
    ignored = torch.arange(SEQUENCES).unsqueeze(1) < SEQUENCES // 2
    targets = targets.masked_fill(ignored & (tokens % 2 == 0), -100)
    loss = loss_of(module(tokens), targets)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    expected = dict(zip(trained, torch.autograd.grad(loss, trained.values()))) | {"positions": None}

    def program():
        on, model = meshes(), fs.functionalize(module)

        def loss_fn(params, tokens, targets):
            return loss_of(model.apply(params, tokens), targets, reduction="sum"), (targets != -100).sum()

        for strategy in ONE_AXIS.values():
            params = model.init(strategy(on))
            objective, grads = fs.value_and_grad(loss_fn, reduce="weighted")(params, *mine((tokens, targets)))
            assert_trees_close((objective, grads), (loss.detach(), expected), rtol=0, atol=BOUND)
        return int((mine((tokens, targets))[1] != -100).sum())

    counts = spmd(program, workers(3))
    assert len(set(counts)) > 1
