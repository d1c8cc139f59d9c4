"""A small transformer twice: of one process, and tensor-parallel over the axis "tp" of a mesh of two axes."""

import math
from functools import cache

import torch
import torch.nn.functional as F

import fshard as fs
from tests.trees import normal

ROWS = {1: (12,), 2: (7, 5), 3: (2, 7, 3)}  # of each rank of "shard"
TIME, WIDTH, HEAD, VOCABULARY, LAYERS = 4, 7, 3, 12, 2

# By the dim that is split over "tp".
SPLIT = {0: ("tokens", "*.q", "*.k", "*.v", "*.up.*"), 1: ("*.out", "*.down.weight")}


def heads(tp):
    return 6 if tp == 3 else 4


@cache
def full_params(tp):
    """Full tensors, of sizes that "tp" divides and "shard" mostly does not."""
    draw, inner, hidden = normal(tp), heads(tp) * HEAD, 5 * heads(tp)

    def block():
        attention = {name: draw(inner, WIDTH) / 3 for name in "qkv"} | {"out": draw(WIDTH, inner) / 3}
        up, down = (
            {"weight": draw(*shape) / 3, "bias": draw(shape[0])} for shape in ((hidden, WIDTH), (WIDTH, hidden))
        )
        return {"attention": attention, "up": up, "down": down, "norm": {"weight": draw(WIDTH), "bias": draw(WIDTH)}}

    blocks = [block() for _ in range(LAYERS)]
    return {"tokens": draw(VOCABULARY, WIDTH), "positions": draw(TIME, WIDTH), "blocks": blocks}


@cache
def batch(step=0):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (12, TIME + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def attended(q, k, v):
    """Causal attention written out, because torch's own has no second derivative."""
    q, k, v = (x.unflatten(-1, (-1, HEAD)).transpose(1, 2) for x in (q, k, v))
    future = torch.ones(TIME, TIME).triu(1).bool()
    weights = (q @ k.mT / math.sqrt(HEAD)).masked_fill(future, -math.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def norm(p, x):
    return F.layer_norm(x, (WIDTH,), p["weight"], p["bias"])


def dense_loss(p, x, y):
    """The mean over all tokens, without a word of fshard."""
    h = p["tokens"][x] + p["positions"]
    for block in p["blocks"]:
        normed, attention = norm(block["norm"], h), block["attention"]
        h = h + attended(*(normed @ attention[name].T for name in "qkv")) @ attention["out"].T
        hidden = F.gelu(F.linear(norm(block["norm"], h), **block["up"]))
        h = h + F.linear(hidden, **block["down"])
    return F.cross_entropy((h @ p["tokens"].T).flatten(0, 1), y.flatten())


def looked_up(tokens, ids, tp):
    """Where this rank's piece of a table has the rows of some tokens, and which rows it does not have."""
    own = ids - fs.comm.rank(tp) * len(tokens)
    missing = (own < 0) | (own >= len(tokens))
    return own.masked_fill(missing, 0), missing


def loss_fn(params, x, y, tp):
    """Sum over this rank's tokens, and their number; each part of the tree is gathered when it is used."""
    table = fs.gather(params["tokens"])
    own, missing = looked_up(table, x, tp)
    h = fs.psum_invariant(table[own].masked_fill(missing[..., None], 0.0), tp) + fs.gather(params["positions"])
    for block in params["blocks"]:
        p = fs.gather(block)
        varying = fs.pvary(norm(p["norm"], h), tp)
        q, k, v = (varying @ p["attention"][name].T for name in "qkv")
        h = h + fs.psum_invariant(attended(q, k, v) @ p["attention"]["out"].T, tp)
        hidden = F.gelu(F.linear(fs.pvary(norm(p["norm"], h), tp), **p["up"]))
        h = h + fs.psum_invariant(hidden @ p["down"]["weight"].T, tp) + p["down"]["bias"]
    table = fs.gather(params["tokens"])
    logits = fs.pvary(h, tp) @ table.T
    own, missing = looked_up(table, y, tp)
    right = logits.gather(-1, own[..., None])[..., 0].masked_fill(missing, 0.0)
    normalizer, right = fs.psum_invariant((logits.exp().sum(-1), right), tp)
    return (normalizer.log() - right).sum(), torch.tensor(y.numel())


def mesh_of(sizes):
    return fs.init_mesh(dict(zip(("shard", "tp"), sizes)), device="cpu")


def strategy(mesh, base=fs.zero3, **keywords):
    tp = mesh["tp"]
    rest = fs.masked(fs.split_dim(tp, dim=1), SPLIT[1])
    return fs.compose(base(mesh, **keywords), fs.masked(fs.split_dim(tp, dim=0), SPLIT[0], otherwise=rest))


def mine(mesh, step=0):
    shard = fs.axis_of(mesh, "shard")
    return tuple(tensor.split(ROWS[shard.size])[fs.comm.rank(shard)] for tensor in batch(step))
