"""Norms convert one block of a leaf at a time, and take as many operators of a graph however large a leaf is."""

import math

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard.ext.optim.block_sums import BLOCK, CPU_BLOCK, EXACT_CPU_BLOCK
from fshard.ext.optim.norms import element_sums
from tests.trees import assert_same_bits, normal

ORDERS = (1.0, 2.0, 3.0, math.inf)
# Of each kind of norm, how it adds.
NORMS = [*((p, None) for p in ORDERS), (2.0, "tree"), (math.inf, "tree")]
# What a norm may take beyond its tensors, in bytes, on an accelerator.
LIMIT = 64 << 20


class Peak(TorchDispatchMode):
    """Counts the most bytes that tensors hold which operators have made."""

    def __init__(self, tree):
        super().__init__()
        self.given = {tensor.untyped_storage()._cdata for tensor in fs.tree_leaves(tree)}
        self.held = {}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in fs.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.held = {key: pair for key, pair in self.held.items() if not pair[0].expired()}
        nbytes = [nbytes for key, (_, nbytes) in self.held.items() if key not in self.given]
        self.bytes = max(self.bytes, sum(nbytes))
        return result


def take_norms(tree):
    """Every kind of norm of a tree, and of each of its leaves."""
    norms = []
    for p, order in NORMS:
        norms.append([fs.global_norm(tree, p, reduction_order=order), fs.leaf_norms(tree, p, reduction_order=order)])
    return norms


def gappy_tree(dtype):
    """Tensors of several blocks, and of less than one: contiguous ones, and others with gaps or of another order."""
    draw = normal(0)
    wide = draw(3, 2 * CPU_BLOCK, dtype=dtype)
    long = draw(2 * CPU_BLOCK, 3, dtype=dtype)
    return {
        "plain": wide,
        "narrow": wide[:, 5 : CPU_BLOCK + 12],
        "rows": long[:, :2],
        "transposed": long.T,
        "strided": draw(3 * CPU_BLOCK, dtype=dtype)[::2],
        "one": draw(1, dtype=dtype),
        "scalar": draw(dtype=dtype),
        "empty": draw(0, 3, dtype=dtype),
    }


@pytest.mark.rows(1)
@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16, torch.complex64))
def test_a_graph_has_the_bits_of_eager_calls_and_of_contiguous_tensors(dtype):
    tree = gappy_tree(dtype)
    if dtype == torch.float64:
        # A vector with gaps is read as it is, and a dot product of it rounds otherwise.
        del tree["strided"]
    expected = take_norms({name: tensor.contiguous() for name, tensor in tree.items()})
    assert_same_bits(take_norms(tree), expected)
    assert_same_bits(fs.jit(take_norms)(tree), expected)


def test_powers_are_summed_in_blocks_of_one_size():
    """The bits of every earlier version: a dot product of each block, and one sum of these."""
    tensor = normal(1)(5 * CPU_BLOCK + 3, dtype=torch.float32)
    blocks = [block.double() for block in tensor.split(CPU_BLOCK)]
    power = torch.stack([block.dot(block) for block in blocks]).sum()
    assert_same_bits(fs.global_norm([tensor]), power.sqrt().float())


@pytest.mark.parametrize("p, order", NORMS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.complex64))
def test_a_norm_of_many_blocks_has_no_more_nodes(p, order, dtype):
    def count_nodes(blocks):
        tree = {"w": torch.empty(blocks * CPU_BLOCK + 7, dtype=dtype), "b": torch.ones(3)}
        tx = fs.clip_by_global_norm(0.5, p, reduction_order=order)
        return len(fs.make_graph(lambda tree: tx.update(tree, (), None)[0])(tree).moments)

    # Their memory is never touched.
    assert count_nodes(10) == count_nodes(1000) < 100


@pytest.mark.parametrize("p, order", NORMS)
@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_a_norm_takes_the_memory_of_one_block(device, p, order):
    """On an accelerator too, for which a device without values stands: all but processors take larger blocks."""
    matrix = torch.ones(20 * CPU_BLOCK // 64 if device == "cpu" else 1 << 20, 64, dtype=torch.bfloat16, device=device)
    tree = [matrix, matrix[:, :60], matrix.T[1:]]
    # At most three copies of a block in float64, and its rows.
    limit = 4 * 8 * CPU_BLOCK if device == "cpu" else LIMIT
    with Peak(tree) as peak:
        fs.global_norm(tree, p, reduction_order=order)
    assert peak.bytes <= limit


@pytest.mark.parametrize("device, block", (("cpu", EXACT_CPU_BLOCK), ("meta", BLOCK)))
def test_exact_sums_hold_no_copies_of_the_block_before(device, block):
    """Three copies at a time, of which a processor's cache has room for those of a small block."""
    matrix = torch.ones(4 * block // 64, 64, dtype=torch.bfloat16, device=device)
    for tensor in (matrix, matrix[:, :60]):
        with Peak([tensor]) as peak:
            element_sums([tensor], squares=True)
        assert peak.bytes < 3 * 8 * block


def test_exact_sums_over_a_dim_hold_those_of_one_block():
    """They had held those of all blocks, together as large as the tensor."""
    matrix = torch.ones(1024, 1 << 12)
    for dim in (-1, -2):
        with Peak([matrix]) as peak:
            element_sums([matrix], dim)
        assert peak.bytes < matrix.nbytes // 8
