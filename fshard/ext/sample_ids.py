"""sample_ids: the samples of a step, drawn from its number and a key."""

import math
from typing import Any

import torch

import fshard as fs
from fshard.extend import expect, words_at

# Eight rounds are enough for large datasets. With 16 the 720 permutations of six samples are equally frequent too.
ROUNDS = 16


def sample_ids(
    key: torch.Tensor | int, step: torch.Tensor | int, *, dataset_size: int, batch_size: int
) -> torch.Tensor:
    """Draw the numbers of the samples that all ranks together train on in a step.

    Each epoch is a permutation of range(dataset_size), without repeats, and the next one begins where it ends, within a
    batch if need be. Nothing is stored: the ids depend on the arguments alone, are the same on every rank, and cost no
    time or memory by the size of the dataset. A run that goes on from a checkpoint, at any number of ranks, takes the
    samples that it would have taken. `microbatches` says which of them are this rank's.

    Args:
        key: The key of the run's data, such as fs.fold_in(state.key, 1).
        step: The number of the step, such as state.step.
        dataset_size: The number of samples in the dataset.
        batch_size: The number of samples that the whole job takes in a step.

    Returns:
        An int64 tensor of shape (batch_size,).

    Raises:
        ValueError: if a number is out of range, or `key` is no key.

    >>> import fshard as fs
    >>> first, second = (sample_ids(0, step, dataset_size=8, batch_size=4) for step in range(2))
    >>> torch.cat([first, second]).sort().values.tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    >>> params = fs.shard({"w": torch.ones(2)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> mine = fs.microbatches(first.unflatten(0, (2, -1)).unbind(), like=params)  # two microbatches of two samples
    """
    number: Any = step.item() if isinstance(step, torch.Tensor) else step
    bounds = (
        ("step", number, range(2**31)),
        ("dataset_size", dataset_size, range(1, 2**62)),
        ("batch_size", batch_size, range(1, 2**31)),
    )
    for name, value, allowed in bounds:
        expected = f"{name} to be a whole number from {allowed.start} to {allowed.stop - 1}"
        expect(type(value) is int and value in allowed, "sample_ids", expected, f"{value!r:.40}")
    epoch, first = divmod(number * batch_size, dataset_size)
    places = torch.arange(first, first + batch_size)
    keys = fs.fold_in(key, epoch + places // dataset_size)
    return _permute(places % dataset_size, keys, dataset_size)


def _permute(places: torch.Tensor, keys: torch.Tensor, samples: int) -> torch.Tensor:
    """Permute range(samples), at some places, each in the permutation of its key.

    A Feistel network permutes the cells of a rectangle of not much more than `samples` cells; whoever lands behind the
    last sample goes on from there (cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    columns = math.isqrt(samples - 1) + 1
    rows = -(-samples // columns)
    rounds = [words_at(keys, torch.tensor(number)) for number in range(ROUNDS)]

    def shuffle(cells: torch.Tensor) -> torch.Tensor:
        column, row = cells % columns, cells // columns
        for number, words in enumerate(rounds):
            if number % 2:
                column = (column + words_at(words, row) % columns) % columns
            else:
                row = (row + words_at(words, column) % rows) % rows
        return row * columns + column

    cells = shuffle(places)
    is_outside = cells >= samples
    while is_outside.any():
        cells = torch.where(is_outside, shuffle(cells), cells)
        is_outside = cells >= samples
    return cells
