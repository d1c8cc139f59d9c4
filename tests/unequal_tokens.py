"""A small language model on unequal numbers of tokens, and the forms in which a program asks for their mean."""

import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad_and_value

import fshard as fs
from tests.trees import normal, one_axis

EPS = torch.finfo(torch.float64).eps
VOCABULARY, WIDTH, PLACES = 13, 7, 9

# Valid tokens of each microbatch, by rank: a world of several ranks has one with none at all, and every world has
# microbatches with none.
LENGTHS = {
    1: ((5, 0, 2),),
    2: ((8, 0, 1), (0, 0, 0)),
    3: ((5, 0, 2), (0, 0, 0), (1, 3, 9)),
    4: ((1, 0, 2), (9, 0, 9), (0, 0, 0), (0, 0, 1)),
}

# An element of a gradient sums products over at most 22 tokens, VOCABULARY logits and two layers, all below 1. The two
# sides differ in the order of it all.
ATOL = 22 * VOCABULARY * 2 * EPS
IGNORED = -100

STRATEGIES = {
    "ddp": fs.ddp,
    "zero1": partial(fs.zero1, min_shard_elements=0),
    "zero2": partial(fs.zero2, min_shard_elements=0),
    "zero3": partial(fs.zero3, min_shard_elements=0, merge_bytes=0),
}


def stack():
    """A bigram model of the numbers of a generator of its own: ranks share torch's default one."""
    module = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, VOCABULARY))
    draw = normal()
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.copy_(draw(*parameter.shape) / 2)
    return module


def plain(params, x):
    """The same model as a function that gathers where it needs to."""
    h = fs.gather({"0.weight": params["0.weight"]})["0.weight"][x]
    for name in ("1", "3"):
        layer = fs.gather({key: params[f"{name}.{key}"] for key in ("weight", "bias")})
        h = F.linear(h if name == "1" else torch.tanh(h), layer["weight"], layer["bias"])
    return h


def microbatches(world_size, rank, step=0):
    """Inputs and targets, of which the first few count; the ranks change their lengths in every step."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    lengths = LENGTHS[world_size][(rank + step) % world_size]
    pairs = torch.randint(VOCABULARY, (len(lengths), 2, PLACES), generator=draw)
    for (_, y), length in zip(pairs, lengths):
        y[length:] = IGNORED
    return list(pairs)


def token_sum(forward, params, pair):
    """The sum of the losses of the valid tokens, and their number."""
    x, y = pair
    logits = forward(params, x)
    return F.cross_entropy(logits, y, reduction="sum", ignore_index=IGNORED), (y != IGNORED).sum()


def token_mean(forward, params, pair):
    """What a program averages that does not weight."""
    value, count = token_sum(forward, params, pair)
    return value / count.clamp(min=1)


def all_tokens(world_size, step=0):
    return torch.cat([pair for rank in range(world_size) for pair in microbatches(world_size, rank, step)], dim=1)


def in_one_process(module, world_size):
    """The mean over all tokens and its gradients; on a copy, because functional_call writes to the module."""
    module = copy.deepcopy(module)
    full = {name: parameter.detach() for name, parameter in module.named_parameters()}
    x, y = all_tokens(world_size)
    valid = y != IGNORED
    assert valid.sum() == sum(map(sum, LENGTHS[world_size]))
    grads, value = grad_and_value(lambda p: F.cross_entropy(functional_call(module, p, x[valid]), y[valid]))(full)
    return value, grads


def by_value_and_grad(loss_of, params, pairs):
    return fs.value_and_grad(loss_of, reduce="weighted")(params, torch.cat(pairs, dim=1))


def by_accumulate(communicate, loss_of, params, pairs):
    return fs.accumulate(loss_of, reduce="weighted", communicate=communicate)(params, pairs)


def by_four_verbs(loss_of, params, pairs):
    def summed(full):
        value, count = loss_of(full, torch.cat(pairs, dim=1))
        return value, count

    grads, (value, count) = grad_and_value(summed, has_aux=True)(fs.gather(params))
    grads = fs.scatter_grads(grads, like=params, reduce="weighted", count=count)
    return fs.objective((value, count), like=params, reduce="weighted"), grads


def by_torch_func(loss_of, params, pairs):
    def closed(params):
        return fs.objective(loss_of(params, torch.cat(pairs, dim=1)), like=params, reduce="weighted")

    grads, value = grad_and_value(closed)(params)
    return value, grads


FORMS = {
    "value_and_grad": by_value_and_grad,
    "accumulate each": partial(by_accumulate, "each"),
    "accumulate once": partial(by_accumulate, "once"),
    "four verbs": by_four_verbs,
    "torch.func": by_torch_func,
}


def setup(module, strategy, kind):
    """This rank's parameters, forward function and microbatches."""
    model = fs.functionalize(module, units=(nn.Embedding, nn.Linear))
    mesh = one_axis()
    params = model.init(STRATEGIES[strategy](mesh))
    return params, model.apply if kind == "module" else plain, partial(microbatches, mesh.size(), mesh.get_rank())
