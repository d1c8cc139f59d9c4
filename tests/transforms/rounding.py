"""What int8 blocks make of tensors, computed slowly: the oracle of quantize's tests."""

import torch

from fshard.rounding import tolerance
from tests.trees import normal

# The scale is a float32 or wider, x / scale is rounded and so is the product, relative to the largest element.
FLOAT32 = tolerance(torch.float32, terms=1)


def pieces(full, ranks, dim=0):
    """Every rank's shard, padded with zeros."""
    full = full.reshape(1) if full.dim() == 0 else full
    size = -(-full.shape[dim] // ranks)
    missing = full.new_zeros([ranks * size - n if d == dim % full.dim() else n for d, n in enumerate(full.shape)])
    return list(torch.cat([full, missing], dim).split(size, dim)) if size else [full] * ranks


def joined(parts, like, dim=0):
    """Undo `pieces`."""
    whole = like.reshape(1) if like.dim() == 0 else like
    return torch.cat(list(parts), dim).narrow(dim, 0, whole.shape[dim]).reshape(like.shape)


def largest(tensor, block):
    """For each element the largest magnitude in its block."""
    flat = tensor.reshape(-1).double().abs()
    tops = [part.max().expand(len(part)) for part in flat.split(block)] if len(flat) else [flat]
    return torch.cat(tops).reshape(tensor.shape)


def bound(tensor, block):
    """How far each element may be off once it has been sent: half a step, and rounding."""
    tops, least = largest(tensor, block), torch.finfo(tensor.dtype).smallest_normal
    rounded = tolerance(tensor.dtype, terms=1)
    return tops / 254 + tops * (FLOAT32 + rounded) + least * rounded


def gather_bound(full, ranks, block, dim=0):
    return joined([bound(piece, block) for piece in pieces(full, ranks, dim)], full.double(), dim)


def rounded(tensor, block):
    """Each block in steps of its largest magnitude / 127, of float32 numbers or wider ones."""
    wide = tensor.reshape(-1).to(torch.promote_types(tensor.dtype, torch.float32))
    parts = []
    for part in wide.split(block) if len(wide) else [wide]:
        scale = part.abs().max() / 127 if len(part) else part.sum()
        codes = (part / scale).round().clamp(-127, 127) + 0.0  # there is no -0.0 among integers
        parts.append(codes * scale if scale > 0 else torch.zeros_like(part))
    return torch.cat(parts).to(tensor.dtype).reshape(tensor.shape)


def gathered(full, ranks, block, dim=0):
    """What every rank gathers."""
    if ranks == 1:
        return full
    return joined([rounded(piece, block) for piece in pieces(full, ranks, dim)], full, dim)


def full_tree(dtype=torch.float64, seed=0):
    draw = normal(seed)
    shapes = {"matrix": (13, 5), "vector": (300,), "scalar": (), "empty": (0, 3), "row": (1, 9)}
    return {name: (draw(*shape) * 10 ** draw(*shape).clamp(-2, 2)).to(dtype) for name, shape in shapes.items()}


def grads_of(step, rank, dtype=torch.float64):
    return full_tree(dtype, 100 * step + rank + 1)
