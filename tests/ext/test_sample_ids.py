"""sample_ids: each epoch is a permutation of its own, a function of the step and the key, whatever the ranks."""

import math

import pytest
import torch

import fshard as fs
from tests.ranks import my_rank, on_ranks
from tests.trees import one_axis

SIZES = (*range(1, 30), 100, 128, 1023, 10_007)


def test_an_epoch_is_a_permutation():
    for key in (0, -(2**63), torch.tensor(7)):
        for samples in SIZES:
            ids = fs.sample_ids(key, 0, dataset_size=samples, batch_size=3 * samples).view(3, samples)
            assert ids.sort().values.equal(torch.arange(samples).expand(3, -1)), samples
            # Permutations share one place on average, and it is rare that they share many.
            assert samples <= 20 or int((ids[0] == ids[1]).sum() + (ids[0] == torch.arange(samples)).sum()) < 16


def test_steps_cut_epochs_in_batches():
    for samples, batch in ((10, 3), (10, 5), (7, 16), (1, 4)):
        once = fs.sample_ids(5, 0, dataset_size=samples, batch_size=12 * batch)
        steps = [fs.sample_ids(5, step, dataset_size=samples, batch_size=batch) for step in range(12)]
        assert torch.cat(steps).equal(once)
        assert fs.sample_ids(torch.tensor(5), torch.tensor(11), dataset_size=samples, batch_size=batch).equal(steps[-1])
    ids = fs.sample_ids(0, 10**9, dataset_size=2**60 + 1, batch_size=1000)
    assert len(ids.unique()) == 1000
    assert 0 <= int(ids.min()) < 2**53 < int(ids.max()) <= 2**60


def test_permutations_are_about_equally_likely():
    """By how many standard deviations Pearson's statistic of all orders of a few is above that of equal chances."""
    for samples in (3, 5):
        ids = fs.sample_ids(1, 0, dataset_size=samples, batch_size=20_000 * samples).view(20_000, samples)
        counts = (ids * samples ** torch.arange(samples)).sum(1).unique(return_counts=True)[1]
        expected, freedom = 20_000 / math.factorial(samples), math.factorial(samples) - 1
        assert len(counts) == freedom + 1
        assert float(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom) < 4


@on_ranks(2)
def test_ranks_share_the_ids_of_a_step(world_size):
    params = fs.shard({"w": torch.ones(3)}, fs.zero3(one_axis()))
    for name, value in (("dataset_size", 0), ("batch_size", 0), ("step", -1), ("key", 0.5)):
        with pytest.raises(ValueError, match=f"expected {name}|{name} must be"):
            fs.sample_ids(**{"step": 0, "key": 0, "dataset_size": 10, "batch_size": 2, name: value})
    ids = fs.sample_ids(0, 3, dataset_size=100, batch_size=16)
    mine = fs.microbatches(ids.unflatten(0, (8, -1)).unbind(), like=params)
    assert torch.cat(mine).equal(ids.unflatten(0, (8, -1))[my_rank() :: world_size].flatten())
