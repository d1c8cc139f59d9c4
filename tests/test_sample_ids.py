"""sample_ids: each epoch is a permutation of its own, a function of the step and the key, whatever the ranks."""

import math
import re

import pytest
import torch

import fshard as fs
from tests.ranks import my_rank, on_ranks
from tests.trees import one_axis

SIZES = (*range(1, 70), 99, 100, 101, 128, 1000, 1023, 4097, 65536, 100_003)


@pytest.mark.parametrize("key", (0, -(2**63), torch.tensor(7)), ids=str)
def test_an_epoch_is_a_permutation(key):
    for samples in SIZES:
        ids = fs.sample_ids(0, key, samples=samples, batch=3 * samples).view(3, samples)
        assert ids.sort().values.equal(torch.arange(samples).expand(3, -1)), samples
        if samples > 20:
            # Permutations share one place on average, and it is rare that they share many.
            assert int((ids[0] == ids[1]).sum()) < 8
            assert int((ids[0] == torch.arange(samples)).sum()) < 8


def test_steps_cut_epochs_in_batches():
    for samples, batch in ((10, 3), (10, 5), (7, 16), (1, 4)):
        once = fs.sample_ids(0, 5, samples=samples, batch=12 * batch)
        steps = [fs.sample_ids(step, 5, samples=samples, batch=batch) for step in range(12)]
        assert torch.cat(steps).equal(once)
        assert fs.sample_ids(torch.tensor(11), torch.tensor(5), samples=samples, batch=batch).equal(steps[-1])
    others = [fs.sample_ids(0, key, samples=1000, batch=100) for key in range(5)]
    assert len({tuple(ids.tolist()) for ids in others}) == 5


def test_a_dataset_may_be_of_any_size():
    ids = fs.sample_ids(10**9, 0, samples=2**60 + 1, batch=1000)
    assert len(ids.unique()) == 1000
    assert 0 <= int(ids.min()) < 2**53 < int(ids.max()) <= 2**60


def excess(counts):
    """How many standard deviations Pearson's statistic is above that of equal chances."""
    expected = counts.double().mean()
    freedom = counts.numel() - 1
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("samples", (2, 3, 4, 5, 6, 13, 32))
def test_permutations_are_about_equally_likely(samples):
    epochs = 20_000
    ids = fs.sample_ids(0, 1, samples=samples, batch=epochs * samples).view(epochs, samples)
    places = torch.arange(samples).expand(epochs, -1)
    # Chances of a sample at each place. Each row and each column adds up, so that fewer are free than are counted.
    assert -2 * math.sqrt(samples) < excess(torch.bincount((places * samples + ids).flatten())) < 4
    # Whole permutations, where there are few; else what follows on a sample.
    if samples < 7:
        weights = samples ** torch.arange(samples)
        counts = (ids * weights).sum(1).unique(return_counts=True)[1]
        assert len(counts) == math.factorial(samples)
        assert excess(counts) < 4
    else:
        pairs = torch.bincount((ids[:, :-1] * samples + ids[:, 1:]).flatten(), minlength=samples**2).view(
            samples, samples
        )
        assert excess(pairs[~torch.eye(samples, dtype=torch.bool)]) < 4


@on_ranks(1, 2, 4)
def test_ranks_share_the_ids_of_a_step(world_size):
    params = fs.shard({"w": torch.ones(3)}, fs.zero3(one_axis()))
    ids = fs.sample_ids(3, 0, samples=100, batch=16)
    mine = fs.microbatches(ids.unflatten(0, (8, -1)).unbind(), like=params, communicate="once")
    assert torch.cat(mine).equal(ids.chunk(world_size)[my_rank()])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"samples": 0}, "sample_ids: expected samples"),
        ({"batch": 0}, "sample_ids: expected batch"),
        ({"step": -1}, "sample_ids: expected step"),
        ({"step": torch.ones(2)}, "sample_ids: expected step"),
        ({"key": 0.5}, "fold_in: expected key"),
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused(arguments, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        fs.sample_ids(**{"step": 0, "key": 0, "samples": 10, "batch": 2, **arguments})
