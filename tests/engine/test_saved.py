"""What autograd saves of gathered weights: a handle of a view, or the tensor itself where a rank saves it late."""

from functools import partial
from itertools import product

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fshard as fs
from tests.ranks import my_rank, on_ranks
from tests.trees import assert_same_bits, normal, one_axis

# Every unit is dropped after its forward and gathered again in the backward; with zero2 none is.
REGATHERED = partial(fs.zero3, min_shard_elements=0, bucket_bytes=0, prefetch=0)
KEPT = partial(fs.zero2, min_shard_elements=0, bucket_bytes=0)

WIDTH = 6

# Square views of a weight of 3 * WIDTH rows and 2 * WIDTH columns, most of which begin behind its first element.
VIEWS = {
    "chunk": lambda w: [part[:, :WIDTH] for part in w.chunk(3)],
    "narrow": lambda w: [w.narrow(0, WIDTH, WIDTH).narrow(1, 3, WIDTH)],
    "split": lambda w: [part[:, WIDTH:] for part in w.split([WIDTH, WIDTH, WIDTH])],
    "unbind": lambda w: list(w.view(3, WIDTH, 2 * WIDTH).unbind())[1].split(WIDTH, dim=1),
    "strided slice": lambda w: [w[1::3, ::2], w[2::3, 1::2]],
    "transposed chunk": lambda w: [part.T[WIDTH:] for part in w.chunk(3)],
    "transposed strided slice": lambda w: [w[2::3, 1::2].T, w.T[1::2, 2::3]],
    "as_strided": lambda w: [w.as_strided((WIDTH, WIDTH), (2 * WIDTH + 1, 1), 7)],
    "select": lambda w: [w.view(3, WIDTH, 2, WIDTH)[2, :, 1]],
    "diagonal": lambda w: [w[3:, 2:].diagonal()[:WIDTH].expand(WIDTH, WIDTH)],
}


class Subclass(torch.Tensor):
    pass


# Views of a complex weight, of which torch puts off the values or sees them in another dtype.
COMPLEX_VIEWS = {
    "conjugate": lambda w: [w.conj()[:WIDTH, WIDTH:]],
    "conjugate transposed": lambda w: [w.mH[:WIDTH, ::3]],
    "negative": lambda w: [torch._neg_view(w.conj())[:WIDTH, ::2]],
    "imaginary part": lambda w: [torch.view_as_real(w)[:WIDTH, WIDTH:, 1]],
    "dtype": lambda w: [w.view(w.real.dtype)[WIDTH : 2 * WIDTH, 3::4]],
    "subclass": lambda w: [w.conj().as_subclass(Subclass)[:WIDTH, ::2]],
}


def attend(x, views):
    """Uses each view twice: in a product of matrices, and element by element."""
    for view in views:
        x = torch.tanh(x @ view.to(x.dtype)) + (x.mean() * view).sum(0)
    return x


def loss_of(params, x, view, wrap):
    h = torch.tanh(x @ fs.gather(params["first"]))

    def middle(h):
        views = view(fs.gather(params["fused"]))
        h = attend(h, views)
        return attend(h, views[::-1]) * fs.gather(params["number"])

    h = wrap(middle, h)
    return (h @ fs.gather(params["last"])).abs().float().square().sum()


def directly(f, *args):
    return f(*args)


WRAPS = {"direct": directly, "checkpoint": partial(checkpoint, use_reentrant=False)}
# The dtype of stored shards, and that of gathered weights where it is another.
DTYPES = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "gathered as bfloat16": (torch.float32, {"param_dtype": torch.bfloat16}),
    "complex128": (torch.complex128, {}),
}
REAL = ("float32", "bfloat16", "gathered as bfloat16")
ROWS = [*product(VIEWS, REAL, WRAPS), *product(COMPLEX_VIEWS, ("complex128",), ("direct",))]


def draw(dtype, seed, *shape):
    real, imaginary = normal(seed)(2, *shape)
    return torch.complex(real, imaginary) if dtype.is_complex else real.to(dtype)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.rows(len(VIEWS | COMPLEX_VIEWS))
@on_ranks(2, 3)
@pytest.mark.parametrize("view, dtype, wrap", ROWS)
def test_views_of_gathered_weights_come_back(view, dtype, wrap):
    """With the bits of a weight that stays, wherever in the weight a view begins."""
    stored, options = DTYPES[dtype]
    shapes = {"first": (5, WIDTH), "fused": (3 * WIDTH, 2 * WIDTH), "last": (WIDTH, 4), "number": ()}
    full = {name: draw(stored, seed, *shape) for seed, (name, shape) in enumerate(shapes.items())}
    x = draw(options.get("param_dtype", stored), len(shapes) + my_rank(), 4, 5)
    f = partial(loss_of, x=x, view=(VIEWS | COMPLEX_VIEWS)[view], wrap=WRAPS[wrap])
    kept, regathered = (fs.shard(full, strategy(one_axis(), **options)) for strategy in (KEPT, REGATHERED))
    expected = fs.value_and_grad(f)(kept)
    with fs.comm.record() as record:
        actual = fs.value_and_grad(f)(regathered)
    assert_same_bits(fs.tree_leaves(actual), fs.tree_leaves(expected))
    # The weight whose views were saved is gathered again.
    gathers = [entry for entry in record if entry.op == "all_gather" and entry.unit == "['fused']"]
    assert len(gathers) == 2


def uses_a_weight_late(params, x, late):
    """Rank 0 computes with the first weight once more, when the second has taken its place."""
    first = fs.gather(params["first"])
    h = torch.tanh(x @ first)
    h = torch.tanh(h @ fs.gather(params["second"]))
    if late:
        h = h @ first
    return h.square().sum()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@on_ranks(2, 3)
def test_a_rank_may_use_a_weight_that_another_has_replaced(dtype):
    """Autograd saves it as it is: a handle would make this rank gather alone."""
    full = {name: draw(dtype, seed, WIDTH, WIDTH) for seed, name in enumerate(("first", "second"))}
    x = draw(dtype, 2 + my_rank(), 4, WIDTH)
    kept, regathered = (fs.shard(full, strategy(one_axis())) for strategy in (KEPT, REGATHERED))
    for late in (my_rank() == 0, my_rank() != 0, True):
        f = partial(uses_a_weight_late, x=x, late=late)
        assert_same_bits(fs.tree_leaves(fs.value_and_grad(f)(regathered)), fs.tree_leaves(fs.value_and_grad(f)(kept)))
