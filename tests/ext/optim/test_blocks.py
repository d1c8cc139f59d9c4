"""An eager chain makes a few gradients at a time where a stage can, with the bits and the purity of all at once."""

import math
import sys
from functools import partial

import pytest
import torch

import fshard as fs
from fshard.ext.optim.block_sums import CPU_BLOCK
from tests.ext.optim.test_norm_blocks import Peak
from tests.trees import STRATEGIES, assert_same_bits, assorted, meshes, normal

# A norm takes the memory of two such leaves.
LEAF_BYTES = 4 * CPU_BLOCK


def set_block_bytes(monkeypatch, block_bytes):
    # `fshard.update` is the function.
    monkeypatch.setattr(sys.modules["fshard.update"], "BLOCK_BYTES", block_bytes)


def adamw(**options):
    return fs.from_torch(torch.optim.AdamW, lr=0.1, **options)


CLIP = fs.clip_by_global_norm(0.5)
CHAINS = {
    "fused": lambda: fs.chain(CLIP, adamw(fused=True)),
    "a first step of its own": lambda: fs.chain(
        CLIP, fs.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    ),
    "a schedule in the state": lambda: fs.chain(
        CLIP, fs.from_torch(torch.optim.Adam, lr=lambda count: 0.1 / (1 + count), inject=("lr",))
    ),
    "state that begins later": lambda: fs.chain(
        CLIP, fs.from_torch(torch.optim.SGD, lr=0.1, momentum=lambda count: 0.9 * min(int(count), 1))
    ),
    "native": lambda: fs.chain(PLUS_ONE, CLIP, fs.adamw(lambda count: 0.1 / (1 + count))),
    "norms of leaves": lambda: fs.chain(fs.clip_by_norm(0.5), fs.sgd(0.1, momentum=0.9, weight_decay=0.1)),
    "parts": lambda: fs.chain(CLIP, fs.partition({"*w*": fs.sgd(0.1, 0.9), "*": adamw()})),
    "an average": lambda: fs.ema(fs.chain(CLIP, fs.clip_by_value(0.1), fs.sgd(0.1)), 0.9),
}
PLUS_ONE = fs.GradientTransformation(
    lambda params: (), lambda grads, state, params: (fs.tree_map(lambda grad: grad + 1, grads), state)
)


def train(tx, strategy, donate):
    """Three updates; the first leaf has no gradient in the second."""
    state = fs.TrainState.create(fs.shard(assorted(), strategy, frozen="*row*"), tx)
    draw = normal()
    for step in range(3):
        full = fs.tree_map(lambda leaf: draw(*leaf.shape), assorted())
        grads = fs.shard(full, strategy, frozen="*row*")
        without = {"row", "nothing"} | ({"scalar"} if step == 1 else set())
        grads = {name: None if name in without else leaf for name, leaf in grads.items()}
        before = fs.tree_map(torch.clone, grads)
        state = fs.update(tx, state, grads, donate=donate)
        assert_same_bits(fs.tree_leaves(grads), fs.tree_leaves(before))
    return fs.tree_leaves(state)


def train_on_ranks(name, donate):
    """The states of a chain under two strategies."""
    strategies = STRATEGIES["ddp"], STRATEGIES["zero2 of every leaf"]
    return fs.testing.spmd(lambda: [train(CHAINS[name](), make(meshes()), donate) for make in strategies], 2)


@pytest.mark.parametrize("name", CHAINS)
def test_blocks_have_the_bits_of_all_gradients_at_once(monkeypatch, name):
    for donate in (False, True):
        results = []
        # All at once, one at a time, and the small ones together.
        for block_bytes in (math.inf, 1, 64):
            set_block_bytes(monkeypatch, block_bytes)
            results.append(train_on_ranks(name, donate))
        assert_same_bits(results[1], results[0])
        assert_same_bits(results[2], results[0])


def peak_of(tx, donate):
    params = {f"{i}": torch.ones(CPU_BLOCK) for i in range(16)}
    state = fs.TrainState.create(params, tx)
    grads = fs.tree_map(torch.ones_like, params)
    del params
    with Peak((state, grads)) as peak:
        fs.update(tx, state, grads, donate=donate)
    return peak.bytes


@pytest.mark.parametrize("optimizer", (adamw, partial(fs.adamw, 0.1), partial(fs.sgd, 0.1, 0.9)))
@pytest.mark.parametrize("donate", (False, True))
def test_clipped_gradients_are_made_as_they_are_used(monkeypatch, optimizer, donate):
    """All of them had been held, as a second set beside the caller's."""
    set_block_bytes(monkeypatch, 2 * LEAF_BYTES)
    plain = peak_of(optimizer(), donate)
    # The numbers of states and norms take a few bytes too.
    assert peak_of(fs.chain(CLIP, optimizer()), donate) < plain + 3 * LEAF_BYTES


def test_others_get_all_gradients_at_once(monkeypatch):
    """An optimizer, or a transformation in front of it, that may look at all leaves together."""
    set_block_bytes(monkeypatch, 1)
    counts = []

    def update(grads, state, params):
        counts.append(sum(grad is not None for grad in fs.tree_leaves(grads)))
        return params, state

    class Copied(torch.optim.SGD):
        """A user's class."""

        def step(self):
            counts.append(len(self.param_groups[0]["params"]))
            super().step()

    params = {"a": torch.ones(2), "b": torch.ones(3)}
    copied = fs.from_torch(Copied, lr=0.1)
    late = fs.GradientTransformation(lambda params: (), lambda grads, state, params: (grads, state))
    for tx, expected in (
        (fs.chain(CLIP, fs.Optimizer(lambda params: (), update)), [2]),
        (fs.chain(CLIP, fs.Optimizer(lambda params: (), update, is_leafwise=True)), [1, 1]),
        (fs.chain(CLIP, late, fs.Optimizer(lambda params: (), update, is_leafwise=True)), [2]),
        (fs.chain(CLIP, copied), [2]),
    ):
        state = tx.init(params)
        counts.clear()
        tx.update(params, state, params)
        assert counts == expected


def test_a_clip_of_your_own_can_make_gradients_in_turn(monkeypatch):
    set_block_bytes(monkeypatch, 1)
    parts = []

    def bind(grads, params):
        norm = fs.global_norm(grads)

        def make(part):
            parts.append([name for name, grad in part.items() if grad is not None])
            return fs.tree_map(lambda grad: grad / norm, part)

        return make

    def update(grads, state, params):
        return bind(grads, params)(grads), state

    tx = fs.chain(fs.GradientTransformation(lambda params: (), update, bind), fs.sgd(1.0))
    params = {"a": torch.zeros(1), "b": torch.zeros(1)}
    grads = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    params, _ = tx.update(grads, tx.init(params), params)
    assert parts == [["a"], ["b"]]
    assert_same_bits(params, {"a": torch.tensor([-3 / 5]), "b": torch.tensor([-4 / 5])})
